"""A word of warning when a run seems to go wrong. It steers nothing: see trainer.on_divergence for what does."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

import lightning.pytorch as L

from txl_lightning import registry
from txl_lightning.config import Section, key

WINDOW = 20
"""Points that the usual gradient norm is the median of."""


@dataclass(frozen=True, kw_only=True)
class EarlyDivergenceConfig(Section):
    """Keys of `callbacks.early_divergence`."""

    section = "callbacks.early_divergence"

    loss_rise: float = key(0.5, "nats per token that train/loss may lie above its lowest point", above=0)
    grad_ratio: float = key(10.0, "gradient norms beyond so many times the usual one count as a jump", above=1)
    points: int = key(3, "points of the curves in a row that must say so before a warning", minimum=1)


@registry.callbacks.register("early_divergence", config=EarlyDivergenceConfig)
class EarlyDivergence(L.Callback):
    """Warns on standard error, once for each time it begins, and logs at each point of the curves:

    warn/loss_rise    nats per token by which train/loss lies above the lowest point since training began or went on
    warn/grad_ratio   gradient norm (before clipping) of the latest step, as a multiple of the median of the 20 finite
                      ones at the points before; from the fifth of them on
    """

    def __init__(self, config: EarlyDivergenceConfig) -> None:
        self.config = config
        self._lowest = float("inf")
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = {"loss": 0, "gradient": 0}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._lowest = float("inf")
        self._norms.clear()
        self._in_a_row = {"loss": 0, "gradient": 0}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.logs_now():
            return
        figures: dict[str, float] = {}
        loss, norm = pl_module.mean_loss(), float(pl_module.latest_grad_norm())
        if loss is not None:
            self._lowest = min(self._lowest, loss)
            rise = figures["warn/loss_rise"] = loss - self._lowest
            said = (
                f"train/loss {loss:.3f} has been more than {self.config.loss_rise} above its lowest {self._lowest:.3f}"
            )
            self._judge(trainer, "loss", not rise <= self.config.loss_rise, said)  # NaN too
        if len(self._norms) >= 5:
            usual = median(self._norms)
            ratio = figures["warn/grad_ratio"] = norm / usual if usual else 1.0
            said = (
                f"the gradient norm {norm:.3g} has been more than {self.config.grad_ratio} times the usual {usual:.3g}"
            )
            self._judge(trainer, "gradient", not ratio <= self.config.grad_ratio, said)
        if isfinite(norm):  # else it would be no measure for others
            self._norms.append(norm)
        pl_module.log_curves(figures)

    def _judge(self, trainer: L.Trainer, what: str, bad: bool, said: str) -> None:
        self._in_a_row[what] = self._in_a_row[what] + 1 if bad else 0
        if self._in_a_row[what] == self.config.points and trainer.is_global_zero:
            optim = "lower optim.lr, raise optim.warmup_steps or lower optim.clip"
            line = f"step {trainer.global_step}: {said} for {self.config.points} points; {optim}"
            print(f"warning: {line}", file=sys.stderr, flush=True)
