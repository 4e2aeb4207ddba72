"""Which part of the model the gradient pulls at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from txl_lightning import registry
from txl_lightning.callbacks.probe import Every
from txl_lightning.config import Section, key
from txl_lightning.training.strategies import engine_of, whole_gradient


@dataclass(frozen=True, kw_only=True)
class GradientNormsConfig(Section):
    """Keys of `callbacks.gradient_norms`."""

    section = "callbacks.gradient_norms"

    every_n_steps: int = key(
        100, "optimizer steps between two figures; under ZeRO each gathers the gradient from all ranks", minimum=1
    )


@registry.callbacks.register("gradient_norms", config=GradientNormsConfig)
class GradientNorms(L.Callback):
    """Logs at the points of every `every_n_steps`-th step, over all ranks' lanes, before clipping:

    optim/grad_norm/<group>   norm of the gradient of embedding, L<layer>, memory (all that strategies learn), softmax
                              and the rest (shared u and v, the last norm); their squares add up to that of
                              optim/grad_norm
    """

    def __init__(self, config: GradientNormsConfig) -> None:
        self.config = config
        self._every = Every(config.every_n_steps)
        self._norms: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._every.begin(pl_module.last_point())
        self._norms.clear()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        point, engine = pl_module.next_point(), engine_of(trainer)
        if point is None or not self._every.is_due(point):
            return
        if engine is not None and not engine.is_gradient_accumulation_boundary():
            return
        self._every.take(point)
        squares: dict[str, list[Tensor]] = {}
        for name, parameter in pl_module.model.named_parameters():
            gradient = whole_gradient(parameter, engine)
            if gradient is not None:
                squares.setdefault(group_of(name), []).append(gradient.detach().float().square().sum())
        self._norms = {group: torch.stack(parts).sum().sqrt() for group, parts in squares.items()}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._norms and pl_module.logs_now():
            pl_module.log_curves({f"optim/grad_norm/{group}": norm for group, norm in self._norms.items()})
            self._norms = {}


def group_of(name: str) -> str:
    """The group of a parameter of the model, by its name."""
    parts = name.split(".")
    if "memories" in parts or parts[0] == "tokens":
        return "memory"
    if parts[0] == "layers":
        return f"L{parts[1]}"
    return parts[0] if parts[0] in ("embedding", "softmax") else "rest"
