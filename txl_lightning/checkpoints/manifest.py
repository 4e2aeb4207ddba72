"""What a run's checkpoints should be: size and sha256 of each, in `manifest.json` beside them.

An entry is written before its file gets its name, and those of the files before it stay for a while. So whenever a
process dies, every checkpoint there is has its entry; a file that matches none was damaged later.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
PREVIOUS = "previous.ckpt"
"""The checkpoint `last` before the latest."""

KEPT = 3  # entries of each name


def note(file: Path, *, size: int, sha256: str) -> None:
    """Add an entry for a file that is about to get its name."""
    held = _entries(file.parent)
    own = [{"size": size, "sha256": sha256}, *held.get(file.name, [])][:KEPT]
    replace_text(file.parent / MANIFEST, json.dumps({**held, file.name: own}, indent=2) + "\n")


def is_damaged(file: Path) -> bool:
    """Whether a checkpoint that has entries matches none of them."""
    entries = _entries(file.parent)
    if file.name != PREVIOUS and file.name not in entries:
        return False
    known = [(entry["size"], entry["sha256"]) for found in entries.values() for entry in found]
    size = file.stat().st_size
    return bool(known) and (all(size != entry[0] for entry in known) or (size, _sha256(file)) not in known)


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that it is the old or the new one whenever the process dies."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def remove_parts(folder: Path) -> None:
    """Delete what a process that died left half written."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def _entries(folder: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: [{"size": int(e["size"]), "sha256": str(e["sha256"])} for e in own] for name, own in held.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or not one of ours
        return {}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
