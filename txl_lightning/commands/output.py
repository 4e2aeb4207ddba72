"""What commands give back beside their tables: the JSON file `out`, and bytes in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from txl_lightning.errors import ConfigError
from txl_lightning.ranks import is_first_rank
from txl_lightning.training.run_folder import write_json

JSON, HTML, PNG = "{[", "<", "\x89"
"""What files begin with, one character of each."""


def check_out(out: str | None, *, key: str = "out", begins: str = "") -> None:
    """Refuse a file `out` that cannot be written, or holds something that no command of ours wrote.

    Args:
        out: the file; None: there is none.
        key: the setting it comes from.
        begins: the characters one of which such a file begins with.

    Raises:
        ConfigError: it is refused.
    """
    if out is None:
        return
    path = Path(os.path.expanduser(out))
    if path.is_dir():
        raise ConfigError(key, out, "is a folder", "give a file in it")
    if not path.parent.is_dir():
        raise ConfigError(key, out, "its folder does not exist", "make the folder first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(key, out, "cannot be written", "give a file elsewhere")
    if begins and path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            start = file.read(1).decode("latin-1")
        if start not in begins:
            raise ConfigError(key, out, "holds something else, which would be lost", "give another file")


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
