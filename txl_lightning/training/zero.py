"""What ZeRO divides among ranks, in bytes (Rajbhandari et al. 2020, arXiv:1910.02054, section 5 and table 1).

With N ranks, P parameters of w bytes each as they are computed with, and an optimizer that keeps a averages of them:

    stage        parameters      gradients       optimizer
    none, 0      w P             w P             (4 if w < 4) P + 4 a P
    1            w P             w P             (4 + 4 a) P / N
    2            w P             w P / N         (4 + 4 a) P / N
    3            w P / N         w P / N         (4 + 4 a) P / N

From stage 1 on the optimizer has weights in float32 of its own, also where those computed with are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on the device of each rank; `host_bytes` are in its main memory instead."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0


def held_by_rank(
    *,
    stage: int | None,
    ranks: int,
    parameters: int,
    parameter_bytes: int,
    optimizer_bytes: int,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> Held:
    """Bytes that weights, gradients and optimizer take on one rank.

    Args:
        stage: of ZeRO, 0 to 3; None: each rank keeps everything, as one rank alone or under DDP.
        ranks: how many share.
        parameters: how many there are.
        parameter_bytes: of the weights as they are computed with.
        optimizer_bytes: that the optimizer keeps of weights in their own precision, or from stage 0 on in float32.
        offload_optimizer: optimizer state and its weights are in main memory (stages 1 to 3).
        offload_parameters: and the weights between their uses (stage 3).
    """
    if stage is None:
        return Held(parameter_bytes=parameter_bytes, gradient_bytes=parameter_bytes, optimizer_bytes=optimizer_bytes)
    half = parameter_bytes < FLOAT32 * parameters
    master = FLOAT32 * parameters if stage >= 1 or half else 0
    weights = _share(parameter_bytes, ranks if stage >= 3 else 1)
    gradients = _share(parameter_bytes, ranks if stage >= 2 else 1)
    optimizer = _share(master + optimizer_bytes, ranks if stage >= 1 else 1)
    host = (optimizer if offload_optimizer else 0) + (weights if offload_parameters else 0)
    return Held(
        parameter_bytes=0 if offload_parameters else weights,
        gradient_bytes=gradients,
        optimizer_bytes=0 if offload_optimizer else optimizer,
        host_bytes=host,
    )


def _share(size: int, ranks: int) -> int:
    return math.ceil(size / ranks)
