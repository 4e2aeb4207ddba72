"""One run in a folder at a time."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from txl_lightning.errors import ConfigError

try:
    import fcntl
except ImportError:  # no such locks on this system: nothing is locked
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. The system takes it back when the process ends, however it ends.

    Raises:
        ConfigError: another process holds it.
    """
    if fcntl is None:
        yield
        return
    file = _acquire(run_dir)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            (run_dir / LOCK).unlink()
        os.close(file)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        cure = "get the right to write there, or name another folder"
        raise ConfigError("run_dir", path.parent, f"cannot be written to: {error.strerror}", cure) from error


def check_unlocked(run_dir: Path) -> None:
    """Raises ConfigError: a process uses the folder."""
    if fcntl is not None and (run_dir / LOCK).exists():
        os.close(_acquire(run_dir))


def _acquire(run_dir: Path) -> int:
    path = run_dir / LOCK
    while True:
        file = _open(path)
        try:
            # of the process, not of the open file: workers that outlive a killed process do not keep it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # some network file systems know no locks
                print(f"{run_dir} cannot be locked ({error.strerror}): start no second run in it", file=sys.stderr)
                return file
            owner = os.read(file, 32).decode(errors="replace").strip()
            os.close(file)
            rule = f"process {owner or 'of another run'} is training in this folder"
            raise ConfigError("run_dir", run_dir, rule, "wait for it, stop it, or name another folder") from error
        with suppress(FileNotFoundError):
            if os.fstat(file).st_ino == path.stat().st_ino:
                os.truncate(file, 0)
                os.write(file, f"{os.getpid()}\n".encode())
                return file
        os.close(file)  # its owner has just left and removed it
