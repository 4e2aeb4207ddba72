"""Memory of the lanes that is too large to be gathered: each rank writes its own, beside the checkpoint.

    checkpoints/last.ckpt                          everything else, and the list of the files below
    checkpoints/lanes/3f9c2a71d0b4/rank_00000.pt   lanes [0, B / W) of that one checkpoint

Where the checkpoint is a folder, which DeepSpeed's ranks write, they lie in it. Else files of a checkpoint have a
folder of their own, which no other checkpoint writes into. They are whole and on disk before the checkpoint that lists
them gets its name, and are deleted when no checkpoint lists them any more. The list holds lanes, size and sha256 of
each file, so any number of ranks can read them, each what it needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from txl_lightning.checkpoints import manifest
from txl_lightning.errors import ConfigError
from txl_lightning.types import State, n_byte

LANES = "lanes"
GATHERED_BYTES = 1 << 30
"""Memory of all lanes up to this size goes into the checkpoint itself, through one rank."""


class SavedLanes(Protocol):
    """Memory of the lanes of all ranks, as a checkpoint holds it."""

    @property
    def n_lane(self) -> int: ...

    @property
    def n_byte(self) -> int: ...

    def part(self, first: int, stop: int) -> State:
        """Lanes [first, stop) on the CPU."""


@dataclass(frozen=True)
class InCheckpoint:
    """In the checkpoint itself."""

    state: State

    @property
    def n_lane(self) -> int:
        return next(iter(self.state.values())).shape[0]

    @property
    def n_byte(self) -> int:
        return n_byte(self.state)

    def part(self, first: int, stop: int) -> State:
        return {key: tensor[first:stop] for key, tensor in self.state.items()}


@dataclass(frozen=True)
class InFiles:
    """In files beside the checkpoint, in the order of their lanes."""

    folder: Path  # that the files are named from: see `root_of`
    shards: Sequence[Mapping[str, Any]]

    @property
    def n_lane(self) -> int:
        return int(self.shards[-1]["stop"])

    @property
    def n_byte(self) -> int:
        return sum(int(shard["bytes"]) for shard in self.shards)

    def part(self, first: int, stop: int) -> State:
        """Reads only files that hold some of them. Raises ConfigError: one of those is missing or damaged."""
        pieces = []
        for shard in self.shards:
            start, end = int(shard["first"]), int(shard["stop"])
            if end <= first or stop <= start:
                continue
            if (fault := fault_of(self.folder, shard)) is not None:
                raise ConfigError("resume", self.folder, fault, "give another checkpoint")
            state = torch.load(self.folder / shard["file"], map_location="cpu", weights_only=True)
            own = slice(max(first, start) - start, min(stop, end) - start)
            pieces.append({key: tensor[own] for key, tensor in state.items()})
        return {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}


def saved_lanes(saved: Mapping[str, Any], *, checkpoint: str | Path | None) -> SavedLanes | None:
    """What a checkpoint says of its lanes; None: nothing was read yet. `checkpoint`: its path, if it has one."""
    if "shards" in saved:
        assert checkpoint is not None, "lanes in files of their own lie beside a file"
        return InFiles(root_of(Path(checkpoint)), saved["shards"])
    return InCheckpoint(saved["lanes"]) if saved["lanes"] else None


def root_of(checkpoint: Path) -> Path:
    """The folder that a checkpoint's files of lanes are named from: itself, or the one it lies in."""
    return checkpoint if checkpoint.is_dir() else checkpoint.parent


def write(own: State, folder: Path, *, name: str, rank: int) -> dict[str, Any]:
    """Write one rank's lanes, so that they are on disk when this returns.

    Args:
        own: (B / W, ...) tensors on the CPU.
        folder: that of the checkpoint, or the checkpoint itself.
        name: of the checkpoint's own folder, the same on all ranks and never used before.
        rank: whose lanes they are.

    Returns:
        The file's entry in the list.
    """
    target = folder / LANES / name / f"rank_{rank:05d}.pt"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with part.open("wb") as file:
        hashed = manifest.Hashed(file)
        torch.save(own, hashed)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    part.replace(target)
    for path in (target.parent, target.parent.parent, folder):
        manifest.sync_folder(path)
    lanes = next(iter(own.values())).shape[0]
    return {
        "file": target.relative_to(folder).as_posix(),
        "first": rank * lanes,
        "stop": (rank + 1) * lanes,
        "bytes": n_byte(own),
        "size": target.stat().st_size,
        "sha256": hashed.digest.hexdigest(),
    }


def fault_of(folder: Path, shard: Mapping[str, Any]) -> str | None:
    """What is wrong with one file of lanes; None: nothing."""
    file = folder / str(shard["file"])
    if not file.is_file():
        return f"{shard['file']}, the memory of lanes {shard['first']} to {shard['stop'] - 1}, is missing"
    if file.stat().st_size != shard["size"] or manifest.sha256_of(file) != shard["sha256"]:
        return f"{shard['file']} is damaged: its size or content is not what the checkpoint says"
    return None


def remove_unused(folder: Path) -> None:
    """Delete the files of lanes that no checkpoint of a folder lists, whole or half written.

    Where a checkpoint cannot be read nothing is deleted.
    """
    if not (folder / LANES).is_dir():
        return
    used = set()
    for file in [path for path in folder.iterdir() if path.is_file() and path.suffix != ".json"]:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            shards = saved["txl_lightning"]["lanes"].get("shards", ())
            used |= {Path(shard["file"]).parent.name for shard in shards}
        except Exception:  # no checkpoint, or a damaged one
            if file.suffix == ".ckpt":
                return
    for own in [path for path in (folder / LANES).iterdir() if path.name not in used]:
        shutil.rmtree(own, ignore_errors=True)
    if not any((folder / LANES).iterdir()):
        (folder / LANES).rmdir()
