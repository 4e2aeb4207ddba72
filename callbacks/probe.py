"""Extra forward passes that leave training as it was, and when they are made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch

from txl_lightning.types import Batch, Segment, State


@contextmanager
def at_rest(module: Any) -> Iterator[None]:
    """The model in evaluation mode, in the run's precision, without gradient; afterwards every part as it was.

    Nothing draws random numbers then.
    """
    training = {part: part.training for part in module.model.modules()}
    module.model.eval()
    try:
        with torch.no_grad(), module.trainer.precision_plugin.forward_context():
            yield
    finally:
        for part, was in training.items():
            part.training = was


def can_look(module: Any) -> bool:
    """Whether extra passes are made: not under ZeRO 3, whose engine gathers weights for its own passes only."""
    return module.config.strategy.stage != 3


def say_no_looks(trainer: L.Trainer, module: Any, *, what: str) -> None:
    """One line on standard error where extra passes are not made."""
    if not can_look(module) and trainer.is_global_zero:
        print(f"{what}: ranks hold shares of the weights (ZeRO 3), so there are no extra passes", file=sys.stderr)


class Every:
    """Which points of the curves a costly figure is taken at: the first one in each run of so many steps.

    Args:
        steps: length of a run; 0: never.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._taken = 0

    def begin(self, step: int) -> None:
        """Training begins, or goes on, when the latest point was that of a step."""
        self._taken = step // self.steps if self.steps else 0

    def is_due(self, step: int) -> bool:
        """Whether to take it at the point of a step."""
        return bool(self.steps) and step // self.steps > self._taken

    def take(self, step: int) -> None:
        """It is taken."""
        self._taken = step // self.steps


def first_lanes(state: State, batch: Batch, count: int) -> tuple[State, Batch]:
    """The first lanes of a state and of the segment they are to read, on its device."""
    reset, length, document = batch.segment
    document = None if document is None else document[:count]
    device = batch.tokens_BT.device
    return {name: tensor[:count].to(device) for name, tensor in state.items()}, batch._replace(
        tokens_BT=batch.tokens_BT[:count],
        targets_BT=batch.targets_BT[:count],
        segment=Segment(reset[:count], length[:count], document),
    )
