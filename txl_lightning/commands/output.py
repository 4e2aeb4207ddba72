"""What commands give back beside their tables: the JSON file `out`, and bytes in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from txl_lightning.errors import ConfigError
from txl_lightning.ranks import is_first_rank
from txl_lightning.training.run_folder import write_json


def check_out(out: str | None, *, key: str = "out") -> None:
    """Refuse a file `out` that cannot be written; `key` is the setting it comes from. Raises ConfigError."""
    if out is None:
        return
    path = Path(os.path.expanduser(out))
    if path.is_dir():
        raise ConfigError(key, out, "is a folder", "give a file in it")
    if not path.parent.is_dir():
        raise ConfigError(key, out, "its folder does not exist", "make the folder first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(key, out, "cannot be written", "give a file elsewhere")


def write_out(out: str | None, value: Any) -> None:
    """Write plain containers as JSON if a file is named: once, although every rank comes here."""
    if out is not None and is_first_rank():
        write_json(Path(os.path.expanduser(out)), value)


def bytes_in_words(n_byte: int) -> str:
    """As 12 B, 1.5 KiB, 200 MiB or 2.1 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_byte >= size:
            return f"{n_byte / size:.4g} {unit}"
    return f"{n_byte} B"
