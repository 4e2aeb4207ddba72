"""The corpus `enwik8`: the first 100 million bytes of a Wikipedia dump, in two readings.

- `data.reading=reference`: as the Transformer-XL code reads it. Its preparation writes each byte as a number and each
  newline as a newline, which its reader takes for white space: newlines are gone, and of 205 byte values 204 symbols
  remain. Its bits per character are means over what remains.
- `data.reading=bytes`: every byte is a target, as in most other papers; ids are the byte values.

The two scores are means over different targets and do not compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.layouts import RENAMED, BenchmarkConfig, Origin, one_or_three
from txl_lightning.data.sources import Source
from txl_lightning.data.symbols import Bytes, SymbolCorpus
from txl_lightning.data.vocab import SymbolVocab

NEWLINE = 10

RAW = {split: f"{name}.raw" for split, name in RENAMED.items()}
ORIGIN = Origin(archive="enwik8.zip", n_byte=36_445_475, layouts=({"all": "enwik8"}, RENAMED, RAW))

PART_BYTES = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
PUBLISHED = {"reference": {"vocabulary": {"all": 204}, "bytes": PART_BYTES}}
PUBLISHED["bytes"] = {"symbols": {"all": 205}, "bytes": PART_BYTES, "tokens": PART_BYTES}

NUMBERS = re.compile(rb"[\s\d]+")
VALUES = {str(value).encode(): value for value in range(256)}

RULES = {
    "reference": "the byte values but newlines, which are dropped, by falling count over all three splits",
    "bytes": "ids 0-255 are the bytes as they are, newlines too",
}


@dataclass(frozen=True, kw_only=True)
class Enwik8Config(BenchmarkConfig):
    """How its bytes are read."""

    name: str = key("enwik8", "100 million bytes of Wikipedia")
    reading: str = key(
        "reference",
        "reference: 204 symbols, newlines dropped, as the authors; bytes: every byte is a target",
        choices=tuple(RULES),
    )


@registry.corpora.register("enwik8", config=Enwik8Config)
class Enwik8(SymbolCorpus):
    """The first 100 million bytes of Wikipedia: 90 to train, 5 to validate, 5 to test."""

    Config = Enwik8Config

    def __init__(self, config: Enwik8Config) -> None:
        self.reading = config.reading
        super().__init__(
            name=config.name,
            files=one_or_three(config, ORIGIN),
            published=PUBLISHED[config.reading],
            details={"reading": config.reading},
        )

    def is_spelt(self, head: bytes) -> bool:
        """`60 109 101 …` or `<mediawiki …`."""
        return NUMBERS.fullmatch(head) is not None and all(number in VALUES for number in head.split()[:-1])

    def unspell(self, text: bytes, source: Source) -> bytes:
        numbers = text.replace(b"\r\n", b"\n").replace(b"\n", b" 10 ").split()
        try:
            return bytes(map(VALUES.__getitem__, numbers))
        except KeyError as error:
            wrong = error.args[0].decode("latin-1")
            raise source.refuse(f"has {wrong!r} where a byte as a number should be", "prepare it again") from error

    def check(self, chunk: Bytes, source: Source, *, done: int) -> None:
        """Any byte may be there."""

    def tokens(self, part: Iterator[Bytes]) -> Iterator[Bytes]:
        if self.reading == "bytes":
            return part
        return (chunk[chunk != NEWLINE] for chunk in part)

    def vocab_of(self, symbols: Sequence[int]) -> SymbolVocab:
        if self.reading == "bytes":
            return SymbolVocab(range(256), unit="byte", rule=RULES["bytes"])
        return SymbolVocab(symbols, unit="char", rule=RULES["reference"])

    def notes(self) -> tuple[str, ...]:
        if "all" in self.files and not self.heads["all"].startswith(b"<mediawiki"):
            return ("this file does not begin with <mediawiki as enwik8 does",)
        return ()
