"""Whether the user lets checkpoints run code on loading: `trust=true`, for as long as a command runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from txl_lightning.overrides import Typed

KEY = "trust"

_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


def is_trusted() -> bool:
    """Whether it was typed."""
    return _trusted.get()


@contextmanager
def as_typed(typed: Sequence[Typed]) -> Iterator[None]:
    """While this lasts `trust` is what was typed."""
    given = [item.text for item in typed if item.key == KEY]
    token = _trusted.set(bool(given) and given[-1].lower() == "true")
    try:
        yield
    finally:
        _trusted.reset(token)
