"""Optimizer, parameter groups and learning-rate schedule."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from txl_lightning.config import ConfigError, OptimConfig
from txl_lightning.optim_config import MORE_OPTIMIZERS

TORCH, MORE = "torch.optim", "pytorch_optimizer"


@dataclass(frozen=True)
class Kind:
    """One optimizer.

    Attributes:
        module, name: where its class is.
        averages: tensors as large as the weights that it keeps, momentum not counted.
        keys: what it reads of `optim` beside lr and weight_decay.
        fixed: arguments that are always given.
        fuses: it can update all weights in one pass over memory.
    """

    module: str
    name: str
    averages: int
    keys: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()
    fuses: bool = False


KINDS = {
    "adam": Kind(TORCH, "Adam", 2, ("betas", "eps"), fuses=True),
    "adamw": Kind(TORCH, "AdamW", 2, ("betas", "eps"), fuses=True),
    "nadam": Kind(TORCH, "NAdam", 2, ("betas", "eps")),
    "radam": Kind(TORCH, "RAdam", 2, ("betas", "eps")),
    "adagrad": Kind(TORCH, "Adagrad", 1, ("eps",)),
    "rmsprop": Kind(TORCH, "RMSprop", 1, ("eps", "momentum")),
    "sgd": Kind(TORCH, "SGD", 0, ("momentum",), fuses=True),
    "adafactor": Kind(TORCH, "Adafactor", 0),  # a row and a column for each matrix
    # the decay belongs to the update that the trust ratio scales, as in the paper (arXiv:1904.00962); without the other
    # argument the package divides the scaled update by 1 - beta1^t: the first one would be ten times too large
    "lamb": Kind(MORE, "Lamb", 2, ("betas", "eps"), (("weight_decouple", False), ("adam_debias", True))),
    "lion": Kind(MORE, "Lion", 1, ("betas",)),
    "adabelief": Kind(MORE, "AdaBelief", 2, ("betas", "eps")),
}

UNDECAYED = ("u", "v", "rows", "row_bias", "start", "persistent", "taps")
"""Last part of the names of matrices that are no linear maps: biases of the score, learned positions, tokens, slots and
start states, and convolutions that keep features apart."""

RATES = ("rate", "rates", "span")
"""Modules whose output is one number per token that says how much is written, kept or seen: gates with one row of
weights."""


def decays(name: str, parameter: Tensor) -> bool:
    """Whether `optim.weight_decay` acts on a parameter: on matrices, but never on gates, `RATES` and `UNDECAYED`.

    Norms and biases are vectors.
    """
    *modules, last = name.split(".")
    if parameter.dim() < 2 or last in UNDECAYED or not set(RATES).isdisjoint(modules):
        return False
    return "gate" not in last and "bias" not in last


def check_optimizer(config: OptimConfig) -> type[torch.optim.Optimizer]:
    """The class of the chosen optimizer. Raises ConfigError if its package is not installed."""
    kind = KINDS[config.name]
    try:
        return getattr(importlib.import_module(kind.module), kind.name)
    except ImportError as error:
        assert config.name in MORE_OPTIMIZERS
        cure = "pip install 'txl-lightning[optimizers]'"
        raise ConfigError("optim.name", config.name, "the package pytorch-optimizer is not installed", cure) from error


def optimizer_bytes(weight_bytes: int, config: OptimConfig) -> int:
    """Bytes that the optimizer keeps for weights of so many, and with `optim.ema` their average."""
    return weight_bytes * (KINDS[config.name].averages + bool(config.momentum) + bool(config.ema))


def parameter_groups(named: Iterable[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    """Names and parameters in the optimizer's groups: those with weight decay, those without."""
    groups: list[list[tuple[str, Tensor]]] = [[], []]
    for name, parameter in named:
        groups[0 if decays(name, parameter) else 1].append((name, parameter))
    return groups


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, *, fuse: bool = False
) -> torch.optim.Optimizer:
    """Optimizer over the parameters, in two groups: with and without weight decay.

    Args:
        named: the parameters.
        config: its keys.
        fuse: update all weights in one pass over memory, where the optimizer can and the weights are on CPU or CUDA.
            A loss scaler (fp16) must not be used then, and nobody may divide the weights (DeepSpeed).
    """
    groups: list[dict[str, Any]] = [
        {"params": [parameter for _, parameter in group], "weight_decay": decay}
        for group, decay in zip(parameter_groups(named), (config.weight_decay, 0.0), strict=True)
    ]
    kind = KINDS[config.name]
    keys: dict[str, Any] = {name: getattr(config, name) for name in kind.keys} | dict(kind.fixed)
    places = {parameter.device.type for group in groups for parameter in group["params"]}
    if fuse and kind.fuses and places in ({"cpu"}, {"cuda"}):
        keys["fused"] = True
    optimizer = check_optimizer(config)([g for g in groups if g["params"]], lr=config.lr, **keys)  # type: ignore[call-arg]
    if "fused" in keys:
        optimizer.register_step_post_hook(_note_change)
    _stay_as_built(optimizer)
    return optimizer


