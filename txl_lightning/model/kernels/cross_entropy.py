"""What cross-entropy does to logits, as operators that torch.compile takes as they are. Importing it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor, library

from txl_lightning.model.kernels import on_device
from txl_lightning.model.kernels.columns import gradient_kernel, losses_kernel

_LARGEST_BLOCK = 4096


@library.custom_op("txl_lightning::cross_entropy", mutates_args=(), schema="(Tensor logits, Tensor target) -> Tensor")
def losses(logits: Tensor, target: Tensor) -> Tensor:
    """(N) float32 negative log-likelihoods; NaN where a target is no column.

    Args:
        logits: (N, V) in at most 32 bits, rows of stride 1.
        target: (N) int64.
    """
    nll = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        with on_device(logits):
            losses_kernel[(len(logits),)](logits, target.contiguous(), nll, **_cut(logits))
    return nll


@losses.register_fake
def _(logits: Tensor, target: Tensor) -> Tensor:
    return torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device)


@library.custom_op(
    "txl_lightning::cross_entropy_gradient",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor target, Tensor nll, Tensor grad) -> ()",
)
def _gradient(logits: Tensor, target: Tensor, nll: Tensor, grad: Tensor) -> None:
    if len(logits):
        given = (target.contiguous(), nll.contiguous(), grad.contiguous())
        with on_device(logits):
            gradient_kernel[(len(logits),)](logits, *given, **_cut(logits))


def gradient_(logits: Tensor, target: Tensor, nll: Tensor, grad: Tensor) -> Tensor:
    """The logits' gradient, written over them.

    Args:
        logits, target: as `losses` took them.
        nll: (N) as it gave them.
        grad: (N) float32, the gradient of each.
    """
    _gradient(logits, target, nll, grad)
    return logits


def _cut(logits: Tensor) -> dict[str, Any]:
    """Sizes, and how many columns a program takes at a time."""
    n_column = logits.shape[1]
    block = min(_LARGEST_BLOCK, max(16, triton.next_power_of_2(n_column)))
    return {
        "stride": logits.stride(0),
        "n_column": n_column,
        "BLOCK": block,
        "num_warps": 8 if block >= 2048 else 4,
    }
