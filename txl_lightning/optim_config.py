"""The keys of optimizer and learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from txl_lightning.section import Section, key

TORCH_OPTIMIZERS = ("adam", "adamw", "nadam", "radam", "adagrad", "rmsprop", "sgd", "adafactor")

MORE_OPTIMIZERS = ("lamb", "lion", "adabelief")
"""Those of the package pytorch-optimizer."""

OPTIMIZERS = (*TORCH_OPTIMIZERS, *MORE_OPTIMIZERS)

WHOLE_TENSORS = ("adafactor", "lamb")
"""Those whose update of a number depends on the rest of its matrix."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    section: ClassVar[str] = "optim"

    name: str = key("adamw", f"optimizer; {', '.join(MORE_OPTIMIZERS)} need the extra optimizers", choices=OPTIMIZERS)
    lr: float = key(2.5e-4, "peak learning rate", above=0)
    betas: tuple[float, float] = key(
        (0.9, 0.999),
        "decay of the two running averages; not read by sgd, adagrad, rmsprop, adafactor",
        minimum=0,
        maximum=0.9999999,
    )
    momentum: float = key(0.0, "of sgd and rmsprop", minimum=0, maximum=0.9999999)
    eps: float = key(1e-8, "added to the denominator of the update; not read by sgd, adafactor, lion", above=0)
    weight_decay: float = key(
        0.0, "decay of matrices; never of biases, norms, gates, u and v and learned positions", minimum=0
    )
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", minimum=0)
    lr_start: float = key(0.0, "rate that the warm-up rises from; its first step is one rung above it", minimum=0)
    schedule: str = key(
        "cosine",
        "after the warm-up: fall to lr_min along a cosine, fall with 1/sqrt(step), fall by lr_factor whenever val/loss "
        "has not fallen for `patience` validations, or stay",
        choices=("cosine", "inverse_sqrt", "plateau", "constant"),
    )
    lr_min: float = key(
        0.0, "the rate never falls below it; the cosine gets there right after the last step", minimum=0
    )
    lr_factor: float = key(0.5, "what plateau multiplies the rate with", above=0, maximum=0.999)
    patience: int = key(5, "validations without a lower val/loss before plateau lowers the rate", minimum=1)
    clip: float = key(0.25, "largest gradient norm; 0: off", minimum=0)
    ema: float = key(
        0.0,
        "decay of the weights' moving average, which validation, checkpoints and evaluation then use; 0: off",
        minimum=0,
        maximum=0.9999999,
    )

    def check(self) -> None:
        if self.momentum and self.name not in ("sgd", "rmsprop"):
            raise self.refuse(
                "momentum", f"optim={self.name} has none", "set it to 0: optim.betas says how it averages"
            )
        if self.lr_min and self.schedule == "constant":
            raise self.refuse("lr_min", "optim.schedule=constant never falls", "set it to 0")
        if len(self.betas) != 2:
            raise self.refuse("betas", "must be two numbers", "for example optim.betas=[0.9,0.999]")
        if self.lr_start and not self.warmup_steps:
            raise self.refuse("lr_start", "there is no warm-up to begin with it", "set optim.warmup_steps too")
        if self.lr_start > self.lr:
            raise self.refuse("lr_start", f"must be <= optim.lr={self.lr}", "lower it or raise optim.lr")
        if self.lr_min > self.lr:
            raise self.refuse("lr_min", f"must be <= optim.lr={self.lr}", "lower it or raise optim.lr")