HOW = ("fused", "foreach", "capturable")
"""Keys of an optimizer's groups that say how it computes, not what."""


def _stay_as_built(optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint may have been written where updates were computed another way."""
    built = [{name: group[name] for name in HOW if name in group} for group in optimizer.param_groups]

    def take_back(loaded: torch.optim.Optimizer) -> None:
        for group, own in zip(loaded.param_groups, built, strict=True):
            group.update(own)
            if own.get("fused"):  # counts its steps where the weights are; loading leaves them where they were read
                _move_step_counts(loaded, group["params"])

    optimizer.register_load_state_dict_post_hook(take_back)


def _move_step_counts(optimizer: torch.optim.Optimizer, weights: Iterable[Tensor]) -> None:
    for weight in weights:
        state = optimizer.state.get(weight, {})
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=weight.device)


def _note_change(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused updates leave the weights' version counters as they were, by which others know that weights moved."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                torch.autograd.graph.increment_version(weight)


def lr_factor(step: int, *, config: OptimConfig, max_steps: int) -> float:
    """Learning rate of update number `step` (from 0) as a fraction of `optim.lr`, plateau's own falls left out.

    Of w warm-up updates the first runs 1/w of the way up from `lr_start`, the last at the full rate. Then the cosine
    spans the remaining updates and would reach `lr_min` right after the last; inverse_sqrt falls as sqrt(w / n) at the
    n-th update.

    The published codes differ from it and from each other. The authors' PyTorch code sets the warm-up rate only after
    an update, so its first update runs at the full rate, and it does not shift its cosine: the rate jumps down at the
    end of the warm-up. Their TensorFlow code starts at 0, shifts the cosine as we do and ends at 0.004 * lr
    (`optim.lr_min`). NVIDIA shifts too. In the authors' inverse_sqrt the rate after the warm-up is lr / sqrt(n): ours
    with lr / sqrt(w) for `optim.lr`.
    """
    if step < config.warmup_steps:
        start = config.lr_start / config.lr
        return start + (1 - start) * (step + 1) / config.warmup_steps
    floor = config.lr_min / config.lr
    if config.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(1, config.warmup_steps) / (step + 1)))
    if config.schedule != "cosine":
        return 1.0
    span = max(1, max_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


class Plateau(LRScheduler):
    """Warm-up, then the rate falls whenever the validation loss has not for `optim.patience` validations.

    It is stepped after every update like any schedule, so warm-up works, and told each validation's loss by the
    module: Lightning would hand torch's own ReduceLROnPlateau the latest loss again after every update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
        self.config = config
        self.best = float("inf")
        self.waited = 0  # validations since the lowest loss, or since the rate fell
        self.scale = 1.0
        self.told_at = -1  # update of the latest validation: a resumed run may repeat one
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next update, of each group."""
        warm = self.config.lr * lr_factor(self.last_epoch, config=self.config, max_steps=1)
        rate = max(min(self.config.lr_min, warm), self.scale * warm)
        return [rate for _ in self.base_lrs]

    def tell(self, loss: float) -> None:
        """Take note of a validation loss; the rate changes at once."""
        if self.told_at == self.last_epoch:
            return
        self.told_at = self.last_epoch
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        if self.waited >= self.config.patience:
            self.waited, self.scale = 0, self.scale * self.config.lr_factor
            for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {name: value for name, value in super().state_dict().items() if name != "config"}


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, *, max_steps: int) -> LRScheduler:
    """Schedule over optimizer steps."""
    if config.schedule == "plateau":
        return Plateau(optimizer, config)
    return LambdaLR(optimizer, lambda step: lr_factor(step, config=config, max_steps=max_steps))
