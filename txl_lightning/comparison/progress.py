"""Progress over the whole matrix of runs."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import lightning.pytorch as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_PER_LINE = 10.0  # where standard error is no terminal


class MatrixProgress:
    """One bar over all runs and one over the run under way; plain lines where standard error is no terminal.

    Args:
        total: runs.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.is_terminal = console.is_terminal
        self._runs = self._bars.add_task("runs", total=total, figures="")
        self._steps = self._bars.add_task("", total=None, figures="")
        self._done, self._name, self._said = 0, "", 0.0

    def __enter__(self) -> MatrixProgress:
        if self.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_terminal:
            self._bars.stop()

    def begin(self, name: str, *, seconds: float | None) -> L.Callback:
        """A run starts, of so many seconds of training or (None) max_steps; its Trainer is given what this returns."""
        self._name, self._said = name, time.monotonic()
        self._bars.reset(self._steps, description=name, total=None, figures="")
        self._say("starts")
        return _Watch(self, seconds=seconds)

    def finish(self, figures: str) -> None:
        """The run under way is done."""
        self._say(figures)
        self._done += 1
        self._bars.update(self._runs, completed=self._done)

    def skip(self, count: int) -> None:
        """So many runs were there already."""
        self._done += count
        self._bars.update(self._runs, completed=self._done)

    def step(self, done: float, total: float, figures: str) -> None:
        """Where the run under way stands."""
        self._bars.update(self._steps, completed=done, total=total, figures=figures)
        if time.monotonic() - self._said >= SECONDS_PER_LINE:
            self._said = time.monotonic()
            self._say(f"{done:.0f} of {total:.0f}, {figures}")

    def _say(self, text: str) -> None:
        if not self.is_terminal:
            print(f"run {self._done + 1} of {self.total}, {self._name}: {text}", file=sys.stderr, flush=True)


class _Watch(L.Callback):
    """Tells the progress about every step. Observes and never steers."""

    def __init__(self, progress: MatrixProgress, *, seconds: float | None) -> None:
        self.progress, self.seconds = progress, seconds

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        rate = f"{pl_module.clock.rate():,.0f} tok/s"
        if self.seconds is not None:
            self.progress.step(pl_module.clock.seconds, self.seconds, rate)
        else:
            self.progress.step(trainer.global_step, trainer.max_steps, rate)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.progress.step(trainer.global_step, trainer.max_steps, "validates")

    def on_test_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        batch_idx = args[2]
        self.progress.step(batch_idx + 1, sum(map(float, trainer.num_test_batches)), "scores the test split")
