"""Files inside archives (zip, tar, tar.gz), read where they are: nothing is unpacked to disk."""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

DAMAGE = (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, NotImplementedError)
"""What reading an archive raises that is cut short or otherwise damaged."""

ZIP, GZIP, TAR = b"PK\x03\x04", b"\x1f\x8b", b"ustar"
TAR_MAGIC = slice(257, 262)


def is_archive(path: Path) -> bool:
    """Whether a file holds other files, by its first bytes; a damaged archive is one too. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(GZIP):
        head = b""
        with suppress(*DAMAGE), gzip.open(path) as unpacked:
            head = unpacked.read(512)
        return head[TAR_MAGIC] == TAR or path.name.lower().endswith((".tgz", ".tar.gz"))
    return head.startswith(ZIP) or head[TAR_MAGIC] == TAR or path.name.lower().endswith((".zip", ".tar"))


class _Place(NamedTuple):
    """One file in an archive."""

    info: zipfile.ZipInfo | tarfile.TarInfo
    size: int  # bytes unpacked


class Archive:
    """A zip or tar file. As a context (entering it again is fine) it stays open, so that its files are read in one go.

    Args:
        path: the archive.

    Raises:
        OSError: the file cannot be read.
        Exception: one of DAMAGE: the file is no whole archive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: zipfile.ZipFile | tarfile.TarFile | None = None
        self._depth = 0
        with self:
            assert self._handle is not None
            self._places: dict[str, _Place] = _places(self._handle)

    def names(self) -> list[str]:
        """POSIX paths of the files inside, sorted as code points."""
        return sorted(self._places)

    def size(self, name: str) -> int:
        """Bytes of a file, unpacked."""
        return self._places[name].size

    def open(self, name: str) -> IO[bytes]:
        """A file inside, to be read and closed; the archive must be entered."""
        info = self._places[name].info
        if isinstance(self._handle, zipfile.ZipFile):
            assert isinstance(info, zipfile.ZipInfo)
            return self._handle.open(info)
        assert self._handle is not None and isinstance(info, tarfile.TarInfo), "enter the archive first"
        file = self._handle.extractfile(info)
        assert file is not None
        return file

    def __enter__(self) -> Archive:
        if self._handle is None:
            with self.path.open("rb") as file:
                zipped = file.read(len(ZIP)) == ZIP
            self._handle = zipfile.ZipFile(self.path) if zipped else tarfile.open(self.path)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and self._handle is not None:
            self._handle.close()
            self._handle = None


def _places(handle: zipfile.ZipFile | tarfile.TarFile) -> dict[str, _Place]:
    """The files inside by name, hidden ones and what macOS adds left out."""
    if isinstance(handle, zipfile.ZipFile):
        found = {info.filename: _Place(info, info.file_size) for info in handle.infolist() if not info.is_dir()}
    else:
        found = {member.name: _Place(member, member.size) for member in handle.getmembers() if member.isfile()}
    clean = {os.path.normpath(name).replace(os.sep, "/"): place for name, place in found.items()}
    return {
        name: place
        for name, place in clean.items()
        if not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
    }
