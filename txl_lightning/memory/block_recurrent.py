"""Block-Recurrent Transformer: state vectors that the tokens of one layer read, and that read the tokens in turn.

Hutchins et al. 2022, arXiv:2203.07852. The layer has S state vectors s (S, D). A segment is read in blocks of
`block_len` tokens; for each block, with e its tokens, N a layer norm, and `id_bias` a learned ID per state, without
which states could not specialise:

    states      n = N(s) + id_bias;   K_s, V_s = n W_k, n W_v            one pair for both directions
    read        tokens:  heads + attention(q_read(e), K_s, V_s)          own queries, own output matrix, no positions
    write       a = [attention(q_self(n), K_s, V_s) ; attention(q_cross(n), K_e, V_e)]
    gate        fixed:  s' = g s + (1 - g) (a W + b),   g = sigmoid(learned vector)
                lstm:   s' = sigmoid(a W_f + b_f + 1) s + sigmoid(a W_i + b_i - 1) tanh(a W_z + b_z)
    feed_forward        a second gate of the same kind behind gelu(N(s') W_1); without it: the paper's "skip", its best

K_e, V_e are the layer's own keys and values of the block's tokens and of the `window` tokens before them. A token reads
the states as they were before its block. s starts at a learned value; no dropout acts on the states. That tokens' heads
and the read are joined and projected at once is the same as two output matrices, which is how it is done here.

Where we differ: tokens see all of their segment and `window` tokens before it, not a band of `window` tokens; the
paper's numbers are block_len = window = n_states = 512 and segments of 8 blocks. Initial values of matrices are ours.

Gradient: through all blocks of a segment. With `carry` through the segment border too, up to `trainer.bptt_segments`;
the paper stops there, which is `stop`.
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
    Slots,
    State,
    Tap,
    plan_per_layer,
    register,
)
from txl_lightning.memory.cache import Cache
from txl_lightning.types import lane_where


@dataclass(frozen=True, kw_only=True)
class BlockRecurrentConfig(UpperLayerMemoryConfig):
    """Keys of `memory=block_recurrent`."""

    unbounded: ClassVar[bool] = True
    size_key: ClassVar[str | None] = "n_states"

    name: str = key("block_recurrent", "state vectors that read the tokens and are read by them")
    n_states: int = key(16, "state vectors, per lane and layer", minimum=1)
    block_len: int = key(16, "tokens between two updates of the states; a last block may be shorter", minimum=1)
    window: int = key(64, "tokens kept, which this layer's tokens and states see too; 0: none", minimum=0)
    gate: str = key("fixed", "how a state changes", choices=("fixed", "lstm"))
    feed_forward: bool = key(False, "a feed-forward part with its own gate on the states; the paper does best without")
    gradient: str = key(
        "carry",
        "carry: through trainer.bptt_segments segments; stop: through the blocks of one segment",
        choices=("carry", "stop"),
    )

    @property
    def reaches_back(self) -> bool:
        return self.window > 0

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        super().check_fit(model, segment_len=segment_len)
        if self.gradient == "stop" and self.block_len >= segment_len:
            rule = f"needs memory.block_len < data.segment_len={segment_len}: no loss would teach the states to write"
            raise self.refuse("gradient", rule, "lower memory.block_len, or use memory.gradient=carry")


class BlockRecurrent(MemoryStrategy):
    """State vectors of one layer.

    State:
        vectors (B, S, D)
        with a window, what `Cache` keeps: hidden (B, W, D), or keys and values (B, W, G, K); filled (B,)

    Args:
        config: its keys.
        model: the model it is for.
    """

    def __init__(self, config: BlockRecurrentConfig, model: ModelConfig) -> None:
        super().__init__()
        width, inner = model.d_model, model.n_head * model.d_head
        self.gradient, self.block_len, self.d_head = config.gradient, config.block_len, model.d_head
        self.max_age = config.window
        self.window = _window(config.window, model) if config.window else None
        self.start = nn.Parameter(0.1 * torch.randn(config.n_states, width))
        self.id_bias = nn.Parameter(torch.randn(config.n_states, width))
        self.norm = nn.LayerNorm(width)
        self.keys_values = nn.Linear(width, 2 * inner, bias=False)
        self.queries = nn.Linear(width, 2 * inner, bias=False)  # for the states, for the tokens
        self.read_queries = nn.Linear(width, inner, bias=False)
        self.read_out = nn.Linear(inner, width, bias=False)
        kind = GATES[config.gate]
        self.attended = kind(2 * inner, width)
        self.fed_forward = FeedForward(width, model.d_inner, kind) if config.feed_forward else None

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        state = {"vectors": torch.zeros(batch, *self.start.shape, device=device, dtype=dtype)}
        if self.window is not None:
            state.update(self.window.init_state(batch, form=form, device=device, dtype=dtype))
        return state

    def initial(self) -> State:
        return {"vectors": self.start}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots | None:
        return None if self.window is None else self.window.slots(state, x_BTD, segment)

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
        queries = self._heads(self.read_queries(tap.h_BTD)).split(self.block_len, dim=2)
        states = self.states(state, tap, segment, last=False)
        read = [
            F.scaled_dot_product_attention(q, *self._own(self._numbered(s)))
            for q, s in zip(queries, states, strict=True)
        ]
        return heads_BHTK, self.read_out(_joined(torch.cat(read, dim=2)))

    def states(self, state: State, tap: Tap, segment: Segment, *, last: bool) -> list[Tensor]:
        """The states (B, S, D) before each block of the segment, and if `last` those after the last one."""
        n_token = tap.k_BHTK.shape[2]
        keys, values, seen = self._seen(state, tap, segment)
        found = [state["vectors"].to(self.norm.weight.dtype)]
        for start in range(0, n_token if last else n_token - self.block_len, self.block_len):
            size = min(self.block_len, n_token - start)
            k, v, here = (
                part.narrow(-1 if part is seen else 2, start, self.max_age + size) for part in (keys, values, seen)
            )
            moved = self._step(found[-1], k, v, here)
            found.append(lane_where(segment.length > start, moved, found[-1]))
        return found

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        old, new = state["vectors"], self.states(state, tap, segment, last=True)[-1]
        change = (new - old).detach().float()
        metrics = {"gate": self.attended.openness(), "change": change.square().mean().sqrt()}
        new = new.detach() if self.gradient == "stop" else new
        kept = {} if self.window is None else self.window.write(state, tap, layer, segment)[0]
        return {**kept, "vectors": new.to(old.dtype)}, Aux(metrics=metrics)

    def _seen(self, state: State, tap: Tap, segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, H, W + T, K) of window and segment, and which of them are there (B, W + T)."""
        k, v, real = tap.k_BHTK, tap.v_BHTK, segment.mask(tap.k_BHTK.shape[2])
        if self.window is None:
            return k, v, real
        assert tap.slot_k_BHSK is not None and tap.slot_v_BHSK is not None
        filled = torch.arange(self.max_age, 0, -1, device=k.device) <= state["filled"][:, None]
        k, v = torch.cat([tap.slot_k_BHSK.to(k.dtype), k], dim=2), torch.cat([tap.slot_v_BHSK.to(v.dtype), v], dim=2)
        return k, v, torch.cat([filled, real], dim=1)

    def _step(self, s_BSD: Tensor, k_BHPK: Tensor, v_BHPK: Tensor, seen_BP: Tensor) -> Tensor:
        """The states after one block, of lanes that have a token in it."""
        numbered = self._numbered(s_BSD)
        to_states, to_tokens = self._heads(self.queries(numbered)).chunk(2, dim=1)
        seen = (seen_BP | ~seen_BP.any(dim=1, keepdim=True))[:, None, None]  # no softmax over nothing
        among = F.scaled_dot_product_attention(to_states, *self._own(numbered))
        across = F.scaled_dot_product_attention(to_tokens, k_BHPK, v_BHPK, attn_mask=seen)
        s = self.attended(s_BSD, _joined(torch.cat([among, across], dim=1)))
        return s if self.fed_forward is None else self.fed_forward(s)

    def _numbered(self, s_BSD: Tensor) -> Tensor:
        return self.norm(s_BSD) + self.id_bias

    def _own(self, numbered_BSD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._heads(self.keys_values(numbered_BSD)).chunk(2, dim=1)
        return keys, values

    def _heads(self, x_BTD: Tensor) -> Tensor:
        """(B, T, n K) -> (B, n, T, K)."""
        return x_BTD.unflatten(-1, (-1, self.d_head)).transpose(1, 2)


class FixedGate(nn.Module):
    """s' = g s + (1 - g) (x W + b), with g = sigmoid of a learned vector: the same for all states and inputs."""

    def __init__(self, d_in: int, width: int) -> None:
        super().__init__()
        self.update = nn.Linear(d_in, width)
        self.gate = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, s_BSD: Tensor, x_BSN: Tensor) -> Tensor:
        """The new states (B, S, D)."""
        gate = self.gate.sigmoid()
        return gate * s_BSD + (1 - gate) * self.update(x_BSN)

    def openness(self) -> Tensor:
        """Mean share of a new state that is new, at no input."""
        return 1 - self.gate.sigmoid().mean()


