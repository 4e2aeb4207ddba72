"""Attention with gradient on a CPU, a few lanes and heads at a time, so that their scores never leave its cache.

The plain twin is `Attention.attend`. Both form the same four terms; here backward is written out as well, and keeps
nothing of the size of all scores but the weights. With w = softmax(s), for an output gradient g:

    ds = w (g v^T - sum(w g v^T)),   dv = w^T g,   dk = ds^T (q + u),   dr = shift^-1(ds)^T (q + v)

The relative shift is a view of the scores by row of the distance table, whose rows are one longer than the step from
one query to the next; its inverse writes through the same view into zeros. N is the number of lanes and heads of a
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_lightning.model.attention import Attention
from txl_lightning.model.parts import noise_like
from txl_lightning.model.positions import Biases, DistanceTable, Reading, TransformerXLPosition

CHUNK_BYTES = 2**20
"""Of the scores of a chunk: about what a core's cache holds beside keys, values and distances."""


def can_chunk(attention: Attention, q_BHTK: Tensor, read: Reading) -> bool:
    """Whether `chunked` may stand in for `Attention.attend`, when nobody wants the weights."""
    position = attention.position
    if not isinstance(position, TransformerXLPosition) or position.always_reference or "b" not in position.terms:
        return False
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or q_BHTK.device.type != "cpu":
        return False
    return read.contiguous and read.bias is not None and not read.bias.requires_grad


def chunked(attention: Attention, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases) -> Tensor:
    """(B, H, T, K) the heads' outputs."""
    r_WHK, (u, v), _ = attention.position.projected(table, biases, dtype=q_BHTK.dtype)
    assert r_WHK is not None and read.bias is not None
    keys, values = read.k_BHPK.to(q_BHTK.dtype), read.v_BHPK
    noise = None
    if attention.training and attention.dropatt:
        noise = noise_like(values.new_empty(*q_BHTK.shape[:3], keys.shape[2]), attention.dropatt)
    return _Attend.apply(q_BHTK, keys, values, r_WHK, u, v, read.bias, noise, attention.position.scale)


class _Chunk(NamedTuple):
    """A share of heads (all lanes) or of the lanes of one head."""

    heads: slice
    lanes: slice

    def of(self, tensor_HBxx: Tensor) -> Tensor:
        """(N, x, x)."""
        return tensor_HBxx[self.heads, self.lanes].flatten(0, 1)

    def rows(self, place_HBTK: Tensor) -> Tensor:
        """(heads, lanes T, K): what meets a head's distances."""
        return place_HBTK[self.heads, self.lanes].flatten(1, 2)


