"""Names to parts: memory strategies, corpora and callbacks are looked up here, built in and plugged in alike.

A registry imports its home package on first use and then asks the installed packages' entry points, so no file of a
low floor imports one of a higher floor, and a third party's part is found exactly like one of ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from txl_lightning.errors import ConfigError, suggest

Build = TypeVar("Build", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[Build]):
    """A registered part: its name, the dataclass of its keys and what builds it."""

    name: str
    config: type
    build: Build
    paper: str = ""  # "Author et al. year, arXiv:number" where there is one


class Registry(Generic[Build]):
    """One kind of pluggable part, e.g. every memory strategy."""

    def __init__(self, *, kind: str, home: str) -> None:
        self.kind = kind
        self.home = home  # package that registers ours; also the entry point group of third parties
        self._entries: dict[str, Entry[Build]] = {}
        self._loaded = False

    def register(self, name: str, *, config: type, paper: str = "") -> Callable[[Build], Build]:
        """Decorator: make `build` known as `name` with the keys of the dataclass `config`."""

        def add(build: Build) -> Build:
            known = self._entries.get(name)
            if known is not None and known.build is not build:
                raise ConfigError(
                    f"{self.kind}.name", name, f"two {self.kind} parts have this name", "rename one of them"
                )
            self._entries[name] = Entry(name=name, config=config, build=build, paper=paper)
            return build

        return add

    def get(self, name: str) -> Entry[Build]:
        """The part called `name`, or `package.module:Attribute` for one that is not registered.

        Raises:
            ConfigError: no such name; the message names the nearest ones.
        """
        self._load()
        if name not in self._entries and ":" in name:
            return self._import(name)
        if name not in self._entries:
            raise ConfigError(f"{self.kind}.name", name, f"no such {self.kind}", suggest(name, self.names()))
        return self._entries[name]

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load()
        return sorted(self._entries)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        importlib.import_module(self.home)
        for point in entry_points(group=self.home):
            point.load()  # loading runs its @register

    def _import(self, name: str) -> Entry[Build]:
        module, _, attribute = name.partition(":")
        try:
            part = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{self.kind}.name", name, f"cannot be imported: {error}", "give package.module:Attribute"
            ) from error
        config = getattr(part, "Config", None)
        if config is None:
            cure = "give the class an attribute Config: a frozen dataclass of its keys"
            raise ConfigError(f"{self.kind}.name", name, "has no typed config", cure)
        return Entry(name=name, config=config, build=getattr(part, "build", part), paper=getattr(part, "paper", ""))


memories: Registry[Any] = Registry(kind="memory", home="txl_lightning.memory")
corpora: Registry[Any] = Registry(kind="data", home="txl_lightning.data")
callbacks: Registry[Any] = Registry(kind="callbacks", home="txl_lightning.callbacks")
