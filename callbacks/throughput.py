"""How fast training is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L

from txl_lightning import registry
from txl_lightning.config import Section


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig(Section):
    """Nothing to set: it logs at `trainer.log_every_n_steps`."""

    section = "callbacks.throughput"


@registry.callbacks.register("throughput", config=ThroughputConfig)
class Throughput(L.Callback):
    """Logs at each point of the curves:

    perf/tokens_per_second   targets trained on per second since the last point, over all ranks, without validation
    """

    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config
        self._tokens, self._seconds = 0, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._tokens, self._seconds = pl_module.clock.tokens, pl_module.clock.seconds

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.logs_now():
            return
        tokens, seconds = pl_module.clock.tokens, pl_module.clock.seconds
        if tokens > self._tokens:
            pl_module.log_curves({"perf/tokens_per_second": (tokens - self._tokens) / (seconds - self._seconds)})
        self._tokens, self._seconds = tokens, seconds
