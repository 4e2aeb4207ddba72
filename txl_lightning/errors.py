"""The one error a user is meant to read, and how it proposes a cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


class ConfigError(ValueError):
    """A setting, file or request that is refused. Says which key, which value, which rule, and the cure."""

    def __init__(self, key: str, value: object, rule: str, cure: str) -> None:
        super().__init__(key, value, rule, cure)
        self.key, self.value, self.rule, self.cure = key, value, rule, cure

    def __str__(self) -> str:
        text = f"{self.key}={yaml_text(self.value)}: {self.rule}; {self.cure}"
        return " ".join(text.splitlines())


def yaml_text(value: object) -> str:
    """A value as it would be typed: null, true, [0,2], {name: cache}."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(yaml_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {yaml_text(item)}" for name, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def keys_renamed(section: str, *, to: str) -> Iterator[None]:
    """Errors about keys of `section` call them keys of `to`: the same dataclass may stand in several places."""
    try:
        yield
    except ConfigError as error:
        head, dot, name = error.key.rpartition(".")
        if section == to or not dot or head != section:
            raise
        raise ConfigError(f"{to}.{name}", error.value, error.rule, error.cure) from error


def suggest(name: str, names: Iterable[str]) -> str:
    """A cure for a misspelt name: the nearest valid ones, else the whole list."""
    known = sorted(set(names))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"choose one of {', '.join(known)}" if known else "there is none to choose"
