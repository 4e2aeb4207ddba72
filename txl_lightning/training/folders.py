"""Checkpoints that several ranks write: folders that appear whole, under names that point to them.

A run's `checkpoints` then holds

    zero_00000007_0/      one checkpoint: DeepSpeed's files and their sizes and hashes in manifest.json, written last
    last.ckpt             a link to it, as are previous.ckpt, best.ckpt and step_00000007.ckpt

A folder is written as `.zero_00000007_0.part`, flushed, renamed; then the link is exchanged, and only then are the
folders removed that no link points to. So whenever a process dies, every link leads to a whole checkpoint.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from pathlib import Path

from txl_lightning.checkpoints import LAST, manifest
from txl_lightning.checkpoints.manifest import Facts, sync_folder

TAG = "checkpoint"
"""DeepSpeed's name for the one checkpoint in a folder."""

PREFIX = "zero_"


def new_place(target: Path, *, step: int) -> Path:
    """A folder beside `target` that is not there yet."""
    places = (target.with_name(f"{PREFIX}{step:08d}_{number}") for number in itertools.count())
    return next(place for place in places if not place.exists())


def flushed(part: Path, *, rank: int) -> dict[str, Facts]:
    """Flush the files that this rank wrote to disk: sizes and hashes by path within the folder.

    Not those of others: on a network file system they may not be seen here yet.
    """
    files = [path for path in part.rglob("*") if path.is_file() and _writer(path) == rank]
    return {path.relative_to(part).as_posix(): manifest.flush(path) for path in sorted(files)}


def _writer(file: Path) -> int:
    """The rank that wrote a file, DeepSpeed's or one of lanes: the first one all that belong to no rank."""
    found = re.match(r"(?:zero_pp_)?rank_(\d+)[_.]", file.name)
    return int(found.group(1)) if found else 0


def give_name(part: Path, folder: Path, target: Path, *, files: dict[str, Facts]) -> None:
    """Note what the files are, give the folder its name, point `target` to it and remove what nothing points to."""
    manifest.note_folder(part, files)
    for below in (*(path for path in part.rglob("*") if path.is_dir()), part):
        sync_folder(below)
    os.rename(part, folder)
    sync_folder(folder.parent)
    if target.name == LAST:
        manifest.keep_previous(target)
    point(target, folder)
    sync_folder(folder.parent)
    remove_unused(folder.parent)


def point(link: Path, folder: Path) -> None:
    """Make `link` lead to a folder beside it, in one step."""
    part = link.with_name(f".{link.name}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(folder.name, target_is_directory=True)
    part.replace(link)


def remove_unused(parent: Path) -> None:
    """Remove the folders that no link beside them leads to."""
    used = {os.readlink(link) for link in parent.iterdir() if link.is_symlink()}
    for folder in parent.glob(f"{PREFIX}[0-9]*_[0-9]*"):
        if folder.name not in used and not folder.is_symlink():
            shutil.rmtree(folder)
