"""Stop when asked to: by Ctrl-C, SIGTERM or SIGUSR1, at a step or after a time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning.pytorch as L

from txl_lightning.exit_codes import INTERRUPTED, REQUEUE
from txl_lightning.signals import EARLY
from txl_lightning.training.agreement import anyone

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stopped(SystemExit):
    """A signal ended an evaluation."""


class StoppedNow(SystemExit):
    """A second Ctrl-C: end at once, whatever is under way."""


class GracefulStop(L.Callback):
    """The first signal ends training after the optimizer step under way, and an evaluation after its batch.

    All ranks stop together. A second Ctrl-C stops at once. Used as a context, it also covers what happens outside
    the loops:

        with stop.listening():
            trainer.fit(...)

    Args:
        at_step: end after this optimizer step too; None: no such step.
        after_seconds: and after so long, counted from now; None: no limit.
    """

    def __init__(self, *, at_step: int | None = None, after_seconds: float | None = None) -> None:
        self.received: int | None = None
        self.limit: str | None = None  # the key that ended training
        self.at_step, self.after_seconds = at_step, after_seconds
        self._began = time.monotonic()

    @property
    def exit_code(self) -> int:
        """What the process should end with."""
        if self.received is None:
            return 0
        return INTERRUPTED if self.received == signal.SIGINT else REQUEUE

    @property
    def name(self) -> str | None:
        """The signal that came or the key that set a limit, or None."""
        return signal.Signals(self.received).name if self.received is not None else self.limit

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; afterwards they are as before."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self._listen()
        if self.received is None and EARLY:
            self.received = EARLY[-1]
        try:
            yield
        finally:
            if _in_main_thread():
                for number, handler in before.items():
                    signal.signal(number, handler)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        # inside an accumulation window the gradients so far would be lost
        if not pl_module.at_border:
            return
        if self._asked(trainer):
            self._end_here(trainer)
        elif trainer.global_step < trainer.max_steps and (limit := self._limit(trainer)):
            self.limit = limit
            self._end_here(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._end_evaluation(trainer)

    def on_test_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._end_evaluation(trainer)

    def _limit(self, trainer: L.Trainer) -> str | None:
        """The key whose limit is reached; the clock of the first rank counts."""
        if self.at_step is not None and trainer.global_step >= self.at_step:
            return "trainer.stop_at_step"
        if self.after_seconds is None:
            return None
        over = trainer.is_global_zero and time.monotonic() - self._began >= self.after_seconds
        return "trainer.max_time" if anyone(over, trainer=trainer) else None

    @staticmethod
    def _end_here(trainer: L.Trainer) -> None:
        # `should_stop` would have a validation run that is not due
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step

    def _listen(self) -> None:
        # lightning puts its own handlers in place whenever it starts a loop
        for number in SIGNALS if _in_main_thread() else ():
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise StoppedNow(INTERRUPTED)
        self.received = number

    def _asked(self, trainer: L.Trainer) -> bool:
        asked = anyone(self.received is not None, trainer=trainer)
        if asked and self.received is None:
            self.received = signal.SIGTERM  # another rank was asked
        return asked

    def _end_evaluation(self, trainer: L.Trainer) -> None:
        if self._asked(trainer):
            raise Stopped(self.exit_code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
