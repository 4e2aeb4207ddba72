"""What the training lanes' memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
from torch import Tensor

from txl_lightning import registry
from txl_lightning.config import Section
from txl_lightning.memory.base import MemoryStrategy
from txl_lightning.model.block import substate


@dataclass(frozen=True, kw_only=True)
class MemoryMonitorConfig(Section):
    """Nothing to set: it logs at `trainer.log_every_n_steps`."""

    section = "callbacks.memory_monitor"


@registry.callbacks.register("memory_monitor", config=MemoryMonitorConfig)
class MemoryMonitor(L.Callback):
    """Logs at each point of the curves, as means over the lanes of rank 0:

    memory/<strategy>/fill/L<layer>   share of the memory that is in use, 0 to 1
    memory/<strategy>/norm/L<layer>   root mean square of everything the state holds in floating point, empty places
                                      counted as the zeros they are
    """

    def __init__(self, config: MemoryMonitorConfig) -> None:
        self.config = config

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = pl_module.lanes.current("train")
        if state is None or not pl_module.logs_now():
            return
        figures: dict[str, Tensor] = {}
        for path, memory in pl_module.model.memory_parts():
            where, _, name = path.rpartition(".")
            layer = f"/L{where.removeprefix('layers.')}" if where else ""
            part = substate(state, path)
            fill = memory.fill(part) if isinstance(memory, MemoryStrategy) else None
            if fill is not None:
                figures[f"memory/{name}/fill{layer}"] = fill.float().mean()
            if any(tensor.is_floating_point() for tensor in part.values()):
                figures[f"memory/{name}/norm{layer}"] = root_mean_square(part)
        pl_module.log_curves(figures)


def root_mean_square(state: dict[str, Tensor]) -> Tensor:
    """0-dim root mean square over all floating-point entries of a state that has some."""
    floats = [tensor.float() for tensor in state.values() if tensor.is_floating_point()]
    total = sum(tensor.square().sum() for tensor in floats)
    return (total / sum(tensor.numel() for tensor in floats)).sqrt()  # type: ignore[union-attr]
