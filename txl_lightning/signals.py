"""Signals that come before training listens to them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from txl_lightning.exit_codes import REQUEUE

EARLY: list[int] = []
"""Signals of `stopping_early`."""


@contextmanager
def stopping_early() -> Iterator[None]:
    """End with the code of a requeue on SIGTERM and SIGUSR1 while nothing is trained and so nothing is lost.

    Training listens by itself later on, and looks at EARLY first: code that swallows the exit which the signal raises
    cannot swallow the signal.
    """
    EARLY.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.signal(number, _end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    EARLY.append(number)
    raise SystemExit(REQUEUE)
