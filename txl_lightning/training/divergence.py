"""When a step would ruin the weights, and what becomes of it: training stops, or the step is left out.

A step is ruinous if a loss or the gradient is not finite, or if its loss, the mean over all its targets, is more than
`trainer.max_loss_rise` nats above the running mean of the steps before it,

    m_n = d m_(n-1) + (1 - d) loss_n,   mean = m_n / (1 - d^n),   d = 0.99,

once n has reached 10. Steps that are left out do not enter the mean. All ranks decide alike: the loss is that of all
ranks' targets, and so is the gradient.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from txl_lightning.config import TrainerConfig

DECAY, WARM = 0.99, 10


class Diverged(RuntimeError):
    """Training on would ruin the weights, or leads nowhere."""


class NonFiniteLoss(Diverged):
    """The loss or the gradient became NaN or infinite."""


class Guard:
    """Judges one optimizer step after the other.

    Args:
        config: `on_divergence`, `max_loss_rise` and `max_skipped_steps` are read.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.skipped = 0  # steps left out since the run began
        self.in_a_row = 0
        self._moment, self._n_step = 0.0, 0

    @property
    def skips(self) -> bool:
        """Whether a ruinous step is left out instead of ending training."""
        return self.config.on_divergence == "skip"

    @property
    def needs_loss(self) -> bool:
        """Whether `judge` looks at the loss; else there is no need to sum it over the ranks."""
        return self.skips or self.config.max_loss_rise > 0

    @property
    def mean(self) -> float | None:
        """Running mean of the loss in nats per token; None before the first step."""
        return self._moment / (1 - DECAY**self._n_step) if self._n_step else None

    def judge(self, *, loss: float | None, grad_norm: Tensor) -> str | None:
        """Why a step is ruinous, or None. Its gradient is finite or not, its loss a mean over all targets."""
        if loss is not None and not math.isfinite(loss):
            return "the loss is not finite"
        if not grad_norm.isfinite():
            return "the gradient is not finite"
        limit = self.config.max_loss_rise
        if loss is None or not limit or self.mean is None or self._n_step < WARM or loss - self.mean <= limit:
            return None
        rule = f"trainer.max_loss_rise={limit} above the running mean {self.mean:.3f}"
        return f"the loss of {loss:.3f} nats is more than {rule}"

    def accept(self, loss: float | None) -> None:
        """The step is made."""
        self.in_a_row = 0
        if loss is not None:
            self._moment, self._n_step = DECAY * self._moment + (1 - DECAY) * loss, self._n_step + 1

    def leave_out(self, why: str, *, step: int) -> None:
        """The step is not made.

        Raises:
            Diverged: it is one too many in a row.
        """
        limit = self.config.max_skipped_steps
        if self.in_a_row >= limit:
            rule = f"trainer.max_skipped_steps={limit} steps in a row were skipped before step {step}, and now again"
            raise Diverged(f"{rule} {why}")
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        _say(f"step {step} is skipped: {why}; weights, optimizer state and memory stay as they were")

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "moment": self._moment, "n_step": self._n_step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.skipped, self.in_a_row = saved["skipped"], saved["in_a_row"]
        self._moment, self._n_step = saved["moment"], saved["n_step"]


@rank_zero_only
def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
