"""Loss over exactly the scored targets of all ranks, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torchmetrics
from torch import Tensor


class TokenLoss(torchmetrics.Metric):
    """Mean negative log-likelihood in nats per token: the sum over all targets by their count, over all ranks."""

    full_state_update = False
    nll: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.float32 if torch.backends.mps.is_available() else torch.float64  # mps has no float64
        self.add_state("nll", torch.zeros((), dtype=self.wide), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, *args: Any, **kwargs: Any) -> TokenLoss:
        # precision=bf16-true casts the whole module; a sum in bfloat16 soon stops growing
        super()._apply(*args, **kwargs)
        self.nll = self.nll.to(self.wide)
        self._defaults["nll"] = torch.zeros_like(self.nll)
        return self

    def update(self, nll: Tensor, count: Tensor) -> None:
        """Add the summed loss of some targets and their number."""
        self.nll = self.nll + nll.to(self.nll.dtype)
        self.count = self.count + count

    def sums(self) -> list[Tensor]:
        """Summed loss and count of this rank so far, where they are: nobody waits for the device."""
        return [self.nll.detach().clone(), self.count.detach().clone()]

    def set_sums(self, sums: list[Tensor]) -> None:
        """Go on from what `sums` gave."""
        self.reset()
        self.update(sums[0].to(self.nll.device), sums[1].to(self.count.device))

    def compute(self) -> Tensor:
        """Nats per token; NaN if nothing was scored."""
        return self.nll / self.count


def scores(loss: float, unit: str, *, per_target: Mapping[str, float] | None = None) -> dict[str, float]:
    """The customary figures of a loss in nats per token.

    Args:
        loss: nats per token.
        unit: what a token stands for: "byte", "char", "word" or "token".
        per_target: words and bytes of the scored text per scored target, where they are counted ("word", "byte").

    Returns:
        loss, bits per unit, and ppl = exp(loss), which is given as e^700 where it would overflow; with counts also
        word_ppl = exp(total loss / words) and bits_per_byte, whatever the tokens are.
    """
    per_target = per_target or {}
    found = {"loss": loss, f"bits_per_{unit}": loss / math.log(2), "ppl": math.exp(min(loss, 700.0))}
    if words := per_target.get("word"):
        found["word_ppl"] = math.exp(min(loss / words, 700.0))
    if n_byte := per_target.get("byte"):
        found["bits_per_byte"] = loss / math.log(2) / n_byte
    return found
