"""How the command `txl` ends."""

from __future__ import annotations

DONE = 0
FAILED = 1
REFUSED = 2
REQUEUE = 75
INTERRUPTED = 130

MEANINGS = {
    DONE: "done",
    FAILED: "failed while running",
    REFUSED: "refused: one line says which key, why and what to do; nothing was written (TXL_DEBUG=1: traceback)",
    REQUEUE: "stopped by SIGTERM or SIGUSR1 after saving: start it again",
    INTERRUPTED: "interrupted with Ctrl-C after saving",
}