def _chunks(n_head: int, lanes: int, *, n_byte: int) -> Iterator[_Chunk]:
    """All heads and lanes in shares of about CHUNK_BYTES; n_byte: of the scores of one head of one lane."""
    at_once = max(1, CHUNK_BYTES // n_byte)
    if at_once >= lanes:
        step = max(1, at_once // lanes)
        for head in range(0, n_head, step):
            yield _Chunk(slice(head, head + step), slice(0, lanes))
        return
    for head in range(n_head):
        for lane in range(0, lanes, at_once):
            yield _Chunk(slice(head, head + 1), slice(lane, lane + at_once))


def _shifted(by_row_NTW: Tensor, *, n_key: int) -> Tensor:
    """(N, T, P) the view that lines up equal keys, as in `positions.shifted_scores`."""
    n_token, n_row = by_row_NTW.shape[-2:]
    return by_row_NTW.flatten(1)[:, n_token:].unflatten(1, (n_token, n_row - 1))[..., :n_key]


def _added(x_BHTK: Tensor, bias_HK: Tensor | None, scale: float) -> Tensor:
    """(H, B, T, K) contiguous: (x + bias) scale."""
    x = x_BHTK.transpose(0, 1)
    x = x if bias_HK is None else x + bias_HK[:, None, None]
    return (x * scale).contiguous()


class _Attend(torch.autograd.Function):
    """Arguments as the letters in the module's text; bias (1|B, 1|H, T, P), noise (B, H, T, P) or None."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Any, w: Any, bias: Tensor, noise: Any, scale: float
    ) -> Tensor:
        batch, n_head, n_token, width = q.shape
        n_key = k.shape[2]
        content, place = _added(q, u, scale), _added(q, w, scale)
        keys, values, rows = k.transpose(0, 1), v.transpose(0, 1), r.transpose(0, 1).transpose(1, 2)  # rows (H, K, W)
        masks = bias.expand(batch, n_head, -1, -1).transpose(0, 1)
        weights = q.new_empty(n_head, batch, n_token, n_key)
        heads = q.new_empty(n_head, batch, n_token, width)
        for chunk in _chunks(n_head, batch, n_byte=n_token * n_key * q.element_size()):
            by_row = torch.bmm(chunk.rows(place), rows[chunk.heads]).view(-1, n_token, rows.shape[-1])
            own = chunk.of(weights)
            torch.baddbmm(chunk.of(masks), chunk.of(content), chunk.of(keys).transpose(1, 2), out=own)
            own.add_(_shifted(by_row, n_key=n_key))
            torch.softmax(own, dim=-1, out=own)
            kept = own if noise is None else own * chunk.of(noise.transpose(0, 1))
            torch.bmm(kept, chunk.of(values), out=chunk.of(heads))
        ctx.save_for_backward(k, v, r, content, place, weights, noise)
        ctx.scale, ctx.biases = scale, (u is not None, w is not None)
        return heads.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        k, v, r, content, place, weights, noise = ctx.saved_tensors
        keys, values, rows = k.transpose(0, 1), v.transpose(0, 1), r.transpose(0, 1)  # rows (H, W, K)
        (n_head, batch, n_token, n_key), given = weights.shape, g.transpose(0, 1)
        d_content, d_place = torch.empty_like(content), torch.empty_like(place)
        d_keys, d_values = (content.new_empty(n_head, batch, *k.shape[2:]) for _ in range(2))
        d_rows = torch.zeros(rows.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
        for chunk in _chunks(n_head, batch, n_byte=n_token * n_key * weights.element_size()):
            own, g_own, mine = chunk.of(weights), chunk.of(given).contiguous(), chunk.of(values)
            kept, d_own = own, torch.bmm(g_own, mine.transpose(1, 2))
            if noise is not None:
                drawn = chunk.of(noise.transpose(0, 1))
                kept, d_own = own * drawn, d_own.mul_(drawn)
            torch.bmm(kept.transpose(1, 2), g_own, out=chunk.of(d_values))
            d_scores = torch._softmax_backward_data(d_own, own, -1, own.dtype)
            torch.bmm(d_scores, chunk.of(keys), out=chunk.of(d_content))
            torch.bmm(d_scores.transpose(1, 2), chunk.of(content), out=chunk.of(d_keys))
            by_row = d_scores.new_zeros(len(own), n_token, rows.shape[1])
            _shifted(by_row, n_key=n_key).copy_(d_scores)
            of_heads = by_row.view(chunk.rows(place).shape[0], -1, rows.shape[1])
            torch.bmm(of_heads, rows[chunk.heads], out=chunk.rows(d_place))
            d_rows[chunk.heads] += torch.bmm(of_heads.transpose(1, 2), chunk.rows(place))
        d_content, d_place = d_content * ctx.scale, d_place * ctx.scale
        d_biases = (
            d.sum(dim=(1, 2)) if there else None for d, there in zip((d_content, d_place), ctx.biases, strict=True)
        )
        d_q = (d_content + d_place).transpose(0, 1)
        d_r = d_rows.to(r.dtype).transpose(0, 1)
        return (d_q, d_keys.transpose(0, 1), d_values.transpose(0, 1), d_r, *d_biases, None, None, None)
