"""Files a corpus is made of: finding them in a fixed order, and reading them in chunks.

Bytes are taken as they are: no decoding, no newline translation, a byte order mark stays. Only gzip is undone.
"""

from __future__ import annotations

import glob
import gzip
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from txl_lightning.data.archives import DAMAGE, Archive
from txl_lightning.errors import ConfigError

CHUNK = 4 * 2**20  # bytes read at a time; everything held at once is a small multiple of it

TAKES = "give a file, a folder, a glob or a list of them"


class Source(NamedTuple):
    """One file of a corpus."""

    path: Path
    name: str  # POSIX path relative to what the user named: gives the order, is part of the fingerprint
    key: str  # the setting that named it, for messages
    archive: Archive | None = None  # path is an archive, and the file is `name` in it

    def refuse(self, rule: str, cure: str) -> ConfigError:
        """The error for this file."""
        return ConfigError(self.key, str(self.path), rule if self.archive is None else f"{self.name}: {rule}", cure)

    @property
    def gzipped(self) -> bool:
        return self.archive is None and self.path.name.lower().endswith(".gz")


def find(spec: str | tuple[str, ...], *, key: str) -> list[Source]:
    """All files a setting names: entries in the given order, files of a folder or glob by name as code points.

    Args:
        spec: a file, a folder (searched recursively, hidden files and folders left out), a glob, or several of them.
        key: dotted key of the setting.

    Raises:
        ConfigError: an entry is missing, names no file or cannot be read, or a file is named twice.
    """
    entries = (spec,) if isinstance(spec, str) else spec
    sources = [source for entry in entries for source in _entry(entry, key)]
    refuse_twice(sources)
    return sources


def refuse_twice(sources: Iterable[Source]) -> None:
    """Raise ConfigError if a file occurs more than once: it would leak from one split into another, or count double."""
    seen: dict[str, Source] = {}
    for source in sources:
        first = seen.setdefault(os.path.realpath(source.path), source)
        if first is not source:
            other = "" if first.key == source.key else f", first in {first.key}"
            raise source.refuse(f"this file is named twice{other}", "name each file once")


def stat_of(source: Source) -> tuple[int, int]:
    """Size on disk in bytes and time of last change in ns."""
    try:
        found = os.stat(source.path)
    except OSError as error:
        raise _unreadable(source, error) from error
    return found.st_size, found.st_mtime_ns


def size_of(source: Source) -> int:
    """Bytes that `read` will say it has done: those on disk, or unpacked those in an archive."""
    return stat_of(source)[0] if source.archive is None else source.archive.size(source.name)


def read(source: Source, advance: Callable[[int], None] = lambda done: None) -> Generator[bytes, None, None]:
    """The file's bytes, unpacked, in chunks of at most CHUNK; `advance` gets the bytes of the file on disk done so far.

    Raises:
        ConfigError: the file cannot be read, or is not the whole gzip file its name promises.
    """
    try:
        with _open(source) as file:
            while chunk := file.read(CHUNK):
                yield chunk
                if not source.gzipped:
                    advance(len(chunk))
    except DAMAGE as error:
        what = "gzip file" if source.archive is None else "archive"
        raise source.refuse(f"is not a whole {what}", "copy it again, or unpack it") from error
    except OSError as error:
        raise _unreadable(source, error) from error
    if source.gzipped:
        advance(stat_of(source)[0])


@contextmanager
def _open(source: Source) -> Iterator[IO[bytes]]:
    if source.archive is not None:
        with source.archive as archive, archive.open(source.name) as file:
            yield file
    else:
        with gzip.open(source.path) if source.gzipped else open(source.path, "rb") as file:
            yield file  # type: ignore[misc]


def _unreadable(source: Source, error: OSError) -> ConfigError:
    return source.refuse(f"cannot be read: {error.strerror or error}", "check the file and its permissions")


def _entry(entry: str, key: str) -> list[Source]:
    path = Path(os.path.expanduser(entry))
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return _glob(path, key)
    except OSError as error:
        raise _unreadable(Source(path, path.name, key), error) from error
    if stat.S_ISDIR(mode):
        return _folder(path, key)
    if not stat.S_ISREG(mode):
        raise ConfigError(key, str(path), "is neither a file nor a folder", TAKES)
    return [Source(path, path.name, key)]


def _folder(folder: Path, key: str) -> list[Source]:
    def fail(error: OSError) -> None:
        raise _unreadable(Source(Path(error.filename or folder), "", key), error) from error

    found, visited = [], set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        if os.path.realpath(place) in visited:  # a link back to a folder above
            folders.clear()
            continue
        visited.add(os.path.realpath(place))
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in files if not name.startswith(".")]
    if not (sources := _named(found, folder, key)):
        raise ConfigError(key, str(folder), "there is no file in this folder", TAKES)
    return sources


def _glob(pattern: Path, key: str) -> list[Source]:
    if not any(sign in str(pattern) for sign in "*?["):
        raise ConfigError(key, str(pattern), "no such file or folder", TAKES)
    root = Path(*(part for part in _before_wildcard(pattern)))
    found = [Path(name) for name in glob.glob(str(pattern), recursive=True)]
    if not (sources := _named(found, root, key)):
        raise ConfigError(key, str(pattern), "this pattern matches no file", TAKES)
    return sources


def _before_wildcard(pattern: Path) -> Iterator[str]:
    for part in pattern.parts[:-1]:
        if any(sign in part for sign in "*?["):
            return
        yield part


def _named(paths: Iterable[Path], root: Path, key: str) -> list[Source]:
    # a dangling link is kept: reading it says what is wrong, dropping it would hide missing text
    files = (path for path in paths if path.is_file() or (path.is_symlink() and not path.exists()))
    sources = (Source(path, path.relative_to(root).as_posix(), key) for path in files)
    return sorted(sources, key=lambda source: source.name)
