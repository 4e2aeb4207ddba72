"""Corpora of symbols: one file of bytes cut at fixed places, or its three parts, as they are or spelt out.

Spelt out is what the authors' preparation scripts leave: enwik8's bytes as decimal numbers, text8's letters, with
spaces between them. Symbols are numbered by falling count over all splits, those of equal count in the order they were
first seen.
"""

from __future__ import annotations

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from txl_lightning.data.console import Advance
from txl_lightning.data.corpora import Scan
from txl_lightning.data.counts import Published
from txl_lightning.data.layouts import opened
from txl_lightning.data.sources import Source, read, stat_of
from txl_lightning.data.splits import SPLITS
from txl_lightning.data.vocab import SymbolVocab, Tokens

HELD_OUT, SMALL = 5_000_000, 50_000_000
"""Bytes of the validation and of the test split, and below which size of a file they are a twentieth of it each."""

HEAD = 4096  # bytes by which the form of a file is told

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where a split is: bytes start <= position < end of a file; end None: to its end."""

    source: Source
    start: int = 0
    end: int | None = None


class SymbolCorpus(ABC):
    """Bytes as symbols.

    Args:
        name: of the corpus.
        files: the whole file under "all", or one for each split.
        published: what was published about it.
        details: what else to record.
    """

    rule_version: ClassVar[int] = 1

    def __init__(
        self, *, name: str, files: Mapping[str, Source], published: Published, details: Mapping[str, Any] | None = None
    ) -> None:
        self.name, self.files, self.published, self.details = name, dict(files), published, dict(details or {})
        self.heads = {split: _head(source) for split, source in self.files.items()}
        self._spelt = {split: self.is_spelt(head) for split, head in self.heads.items()}
        if self._spelt.get("all"):
            raise self.files["all"].refuse("is one part of the prepared files", "give the folder of all three")

    @abstractmethod
    def is_spelt(self, head: bytes) -> bool:
        """Whether a file that begins like this is spelt out."""

    @abstractmethod
    def unspell(self, text: bytes, source: Source) -> bytes:
        """The bytes behind whole symbols of a file that is spelt out. Raises ConfigError."""

    @abstractmethod
    def check(self, chunk: Bytes, source: Source, *, done: int) -> None:
        """Refuse bytes that cannot be in this corpus; `done`: bytes of the file before these. Raises ConfigError."""

    @abstractmethod
    def tokens(self, part: Iterator[Bytes]) -> Iterator[Bytes]:
        """The bytes of a split that become tokens."""

    @abstractmethod
    def vocab_of(self, symbols: Sequence[int]) -> SymbolVocab:
        """The vocabulary, from the byte values that became tokens, by falling count."""

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(dict.fromkeys((str(source.path), *stat_of(source)) for source in self.files.values()))

    def scan(self) -> Scan:
        with self._opened("reading") as advance:
            digests, sizes = {}, {}
            for name, source in self.files.items():
                digests[name], sizes[name] = self._measure(name, source, advance)
        n_token, symbols = self._count(sizes)
        whole = sizes.get("all")
        return Scan(
            vocab=self.vocab_of(symbols),
            content=hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
            rule="three files" if whole is None else _cut_rule(whole),
            documents=dict.fromkeys(n_token, 1),
            tokens=n_token,
            bytes=sizes if whole is None else dict(zip(SPLITS, _shares(whole), strict=True)),
            details={**self.details, "symbols": len(symbols)},
            notes=self.notes(),
        )

    def notes(self) -> tuple[str, ...]:
        """One-line remarks for the user."""
        return ()

    def stream(self, scan: Scan) -> Iterator[tuple[str, Tokens]]:
        vocab = scan.vocab
        assert isinstance(vocab, SymbolVocab)
        table = vocab.table.astype(vocab.dtype)
        parts = self._parts({"all": sum(scan.bytes.values())})
        with self._opened("writing tokens") as advance:
            for split, part in parts.items():
                for chunk in self.tokens(self._bytes(part, advance)):
                    yield split, table[chunk]

    def _count(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], list[int]]:
        """Tokens of each split, and the byte values among them by falling count, ties as first seen."""
        count, first = np.zeros(256, dtype=np.int64), np.zeros(256, dtype=np.int64)
        n_token: dict[str, int] = {}
        with self._opened("counting") as advance:
            for split, part in self._parts(sizes).items():
                n_token[split] = 0
                for chunk in self.tokens(self._bytes(part, advance)):
                    _add(chunk, count, first, seen=sum(n_token.values()))
                    n_token[split] += len(chunk)
                if not n_token[split]:
                    raise part.source.refuse(f"leaves no symbol for {split}", "fetch it again")
        return n_token, sorted(np.flatnonzero(count).tolist(), key=lambda symbol: (-count[symbol], first[symbol]))

    def _opened(self, label: str) -> AbstractContextManager[Advance]:
        return opened(label, list(self.files.values()))

    def _measure(self, name: str, source: Source, advance: Advance) -> tuple[str, int]:
        """sha256 and number of a file's bytes, spelt or not, all of them checked."""
        digest, done, newlines, returns = hashlib.sha256(), 0, 0, 0
        for chunk in self._bytes(Part(source=source), advance, spelt=self._spelt[name]):
            self.check(chunk, source, done=done)
            digest.update(chunk.data)
            done += len(chunk)
            newlines, returns = newlines + int((chunk == 10).sum()), returns + int((chunk == 13).sum())
        if newlines and returns == newlines:
            raise source.refuse("its line ends were changed to CR LF", "fetch it again and unpack it as binary")
        return digest.hexdigest(), done

    def _parts(self, sizes: Mapping[str, int]) -> dict[str, Part]:
        if "all" not in self.files:
            return {split: Part(source=source) for split, source in self.files.items()}
        ends = list(accumulate(_shares(sizes["all"])))
        starts = [0, *ends]
        return {
            split: Part(source=self.files["all"], start=start, end=end)
            for split, start, end in zip(SPLITS, starts, ends, strict=False)
        }

    def _bytes(self, part: Part, advance: Advance, *, spelt: bool | None = None) -> Iterator[Bytes]:
        """The bytes of a part, in chunks that are never empty."""
        if spelt is None:
            spelt = any(self._spelt[split] for split, source in self.files.items() if source is part.source)
        chunks = read(part.source, advance)
        for chunk in self._unspelt(chunks, part.source) if spelt else _within(chunks, part):
            if chunk:
                yield np.frombuffer(chunk, dtype=np.uint8)

    def _unspelt(self, chunks: Iterator[bytes], source: Source) -> Iterator[bytes]:
        rest = b""
        for chunk in chunks:
            whole, space, last = (rest + chunk).rpartition(b" ")
            if space:
                yield self.unspell(whole, source)
            rest = last
        yield self.unspell(rest, source)


