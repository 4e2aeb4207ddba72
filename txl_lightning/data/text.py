"""The corpus `text`: the user's own files, as bytes or in sub-words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.corpora import SPLITS, ByteCorpus
from txl_lightning.data.documents import RULES
from txl_lightning.data.sources import TAKES, find, refuse_twice
from txl_lightning.data.tokenizer import SubwordConfig
from txl_lightning.errors import ConfigError

RATIOS = (0.9, 0.05, 0.05)


@dataclass(frozen=True, kw_only=True)
class TextConfig(SubwordConfig):
    """Where the text is and how it is split: either `path` with `ratios`, or a path for each split."""

    name: str = key("text", "your own text, as bytes or in sub-words")
    path: Any = key(None, "file, folder, glob, .gz or a list of them, split by data.ratios")
    train: Any = key(None, "training text, like data.path; then data.valid and data.test name theirs")
    valid: Any = key(None, "validation text")
    test: Any = key(None, "test text")
    ratios: Any = key(None, "shares of train, valid and test in data.path; null: [0.9,0.05,0.05]", minimum=0, maximum=1)
    document: str = key("file", "what ends a document: its file, every line, or empty lines", choices=tuple(RULES))
    column: str | None = key(None, "read JSON Lines or Parquet files: the column with the text; each row is a document")
    binary: bool = key(False, "read files with NUL bytes too")

    def check(self) -> None:
        super().check()
        if self.column is not None and self.document != "file":
            raise self.refuse("document", "cannot go with data.column", "each row is a document; leave it out")
        for name in ("path", *SPLITS):
            if (spec := getattr(self, name)) is not None:
                self._check_spec(name, spec)
        given = [name for name in SPLITS if getattr(self, name) is not None]
        if given and self.path is not None:
            cure = "give data.path and data.ratios, or data.train, data.valid and data.test"
            raise self.refuse("path", f"cannot go with data.{given[0]}", cure)
        if given and self.ratios is not None:
            raise self.refuse("ratios", f"cannot go with data.{given[0]}", "they split data.path; leave them out")
        if self.ratios is not None and not _are_shares(self.ratios):
            raise self.refuse(
                "ratios", "must be three numbers that sum to 1", "for example data.ratios=[0.9,0.05,0.05]"
            )

    def _check_spec(self, name: str, spec: object) -> None:
        entries = spec if isinstance(spec, tuple) else (spec,)
        if not entries or not all(isinstance(entry, str) for entry in entries):
            raise self.refuse(name, "must be a path or a list of paths", TAKES)
        if not all(entry.strip() for entry in entries):
            raise self.refuse(name, "a path is empty", TAKES)


def _are_shares(ratios: object) -> bool:
    return (
        isinstance(ratios, tuple)
        and len(ratios) == 3
        and all(type(ratio) in (int, float) for ratio in ratios)
        and math.isclose(sum(ratios), 1, abs_tol=1e-6)
    )


@registry.corpora.register("text", config=TextConfig)
class Text(ByteCorpus):
    """Bytes of the user's files as they are: line ends, byte order marks and encodings stay what they were."""

    Config = TextConfig

    def __init__(self, config: TextConfig) -> None:
        if config.path is not None:
            parts = {"all": find(config.path, key="data.path")}
            ratios, rule = config.ratios or RATIOS, "ratios"
        else:
            given = {split: spec for split in SPLITS if (spec := getattr(config, split)) is not None}
            parts = {split: find(spec, key=f"data.{split}") for split, spec in given.items()}
            refuse_twice(source for sources in parts.values() for source in sources)
            ratios, rule = None, "given"
        if not parts:
            cure = "set data.path to a file, folder, glob or list of them, or set data.train, data.valid and data.test"
            raise ConfigError("data.path", "null", "no text was given", cure)
        super().__init__(
            name=config.name,
            parts=parts,
            rule=rule,
            document=config.document,
            column=config.column,
            ratios=ratios,
            binary=config.binary,
        )
