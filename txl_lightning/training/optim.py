"""Optimizer, parameter groups and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from txl_lightning.config import OptimConfig

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """Optimizer with weight decay on matrices only: never on biases, norms, gates, u and v."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in named:
        matrix = parameter.dim() >= 2 and name.rpartition(".")[2] not in ("u", "v")
        (decayed if matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return OPTIMIZERS[config.name](groups, lr=config.lr, betas=config.betas, eps=config.eps)  # type: ignore[call-arg]


def lr_factor(step: int, *, config: OptimConfig, max_steps: int) -> float:
    """Learning rate of update number `step` (from 0) as a fraction of `optim.lr`.

    The first of w warm-up updates runs at 1/w, the last at the full rate; the cosine then spans the remaining updates
    and would reach `lr_min` right after the last.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    span = max(1, max_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    floor = config.lr_min / config.lr
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, *, max_steps: int) -> LambdaLR:
    """Schedule over optimizer steps."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, config=config, max_steps=max_steps))
