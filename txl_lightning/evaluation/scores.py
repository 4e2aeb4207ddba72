"""Losses of single tokens as rows that stand beside their text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from txl_lightning.config import Config
from txl_lightning.data.vocab import Tokens, Vocab
from txl_lightning.evaluation.losses import Losses, pieces_of

ROWS_AT_ONCE = 65536


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What was scored and how."""

    split: str
    n_token: int
    n_target: int  # one fewer: nothing stands before the first token
    loss: float  # nats per target
    segment_len: int
    n_lane: int
    memory: dict[str, Any]
    data_fingerprint: str
    file: str

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def summary(config: Config, losses: Losses, *, split: str, fingerprint: str, file: str) -> Scores:
    """The mean and what it depends on."""
    return Scores(
        split=split,
        n_token=len(losses.nats) + 1,
        n_target=len(losses.nats),
        loss=float(losses.nats.mean(dtype="float64")),
        segment_len=config.eval_segment_len,
        n_lane=losses.n_lane,
        memory=config.memory.to_dict(),
        data_fingerprint=fingerprint,
        file=file,
    )


def rows(tokens: Tokens, losses: Losses, vocab: Vocab) -> Iterator[dict[str, Any]]:
    """One row per token.

    `index` in the split; `token` id; `text` and the characters from `start` to `end` that it is in the text of all rows
    together; `nats` (null for the first); `place` and `age`, as in `Losses` (0 for the first).
    """
    start = 0
    for index, piece in enumerate(pieces_of(vocab, tokens)):
        scored = index > 0
        yield {
            "index": index,
            "token": int(tokens[index]),
            "text": piece,
            "start": start,
            "end": start + len(piece),
            "nats": float(losses.nats[index - 1]) if scored else None,
            "place": int(losses.place[index - 1]) if scored else 0,
            "age": int(losses.age[index - 1]) if scored else 0,
        }
        start += len(piece)


def write_jsonl(path: Path, given: Iterator[dict[str, Any]]) -> None:
    """One JSON object per line; the file is whole or not there."""

    def write(file: BinaryIO) -> None:
        for row in given:
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")

    _whole(path, write)


def write_parquet(path: Path, given: Iterator[dict[str, Any]]) -> None:
    """The same rows as columns; the file is whole or not there."""
    import pyarrow
    from pyarrow import parquet

    kinds = {"text": pyarrow.string(), "nats": pyarrow.float32()}
    names = ("index", "token", "text", "start", "end", "nats", "place", "age")
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.int64())) for name in names])

    def write(file: BinaryIO) -> None:
        with parquet.ParquetWriter(file, schema) as writer:
            while part := [row for _, row in zip(range(ROWS_AT_ONCE), given, strict=False)]:
                writer.write_table(pyarrow.Table.from_pylist(part, schema=schema))

    _whole(path, write)


WRITERS = {".jsonl": write_jsonl, ".parquet": write_parquet}
"""Suffix of a file to what writes it."""


def _whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
