"""Attention without gradient and without weights: what evaluation runs on a CPU.

The plain twin is `Attention.attend`. Here position scores are an additive mask of torch's fused attention, so content
scores and weights never stand in memory as a whole. With the paper's positions the mask is made for a few heads and
queries at a time, and slots and segment are laid side by side for these heads only (`Reading.before`): so what a call
needs beside the state hardly grows with the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_lightning.model.attention import Attention
from txl_lightning.model.positions import (
    Biases,
    DistanceTable,
    Reading,
    RotaryPosition,
    TransformerXLPosition,
    distance_rows,
    rows_product,
)
from txl_lightning.types import Slots

BLOCK_BYTES = 2**21
"""Of the position scores that are made at once."""

MIN_QUERIES = 16
"""Fewer queries of a head at once would be slower than they are small."""


def can_fuse(attention: Attention, q_BHTK: Tensor, read: Reading) -> bool:
    """Whether `fused` may stand in for `Attention.attend`, when nobody wants the weights."""
    if torch.is_grad_enabled() or attention.training or attention.position.always_reference:
        return False
    if isinstance(attention.position, RotaryPosition) and not (read.farthest is None and read.positioned is None):
        return False
    return q_BHTK.device.type == "cpu" and not torch.compiler.is_compiling()


def reads_apart(attention: Attention, q_BHTK: Tensor, slots: Sequence[Slots], *, contiguous: bool) -> bool:
    """Whether `fused` takes slots and segment apart; else they are joined before."""
    position = attention.position
    if not isinstance(position, TransformerXLPosition) or position.always_reference or "b" not in position.terms:
        return False
    if torch.is_grad_enabled() or attention.training or q_BHTK.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return contiguous and len(slots) == 1 and slots[0].keys_values is not None


def by_heads(attention: Attention, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> Tensor:
    """(B, H, T, K) the heads' outputs, from slots and segment that stand apart."""
    assert read.before is not None and read.bias is not None and read.mask is not None and read.mask.slots is not None
    r_WHK, (u, v), _ = attention.position.projected(table, biases, dtype=q_BHTK.dtype)
    assert r_WHK is not None
    (batch, n_head, n_token, _), scale = q_BHTK.shape, attention.position.scale
    content = q_BHTK if u is None else q_BHTK + u[:, None]
    place = (q_BHTK if v is None else q_BHTK + v[:, None]) * scale
    found = torch.empty_like(content)
    slots = read.mask.slots if read.mask.slots.any() else None  # usually all of them are seen
    at_once = BLOCK_BYTES // (batch * len(r_WHK) * q_BHTK.element_size())  # queries, of all heads together
    step, block = max(1, at_once // n_token), max(MIN_QUERIES, min(n_token, at_once))
    for head in range(0, n_head, step):
        part = slice(head, head + step)
        keys, values = (
            torch.cat([old[:, part].to(own.dtype), own[:, part]], dim=2)
            for old, own in zip(read.before, (read.k_BHPK, read.v_BHPK), strict=True)
        )
        to_slots = slots if slots is None or slots.shape[1] == 1 else slots[:, part]
        for start in range(0, n_token, block):
            end = min(n_token, start + block)
            seen, now = read.n_slot + end, slice(start, end)  # keys up to the last of these queries
            by_row = rows_product(place[:, part, now], r_WHK[n_token - end :, part])
            mask = shifted(by_row, n_key=seen)
            mask[..., read.n_slot :] += read.bias[:, :, now, :end]
            if to_slots is not None:
                mask[..., : read.n_slot] += to_slots if to_slots.shape[2] == 1 else to_slots[:, :, now]
            found[:, part, now] = F.scaled_dot_product_attention(
                content[:, part, now], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
            )
    return found


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
