"""The folder token files are kept in, and putting a finished folder there in one move."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from txl_lightning.config import DataConfig
from txl_lightning.errors import ConfigError

STALE = 24 * 3600  # seconds after which a half-built folder belongs to a process that died


def cache_root(config: DataConfig) -> Path:
    """The folder of all token files: `data.cache_dir`, else under $TXL_CACHE_DIR, else the user's cache folder."""
    if config.cache_dir:
        return Path(os.path.expanduser(config.cache_dir))
    if chosen := os.environ.get("TXL_CACHE_DIR"):
        return Path(os.path.expanduser(chosen)) / "tokens"
    return _user_cache() / "txl_lightning" / "tokens"


def _user_cache() -> Path:
    variable = {"darwin": None, "win32": "LOCALAPPDATA"}.get(sys.platform, "XDG_CACHE_HOME")
    if variable and (chosen := os.environ.get(variable)):
        return Path(chosen)
    try:
        home = Path.home()
    except RuntimeError as error:
        raise _no_cache("null", "this user has no home folder for it") from error
    return home.joinpath(
        *{"darwin": ("Library", "Caches"), "win32": ("AppData", "Local")}.get(sys.platform, (".cache",))
    )


def check_writable(root: Path) -> None:
    """Raise ConfigError if token files cannot be put under root, as far as can be told without writing."""
    place = root
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    if not os.path.isdir(place):
        raise _no_cache(root, f"{place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise _no_cache(root, f"{place} cannot be written")


def _no_cache(root: Path | str, rule: str) -> ConfigError:
    return ConfigError(
        "data.cache_dir", root, rule, "set data.cache_dir or TXL_CACHE_DIR to a folder that can be written"
    )


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder`, gone at the end whatever happens.

    Raises:
        ConfigError: it, or something in it, cannot be written.
    """
    work = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        work.mkdir()
        yield work
    except OSError as error:
        raise _no_cache(folder.parent, f"cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}.*"):
        with suppress(FileNotFoundError):  # its owner is alive and just done
            if left.stat().st_mtime < time.time() - STALE:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def publish(work: Path, folder: Path, *, is_whole: Callable[[], bool]) -> None:
    """Move the finished folder `work` to its place, unless another process has put one there that `is_whole`."""
    aside = work.with_name(f"{work.name}.old")
    for attempts_left in (2, 1, 0):
        try:
            os.rename(work, folder)
            return
        except OSError:
            if is_whole():
                return
            if not attempts_left:
                raise
        with suppress(FileNotFoundError):  # another process was faster to move the damaged one away
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
