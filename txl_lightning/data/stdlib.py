"""The corpus `stdlib`: the sources of Python itself, which every machine that runs this has.

Only the directories that no distribution cuts out or patches count, without the two that hold generated tables. Still
the text differs between Python versions: scores compare on one interpreter only, so its version is part of the
fingerprint.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.corpora import SPLITS, ByteCorpus
from txl_lightning.data.sources import Source
from txl_lightning.data.tokenizer import SubwordConfig
from txl_lightning.errors import ConfigError

NOT_FOLDERS = frozenset(
    "__pycache__ site-packages dist-packages test tests idle_test idlelib lib2to3 turtledemo tkinter ensurepip "
    "distutils lib-dynload encodings pydoc_data".split()
)
NOT_FILES = frozenset(("sitecustomize.py", "usercustomize.py"))
NOT_PREFIXES = ("config-", "_sysconfigdata")


@dataclass(frozen=True, kw_only=True)
class StdlibConfig(SubwordConfig):
    """Nothing to set beside what every corpus has."""

    name: str = key("stdlib", "Python's own sources, one document per file")


def split_of(name: str) -> str:
    """The split of a file, from its POSIX path relative to the library: it never moves when other files come or go.

    The first 8 hexadecimal digits of sha256(path) mod 20: 0 is test, 1 valid, the other 18 train.
    """
    remainder = int(hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8], 16) % 20
    return {0: "test", 1: "valid"}.get(remainder, "train")


@registry.corpora.register("stdlib", config=StdlibConfig)
class Stdlib(ByteCorpus):
    """Python's own sources in the order of their paths, split by a hash of the path."""

    Config = StdlibConfig

    def __init__(self, config: StdlibConfig) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        found = sorted(_files(root), key=lambda source: source.name)
        readable = [source for source in found if os.access(source.path, os.R_OK)]
        if not readable:
            cure = "read a text of your own: data=text data.path=FILE_OR_FOLDER"
            raise ConfigError("data", config.name, f"this Python keeps no source files in {root}", cure)
        parts = {split: [source for source in readable if split_of(source.name) == split] for split in SPLITS}
        details: dict[str, object] = {"python": platform.python_version()}
        if len(readable) < len(found):
            details["unreadable"] = len(found) - len(readable)
        super().__init__(
            name=config.name,
            parts={split: sources for split, sources in parts.items() if sources},
            rule="sha256(path) mod 20",
            binary=True,
            details=details,
        )


def _files(root: Path) -> Iterator[Source]:
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_FOLDERS and not name.startswith(NOT_PREFIXES)]
        for name in files:
            path = Path(place, name)
            if not name.endswith(".py") or name in NOT_FILES or name.startswith(NOT_PREFIXES):
                continue
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                yield Source(path, path.relative_to(root).as_posix(), "data")
