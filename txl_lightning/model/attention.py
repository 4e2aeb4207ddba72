"""Multi-head attention over memory slots and the segment's own tokens: projections, scores, weights.

How scores depend on position is the business of `positions.py`, which way they are computed that of `backends.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import ModelConfig
from txl_lightning.model.backends import Need, choose
from txl_lightning.model.parts import RMSNorm, dropout, frozen_norm
from txl_lightning.model.positions import KINDS, Biases, DistanceTable, Reading


class Attention(nn.Module):
    """Projections and scores of one layer. No bias anywhere, as in the paper.

    Weights, with G key and value heads (G = H unless `n_kv_head`): qkv (H K + 2 G K, D) with all queries' rows first,
    then keys', then values'; out (D, H K); with `qk_norm` q_norm and k_norm (K); those of `position`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.d_head = config.n_head, config.kv_heads, config.d_head
        self.split = (config.n_head * config.d_head, config.kv_heads * config.d_head, config.kv_heads * config.d_head)
        self.dropatt = config.dropatt
        self.wanted, self.position_name = config.attention, config.position
        self.qkv = nn.Linear(config.d_model, sum(self.split), bias=False)
        self.position = KINDS[config.position](config)
        self.out = nn.Linear(config.n_head * config.d_head, config.d_model, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(config.d_head, eps=config.norm_eps) if config.qk_norm else None for _ in range(2)
        )

    def project(self, h_BTD: Tensor, queries_from: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values (B, H, T, K) of the segment; `queries_from` (B, T, D) where it is not h."""
        if queries_from is None:
            q, k, v = self.qkv(h_BTD).split(self.split, dim=-1)
        else:
            q = F.linear(queries_from, self.qkv.weight[: self.split[0]])
            k, v = F.linear(h_BTD, self.qkv.weight[self.split[0] :]).split(self.split[1:], dim=-1)
        return _normed(self.heads(q), self.q_norm), *self._keys_values(k, v)

    def project_slots(self, h_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, K) of hidden slots, with the current weights."""
        k, v = F.linear(h_BSD, self.qkv.weight[self.split[0] :]).split(self.split[1:], dim=-1)
        return self._keys_values(k, v)

    def heads(self, x_BTD: Tensor) -> Tensor:
        """(B, T, n K) -> (B, n, T, K)."""
        return x_BTD.unflatten(-1, (-1, self.d_head)).transpose(1, 2)

    def way(self, x: Tensor, *, weights: bool) -> str:
        """How attention of a layer with this input is computed, as `backends.choose` says.

        Args:
            x: the input, of any shape.
            weights: whether its attention weights are wanted.
        """
        need = Need.of(x, d_head=self.d_head, position=self.position_name, weights=weights)
        return choose(self.wanted, need)

    def attend(
        self,
        q_BHTK: Tensor,
        read: Reading,
        table: DistanceTable,
        biases: Biases,
        *,
        way: str = "shift",
        weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Heads' outputs (B, H, T, K) and attention weights (B, H, T, P), before dropout; None where not wanted.

        Args:
            q_BHTK: queries.
            read: keys, values and what is known of them; with a `mask` for `triton`, else with a `bias`.
            table, biases: distances, u and v.
            way: as `way` gave it.
            weights: whether the weights are wanted; never of `triton`.
        """
        if way == "triton":
            return self._fused(q_BHTK, read, table, biases), None
        compute = _compiled() if way == "compiled" and not torch.compiler.is_compiling() else _plain
        heads, found = compute(self, q_BHTK, read, table, biases)
        return heads, found if weights else None

    def _fused(self, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> Tensor:
        """(B, H, T, K) heads' outputs by the kernels."""
        from txl_lightning.model.kernels.launch import Numbers, Operands
        from txl_lightning.model.kernels.relative import relative_attention

        mask, v = read.mask, read.v_BHPK
        assert mask is not None
        r, (u, w), term_b = self.position.projected(table, biases, dtype=v.dtype)
        looked_up = not read.contiguous
        drops = self.training and self.dropatt > 0
        ops = Operands(
            *(q_BHTK.to(v.dtype), read.k_BHPK.to(v.dtype), v),
            *(None if r is None else r.to(v.dtype).permute(1, 0, 2), u, w),
            *(mask.slots if read.n_slot else None, mask.own, mask.document),
            *(read.ages() if looked_up else None, read.farthest, read.positioned),
            torch.randint(2**31 - 1, (1,), device=v.device) if drops else None,
        )
        limits = (mask.slot_limit, mask.own_limit)
        numbers = Numbers(
            read.n_slot, table.first, *limits, self.position.scale, self.dropatt if drops else 0.0, term_b
        )
        return relative_attention(ops, numbers)

    def merge(self, heads_BHTK: Tensor) -> Tensor:
        """(B, T, D): the output projection of the joined heads."""
        return self.out(heads_BHTK.transpose(1, 2).flatten(-2))

    def frozen(self, h_BTD: Tensor, m_BSD: Tensor) -> Tensor:
        """(B, T, H K) content-only attention of h over m with weights cut out of the graph; no mask, no positions."""
        weight = self.qkv.weight.detach()
        q = _normed(self.heads(F.linear(h_BTD, weight[: self.split[0]])), self.q_norm, frozen=True)
        k, v = F.linear(m_BSD, weight[self.split[0] :]).split(self.split[1:], dim=-1)
        k, v = self._keys_values(k, v, frozen=True)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    def _keys_values(self, k_BTD: Tensor, v_BTD: Tensor, *, frozen: bool = False) -> tuple[Tensor, Tensor]:
        """(B, H, T, K) each; a head that serves a group of queries' heads is repeated for each."""
        k, v = _normed(self.heads(k_BTD), self.k_norm, frozen=frozen), self.heads(v_BTD)
        group = self.n_head // self.n_kv_head
        return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def _plain(
    layer: Attention, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases
) -> tuple[Tensor, Tensor]:
    """Heads' outputs and weights by matrix products; every pair's score is formed."""
    assert read.bias is not None
    scores = layer.position.scores(q_BHTK, read, table, biases)
    # ours alone, so it may be changed; softmax of half-precision scores sums in float32 by itself
    weights = torch.softmax(scores.add_(read.bias), dim=-1).to(read.v_BHPK.dtype)
    dropped = dropout(weights, layer.dropatt, layer.training)
    return dropped @ read.v_BHPK, weights


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_plain)


def _normed(x: Tensor, norm: RMSNorm | None, *, frozen: bool = False) -> Tensor:
    """x through a norm, if there is one; `frozen`: with its gains cut out of the graph."""
    if norm is None:
        return x
    return frozen_norm(norm, x) if frozen else norm(x)
