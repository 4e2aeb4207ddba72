"""The one error a user is meant to read, and how it proposes a cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting, file or request that is refused. Says which key, which value, which rule, and the cure."""

    def __init__(self, key: str, value: object, rule: str, cure: str) -> None:
        super().__init__(key, value, rule, cure)
        self.key, self.value, self.rule, self.cure = key, value, rule, cure

    def __str__(self) -> str:
        text = f"{self.key}={self.value}: {self.rule}; {self.cure}"
        return " ".join(text.splitlines())


def suggest(name: str, names: Iterable[str]) -> str:
    """A cure for a misspelt name: the nearest valid ones, else the whole list."""
    known = sorted(set(names))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"choose one of {', '.join(known)}" if known else "there is none to choose"
