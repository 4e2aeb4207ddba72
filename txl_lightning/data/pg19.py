"""The corpus `pg19`: books of Project Gutenberg from before 1919 (Rae et al. 2019, arXiv:1911.05507).

Every book is a document. It has no vocabulary of its own: books are read as bytes, or in sub-words with
`data.tokenizer`. Either way scores are given per word too, words being what white space sets apart.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.console import Advance
from txl_lightning.data.corpora import ByteCorpus, Scan
from txl_lightning.data.documents import Positions
from txl_lightning.data.layouts import BenchmarkConfig, Origin, files_of, opened
from txl_lightning.data.sources import Source, read
from txl_lightning.data.tokenizer import SubwordConfig
from txl_lightning.errors import ConfigError

FOLDERS = {"train": "train", "validation": "valid", "valid": "valid", "test": "test"}
METADATA = "metadata.csv"

ORIGIN = Origin(archive="the PG-19 folders train, validation and test", n_byte=None, layouts=())

PUBLISHED = {
    "documents": {"train": 28_602, "valid": 50, "test": 100},
    "words": {"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499},
}


@dataclass(frozen=True, kw_only=True)
class Pg19Config(BenchmarkConfig, SubwordConfig):
    """Where the books are and how they are read."""

    name: str = key("pg19", "books of Project Gutenberg, one document each")

    def check(self) -> None:
        BenchmarkConfig.check(self)
        SubwordConfig.check(self)


@registry.corpora.register("pg19", config=Pg19Config)
class Pg19(ByteCorpus):
    """Books in the order of their file names; train, validation and test are folders."""

    Config = Pg19Config
    published = PUBLISHED

    def __init__(self, config: Pg19Config) -> None:
        self.all = files_of(config, ORIGIN, known=_is_book)
        parts: dict[str, list[Source]] = {split: [] for split in PUBLISHED["words"]}
        for source in filter(_is_book, self.all):
            parts[FOLDERS[_folder(source)]].append(source)
        for split, books in parts.items():
            if not books:
                cure = f"give {ORIGIN.archive}, with books as .txt files in them"
                raise ConfigError("data.path", config.path, f"there is no book in the folder {split}", cure)
        self._words: dict[str, int] | None = None  # counted so far, while the books are scanned
        super().__init__(name=config.name, parts=parts, rule="as published")

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(dict.fromkeys(super().signature()))

    def scan(self) -> Scan:
        self._words = words = dict.fromkeys(self.parts, 0)
        whole = super().scan()
        self._words = None
        return dataclasses.replace(
            whole,
            details={**whole.details, "words": words},
            words={split: count - _starts_with_word(self.parts[split][0]) for split, count in words.items()},
            notes=(*whole.notes, *self._lost()),
        )

    def _chunks(self, source: Source, advance: Advance) -> Iterator[tuple[bytes, Positions]]:
        found = super()._chunks(source, advance)
        return found if self._words is None else self._counted(found, self._words, FOLDERS[_folder(source)])

    def _counted(
        self, chunks: Iterable[tuple[bytes, Positions]], words: dict[str, int], split: str
    ) -> Iterator[tuple[bytes, Positions]]:
        """The chunks of a book, their words added to `words`."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        within = False  # a word that goes on in the next chunk
        for chunk, starts in chunks:
            if text := decoder.decode(chunk):
                words[split] += len(text.split()) - (within and not text[0].isspace())
                within = not text[-1].isspace()
            yield chunk, starts

    def _progress(self, label: str) -> AbstractContextManager[Advance]:
        return opened(label, list(self._sources()))

    def _lost(self) -> tuple[str, ...]:
        """Says how many books the metadata name that are not there."""
        files = [source for source in self.all if source.name.rpartition("/")[2] == METADATA]
        if len(files) != 1:
            return ()
        named = {line.partition(b",")[0].strip(b'" ') for line in b"".join(read(files[0])).splitlines()}
        there = {source.name.rpartition("/")[2].removesuffix(".txt").encode() for source in self._sources()}
        lost = sum(name.isdigit() for name in named - there)
        what = f"1 book that {METADATA} names is" if lost == 1 else f"{lost} books that {METADATA} names are"
        return (f"{what} not there",) if lost else ()


def _folder(source: Source) -> str:
    """The folder right above a file."""
    return source.name.rpartition("/")[0].rpartition("/")[2]


def _is_book(source: Source) -> bool:
    return source.name.endswith(".txt") and _folder(source) in FOLDERS


def _starts_with_word(source: Source) -> bool:
    """Whether a book's first byte is a word by itself: it is no target, so it counts for no score."""
    with closing(read(source)) as chunks:
        head = next(chunks, b"")[:2]
    return len(head) == 2 and not head[:1].isspace() and head[1:].isspace()
