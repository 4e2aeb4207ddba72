"""What a module shows: points of its curves at optimizer steps, and texts, images and tables beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor


class Showing(L.LightningModule):
    """What observers ask and tell a module.

    A point is collected with `log_curves` and goes to the loggers as a whole, at the number of optimizer steps made.

    Args:
        every_n_steps: optimizer steps between two points of training.
    """

    def __init__(self, *, every_n_steps: int) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        self.latest: dict[str, float] = {}  # the latest figure of every curve
        self._curves: dict[str, Any] = {}  # figures of the point under way
        self._step_before = 0  # optimizer steps made when the batch under way began

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._step_before = self.trainer.global_step

    def logs_now(self) -> bool:
        """Whether this batch ended an optimizer step at which curves get a point. For `on_train_batch_end` hooks."""
        step = self.trainer.global_step
        return step > self._step_before and step % self.every_n_steps == 0

    def next_point(self) -> int | None:
        """The optimizer step under way, counted from 1, if it will be a point. For hooks before it is made."""
        step = self.trainer.global_step + 1
        return step if step % self.every_n_steps == 0 else None

    def log_curves(self, figures: Mapping[str, Any]) -> None:
        """Add figures to the point of the curves that this step draws. For callbacks, where `logs_now` is true."""
        self._curves.update(figures)
        self.log_dict(dict(figures), logger=False)  # for callbacks; the loggers get the point as a whole

    def over_ranks(self, figures: Mapping[str, Tensor], *, by: str = "mean") -> dict[str, Tensor]:
        """Means (or "sum", "max") of 0-dim figures over all ranks, which hold the same names. Every rank must call it.

        In the widest type among them, float32 at least.
        """
        if self.trainer.world_size == 1 or not figures:
            return dict(figures)
        values = [value.detach().to(self.device) for value in figures.values()]
        wide = torch.float32
        for value in values:
            wide = torch.promote_types(wide, value.dtype)
        joined = self.trainer.strategy.reduce(torch.stack([value.to(wide) for value in values]), reduce_op=by)
        return dict(zip(figures, joined.unbind(), strict=True))

    def draw_point(self) -> None:
        """Hand the point to the loggers (lightning's own count of steps starts at 0)."""
        figures = as_floats(self._curves)
        self._curves.clear()
        self.latest.update(figures)
        for logger in self.trainer.loggers:
            logger.log_metrics(figures, step=self.trainer.global_step)

    @rank_zero_only
    def log_text(self, *, tag: str, text: str) -> None:
        """Show text in every logger that can."""
        for logger in self.trainer.loggers:
            add = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add is not None:
                add(tag, text, self.trainer.global_step)

    @rank_zero_only
    def log_table(self, *, tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table in every logger that can."""
        head = [" | ".join(columns), " | ".join("---" for _ in columns)]
        lines = [*head, *(" | ".join(f"{cell:.6g}" for cell in row) for row in rows)]
        self.log_text(tag=tag, text="\n".join(f"| {line} |" for line in lines))


def as_floats(figures: Mapping[str, Any]) -> dict[str, float]:
    """Plain numbers; the device is waited for once."""
    found: dict[str, float] = {}
    tensors = {name: value.detach() for name, value in figures.items() if isinstance(value, Tensor)}
    if tensors:
        device = next(iter(tensors.values())).device
        wide = torch.float32 if device.type == "mps" else torch.float64
        numbers = torch.stack([value.to(device=device, dtype=wide) for value in tensors.values()]).tolist()
        found = dict(zip(tensors, numbers, strict=True))
    return {name: found[name] if name in found else float(value) for name, value in figures.items()}
