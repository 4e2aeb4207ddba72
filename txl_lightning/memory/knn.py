"""Memorizing Transformers: each query looks up its nearest keys among all the layer has seen, exactly.

Wu et al. 2022, arXiv:2203.08913, per lane, head and query; N = mem_len, E = the kept keys and values:

    read    top = the top_k entries of E with the largest score;  m = softmax(scores of top) . their values
            heads = (1 - g) heads + g m,   g = sigmoid(b), one number per head that starts at 0.5
    score   scale (q / |q|) . (k / |k|) with a learned scale per head, or q . k / sqrt(K) without `normalise`
    write   E' = the last N of [E ; keys and values of this segment], a ring: the oldest are overwritten

A segment is read before it is written, so it never finds itself. Retrieved entries have no position. Gradient reaches
queries, gate and scale, never what is kept: kept keys were made with older weights, and unit length is what keeps them
comparable. What is kept belongs to the lane and the head; a lane that starts anew has an empty memory and reads its
segment only.

Where we differ: scores of unit vectors need a factor, and ours is `scale`, which starts at sqrt(K). The authors' code
leaves positions out of the layer that has this memory; here they are up to `model.position`, of the whole model. The
search is exact at every size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import ModelConfig, UpperLayerMemoryConfig, key
from txl_lightning.memory.base import (
    Aux,
    LayerHandle,
    MemoryPlan,
    MemoryStrategy,
    Segment,
    State,
    Tap,
    full_precision,
    plan_per_layer,
    register,
)
from txl_lightning.types import MASKED

SEARCHED_AT_ONCE = 8192
"""Entries whose scores exist at the same time; more only cost memory."""


@dataclass(frozen=True, kw_only=True)
class KnnConfig(UpperLayerMemoryConfig):
    """Keys of `memory=knn`."""

    size_key: ClassVar[str | None] = "mem_len"

    name: str = key("knn", "exact search among the last mem_len keys of one layer")
    mem_len: int = key(512, "keys and values kept, per lane and layer; 0 trains without memory", minimum=0)
    top_k: int = key(32, "entries each query reads, those with the largest scores", minimum=1)
    normalise: bool = key(True, "compare queries and keys of unit length, times a learned scale per head")

    @property
    def reaches_back(self) -> bool:
        """False: what is found has no position."""
        return False

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        super().check_fit(model, segment_len=segment_len)
        if model.same_length:
            rule = "limits distances, and what this memory finds has none"
            raise model.refuse("same_length", rule, "set it to false, or use memory=cache")

    def span(self, model: ModelConfig, *, segment_len: int) -> float:
        """N: any entry may be among the nearest."""
        return self.mem_len

    def check(self) -> None:
        super().check()
        if self.mem_len and self.top_k > self.mem_len:
            raise self.refuse("top_k", f"must be <= memory.mem_len={self.mem_len}", "lower it, or raise memory.mem_len")


class Knn(MemoryStrategy):
    """The last `mem_len` keys and values of one layer, of which each query reads `top_k`.

    State, with N = mem_len, and G = H unless `model.n_kv_head`:
        keys, values (B, N, G, K): token i of the lane is entry i mod N; keys have unit length under `normalise`
        written (B,) int64: tokens written since the lane started

    Args:
        mem_len, top_k: N and how many of them are read.
        normalise: compare directions only.
        n_head, d_head: H and K of the layer.
        n_kv_head: heads that are kept, each for a group of heads; None: all.
    """

    inner_resets = True
    token_by_token = True

    def __init__(
        self, *, mem_len: int, top_k: int, normalise: bool, n_head: int, d_head: int, n_kv_head: int | None = None
    ) -> None:
        super().__init__()
        self.mem_len, self.top_k, self.d_head = mem_len, top_k, d_head
        self.n_kept = n_kv_head or n_head
        self.group = n_head // self.n_kept
        self.gate = nn.Parameter(torch.zeros(n_head))
        self.scale = nn.Parameter(torch.full((n_head,), d_head**0.5)) if normalise else None

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        keys = torch.zeros(batch, self.mem_len, self.n_kept, self.d_head, device=device, dtype=dtype)
        written = torch.zeros(batch, dtype=torch.int64, device=device)
        return {"keys": keys, "values": keys.clone(), "written": written}

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, None]:
        with full_precision(heads_BHTK.device):
            found = self.read(state, _exact(tap.q_BHTK))
            gate = self.gate.sigmoid()[:, None, None]
            gate = gate * self._has_memory(state, segment)
            return gate * found + (1 - gate) * heads_BHTK, None

    def _has_memory(self, state: State, segment: Segment) -> Tensor:
        """(B, 1, 1|T, 1) whether a token has a memory: something is kept, of the document that it belongs to."""
        kept = (state["written"] > 0)[:, None]
        if segment.document is not None:
            kept = kept & (segment.document == segment.document[:, :1])
        return kept[:, None, :, None]

    def _scaled(self, q_BHTK: Tensor) -> Tensor:
        """(B, G, Q, K): queries of a group share their head's keys."""
        scaled = q_BHTK / self.d_head**0.5 if self.scale is None else _unit(q_BHTK) * self.scale[:, None, None]
        return scaled.unflatten(1, (self.n_kept, self.group)).flatten(2, 3)

    @torch.no_grad()
    def hit_ages(self, state: State, q_BHTK: Tensor) -> Tensor:
        """(B, H, T, top_k) int64: tokens from what each query finds to the segment's first token; 0: nothing is kept.

        In no order.
        """
        with full_precision(q_BHTK.device):
            q, written = self._scaled(_exact(q_BHTK)), state["written"]
            is_kept = torch.arange(self.mem_len, device=q.device) < written[:, None]
            entry = self._nearest(q, state["keys"].transpose(1, 2), is_kept)
        newest = (written - 1)[:, None, None, None]
        age = 1 + (newest - entry) % self.mem_len
        age = torch.where(age <= written[:, None, None, None], age, 0)
        return age.unflatten(2, (self.group, -1)).flatten(1, 2)

    def read(self, state: State, q_BHTK: Tensor) -> Tensor:
        """(B, H, T, K): what each query finds; a mean of zeros where nothing is kept."""
        q = self._scaled(q_BHTK)
        keys, values = (state[name].transpose(1, 2) for name in ("keys", "values"))  # (B, G, N, K)
        is_kept = torch.arange(self.mem_len, device=q.device) < state["written"][:, None]  # (B, N)
        entry = self._nearest(q, keys, is_kept)  # (B, G, Q, top_k)
        scores = (q[..., None, :] * _exact(_take(keys, entry))).sum(dim=-1)
        absent = ~is_kept[:, None, None].expand(*entry.shape[:3], -1).gather(-1, entry)
        weights = scores.masked_fill(absent, MASKED).softmax(dim=-1)
        found = (weights[..., None] * _exact(_take(values, entry))).sum(dim=-2)
        return found.unflatten(2, (self.group, -1)).flatten(1, 2)

    @torch.no_grad()
    def _nearest(self, q_BGQK: Tensor, keys_BGNK: Tensor, is_kept_BN: Tensor) -> Tensor:
        """(B, G, Q, top_k) entries with the largest scores, those that are not kept last."""
        scores, entries = [], []
        for start in range(0, self.mem_len, SEARCHED_AT_ONCE):
            keys = _exact(keys_BGNK[:, :, start : start + SEARCHED_AT_ONCE])
            here = is_kept_BN[:, None, None, start : start + SEARCHED_AT_ONCE]
            best = (q_BGQK @ keys.mT).masked_fill(~here, MASKED).topk(min(self.top_k, keys.shape[2]), dim=-1)
            scores.append(best.values)
            entries.append(best.indices + start)
        chosen = torch.cat(scores, dim=-1).topk(self.top_k, dim=-1).indices
        return torch.cat(entries, dim=-1).gather(-1, chosen)

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        keys = tap.k_BHTK if self.scale is None else _unit(_exact(tap.k_BHTK))
        rows = {"keys": keys, "values": tap.v_BHTK}
        token = self._newest(state["written"], segment)
        new = {name: self._ring(state[name], row.detach(), token) for name, row in rows.items()}
        written = segment.since_start(state["written"])
        return {**new, "written": written}, Aux(metrics={"gate": self.gate.sigmoid().mean()})

    def _newest(self, written_B: Tensor, segment: Segment) -> Tensor:
        """(B, N) the newest token of the segment that falls on each entry, -1 if none does."""
        now, length = segment.since_start(written_B), segment.length
        count = torch.where(now == written_B + length, length, now)  # tokens of the document that goes on
        first = (torch.arange(self.mem_len, device=now.device) - (now - count)[:, None]) % self.mem_len
        token = first + (count[:, None] - 1 - first) // self.mem_len * self.mem_len  # the last one of its turns
        return torch.where(first < count[:, None], token + (length - count)[:, None], -1)

    def _ring(self, old_BNGK: Tensor, rows_BHTK: Tensor, token_BN: Tensor) -> Tensor:
        """(B, N, G, K): each entry exchanged for the token that falls on it."""
        rows = rows_BHTK[:, :: self.group].transpose(1, 2)  # heads of a group are copies of one another
        index = token_BN.clamp(min=0)[..., None, None].expand(-1, -1, *rows.shape[2:])
        hit = (token_BN >= 0)[..., None, None]
        return torch.where(hit, rows.gather(1, index).to(old_BNGK.dtype), old_BNGK)

    def fill(self, state: State) -> Tensor:
        return (state["written"] / self.mem_len).clamp(max=1)


def _exact(x: Tensor) -> Tensor:
    """At least float32: half precision would put near neighbours in another order."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _take(rows_BGNK: Tensor, entry_BGQn: Tensor) -> Tensor:
    """(B, G, Q, n, K): the named rows for each query."""
    index = entry_BGQn.flatten(2)[..., None].expand(-1, -1, -1, rows_BGNK.shape[-1])
    return rows_BGNK.gather(2, index).unflatten(2, entry_BGQn.shape[2:])


@register("knn", config=KnnConfig, paper="Wu et al. 2022, arXiv:2203.08913")
def build(config: KnnConfig, model: ModelConfig) -> MemoryPlan:
    """A searched memory in each chosen layer; with mem_len 0 the plain model, exactly as `memory=none`."""
    if config.mem_len == 0:
        return MemoryPlan(layers=[{} for _ in range(model.n_layer)])

    def make() -> Knn:
        return Knn(
            mem_len=config.mem_len,
            top_k=config.top_k,
            normalise=config.normalise,
            n_head=model.n_head,
            d_head=model.d_head,
            n_kv_head=model.n_kv_head,
        )

    return plan_per_layer(config, model, make)
