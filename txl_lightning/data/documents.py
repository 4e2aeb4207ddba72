"""Where documents begin in a stream of bytes, found chunk by chunk with numpy.

No byte is ever dropped: the newline that ends a line, and the empty lines between paragraphs, belong to the document
before them. A file that does not end in a newline is as good as one that does. The end of a file ends its document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

NEWLINE, RETURN = 10, 13

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


class Starts(Protocol):
    """Called with the chunks of ONE file in order: positions in the chunk where a further document begins, ascending.

    The first document of the file is not reported.
    """

    def __call__(self, chunk: Bytes) -> Positions: ...


class FileStarts:
    """The whole file is one document."""

    def __call__(self, chunk: Bytes) -> Positions:
        return np.empty(0, dtype=np.int64)


class LineStarts:
    """Every line is a document, with its newline; an empty line is one of a single byte."""

    def __init__(self) -> None:
        self._pending = False  # the chunk before ended in a newline

    def __call__(self, chunk: Bytes) -> Positions:
        starts = np.flatnonzero(chunk == NEWLINE) + 1
        if self._pending:
            starts = np.concatenate(([0], starts))
        self._pending = bool(chunk[-1] == NEWLINE)
        return starts[:-1] if self._pending else starts


class BlankLineStarts:
    """Documents are set apart by one or more empty lines (LF or CRLF); leading ones belong to the first document."""

    def __init__(self) -> None:
        self._newlines = 0  # since the last begin of a run of other bytes
        self._in_break = True  # the byte before was a newline or carriage return, or there was none
        self._seen = False  # the file has had a byte that is neither

    def __call__(self, chunk: Bytes) -> Positions:
        content = (chunk != NEWLINE) & (chunk != RETURN)
        begins = content.copy()
        begins[1:] &= ~content[:-1]
        begins[0] &= self._in_break
        runs = np.flatnonzero(begins)
        newlines = np.flatnonzero(chunk == NEWLINE)
        before = np.searchsorted(newlines, runs)
        gaps = np.diff(before, prepend=-self._newlines)  # newlines between each run and the one before
        first = int(runs.size > 0 and not self._seen)
        starts = runs[first:][gaps[first:] >= 2]
        self._newlines = newlines.size - int(before[-1]) if runs.size else self._newlines + newlines.size
        self._in_break = not bool(content[-1])
        self._seen = self._seen or runs.size > 0
        return starts


RULES: dict[str, Callable[[], Starts]] = {"file": FileStarts, "line": LineStarts, "blank_line": BlankLineStarts}
"""`data.document` to what finds documents in one file."""


def with_starts(chunks: Iterable[bytes], *, document: str) -> Iterator[tuple[bytes, Positions]]:
    """The chunks of one file, each with the positions where a further document begins in it."""
    starts = RULES[document]()
    for chunk in chunks:
        yield chunk, starts(np.frombuffer(chunk, dtype=np.uint8))


def joined(rows: Iterable[bytes], *, chunk: int) -> Iterator[tuple[bytes, Positions]]:
    """Documents as chunks of at least `chunk` bytes, each with the positions where a further document begins in it.

    An empty one is none.
    """
    held, starts, size, first = [], [], 0, True
    for row in filter(None, rows):
        if not first:
            starts.append(size)
        first = False
        held.append(row)
        size += len(row)
        if size >= chunk:
            yield b"".join(held), np.array(starts, dtype=np.int64)
            held, starts, size = [], [], 0
    if held:
        yield b"".join(held), np.array(starts, dtype=np.int64)


def with_separators(
    chunks: Iterable[tuple[bytes, Positions]], *, separator: int, dtype: np.dtype[Any]
) -> Iterator[npt.NDArray[Any]]:
    """One file as token ids, the separator after each of its documents; nothing for an empty file.

    Args:
        chunks: its bytes, and where further documents begin in them.
        separator: the id.
        dtype: of the ids.
    """
    last = None
    for last, starts in chunks:
        chunk = np.frombuffer(last, dtype=np.uint8)
        yield np.insert(chunk.astype(dtype), starts, separator)
    if last is not None:
        yield np.array([separator], dtype=dtype)
