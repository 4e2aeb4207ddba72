"""How the command `txl` ends."""

from __future__ import annotations

DONE = 0
FAILED = 1
REFUSED = 2
REQUEUE = 75
"""Stopped by SIGTERM or SIGUSR1 after saving: start it again."""
INTERRUPTED = 130
"""Ctrl-C after saving."""
