"""What a corpus is, and the byte corpora: files in, one token stream per split out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from txl_lightning.data.console import Advance, progress
from txl_lightning.data.documents import RULES, Positions, joined, with_separators, with_starts
from txl_lightning.data.sources import CHUNK, Source, read, stat_of
from txl_lightning.data.splits import FEW, SPLITS, Piece, cut_at_bytes, cut_at_documents
from txl_lightning.data.tables import rows
from txl_lightning.data.vocab import ByteVocab, Tokens, Vocab
from txl_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What one pass over the sources found. Splits without a token are absent from the counts."""

    vocab: Vocab  # what the tokens are; it may come out of the text
    content: str  # sha256 over every source's name, size and bytes
    rule: str  # how the splits are made, in words that differ whenever the splits may
    documents: dict[str, int]
    tokens: dict[str, int]
    bytes: dict[str, int]
    details: dict[str, Any]  # what else belongs beside a score: counts, versions
    # of the scored text, all but the first token; empty where no score is given per word or none per byte but itself
    words: dict[str, int] = field(default_factory=dict)  # between white space
    scored_bytes: dict[str, int] = field(default_factory=dict)  # UTF-8, and one for each end of a document
    notes: tuple[str, ...] = ()  # one-line remarks the user should see
    pieces: dict[str, Piece] = field(default_factory=dict)  # where one stream is cut into splits


class Corpus(Protocol):
    """What a registered name builds from its config. Building finds the sources and refuses what cannot serve."""

    name: str
    rule_version: int  # raise it when the same sources would give other tokens

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """Path, size and time of change (ns) of every source."""

    def scan(self) -> Scan:
        """Read everything once: check, count, hash. Raises ConfigError."""

    def stream(self, scan: Scan) -> Iterator[tuple[str, Tokens]]:
        """All tokens, each chunk with the split it belongs to; within a split in order."""


