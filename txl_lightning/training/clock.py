"""Training time without validation, and the tokens trained on in it."""

from __future__ import annotations

import time


class Clock:
    """A stopwatch that validation pauses."""

    def __init__(self) -> None:
        self.tokens = 0  # targets read for training, over all ranks; those of skipped steps too
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds spent training so far."""
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._seconds + running

    def start(self) -> None:
        """Go on counting."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """Stop counting until the next start."""
        self._seconds, self._since = self.seconds, None

    def state_dict(self) -> dict[str, float]:
        """Tokens and seconds so far."""
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.tokens, self._seconds, self._since = int(saved["tokens"]), saved["seconds"], None

    def rate(self) -> float:
        """Tokens per second since the first start; 0 before anything was trained."""
        return self.tokens / self.seconds if self.tokens else 0.0
