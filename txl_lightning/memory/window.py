"""A sliding window: every query sees the last W tokens, itself among them, wherever the segments begin.

Beltagy et al. 2020, arXiv:2004.05150 (Longformer); Jiang et al. 2023, arXiv:2310.06825 (Mistral):

    read    token p attends to tokens p - W + 1, ..., p          a band, within the segment and across borders
    write   m' = last W - 1 rows of [m ; h]

So a segment longer than W is local attention with gradient between neighbours; across segments it is a cache without.
The reach is L (W - 1) tokens over L layers. Losses do not depend on where segments are cut.

With S sinks the first S tokens of the stream stay for ever (Xiao et al. 2023, arXiv:2309.17453, StreamingLLM): once
token i < S has left the window, every query sees it beside the window. Positions are places within what is cached, not
in the text: a query stands at min(p, S + W - 1), sink i at i, so the distance of a sink stops growing at S + W - 1 - i.
The paper adds sinks to trained models; here they are there in training as well.

Where we differ: the paper's code cuts its cache back after a token is read, so a query sees one key more than S + W.
Longformer's dilated windows and global tokens are not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
    is_given_up,
    keep_last,
    plan_per_layer,
    register,
)
from txl_lightning.memory.rows import Rows, empty_bias, falling_ages, form_of, rows_of, with_prefix
from txl_lightning.types import MASKED


@dataclass(frozen=True, kw_only=True)
class WindowConfig(LayerMemoryConfig):
    """Keys of `memory=window`."""

    size_key: ClassVar[str | None] = "window"

    name: str = key("window", "each token sees the last tokens, and the first ones of the stream")
    window: int = key(64, "tokens that a token sees, itself among them, in its own segment too", minimum=2)
    sinks: int = key(0, "first tokens of the stream that are always seen beside the window; 0: none", minimum=0)

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        super().check_fit(model, segment_len=segment_len)
        if self.sinks and self.window < segment_len:
            rule = f"must be >= data.segment_len={segment_len} with sinks: a sink is kept when its segment has ended"
            raise self.refuse("window", rule, "raise it, or set memory.sinks=0")

    def reach(self, model: ModelConfig, *, segment_len: int) -> float | None:
        """L (W - 1), and without end with sinks."""
        if self.reset == "segment":
            return 0
        return None if self.layers != "all" or self.sinks else model.n_layer * (self.window - 1)

    @property
    def reaches_back(self) -> bool:
        return True


class Window(MemoryStrategy):
    """The last W - 1 tokens of the lane and its first S, per layer.

    State, with N = W - 1 rows of one kind and S of the other:
        recent_hidden (B, N, D), or in projected form recent_keys and recent_values (B, N, G, K) each; newest last
        sink_hidden (B, S, D), or sink_keys and sink_values; in order of time; only with sinks
        read (B,) int64: tokens since the lane started anew
    """

    gradient = "stop"
    inner_resets = True
    token_by_token = True

    def __init__(self, config: WindowConfig, model: ModelConfig) -> None:
        super().__init__()
        self.window, self.sinks = config.window, config.sinks
        self.own_limit = config.window - 1
        self.max_age = config.window - 1 + config.sinks
        self.ages = "any" if config.sinks else "contiguous"
        self.layer_parallel = not config.sinks
        self.rows = Rows.of(model)

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        state = {"read": torch.zeros(batch, dtype=torch.int64, device=device)}
        for prefix, size in self._parts().items():
            rows = self.rows.empty(batch, size, form=form, device=device, dtype=dtype)
            state.update(with_prefix(prefix, rows))
        return state

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        if self.sinks and x_BTD.shape[1] > self.window:
            raise ValueError(f"a segment of {x_BTD.shape[1]} tokens is longer than window={self.window} with sinks")
        parts = [rows_of(state, prefix) for prefix in self._parts()]
        hidden, keys_values = self.rows.offered({name: torch.cat([p[name] for p in parts], dim=1) for name in parts[0]})
        step = torch.arange(x_BTD.shape[1], device=x_BTD.device)[:, None]
        age, bias = self._recent(state, step)
        if not self.sinks:
            return Slots(hidden=hidden, keys_values=keys_values, age=age, bias=bias)
        sink_age, sink_bias, farthest = self._sinks(state, step)
        age = torch.cat([sink_age, age.expand(len(sink_age), -1)], dim=1)
        return Slots(
            hidden=hidden,
            keys_values=keys_values,
            age=age,
            bias=torch.cat([sink_bias, bias], dim=-1),
            farthest=torch.cat([farthest, torch.full_like(age[0, self.sinks :], self.max_age)]),
        )

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        read = segment.since_start(state["read"])
        new = {"read": read}
        rows = self.rows.of_segment(tap, form=form_of(state, "recent_"))
        for name, row in rows.items():
            old = state[f"recent_{name}"]
            new[f"recent_{name}"] = keep_last(old, row.detach(), segment.length, in_place=is_given_up())
            if self.sinks:
                new[f"sink_{name}"] = self._keep_first(state[f"sink_{name}"], row.detach(), read, segment)
        return new, Aux()

    def fill(self, state: State) -> Tensor:
        return state["read"].clamp(max=self.window - 1) / (self.window - 1)

    def _parts(self) -> dict[str, int]:
        """Kinds of rows by prefix, in the order in which they are read."""
        return {**({"sink_": self.sinks} if self.sinks else {}), "recent_": self.window - 1}

    def _recent(self, state: State, step_T1: Tensor) -> tuple[Tensor, Tensor]:
        """Ages (1, N) and bias (B, 1, T, N) of the window's rows: each query sees those less than W before it."""
        age = falling_ages(self.window - 1, device=step_T1.device)
        gone = age + step_T1 >= self.window  # (T, N)
        band = torch.zeros_like(gone, dtype=torch.float32).masked_fill(gone, MASKED)
        return age, empty_bias(state["read"], self.window - 1) + band

    def _sinks(self, state: State, step_T1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ages (B, S), bias (B, 1, T, S) and farthest distances (S,) of the sinks: seen once they left the window."""
        index = torch.arange(self.sinks, device=step_T1.device)
        farthest = self.max_age - index
        age = state["read"][:, None] - index  # below 1: not read yet
        gone = age[:, None] + step_T1 >= self.window  # (B, T, S); a segment is no longer than the window
        bias = torch.zeros_like(gone, dtype=torch.float32).masked_fill(~gone, MASKED)[:, None]
        return age.clamp(min=1).minimum(farthest), bias, farthest

    def _keep_first(self, old_BSx: Tensor, new_BTx: Tensor, read_B: Tensor, segment: Segment) -> Tensor:
        """The sinks, those that this segment brought among them."""
        start = segment.length - read_B  # where the stream began, counted from the segment's first token
        place = start[:, None] + torch.arange(self.sinks, device=start.device)  # (B, S)
        here = (place >= 0) & (place < segment.length[:, None])
        more = [1] * (new_BTx.dim() - 2)
        index = place.clamp(0, new_BTx.shape[1] - 1).view(*place.shape, *more).expand(-1, -1, *new_BTx.shape[2:])
        found = new_BTx.to(old_BSx.dtype).gather(1, index)
        return torch.where(here.view(*here.shape, *more), found, old_BSx)


@register(
    "window", config=WindowConfig, paper="Beltagy et al. 2020, arXiv:2004.05150; Xiao et al. 2023, arXiv:2309.17453"
)
def build(config: WindowConfig, model: ModelConfig) -> MemoryPlan:
    """A window in each chosen layer; the other layers see their segment."""
    return plan_per_layer(config, model, lambda: Window(config, model))
