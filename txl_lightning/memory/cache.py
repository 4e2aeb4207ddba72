"""Transformer-XL's memory: the last M inputs of every layer, read as extra keys and values.

Dai et al. 2019, arXiv:1901.02860, section 3.2:

    read    h~ = [SG(m) ; h];  q = h W_q,  k = h~ W_k,  v = h~ W_v        SG: stop-gradient
    write   m' = last M rows of [m ; h]

Gradient stops at m, but W_k and W_v still learn through it: m holds layer inputs, projected with the current weights.
At evaluation weights do not move, so the state holds keys and values instead, and each is projected once.
`gradient=carry` leaves SG out: layers below then learn what to leave behind for the next segments.

With `reuse_len` only the first so many tokens of a segment enter, as in XLNet (Yang et al. 2019, arXiv:1906.08237),
whose segments overlap: the next one begins where the kept tokens end. Positions are XLNet's, the newest slot right
before the segment; our segments do not overlap, so the tokens that were left out are missing in between.

Where we differ from the authors' code: an empty slot is absent from the softmax for each lane on its own (theirs is
absent for the whole batch at once), and the memory of the last layer's output, which nothing reads, is not kept.
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
from txl_lightning.memory.rows import Rows, empty_bias, falling_ages, form_of, rows_of


@dataclass(frozen=True, kw_only=True)
class CacheConfig(LayerMemoryConfig):
    """Keys of `memory=cache`."""

    size_key: ClassVar[str | None] = "mem_len"

    name: str = key("cache", "the last mem_len inputs of every layer")
    mem_len: int = key(64, "tokens kept, per lane and layer; 0 trains without memory", minimum=0)
    reuse_len: int | None = key(
        None, "only the first so many tokens of a segment enter memory, as in XLNet; null: all", minimum=1
    )
    gradient: str = key(
        "stop",
        "stop: memory carries no graph; carry: layers learn through it, trainer.bptt_segments segments back",
        choices=("stop", "carry"),
    )
    cold: str = key(
        "absent",
        "what a slot is before a token fills it: absent, or zeros that are read, as in TensorFlow's and Hugging Face's",
        choices=("absent", "zeros"),
    )

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        super().check_fit(model, segment_len=segment_len)
        if self.reuse_len is not None and self.reuse_len >= segment_len:
            rule = f"must be < data.segment_len={segment_len}, else every token enters"
            raise self.refuse("reuse_len", rule, "lower it, or set it to null for all tokens")

    def span(self, model: ModelConfig, *, segment_len: int) -> float | None:
        """M; so the reach is (L - 1) ceil(M / T) T + M with memory in all L layers."""
        return None if self.mem_len and (self.reuse_len or model.same_length) else self.mem_len


class Cache(MemoryStrategy):
    """The last `mem_len` tokens of the lane, per layer.

    State, with M = mem_len:
        hidden (B, M, D), or in projected form keys and values (B, M, G, K) each, with G key and
            value heads (G = H unless `model.n_kv_head`); newest last
        filled (B,) int64: how many of the M are real

    Args:
        mem_len: M.
        d_model, n_head, d_head: of the layer.
        n_kv_head: heads of keys and values that are kept, each for a group of heads; None: all are kept.
        reuse_len: tokens of a segment that enter, from its start; None: all.
        gradient: "stop" or "carry".
        cold: "absent": an empty slot is masked; "zeros": it is a zero state that is read like any other.
        normed: the layer normalises what it projects, so a zero state has keys: then it is kept in both forms.
    """

    ages = "contiguous"
    token_by_token = True

    def __init__(
        self,
        *,
        mem_len: int,
        d_model: int,
        n_head: int,
        d_head: int,
        n_kv_head: int | None = None,
        reuse_len: int | None = None,
        gradient: str = "stop",
        cold: str = "absent",
        normed: bool = False,
    ) -> None:
        super().__init__()
        self.max_age = mem_len
        self.reuse_len, self.gradient = reuse_len, gradient
        # not with reuse_len: the document that goes on may be one of which nothing was kept; not with zeros: those of a
        # document that began inside the segment are rows of the one before
        self.inner_resets = reuse_len is None and cold == "absent"
        self.rows = Rows(d_model=d_model, d_head=d_head, n_head=n_head, n_kept=n_kv_head or n_head)
        self.layer_parallel = reuse_len is None
        self.zeros_are_read = cold == "zeros"
        self.always_hidden = self.zeros_are_read and normed

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        form = "hidden" if self.always_hidden else form
        rows = self.rows.empty(batch, self.max_age, form=form, device=device, dtype=dtype)
        return {**rows, "filled": torch.zeros(batch, dtype=torch.int64, device=device)}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        bias = empty_bias(state["filled"], self.max_age)
        hidden, keys_values = self.rows.offered(rows_of(state, ""))
        return Slots(
            hidden=hidden,
            keys_values=keys_values,
            age=falling_ages(self.max_age, device=x_BTD.device),
            bias=torch.zeros_like(bias) if self.zeros_are_read else bias,
        )

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        if self.reuse_len is not None:
            segment = segment._replace(length=segment.length.clamp(max=self.reuse_len))
        kept = {"filled": segment.since_start(state["filled"]).clamp(max=self.max_age)}
        for name, row in self.rows.of_segment(tap, form=form_of(state)).items():
            fresh = row.detach() if self.gradient == "stop" else row
            kept[name] = keep_last(state[name], fresh, segment.length, in_place=is_given_up())
        return kept, Aux()

    def fill(self, state: State) -> Tensor:
        return state["filled"] / self.max_age


@register("cache", config=CacheConfig, paper="Dai et al. 2019, arXiv:1901.02860")
def build(config: CacheConfig, model: ModelConfig) -> MemoryPlan:
    """A cache in each chosen layer; with mem_len 0 the plain model, exactly as `memory=none`."""
    if config.mem_len == 0:
        return MemoryPlan(layers=[{} for _ in range(model.n_layer)])

    def make() -> Cache:
        return Cache(
            mem_len=config.mem_len,
            d_model=model.d_model,
            n_head=model.n_head,
            d_head=model.d_head,
            n_kv_head=model.n_kv_head,
            reuse_len=config.reuse_len,
            gradient=config.gradient,
            cold=config.cold,
            normed=model.pre_norm,
        )

    return plan_per_layer(config, model, make)
