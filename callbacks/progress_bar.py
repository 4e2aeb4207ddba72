"""The progress bar: step, loss in the corpus's unit, tokens per second, time left."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from txl_lightning import registry
from txl_lightning.config import Section, key


@dataclass(frozen=True, kw_only=True)
class ProgressBarConfig(Section):
    """Keys of `callbacks.progress_bar`."""

    section = "callbacks.progress_bar"

    refresh_per_second: float = key(4.0, "redraws per second", above=0, maximum=30)
    seconds_per_line: float = key(10.0, "seconds between two lines where there is no terminal", above=0)


@registry.callbacks.register("progress_bar", config=ProgressBarConfig)
class ProgressBar(L.Callback):
    """One bar over all optimizer steps, and one over batches while a split is evaluated. Shows, logs nothing.

    Where standard error is no terminal, a plain line every `seconds_per_line` and after each validation instead.
    """

    def __init__(self, config: ProgressBarConfig) -> None:
        self.config = config
        self._console = Console(stderr=True)
        self._said = 0.0
        self._progress: Progress | None = None
        self._train: TaskID | None = None
        self._eval: TaskID | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not trainer.is_global_zero or self._progress is not None or not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=self.config.refresh_per_second,
        )
        self._progress.start()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._said = time.monotonic()
        if self._progress is not None:
            self._train = self._progress.add_task(
                "train", total=trainer.max_steps, figures="", completed=trainer.global_step
            )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._progress is not None and self._train is not None:
            self._progress.update(self._train, completed=trainer.global_step, figures=self._figures(pl_module))
        elif time.monotonic() - self._said >= self.config.seconds_per_line:
            self._say(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("valid", trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("score", trainer.num_test_batches)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._advance()

    def on_test_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._advance()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._finish()
        if self._progress is None and not trainer.sanity_checking:
            self._say(trainer, pl_module)

    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._finish()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _say(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.is_global_zero and not self._console.is_terminal:
            self._said = time.monotonic()
            print(
                f"step {trainer.global_step}/{trainer.max_steps}: {self._figures(module)}", file=sys.stderr, flush=True
            )

    def _figures(self, module: Any) -> str:
        unit = module.unit
        bits = {stage: figures[f"bits_per_{unit}"] for stage, figures in module.scores.items()}
        train = f"{bits['train']:.2f} bits/{unit}, " if "train" in bits else ""
        valid = f"valid {bits['val']:.2f}, " if "val" in bits else ""
        return f"{train}{valid}{module.clock.rate():,.0f} tok/s"

    def _begin(self, name: str, batches: Any) -> None:
        if self._progress is not None:
            total = sum(batches) if isinstance(batches, list) else batches
            self._eval = self._progress.add_task(name, total=total, figures="")

    def _advance(self) -> None:
        if self._progress is not None and self._eval is not None:
            self._progress.advance(self._eval)

    def _finish(self) -> None:
        if self._progress is not None and self._eval is not None:
            self._progress.remove_task(self._eval)
            self._eval = None

    def _close(self) -> None:
        self._finish()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
