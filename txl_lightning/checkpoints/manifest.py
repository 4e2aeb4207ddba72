"""What a run's checkpoints should be: size and sha256 of each file, in `manifest.json` beside them.

An entry is written before its file gets its name, and those of the files before it stay for a while. So whenever a
process dies, every checkpoint there is has its entry; a file that matches none was damaged later. A checkpoint that is
a folder has a manifest of its own, written into it before the folder gets its name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypedDict

MANIFEST = "manifest.json"
PREVIOUS = "previous.ckpt"
"""The checkpoint `last` before the latest."""

KEPT = 3  # entries of each name


class Facts(TypedDict):
    """What a file should be."""

    size: int
    sha256: str


def note(file: Path, *, size: int, sha256: str) -> None:
    """Add an entry for a file that is about to get its name."""
    held = _entries(file.parent)
    own = [{"size": size, "sha256": sha256}, *held.get(file.name, [])][:KEPT]
    replace_text(file.parent / MANIFEST, json.dumps({**held, file.name: own}, indent=2) + "\n")


def note_folder(folder: Path, files: dict[str, Facts]) -> None:
    """Write the manifest of a folder that is about to get its name: what its files are, by path within it."""
    replace_text(folder / MANIFEST, json.dumps({"files": files}, indent=2, sort_keys=True) + "\n")


def flush(file: Path) -> Facts:
    """Flush a closed file to disk: what it is."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"size": file.stat().st_size, "sha256": sha256_of(file)}


def is_damaged(file: Path) -> bool:
    """Whether a checkpoint that has entries matches none of them; a folder: whether a file in it is not what it was."""
    if file.is_dir():
        return _is_damaged_folder(file)
    entries = _entries(file.parent)
    if file.name != PREVIOUS and file.name not in entries:
        return False
    known = [(entry["size"], entry["sha256"]) for found in entries.values() for entry in found]
    size = file.stat().st_size
    return bool(known) and (all(size != entry[0] for entry in known) or (size, sha256_of(file)) not in known)


class Hashed:
    """A file that knows the sha256 of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _is_damaged_folder(folder: Path) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    try:
        noted = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return not all(_is(folder / name, facts) for name, facts in noted.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def _is(file: Path, facts: Facts) -> bool:
    return file.stat().st_size == facts["size"] and sha256_of(file) == facts["sha256"]


def keep_previous(target: Path) -> None:
    """Give the `last` there is a second name, so that it outlives its successor's arrival."""
    if not target.exists():
        return
    part = target.with_name(f".{PREVIOUS}.part")
    part.unlink(missing_ok=True)
    if target.is_symlink():
        part.symlink_to(os.readlink(target))
    else:
        try:
            os.link(target, part)
        except OSError:  # a file system without links
            shutil.copyfile(target, part)
    part.replace(target.with_name(PREVIOUS))


def replace_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a text file so that it is the old or the new one whenever the process dies."""
    with replacing(path, errors=errors) as file:
        file.write(text)


@contextmanager
def replacing(path: Path, *, errors: str = "strict") -> Iterator[TextIO]:
    """A text file to write, which takes the place of the one there is when it is whole; a device keeps its place."""
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", errors=errors) as file:
            yield file
        return
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8", errors=errors) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()  # the disk may be full
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Delete what a process that died left half written."""
    for part in folder.glob(".*.part"):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def _entries(folder: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: [{"size": int(e["size"]), "sha256": str(e["sha256"])} for e in own] for name, own in held.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or not one of ours
        return {}


def sha256_of(file: Path) -> str:
    """Of a file as it is now, in hexadecimal; what was hashed once and has not changed since is not read again."""
    found = file.stat()
    return _sha256_of(file, (found.st_ino, found.st_size, found.st_mtime_ns))


@functools.lru_cache(maxsize=4096)  # a folder has two files and more of each rank
def _sha256_of(file: Path, state: tuple[int, int, int]) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
