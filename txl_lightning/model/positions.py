"""Sinusoids over the distance between a query and a key.

Dai et al. 2019, arXiv:1901.02860, section 3.3: R_d = [sin(d f_0) .. sin(d f_(D/2-1)), cos(d f_0) .. cos(d f_(D/2-1))]
with f_i = 10000^(-2i/D): halves, not interleaved, as in the authors' code. W is the number of distances in a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DistanceTable(NamedTuple):
    """Embedded distances first, first-1, ... in falling order. Negative distances look like 0."""

    rows_WD: Tensor
    first: int  # distance of row 0
    ahead: int  # how many negative distances the table ends with

    def for_slots(self, age: int, n_token: int) -> DistanceTable:
        """The part that a layer needs whose oldest slot has this age."""
        skip = self.first - (age + n_token)
        return DistanceTable(self.rows_WD[skip:], self.first - skip, self.ahead)


def sinusoid(distance_W: Tensor, *, d_model: int, clamp_len: int = -1, dtype: torch.dtype = torch.float32) -> Tensor:
    """(W, D) embeddings of integer distances, computed in at least float32.

    Frequencies are float32 numbers even in float64, as everywhere else: published weights were trained with them.

    Args:
        distance_W: (W,) integer distances in tokens.
        d_model: D, even.
        clamp_len: distances beyond it count as it; -1: off.
        dtype: of the result.
    """
    if clamp_len > 0:
        distance_W = distance_W.clamp(max=clamp_len)
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, d_model, 2, dtype=torch.float32, device=distance_W.device) / d_model
    frequency = (1.0 / 10000.0**exponent).to(wide)
    angle = distance_W.to(wide)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def distance_table(
    *, oldest: int, n_token: int, ahead: int, d_model: int, clamp_len: int, device: torch.device, dtype: torch.dtype
) -> DistanceTable:
    """Table for n_token tokens that read slots of age up to `oldest`.

    It starts one distance above the largest that occurs (oldest + n_token - 1): the relative shift needs that row as a
    pad. `ahead` negative distances follow 0 where tokens may look forward (memory tokens).
    """
    first = oldest + n_token
    distance = torch.arange(first, -ahead - 1, -1, device=device)
    rows = sinusoid(distance.clamp(min=0), d_model=d_model, clamp_len=clamp_len, dtype=dtype)
    return DistanceTable(rows, first, ahead)