def stripped(chunks: Iterator[Bytes], *, space: int) -> Iterator[Bytes]:
    """Without the spaces at both ends; those within stay."""
    begun, held = False, 0
    for chunk in chunks:
        content = np.flatnonzero(chunk != space)
        if not len(content):
            held += len(chunk) if begun else 0
            continue
        first, last = int(content[0]) if not begun else 0, int(content[-1])
        yield np.concatenate([np.full(held, space, dtype=np.uint8), chunk[first : last + 1]])
        begun, held = True, len(chunk) - last - 1


def _within(chunks: Iterator[bytes], part: Part) -> Iterator[bytes]:
    done = 0
    for chunk in chunks:
        yield chunk[max(part.start - done, 0) : None if part.end is None else max(part.end - done, 0)]
        done += len(chunk)
        if part.end is not None and done >= part.end:
            return


def _add(chunk: Bytes, count: npt.NDArray[Any], first: npt.NDArray[Any], *, seen: int) -> None:
    """Add a chunk's byte values to `count` and where they were first seen to `first`."""
    found = np.bincount(chunk, minlength=256)
    for value in np.flatnonzero((found > 0) & (count == 0)):
        first[value] = seen + int((chunk == value).argmax())
    count += found


def _shares(n_byte: int) -> tuple[int, int, int]:
    """Bytes of train, valid and test."""
    held_out = HELD_OUT if n_byte >= SMALL else n_byte // 20
    return n_byte - 2 * held_out, held_out, held_out


def _cut_rule(n_byte: int) -> str:
    if n_byte >= SMALL:
        return f"the last two {HELD_OUT:,} bytes are valid and test"
    return "a small file: the last two twentieths are valid and test"


def _head(source: Source) -> bytes:
    with closing(read(source)) as chunks:
        head = next(chunks, b"")[:HEAD]
    if head.startswith(codecs.BOM_UTF8):
        raise source.refuse("begins with a byte order mark, so it was changed", "fetch it again")
    return head
