"""Text files read as the published readers do, by Python's text mode: UTF-8, and every kind of line end is one."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator

from txl_lightning.data.sources import Source, read


def whole_lines(source: Source, advance: Callable[[int], None] = lambda done: None) -> Iterator[str]:
    """The file in texts of some MB that each end in a newline; a last line without one gets it.

    A byte order mark is left out and CR LF (or CR) becomes a newline, so a copy that some editor saved anew gives the
    tokens of the original.

    Raises:
        ConfigError: the file cannot be read, is damaged or is not UTF-8.
    """
    lines = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    rest, done, at_start = "", 0, True
    for chunk in read(source, advance):
        text = _decode(lines, chunk, source, done)
        done += len(chunk)
        if at_start and text:
            text, at_start = text.removeprefix("\ufeff"), False
        whole, newline, last = text.rpartition("\n")
        if newline:
            yield rest + whole + newline
            rest = last
        else:
            rest += last
    rest += _decode(lines, b"", source, done, final=True)
    if rest:
        yield rest if rest.endswith("\n") else rest + "\n"


def _decode(
    lines: io.IncrementalNewlineDecoder, chunk: bytes, source: Source, done: int, *, final: bool = False
) -> str:
    try:
        return lines.decode(chunk, final)
    except UnicodeDecodeError as error:
        at = max(done + error.start, 0)
        raise source.refuse(f"is not UTF-8 near byte {at}", "take it as it was distributed") from error