class LstmGate(nn.Module):
    """s' = sigmoid(x W_f + b_f + 1) s + sigmoid(x W_i + b_i - 1) tanh(x W_z + b_z): at first it mostly remembers."""

    def __init__(self, d_in: int, width: int) -> None:
        super().__init__()
        self.update = nn.Linear(d_in, 3 * width)
        nn.init.zeros_(self.update.bias)

    def forward(self, s_BSD: Tensor, x_BSN: Tensor) -> Tensor:
        """The new states (B, S, D)."""
        update, write, keep = self.update(x_BSN).chunk(3, dim=-1)
        return (keep + 1).sigmoid() * s_BSD + (write - 1).sigmoid() * update.tanh()

    def openness(self) -> Tensor:
        """Mean share of a new state that is new, at no input."""
        return (self.update.bias.chunk(3)[1] - 1).sigmoid().mean()


class FeedForward(nn.Module):
    """The gate of the attention's kind, over gelu(N(s) W_1 + b_1)."""

    def __init__(self, width: int, d_inner: int, kind: type[FixedGate] | type[LstmGate]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, d_inner)
        self.down = kind(d_inner, width)

    def forward(self, s_BSD: Tensor) -> Tensor:
        """The new states (B, S, D)."""
        return self.down(s_BSD, F.gelu(self.up(self.norm(s_BSD))))


GATES: dict[str, type[FixedGate] | type[LstmGate]] = {"fixed": FixedGate, "lstm": LstmGate}


def _window(size: int, model: ModelConfig) -> Cache:
    return Cache(
        mem_len=size,
        d_model=model.d_model,
        n_head=model.n_head,
        d_head=model.d_head,
        n_kv_head=model.n_kv_head,
    )


def _joined(heads_BHTK: Tensor) -> Tensor:
    """(B, n, T, K) -> (B, T, n K)."""
    return heads_BHTK.transpose(1, 2).flatten(-2)


@register("block_recurrent", config=BlockRecurrentConfig, paper="Hutchins et al. 2022, arXiv:2203.07852")
def build(config: BlockRecurrentConfig, model: ModelConfig) -> MemoryPlan:
    """State vectors in each chosen layer."""
    return plan_per_layer(config, model, lambda: BlockRecurrent(config, model))
