"""What memory is worth to the weights as they are: a few segments are read with it, without it, and with another's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from txl_lightning import registry
from txl_lightning.callbacks.probe import at_rest, can_look, say_no_looks
from txl_lightning.config import Section, key
from txl_lightning.types import Batch, State


@dataclass(frozen=True, kw_only=True)
class MemoryBenefitConfig(Section):
    """Keys of `callbacks.memory_benefit`."""

    section = "callbacks.memory_benefit"

    segments: int = key(2, "segments of the validation split, from its middle, that are read thrice", minimum=1)


@registry.callbacks.register("memory_benefit", config=MemoryBenefitConfig)
class MemoryBenefit(L.Callback):
    """Logs after each validation, in nats per token over the targets that all lanes have in the segments looked at
    (not under ZeRO 3):

    memory/benefit/nats      loss without memory less loss with it: above 0 it helps; 0 for memory=none
    memory/benefit/content   loss with another lane's memory less loss with its own: what it says, not that it is there
    memory/probe/with        the three losses: with its own memory, with none (as right after a reset), with the memory
    memory/probe/without     that the next lane of this rank has. The last one needs two lanes with tokens on each rank,
    memory/probe/swapped     and `content` does too
    """

    def __init__(self, config: MemoryBenefitConfig) -> None:
        self.config = config
        self._sums: list[Tensor] = []  # (4,) each: summed losses with, without, swapped; targets

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        say_no_looks(trainer, pl_module, what="memory_benefit")

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._sums.clear()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not can_look(pl_module) or trainer.sanity_checking:
            return
        batches, keys = int(trainer.num_val_batches[dataloader_idx]), pl_module.config
        warming = keys.eval.warm // keys.eval_segment_len
        if batch_idx - warming not in self._chosen(batches - warming):
            return
        state = pl_module.lanes.current(f"val/{dataloader_idx}")
        if state is None:
            return
        fresh = pl_module.fresh_state(len(batch.tokens_BT), "val")
        state, fresh = on_device_of(batch, state), on_device_of(batch, fresh)
        losses = [self._loss(pl_module, batch, given) for given in (state, fresh, swapped(state, batch))]
        self._sums.append(torch.stack([*losses, batch.segment.length.sum().to(losses[0].dtype)]))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self._sums:
            return
        total: Any = trainer.strategy.reduce(torch.stack(self._sums).sum(dim=0), reduce_op="sum")
        own, without, other, count = total.tolist()
        self._sums.clear()
        figures = {"benefit/nats": without - own, "probe/with": own, "probe/without": without}
        if other == other:
            figures |= {"benefit/content": other - own, "probe/swapped": other}
        pl_module.log_curves({f"memory/{name}": value / count for name, value in figures.items()})

    def _chosen(self, batches: int) -> range:
        """The segments in the middle, where memory is full and few lanes have ended; never the first."""
        count = min(self.config.segments, batches - 1)
        first = max(1, (batches - count) // 2)
        return range(first, first + count)

    @staticmethod
    def _loss(module: Any, batch: Batch, state: State | None) -> Tensor:
        """Summed loss of a segment that is read with this memory; NaN without a state."""
        wide = module.eval_loss.wide
        if state is None:
            return torch.full((), torch.nan, dtype=wide, device=batch.tokens_BT.device)
        with at_rest(module):
            return module.model(batch.tokens_BT, state, batch.segment, batch.targets_BT).losses_BT.sum(dtype=wide)


def on_device_of(batch: Batch, state: State) -> State:
    """A state that may be kept on the CPU, where the batch is."""
    return {name: tensor.to(batch.tokens_BT.device) for name, tensor in state.items()}


def swapped(state: State, batch: Batch) -> State | None:
    """Each lane with tokens gets the memory of the next one that has some; None if fewer than two have."""
    alive = (batch.segment.length > 0).nonzero().flatten()
    if len(alive) < 2:
        return None
    order = torch.arange(len(batch.tokens_BT), device=alive.device)
    order[alive] = alive.roll(-1)
    return {name: tensor[order] for name, tensor in state.items()}
