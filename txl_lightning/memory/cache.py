"""Transformer-XL's memory: the last M inputs of every layer, read as extra keys and values.

Dai et al. 2019, arXiv:1901.02860, section 3.2:

    read    h~ = [SG(m) ; h];  q = h W_q,  k = h~ W_k,  v = h~ W_v        SG: stop-gradient
    write   m' = last M rows of [m ; h]

Gradient stops at m, but W_k and W_v still learn through it: m holds layer inputs, projected with the current weights.
At evaluation weights do not move, so the state holds keys and values instead, and each is projected once.

Where we differ from the authors' code: an empty slot is absent from the softmax for each lane on its own (theirs is
absent for the whole batch at once), and the memory of the last layer's output, which nothing reads, is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    keep_last,
    plan_per_layer,
    register,
)
from txl_lightning.types import MASKED


@dataclass(frozen=True, kw_only=True)
class CacheConfig(LayerMemoryConfig):
    """Keys of `memory=cache`."""

    name: str = key("cache", "the last mem_len inputs of every layer")
    mem_len: int = key(64, "tokens kept, per lane and layer; 0 trains without memory", minimum=0)


class Cache(MemoryStrategy):
    """The last `mem_len` tokens of the lane, per layer.

    State, with M = mem_len:
        hidden (B, M, D), or in projected form keys (B, M, H, K) and values (B, M, H, K); newest last
        filled (B,) int64: how many of the M are real
    """

    gradient = "stop"
    ages = "contiguous"

    def __init__(self, *, mem_len: int, d_model: int, n_head: int, d_head: int) -> None:
        super().__init__()
        self.max_age = mem_len
        self.d_model, self.n_head, self.d_head = d_model, n_head, d_head

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        filled = torch.zeros(batch, dtype=torch.int64, device=device)
        if form == "hidden":
            hidden = torch.zeros(batch, self.max_age, self.d_model, device=device, dtype=dtype)
            return {"hidden": hidden, "filled": filled}
        keys = torch.zeros(batch, self.max_age, self.n_head, self.d_head, device=device, dtype=dtype)
        return {"keys": keys, "values": keys.clone(), "filled": filled}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        device = x_BTD.device
        age = torch.arange(self.max_age, 0, -1, device=device)[None]  # (1, M)
        empty = age > state["filled"][:, None]  # (B, M)
        bias = torch.zeros_like(empty, dtype=torch.float32).masked_fill(empty, MASKED)[:, None, None]  # (B, 1, 1, M)
        if "hidden" in state:
            return Slots(hidden=state["hidden"], keys_values=None, age=age, bias=bias)
        keys_values = (state["keys"].transpose(1, 2), state["values"].transpose(1, 2))
        return Slots(hidden=None, keys_values=keys_values, age=age, bias=bias)

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        filled = (state["filled"] + segment.length).clamp(max=self.max_age)
        if "hidden" in state:
            rows = {"hidden": tap.x_BTD}
        else:
            rows = {"keys": tap.k_BHTK.transpose(1, 2), "values": tap.v_BHTK.transpose(1, 2)}
        kept = {name: keep_last(state[name], new.detach(), segment.length) for name, new in rows.items()}
        return {**kept, "filled": filled}, Aux()

    def fill(self, state: State) -> Tensor:
        return state["filled"] / self.max_age


@register("cache", config=CacheConfig, paper="Dai et al. 2019, arXiv:1901.02860")
def build(config: CacheConfig, model: ModelConfig) -> MemoryPlan:
    """A cache in each chosen layer; with mem_len 0 the plain model, exactly as `memory=none`."""
    if config.mem_len == 0:
        return MemoryPlan(layers=[{} for _ in range(model.n_layer)])

    def make() -> Cache:
        return Cache(mem_len=config.mem_len, d_model=model.d_model, n_head=model.n_head, d_head=model.d_head)

    return plan_per_layer(config, model, make)
