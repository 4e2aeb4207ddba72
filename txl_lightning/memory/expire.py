"""Expire-Span: each memory learns how long it is worth seeing.

Sukhbaatar et al. 2021, arXiv:2105.06548. Memory i, a layer input h_i, has a span of e_i tokens, the same for all heads:

    e_i  = L sigmoid(w . h_i + b)                                           L = `max_span`
    m_ti = clip(1 + (e_i - (t - i)) / R, 0, 1)                              R = `ramp`: seen, half seen, gone
    weights of query t = m_t . softmax(a_t), renormalised  =  softmax(a_t + log m_t)
    loss = `loss_weight` * sum of e_i over the memories that are on the ramp (0 < m < 1), mean over tokens

So it is `cache` with an additive bias that carries gradient to w and b; what a memory says carries none.

Where we differ: soft only. What has expired is masked and still takes its place, until it is older than mem_len
tokens: the quality of the paper's, not its saving of memory. The tokens of the segment under way do not expire. With
`shorten` every lane draws a length from 0 to max_span in each training step beyond which it sees no memory: the paper's
regulariser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from txl_lightning.config import LayerMemoryConfig, ModelConfig, key
from txl_lightning.memory.base import (
    Aux,
    LayerHandle,
    MemoryPlan,
    MemoryStrategy,
    Segment,
    Slots,
    State,
    Tap,
    full_precision,
    keep_last,
    plan_per_layer,
    register,
)
from txl_lightning.memory.rows import Rows, falling_ages, form_of, rows_of
from txl_lightning.types import MASKED


@dataclass(frozen=True, kw_only=True)
class ExpireConfig(LayerMemoryConfig):
    """Keys of `memory=expire`."""

    size_key: ClassVar[str | None] = "mem_len"

    name: str = key("expire", "a cache whose tokens learn how long they are worth seeing")
    mem_len: int = key(64, "tokens kept, per lane and layer", minimum=1)
    max_span: float = key(64.0, "longest span a memory can choose, in tokens", above=0)
    ramp: float = key(16.0, "tokens over which a memory fades away", above=0)
    loss_weight: float = key(1e-5, "price of a token of span of each memory that is fading", minimum=0)
    shorten: bool = key(False, "in training every lane sees memory only up to a random age, drawn for each segment")

    def span(self, model: ModelConfig, *, segment_len: int) -> float | None:
        """M, where spans can be so long that even the last token of a segment sees the oldest memory."""
        farthest = self.mem_len + segment_len - 1
        return None if model.same_length or farthest >= self.max_span + self.ramp else self.mem_len


class Expire(MemoryStrategy):
    """The last `mem_len` tokens with learned spans, per layer.

    State, with M = mem_len:
        hidden (B, M, D), or in projected form keys and values (B, M, G, K) each and
            span (B, M), at least float32: e_i in tokens; newest last
        filled (B,) int64: how many of the M are real

    Parameters: span.weight (1, D), span.bias (1,); zeros of w give every memory half of max_span.
    """

    gradient = "stop"
    ages = "contiguous"
    inner_resets = True
    token_by_token = True

    def __init__(self, config: ExpireConfig, model: ModelConfig) -> None:
        super().__init__()
        self.config, self.rows = config, Rows.of(model)
        self.max_age = config.mem_len
        self.span = nn.Linear(model.d_model, 1)
        nn.init.normal_(self.span.weight, std=model.init_std)
        nn.init.zeros_(self.span.bias)

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        state = self.rows.empty(batch, self.max_age, form=form, device=device, dtype=dtype)
        if form == "projected":
            wide = torch.promote_types(dtype, torch.float32)
            state["span"] = torch.zeros(batch, self.max_age, device=device, dtype=wide)
        return {**state, "filled": torch.zeros(batch, dtype=torch.int64, device=device)}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        mask = self._mask(self._spans(state), state, n_token=x_BTD.shape[1])
        if self.config.shorten and self.training:
            seen = torch.rand(len(mask), 1, 1, device=mask.device) * self.config.max_span
            mask = mask * (self._distance(mask.shape[1], device=mask.device) <= seen)
        bias = torch.where(mask > 0, torch.where(mask > 0, mask, 1.0).log(), MASKED)  # no gradient through log 0
        hidden, keys_values = self.rows.offered(rows_of(state, ""))
        age = falling_ages(self.max_age, device=x_BTD.device)
        return Slots(hidden=hidden, keys_values=keys_values, age=age, bias=bias[:, None])

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new = {"filled": segment.since_start(state["filled"]).clamp(max=self.max_age)}
        rows = self.rows.of_segment(tap, form=form_of(state))
        if "span" in state:
            rows["span"] = self._spans({"hidden": tap.x_BTD})
        new.update({name: keep_last(state[name], row.detach(), segment.length) for name, row in rows.items()})
        return new, self._report(state, segment, n_token=tap.x_BTD.shape[1])

    def fill(self, state: State) -> Tensor:
        return state["filled"] / self.max_age

    def _spans(self, state: State) -> Tensor:
        """(B, M) e_i in tokens, in at least float32: a span may be long and its ramp short."""
        if "span" in state:
            return state["span"]
        weight, bias = self.span.weight, self.span.bias
        wide = torch.promote_types(weight.dtype, torch.float32)
        with full_precision(weight.device):
            chosen = state["hidden"].detach().to(wide) @ weight[0].to(wide) + bias.to(wide)
        return self.config.max_span * chosen.sigmoid()

    def _distance(self, n_token: int, *, device: torch.device) -> Tensor:
        """(T, M) tokens from each query back to each slot."""
        return falling_ages(self.max_age, device=device) + torch.arange(n_token, device=device)[:, None]

    def _mask(self, span_BM: Tensor, state: State, *, n_token: int) -> Tensor:
        """(B, T, M) m_ti, 0 where a slot is empty."""
        distance = self._distance(n_token, device=span_BM.device)
        mask = (1 + (span_BM[:, None] - distance) / self.config.ramp).clamp(0, 1)
        return mask * (distance[:1] <= state["filled"][:, None, None])

    def _report(self, state: State, segment: Segment, *, n_token: int) -> Aux:
        """The loss of spans and how long they are, in training only."""
        if not self.training:
            return Aux()
        span = self._spans(state)
        mask = self._mask(span, state, n_token=n_token)
        real = segment.mask(n_token)
        if segment.document is not None:
            real = real & (segment.document == segment.document[:, :1])
        fading = (mask > 0) & (mask < 1) & real[..., None]
        n_query = real.sum().clamp(min=1)
        held = falling_ages(self.max_age, device=span.device) <= state["filled"][:, None]
        metrics = {
            "span": (span * held).sum() / held.sum().clamp(min=1),
            "fading": fading.sum() / n_query,
            "seen": ((mask > 0) & real[..., None]).sum() / n_query,
        }
        loss = self.config.loss_weight * (span[:, None] * fading).sum() / segment.length.sum().clamp(min=1)
        return Aux(losses={"span": loss} if self.config.loss_weight else {}, metrics=metrics)


@register("expire", config=ExpireConfig, paper="Sukhbaatar et al. 2021, arXiv:2105.06548")
def build(config: ExpireConfig, model: ModelConfig) -> MemoryPlan:
    """Memories with spans in each chosen layer."""
    return plan_per_layer(config, model, lambda: Expire(config, model))
