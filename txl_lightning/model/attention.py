"""Relative multi-head attention over memory slots and the segment's own tokens.

Dai et al. 2019, arXiv:1901.02860, section 3.3. The score of query i and key j at distance d = i - j has four terms:

    A(i, j) = q_i . k_j   +  q_i . r_d   +  u . k_j   +  v . r_d        with r_d = W_r R_d
              (a) content    (b) position   (c) and (d): learned biases of each head

`reference_scores` says just that. `shifted_scores` is the same for contiguous distances: (a)+(c) and (b)+(d) are one
product each, and the position scores are lined up by viewing them with a skewed row length, without a copy.
W is the number of rows in the distance table, P = S + T the number of keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import ModelConfig
from txl_lightning.model.positions import DistanceTable


class Biases(NamedTuple):
    """u and v of the paper, (H, K) each."""

    u_HK: Tensor
    v_HK: Tensor


class Reading(NamedTuple):
    """Keys and values a segment attends to, slots first, and what is known about each pair."""

    k_BHPK: Tensor
    v_BHPK: Tensor
    bias: Tensor  # (1|B, 1|H, T, P) additive
    age: Tensor | None  # (1|B, S) ages where they are not contiguous
    positioned: Tensor | None  # (S,) bool; False: no position term
    n_slot: int


def reference_scores(
    q_BHTK: Tensor, k_BHPK: Tensor, r_WHK: Tensor, biases: Biases, *, row: Tensor, positioned: Tensor | None = None
) -> Tensor:
    """(B, H, T, P) the four terms, written out.

    Args:
        q_BHTK, k_BHPK: queries and keys.
        r_WHK: projected distances.
        biases: u and v.
        row: (1|B, T, P) int64, the row of r that belongs to query t and key p.
        positioned: (P,) bool; where False terms (b) and (d) are 0.
    """
    content = torch.einsum("bhtk,bhpk->bhtp", q_BHTK, k_BHPK)  # (a)
    content_bias = torch.einsum("hk,bhpk->bhp", biases.u_HK, k_BHPK)[:, :, None]  # (c)
    by_row = torch.einsum("bhtk,whk->bhtw", q_BHTK, r_WHK)
    bias_by_row = torch.einsum("hk,whk->hw", biases.v_HK, r_WHK)[None, :, None].expand_as(by_row)
    index = row[:, None].expand(*by_row.shape[:3], -1)
    position = by_row.gather(-1, index)  # (b)
    position_bias = bias_by_row.gather(-1, index)  # (d)
    if positioned is not None:
        position, position_bias = position * positioned, position_bias * positioned
    return content + position + content_bias + position_bias


def shifted_scores(q_BHTK: Tensor, k_BHPK: Tensor, r_WHK: Tensor, biases: Biases, *, scale: float) -> Tensor:
    """(B, H, T, P) scaled scores where key p of query t has distance S + t - p.

    Row 0 of r is distance P, one more than occurs: with it each query's scores start one place further left than the
    row above, so dropping the first T and viewing rows of length W - 1 lines up equal keys. Entries above the diagonal
    are only right if r ends with T - 1 negative distances (`DistanceTable.ahead`); else they are garbage to be masked.
    """
    batch, n_head, n_token, width = q_BHTK.shape
    n_key, n_row = k_BHPK.shape[2], r_WHK.shape[0]
    by_row = (q_BHTK + biases.v_HK[:, None]) @ r_WHK.permute(1, 2, 0)  # (B, H, T, W)
    position = by_row.flatten(-2)[..., n_token:].unflatten(-1, (n_token, n_row - 1))[..., :n_key]
    content_q = (q_BHTK + biases.u_HK[:, None]).reshape(-1, n_token, width)
    keys = k_BHPK.reshape(-1, n_key, width).transpose(1, 2)
    scores = torch.baddbmm(position.reshape(-1, n_token, n_key), content_q, keys, beta=scale, alpha=scale)
    return scores.view(batch, n_head, n_token, n_key)


class RelativeAttention(nn.Module):
    """Projections and scores of one layer. No bias anywhere, as in the paper.

    Weights: qkv (3 H K, D) with all queries' rows first, then keys', then values'; r (H K, D); out (D, H K);
    with `untie_r` also u, v (H, K).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.n_head * config.d_head
        self.n_head, self.d_head = config.n_head, config.d_head
        self.scale = 1.0 / math.sqrt(config.d_head)
        self.always_reference = config.attention == "reference"
        self.dropatt = config.dropatt
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.r = nn.Linear(config.d_model, inner, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)
        if config.untie_r:
            self.u = nn.Parameter(torch.zeros(config.n_head, config.d_head))
            self.v = nn.Parameter(torch.zeros(config.n_head, config.d_head))

    def biases(self, shared: Biases | None) -> Biases:
        """This layer's u and v, or the ones all layers share."""
        return shared if shared is not None else Biases(self.u, self.v)

    def project(self, h_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values (B, H, T, K) of the segment."""
        q, k, v = self.qkv(h_BTD).chunk(3, dim=-1)
        return self.heads(q), self.heads(k), self.heads(v)

    def project_slots(self, h_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, K) of hidden slots, with the current weights."""
        inner = self.n_head * self.d_head
        k, v = F.linear(h_BSD, self.qkv.weight[inner:]).chunk(2, dim=-1)
        return self.heads(k), self.heads(v)

    def heads(self, x_BTD: Tensor) -> Tensor:
        """(B, T, H K) -> (B, H, T, K)."""
        return x_BTD.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2)

    def attend(self, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> tuple[Tensor, Tensor]:
        """Heads' outputs (B, H, T, K) and attention weights (B, H, T, P), before dropout."""
        r = self.r(table.rows_WD).unflatten(-1, (self.n_head, self.d_head))  # (W, H, K)
        biases = Biases(biases.u_HK.to(q_BHTK.dtype), biases.v_HK.to(q_BHTK.dtype))
        plain = read.age is None and read.positioned is None
        if plain and not self.always_reference:
            scores = shifted_scores(q_BHTK, read.k_BHPK, r, biases, scale=self.scale)
        else:
            row = distance_rows(read, table, n_token=q_BHTK.shape[2])
            positioned = _pad_positioned(read)
            scores = reference_scores(q_BHTK, read.k_BHPK, r, biases, row=row, positioned=positioned) * self.scale
        # ours alone, so it may be changed; softmax of half-precision scores sums in float32 by itself
        weights = torch.softmax(scores.add_(read.bias), dim=-1).to(read.v_BHPK.dtype)
        dropped = F.dropout(weights, self.dropatt, self.training)
        return dropped @ read.v_BHPK, weights

    def merge(self, heads_BHTK: Tensor) -> Tensor:
        """(B, T, D): the output projection of the joined heads."""
        return self.out(heads_BHTK.transpose(1, 2).flatten(-2))

    def frozen(self, h_BTD: Tensor, m_BSD: Tensor) -> Tensor:
        """(B, T, H K) content-only attention of h over m with weights cut out of the graph; no mask, no positions."""
        inner = self.n_head * self.d_head
        weight = self.qkv.weight.detach()
        q = self.heads(F.linear(h_BTD, weight[:inner]))
        k, v = (self.heads(part) for part in F.linear(m_BSD, weight[inner:]).chunk(2, dim=-1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def distance_rows(read: Reading, table: DistanceTable, *, n_token: int) -> Tensor:
    """(1|B, T, P) row of the distance table for every pair of query and key."""
    device = table.rows_WD.device
    steps = torch.arange(n_token, device=device)
    age = read.age if read.age is not None else torch.arange(read.n_slot, 0, -1, device=device)[None]
    to_slots = age[:, None] + steps[:, None]  # (1|B, T, S)
    to_own = (steps[:, None] - steps)[None].expand(to_slots.shape[0], -1, -1)
    distance = torch.cat([to_slots, to_own], dim=-1)
    return (table.first - distance).clamp(min=0, max=table.first + table.ahead)


def _pad_positioned(read: Reading) -> Tensor | None:
    if read.positioned is None:
        return None
    own = read.positioned.new_ones(read.k_BHPK.shape[2] - read.n_slot)
    return torch.cat([read.positioned, own])
