"""Stop when asked to: Ctrl-C, SIGTERM or SIGUSR1."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning.pytorch as L

from txl_lightning.exit_codes import INTERRUPTED, REQUEUE

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
    """

    def __init__(self) -> None:
        self.received: int | None = None

    @property
    def exit_code(self) -> int:
        """What the process should end with."""
        if self.received is None:
            return 0
        return INTERRUPTED if self.received == signal.SIGINT else REQUEUE

    @property
    def name(self) -> str | None:
        """The signal that came, or None."""
        return signal.Signals(self.received).name if self.received is not None else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; afterwards they are as before."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self._listen()
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
        if pl_module.at_border and self._asked(trainer):
            trainer.should_stop = True

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._end_evaluation(trainer)

    def on_test_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._end_evaluation(trainer)

    def _listen(self) -> None:
        # lightning puts its own handlers in place whenever it starts a loop
        for number in SIGNALS if _in_main_thread() else ():
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise StoppedNow(INTERRUPTED)
        self.received = number

    def _asked(self, trainer: L.Trainer) -> bool:
        anyone = trainer.strategy.reduce_boolean_decision(self.received is not None, all=False)
        if anyone and self.received is None:
            self.received = signal.SIGTERM  # another rank was asked
        return anyone

    def _end_evaluation(self, trainer: L.Trainer) -> None:
        if self._asked(trainer):
            raise Stopped(self.exit_code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
