"""The corpus `text8`: 100 million characters of cleaned Wikipedia text, 26 letters and the space.

Each part is stripped of the spaces at its ends, as in the authors' preparation; within, a space is the symbol they
write as `_`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.layouts import RENAMED, BenchmarkConfig, Origin, one_or_three
from txl_lightning.data.sources import Source
from txl_lightning.data.symbols import Bytes, SymbolCorpus, stripped
from txl_lightning.data.vocab import SymbolVocab

SPACE, UNDERSCORE = b" ", b"_"

RAW = {split: f"{name}.raw" for split, name in RENAMED.items()}
ORIGIN = Origin(archive="text8.zip", n_byte=31_344_016, layouts=({"all": "text8"}, RENAMED, RAW))

PUBLISHED = {"vocabulary": {"all": 27}, "bytes": {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}}

SPELT = re.compile(rb"[a-z_]([ \r\n]+[a-z_])*[ \r\n]*")


@dataclass(frozen=True, kw_only=True)
class Text8Config(BenchmarkConfig):
    """Nothing to set beside where the file is."""

    name: str = key("text8", "100 million letters and spaces of Wikipedia")


@registry.corpora.register("text8", config=Text8Config)
class Text8(SymbolCorpus):
    """Cleaned Wikipedia text: 90 million characters to train, 5 to validate, 5 to test."""

    Config = Text8Config

    def __init__(self, config: Text8Config) -> None:
        super().__init__(name=config.name, files=one_or_three(config, ORIGIN), published=PUBLISHED)

    def is_spelt(self, head: bytes) -> bool:
        """`_ a n a r c h i s m`, each symbol by itself."""
        return SPELT.fullmatch(head) is not None

    def unspell(self, text: bytes, source: Source) -> bytes:
        return b"".join(text.split()).replace(UNDERSCORE, SPACE)

    def check(self, chunk: Bytes, source: Source, *, done: int) -> None:
        strange = np.flatnonzero((chunk != ord(SPACE)) & ((chunk < ord("a")) | (chunk > ord("z"))))
        if len(strange):
            at = int(strange[0])
            rule = f"has {bytes(chunk[at : at + 1])!r} at byte {done + at}, and text8 is letters a-z and spaces only"
            raise source.refuse(rule, f"fetch {ORIGIN.archive} again")

    def tokens(self, part: Iterator[Bytes]) -> Iterator[Bytes]:
        return stripped(part, space=ord(SPACE))

    def vocab_of(self, symbols: Sequence[int]) -> SymbolVocab:
        rule = "the letters and the space by falling count over all three splits"
        return SymbolVocab(symbols, unit="char", rule=rule)
