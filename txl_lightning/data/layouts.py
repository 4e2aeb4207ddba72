"""Finding the files of a benchmark: in the archive it comes in, in the unpacked folder, or under other usual names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from txl_lightning.config import DataConfig, key
from txl_lightning.data.archives import DAMAGE, Archive, is_archive
from txl_lightning.data.console import Advance, progress
from txl_lightning.data.sources import Source, find, size_of
from txl_lightning.errors import ConfigError

Layout = Mapping[str, str]
"""Split to the name of its file, without folders."""

RENAMED: Layout = {"train": "train.txt", "valid": "valid.txt", "test": "test.txt"}


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(DataConfig):
    """Where a benchmark's files are. Nothing is ever downloaded."""

    path: str | None = key(None, "the archive as it is distributed, its unpacked folder, or a folder of train.txt, …")

    def check(self) -> None:
        if self.path is not None and not self.path.strip():
            raise self.refuse("path", "is empty", "give the archive or its folder")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a benchmark comes."""

    archive: str  # its file name
    n_byte: int | None  # size of the archive where it is known
    layouts: tuple[Layout, ...]
    beside: str = ""  # file it needs beside it

    def fetch(self, config: BenchmarkConfig) -> ConfigError:
        """The error for `data.path=null`."""
        size = f" ({self.n_byte:,} bytes)" if self.n_byte else ""
        also = f" and, to lie beside it, {self.beside}" if self.beside else ""
        what = f"{self.archive}{size}{also}"
        cure = f"fetch {what}, nothing is downloaded here, and set data.path to it or its unpacked folder"
        return ConfigError("data.path", "null", f"{config.name} needs its files", cure)

    @property
    def wanted(self) -> str:
        """What the files are called, in words."""
        return " or ".join(", ".join(layout.values()) for layout in self.layouts)


def files_of(config: BenchmarkConfig, origin: Origin, *, known: Callable[[Source], bool] | None = None) -> list[Source]:
    """All files in what `data.path` names: an archive, a folder, or a folder in which just the archive lies.

    Args:
        config: names it.
        origin: how the benchmark comes.
        known: whether a file belongs to the benchmark; by default those of the layouts do.

    Raises:
        ConfigError: `data.path` is null, missing, or no whole archive.
    """
    if config.path is None:
        raise origin.fetch(config)
    found = find(config.path, key="data.path")
    names = {name for layout in origin.layouts for name in layout.values()}
    if not any(known(source) if known else base(source) in names for source in found):
        packed = [source for source in found if len(found) == 1 or source.path.name == origin.archive]
        if len(packed) == 1 and _is_archive(packed[0]):
            return members(packed[0])
    return found


def choose(sources: Sequence[Source], origin: Origin) -> dict[str, Source]:
    """The file of each split, of the first layout that is there.

    Raises:
        ConfigError: no layout is there, or just a part of one, or a name occurs twice.
    """
    for layout in origin.layouts:
        found = _choose(sources, layout)
        for split, name in layout.items():
            if found and split not in found:
                here = " and ".join(source.name for files in found.values() for source in files)
                raise _refuse(sources, f"holds {here} but no {name}", "give the whole benchmark")
            if len(found.get(split, ())) > 1:
                twice = " and ".join(source.name for source in found[split])
                raise _refuse(sources, f"holds {twice}", "give the folder of one of them")
        if found:
            return {split: files[0] for split, files in found.items()}
    names = [source.name for source in sources]
    here = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise _refuse(sources, f"holds no {origin.wanted} (but {here})", f"give {origin.archive} or its unpacked folder")


def one_or_three(config: BenchmarkConfig, origin: Origin) -> dict[str, Source]:
    """The file of each split, or one file under "all": `data.path` may name it whatever it is called.

    Raises:
        ConfigError: as `files_of` and `choose`.
    """
    sources = files_of(config, origin)
    parts = {name for layout in origin.layouts for split, name in layout.items() if split != "all"}
    named = len(sources) == 1 and sources[0].archive is None and sources[0].path == expanded(config.path)
    return {"all": sources[0]} if named and base(sources[0]) not in parts else choose(sources, origin)


def members(source: Source) -> list[Source]:
    """The files in an archive.

    Raises:
        ConfigError: it is damaged or empty.
    """
    try:
        archive = Archive(source.path)
    except DAMAGE as error:
        raise source.refuse(f"is not a whole archive ({error or type(error).__name__})", "fetch it again") from error
    except OSError as error:
        raise source.refuse(f"cannot be read: {error.strerror or error}", "check the file") from error
    if not archive.names():
        raise source.refuse("this archive is empty", "fetch it again")
    return [Source(source.path, name, source.key, archive) for name in archive.names()]


@contextmanager
def opened(label: str, sources: Sequence[Source]) -> Iterator[Advance]:
    """While all their archives are open, and a bar is on show: what tells the bar of bytes read."""
    with ExitStack() as stack:
        for archive in {id(source.archive): source.archive for source in sources}.values():
            if archive is not None:
                stack.enter_context(archive)
        yield stack.enter_context(progress(label, n_byte=sum(map(size_of, sources))))


def expanded(path: str | None) -> Path:
    """A path as typed, with ~ for the home folder."""
    return Path(os.path.expanduser(path or ""))


def beside(path: str, name: str) -> Path:
    """A file in the folder that `path` is, or that it is in."""
    place = expanded(path)
    return (place if place.is_dir() else place.parent) / name


def base(source: Source) -> str:
    """A file's name without folders and without .gz."""
    return source.name.rpartition("/")[2].removesuffix(".gz")


def _choose(sources: Iterable[Source], layout: Layout) -> dict[str, list[Source]]:
    split_of = {name: split for split, name in layout.items()}
    found: dict[str, list[Source]] = {}
    for source in sources:
        if (name := base(source)) in split_of:
            found.setdefault(split_of[name], []).append(source)
    return {split: found[split] for split in layout if split in found}


def _is_archive(source: Source) -> bool:
    try:
        return is_archive(source.path)
    except OSError as error:
        raise source.refuse(f"cannot be read: {error.strerror or error}", "check the file") from error


def _refuse(sources: Sequence[Source], rule: str, cure: str) -> ConfigError:
    first = sources[0]
    place = first.path if first.archive is not None or len(sources) == 1 else _root(first)
    return ConfigError(first.key, str(place), rule, cure)


def _root(source: Source) -> Path:
    """The folder a source was found under."""
    return source.path.parents[source.name.count("/")]