class ByteCorpus:
    """Files as bytes, or one column of tables as UTF-8, with a separator after each document.

    Args:
        parts: the sources of each split; with `ratios` those of all splits together, under any one name.
        document: what a document is in a file: a key of `documents.RULES`.
        column: the sources are tables, each row one document: the text in this column.
        ratios: shares of train, valid and test when the splits are cut from one stream.
        binary: allow NUL bytes; None: no, and there is no key for it.
        rule: how the splits are made, in words; with `ratios` it is completed here.
        details: what else to record.
    """

    rule_version: ClassVar[int] = 1
    vocab: ClassVar[ByteVocab] = ByteVocab()

    def __init__(
        self,
        *,
        name: str,
        parts: Mapping[str, Sequence[Source]],
        rule: str,
        document: str = "file",
        column: str | None = None,
        ratios: Sequence[float] | None = None,
        binary: bool | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        assert document in RULES and (ratios is None or len(parts) == 1)
        self.name, self.rule, self.ratios, self.binary = name, rule, ratios, binary
        self.column, self.document = column, document if column is None else "row"
        self.parts = dict(parts)
        self.details = {**(details or {}), **({} if column is None else {"column": column})}

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        return tuple((str(source.path), *stat_of(source)) for source in self._sources())

    def scan(self) -> Scan:
        content = hashlib.sha256()
        documents, n_byte, sizes = dict.fromkeys(self.parts, 0), dict.fromkeys(self.parts, 0), []
        with self._progress("reading") as advance:
            for part, sources in self.parts.items():
                for source in sources:
                    size, count, digest = self._scan_file(source, advance)
                    content.update(json.dumps([part, source.name, size, digest]).encode())
                    documents[part] += count
                    n_byte[part] += size
                    sizes.append(size)
                if not n_byte[part]:
                    raise _all_empty(sources)
        empty = sizes.count(0)
        whole = Scan(
            vocab=self.vocab,
            content=content.hexdigest(),
            rule=self.rule,
            documents=documents,
            tokens={part: documents[part] + n_byte[part] for part in self.parts},
            bytes=n_byte,
            details={**self.details, "files": len(sizes), "bytes": sum(sizes), "document": self.document},
            notes=(f"{empty} empty file{'s hold' if empty > 1 else ' holds'} no document",) if empty else (),
        )
        return whole if self.ratios is None else self._cut(whole, sizes, self.ratios)

    def stream(self, scan: Scan) -> Iterator[tuple[str, Tokens]]:
        with self._progress("writing tokens") as advance:
            if self.ratios is not None:
                yield from _deal(self._tokens(self._sources(), advance), scan.pieces)
                return
            for part, sources in self.parts.items():
                for tokens in self._tokens(sources, advance):
                    yield part, tokens

    def _sources(self) -> Iterator[Source]:
        return (source for sources in self.parts.values() for source in sources)

    def _tokens(self, sources: Iterable[Source], advance: Advance) -> Iterator[Tokens]:
        for source in sources:
            chunks = self._chunks(source, advance)
            yield from with_separators(chunks, separator=self.vocab.separator, dtype=self.vocab.dtype)

    def _chunks(self, source: Source, advance: Advance) -> Iterator[tuple[bytes, Positions]]:
        """The bytes of a file, and where further documents begin in them."""
        if self.column is None:
            return with_starts(read(source, advance), document=self.document)
        return joined(rows(source, column=self.column, advance=advance), chunk=CHUNK)

    def _scan_file(self, source: Source, advance: Advance) -> tuple[int, int, str]:
        """Bytes (unpacked), documents and sha256 of one file."""
        digest = hashlib.sha256()
        size = further = 0
        for chunk, starts in self._chunks(source, advance):
            if not self.binary and (at := chunk.find(0)) >= 0:
                rule = f"NUL byte at position {size + at}, so this is no text"
                cure = "mend the file" if self.binary is None else "set data.binary=true to read it all the same"
                raise source.refuse(rule, cure)
            digest.update(chunk)
            if self.column is not None:
                digest.update((starts + size).tobytes())  # rows are not told from the bytes
            further += starts.size
            size += len(chunk)
        return size, further + (size > 0), digest.hexdigest()

    def _cut(self, whole: Scan, sizes: list[int], ratios: Sequence[float]) -> Scan:
        """The scan of one stream after it is cut by ratios; `sizes` are bytes per file."""
        n_document, n_token = sum(whole.documents.values()), sum(whole.tokens.values())
        shares = "/".join(str(float(ratio)) for ratio in ratios)
        ends = self._ends(sizes)
        where, notes = "between documents", whole.notes
        if n_document >= FEW:
            pieces = cut_at_documents(ends, n_document=n_document, n_token=n_token, ratios=ratios)
        else:
            pieces = cut_at_bytes(np.concatenate([*ends]), n_token=n_token, ratios=ratios)
            where = "at byte positions"
            if sum(ratio > 0 for ratio in ratios) > 1:
                notes += (_cut_anywhere(n_document, n_token, shares, pieces),)
        return dataclasses.replace(
            whole,
            rule=f"{self.rule} {shares} {where}",
            documents={name: piece.documents for name, piece in pieces.items()},
            tokens={name: piece.end - piece.start for name, piece in pieces.items()},
            bytes={name: piece.end - piece.start - piece.separators for name, piece in pieces.items()},
            notes=notes,
            pieces=pieces,
        )

    def _ends(self, sizes: list[int]) -> Iterator[Tokens]:
        """Positions behind each document's separator in the whole stream, in arrays; holds one chunk at a time."""
        if self.document == "file":
            yield np.cumsum([size + 1 for size in sizes if size])
            return
        done = 0
        with self._progress("counting documents") as advance:
            for tokens in self._tokens(self._sources(), advance):
                yield np.flatnonzero(tokens == self.vocab.separator) + 1 + done
                done += len(tokens)

    def _progress(self, label: str) -> AbstractContextManager[Advance]:
        return progress(label, n_byte=sum(size for _, size, _ in self.signature()))


def _cut_anywhere(n_document: int, n_token: int, shares: str, pieces: Mapping[str, Piece]) -> str:
    count = f"{n_document} document{'s' if n_document > 1 else ''}, fewer than {FEW}"
    short = f"; {n_token} tokens fill only {' and '.join(pieces)}" if len(pieces) < len(SPLITS) else ""
    return f"{count}: cut into {shares} at byte positions, not between documents{short}"


def _all_empty(sources: Sequence[Source]) -> ConfigError:
    if len(sources) == 1:
        return sources[0].refuse("the file is empty", "give a file with text")
    return ConfigError(
        sources[0].key, sources[0].path.parent, f"all {len(sources)} files are empty", "give files with text"
    )


def _deal(stream: Iterable[Tokens], pieces: Mapping[str, Piece]) -> Iterator[tuple[str, Tokens]]:
    """One stream's chunks, cut where the splits meet, with their names."""
    done = 0
    for tokens in stream:
        for name, piece in pieces.items():
            part = tokens[max(piece.start - done, 0) : max(piece.end - done, 0)]
            if len(part):
                yield name, part
        done += len(tokens)


__all__ = ["SPLITS", "ByteCorpus", "Corpus", "Scan"]
