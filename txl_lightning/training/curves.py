"""What a module shows: points of its curves at optimizer steps, and texts, images and tables beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
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

    def last_point(self) -> int:
        """The optimizer step of the latest point that could have been; 0 before the first."""
        return self.trainer.global_step - self.trainer.global_step % self.every_n_steps

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
        """Show text (Markdown) in every logger that can."""
        for logger in self.trainer.loggers:
            show_text(logger, tag=tag, text=text, step=self.trainer.global_step)

    @rank_zero_only
    def log_table(self, *, tag: str, columns: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
        """Show a table of numbers in every logger that can."""
        for logger in self.trainer.loggers:
            show_table(logger, tag=tag, columns=columns, rows=rows, step=self.trainer.global_step)

    @rank_zero_only
    def log_image(self, *, tag: str, image_3HW: Tensor) -> None:
        """Show an image in every logger that can; red, green and blue from 0 to 1."""
        for logger in self.trainer.loggers:
            show_image(logger, tag=tag, image_3HW=image_3HW, step=self.trainer.global_step)


def show_text(logger: Logger, *, tag: str, text: str, step: int) -> None:
    """Text in one logger; nothing where it takes none (CSV)."""
    if isinstance(logger, WandbLogger):
        logger.log_text(tag, columns=["step", "text"], data=[[step, text]])  # type: ignore[list-item]
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_text(logger.run_id, text, f"{tag}/{step}.md")
    elif (add := getattr(getattr(logger, "experiment", None), "add_text", None)) is not None:
        add(tag, text, step)


def show_table(logger: Logger, *, tag: str, columns: Sequence[str], rows: Sequence[Sequence[float]], step: int) -> None:
    """A table in one logger, as text where it has no tables."""
    if isinstance(logger, WandbLogger):
        logger.log_table(tag, columns=list(columns), data=[list(row) for row in rows])
        return
    head = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines = [*head, *(" | ".join(f"{cell:.6g}" for cell in row) for row in rows)]
    show_text(logger, tag=tag, text="\n".join(f"| {line} |" for line in lines), step=step)


def show_image(logger: Logger, *, tag: str, image_3HW: Tensor, step: int) -> None:
    """An image in one logger; nothing where it takes none (CSV)."""
    bytes_3HW = (image_3HW.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    if isinstance(logger, WandbLogger):
        logger.log_image(tag, [bytes_3HW.permute(1, 2, 0).numpy()])
    elif isinstance(logger, MLFlowLogger):
        image = bytes_3HW.permute(1, 2, 0).numpy()
        logger.experiment.log_image(logger.run_id, image, key=tag.replace("/", "."), step=step)
    elif (add := getattr(getattr(logger, "experiment", None), "add_image", None)) is not None:
        add(tag, bytes_3HW, step)


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
