"""Where in a segment, and how long after a reset, tokens are predicted well: the price of cutting a text up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from txl_lightning import registry
from txl_lightning.callbacks.buckets import bucket_name, sums_by_bucket
from txl_lightning.config import Section
from txl_lightning.types import Segment


@dataclass(frozen=True, kw_only=True)
class LossByPositionConfig(Section):
    """Nothing to set: it logs after each validation."""

    section = "callbacks.loss_by_position"


@registry.callbacks.register("loss_by_position", config=LossByPositionConfig)
class LossByPosition(L.Callback):
    """Logs after each validation, in nats per token over exactly the scored targets of all ranks, in buckets 0, 1, 2-3,
    4-7, ... that have some:

    val/loss_by_position/<bucket>   by tokens before it in the segment: without memory a segment begins
                                    badly, with a good one the curve is flat
    val/loss_by_age/<bucket>        by tokens since the lane, or its document, started anew
    """

    def __init__(self, config: LossByPositionConfig) -> None:
        self.config = config
        self._read: Tensor | None = None  # (B,) tokens of each lane since it started anew
        self._by_position: Tensor | None = None  # (2, T): losses and their number
        self._by_age: Tensor | None = None  # (2, buckets): the same

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._read = self._by_position = self._by_age = None

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking:
            return
        losses, n_token = outputs["losses_BT"], outputs["losses_BT"].shape[1]
        before = self._read if self._read is not None else torch.zeros_like(batch.segment.length)
        before = torch.where(batch.segment.reset & (batch.segment.length > 0), 0, before)
        self._read = torch.where(batch.segment.length > 0, batch.segment.since_start(before), before)
        if not batch.n_target:
            return  # lanes are being warmed
        real = batch.segment.mask(n_token).to(pl_module.eval_loss.wide)
        values = torch.stack([losses.to(real.dtype) * real, real])
        ages = tokens_before(batch.segment, before, n_token=n_token)
        by_position, by_age = values.sum(dim=1), sums_by_bucket(ages, values)
        self._by_position = by_position if self._by_position is None else self._by_position + by_position
        self._by_age = by_age if self._by_age is None else self._by_age + by_age

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or self._by_position is None or self._by_age is None:
            return
        place = torch.arange(self._by_position.shape[1], device=self._by_position.device)
        sums: Any = torch.stack([sums_by_bucket(place, self._by_position), self._by_age])
        sums = trainer.strategy.reduce(sums, reduce_op="sum")
        found = {}
        for name, (losses, counts) in zip(("position", "age"), sums.tolist(), strict=True):
            for index, (loss, count) in enumerate(zip(losses, counts, strict=True)):
                if count:
                    found[f"val/loss_by_{name}/{bucket_name(index)}"] = loss / count
        pl_module.log_curves(found)
        self._read = self._by_position = self._by_age = None


def tokens_before(segment: Segment, before_B: Tensor, *, n_token: int) -> Tensor:
    """(B, T) tokens since the lane, or the document that a token belongs to, started anew.

    Args:
        segment: facts about the tokens.
        before_B: (B,) the same for the first of them.
        n_token: T.
    """
    step = torch.arange(n_token, device=before_B.device).expand(len(before_B), -1)
    if segment.document is None:
        return before_B[:, None] + step
    begins = torch.zeros_like(segment.document, dtype=torch.bool)
    begins[:, 1:] = segment.document[:, 1:] != segment.document[:, :-1]
    started = torch.where(begins, step, 0).cummax(dim=1).values  # where a token's document begins
    return torch.where(started > 0, step - started, before_B[:, None] + step)
