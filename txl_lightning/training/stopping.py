"""Stop at the end of a step when asked to: Ctrl-C, SIGTERM or SIGUSR1."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning.pytorch as L

EXIT_INTERRUPTED = 130  # Ctrl-C
EXIT_REQUEUE = 75  # SIGTERM or SIGUSR1: run me again


class GracefulStop(L.Callback):
    """The first signal lets the step under way finish and ends training; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What the process should end with."""
        if self.received is None:
            return 0
        return EXIT_INTERRUPTED if self.received == signal.SIGINT else EXIT_REQUEUE

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        names = ("SIGINT", "SIGTERM", "SIGUSR1")
        for number in (getattr(signal, name) for name in names if hasattr(signal, name)):
            self._before[number] = signal.signal(number, self._note)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        anyone = trainer.strategy.reduce_boolean_decision(self.received is not None, all=False)
        if anyone:
            self.received = self.received or signal.SIGTERM
            trainer.should_stop = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
