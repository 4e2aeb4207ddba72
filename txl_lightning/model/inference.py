"""Attention without gradient and without weights: what evaluation runs on a CPU.

The plain twin is `Attention.attend`. Here position scores are an additive mask of torch's fused attention, so content
scores and weights never stand in memory as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_lightning.model.attention import Attention
from txl_lightning.model.positions import Biases, DistanceTable, Reading, RotaryPosition, distance_rows


def can_fuse(attention: Attention, q_BHTK: Tensor, read: Reading) -> bool:
    """Whether `fused` may stand in for `Attention.attend`, when nobody wants the weights."""
    if torch.is_grad_enabled() or attention.training or attention.position.always_reference:
        return False
    if isinstance(attention.position, RotaryPosition) and not (read.farthest is None and read.positioned is None):
        return False
    return q_BHTK.device.type == "cpu" and not torch.compiler.is_compiling()


def fused(attention: Attention, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> Tensor:
    """(B, H, T, K) the heads' outputs."""
    position, n_token = attention.position, q_BHTK.shape[2]
    assert read.bias is not None
    steps = torch.arange(n_token, device=q_BHTK.device)[None]
    content, by_row = position.parts(q_BHTK, table, biases, place_BT=steps)
    slots = -read.ages()
    keys = position.keys_at(read.k_BHPK, torch.cat([slots, steps.expand(slots.shape[0], -1)], dim=1))
    if by_row is None:
        mask = read.bias
    elif read.contiguous:
        mask = biased(shifted(by_row, n_key=read.k_BHPK.shape[2]), read.bias, n_slot=read.n_slot)
    else:
        mask = gathered(by_row, distance_rows(read, table, n_token=n_token), read.positioned_keys()).add_(read.bias)
    return F.scaled_dot_product_attention(content, keys, read.v_BHPK, attn_mask=mask, scale=position.scale)


def shifted(by_row_BHTW: Tensor, *, n_key: int) -> Tensor:
    """(B, H, T, P) a view that lines up equal keys; as in `positions.shifted_scores`."""
    n_token, n_row = by_row_BHTW.shape[-2:]
    return by_row_BHTW.flatten(-2)[..., n_token:].unflatten(-1, (n_token, n_row - 1))[..., :n_key]


def gathered(by_row_BHTW: Tensor, row: Tensor, positioned_P: Tensor | None) -> Tensor:
    """(B, H, T, P) the row of each pair of query and key, 0 for keys without position.

    Args:
        by_row_BHTW: what each row of the table adds.
        row: (1|B, T, P) int64.
        positioned_P: which keys have a position; None: all.
    """
    found = by_row_BHTW.gather(-1, row[:, None].expand(*by_row_BHTW.shape[:3], -1))
    return found if positioned_P is None else found.mul_(positioned_P)


def biased(scores_BHTP: Tensor, bias: Tensor, *, n_slot: int) -> Tensor:
    """The scores, which are ours to change, with a bias that is usually 0 on all slots."""
    scores_BHTP[..., n_slot:].add_(bias[..., n_slot:])
    if bias[..., :n_slot].any():
        scores_BHTP[..., :n_slot].add_(bias[..., :n_slot])
    return scores_BHTP
