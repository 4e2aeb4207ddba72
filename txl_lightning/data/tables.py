"""Tables as text: one column of JSON Lines or Parquet files, each row one document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from txl_lightning.data.sources import Source, read, stat_of
from txl_lightning.errors import ConfigError, suggest

Advance = Callable[[int], None]

JSON_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = ".parquet"
TAKES = "give files that end in .jsonl, .jsonl.gz or .parquet, or leave data.column out"

ROWS = 256  # of a Parquet file held at once


def rows(source: Source, *, column: str, advance: Advance = lambda done: None) -> Iterator[bytes]:
    """The column's texts in UTF-8, row by row; empty ones too. Blank lines of JSON Lines are no rows.

    Args:
        source: the file; its name's ending says what it is.
        column: the key of each JSON object, or the Parquet column.
        advance: gets the bytes of the file on disk done so far.

    Raises:
        ConfigError: the file is no such table, or a row of it is damaged, lacks the column or holds no text there;
            the message names file and line or row, counted from 1.
    """
    name = source.path.name.lower()
    if name.endswith(JSON_ENDINGS):
        return _json_rows(source, column, advance)
    if name.endswith(PARQUET):
        return _parquet_rows(source, column, advance)
    raise source.refuse("is no table, and data.column names a column", TAKES)


def _json_rows(source: Source, column: str, advance: Advance) -> Iterator[bytes]:
    for number, line in enumerate(_lines(source, advance), start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:  # of UTF-8 and of JSON
            raise source.refuse(f"{place} is not JSON: {error}", "each line must be one JSON object") from error
        if not isinstance(row, dict):
            raise source.refuse(f"{place} is {_kind(row)}", "each line must be one JSON object")
        if column not in row:
            raise source.refuse(f"{place} has no {column!r}", _column_cure(column, list(row)))
        yield _text(row[column], source, place, column)


def _lines(source: Source, advance: Advance) -> Iterator[bytes]:
    rest = b""
    for chunk in read(source, advance):
        *lines, last = chunk.split(b"\n")
        if lines:
            yield rest + lines[0]
            yield from lines[1:]
            rest = b""
        rest += last
    if rest:
        yield rest


def _parquet_rows(source: Source, column: str, advance: Advance) -> Iterator[bytes]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise source.refuse("reading Parquet needs pyarrow", "pip install 'txl-lightning[parquet]'") from error
    try:
        with parquet.ParquetFile(source.path) as file:
            _check_column(file.schema_arrow, source, column)
            number = 0
            for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _text(value, source, f"row {number}", column)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise source.refuse(f"is not a whole Parquet file: {reason}", "copy it again") from error
    advance(stat_of(source)[0])


def _check_column(schema: Any, source: Source, column: str) -> None:
    import pyarrow.types as kinds

    if column not in schema.names:
        raise source.refuse(f"has no column {column!r}", _column_cure(column, schema.names))
    kind = schema.field(column).type
    plain = kind.value_type if kinds.is_dictionary(kind) else kind
    if not (kinds.is_string(plain) or kinds.is_large_string(plain) or kinds.is_string_view(plain)):
        raise source.refuse(f"column {column!r} holds {kind} and no text", "name a column of strings in data.column")


def _text(value: object, source: Source, place: str, column: str) -> bytes:
    if not isinstance(value, str):
        raise source.refuse(f"{place}: {column!r} is {_kind(value)} and no text", "every row needs a string there")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        rule = f"{place}: {column!r} holds half a surrogate pair at character {error.start}"
        raise source.refuse(rule, "write whole characters") from error


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _column_cure(column: str, names: list[str]) -> str:
    return f"data.column: {suggest(column, names)}" if names else "name a column that every row has in data.column"


__all__ = ["ConfigError", "rows"]
