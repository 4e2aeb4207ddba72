"""How the command `txl` ends."""

from __future__ import annotations

from collections.abc import Sequence

DONE = 0
FAILED = 1
REFUSED = 2
REQUEUE = 75
INTERRUPTED = 130

MEANINGS = {
    DONE: "done",
    FAILED: "failed while running",
    REFUSED: "refused: one line says which key, why and what to do; nothing was written (TXL_DEBUG=1: traceback)",
    REQUEUE: "stopped by SIGTERM or SIGUSR1 after saving, or before there was anything to save",
    INTERRUPTED: "interrupted with Ctrl-C after saving",
}


def worst(codes: Sequence[int]) -> int:
    """The exit code of several jobs: failing while running is worse than being refused, being stopped beats both."""
    order = (DONE, REFUSED, FAILED)
    return max(codes, key=lambda code: order.index(code) if code in order else len(order), default=DONE)
