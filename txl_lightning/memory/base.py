"""The memory interface: what a strategy reads, when it writes, and what the model promises it.

Per layer and segment the model calls, in this order:

    residual  -> a change of the layer's input                             (associative tokens, Titans MAL)
    slots     -> keys and values the layer reads in its own softmax        (cache, compressive, window)
    side      -> a read beside attention, merged with the heads' outputs   (kNN, Infini-attention, block-recurrent)
    write     -> the next state, after the layer's output is known

Every call gets the OLD state and none changes it: state is a value, in and out. The model has already put a lane that
starts anew (`Segment.reset`) back to its start values, and it keeps the state of a lane without tokens (`length` 0)
bit for bit, whatever `write` returns: such a lane does not even reset. Everything else is the strategy's to get
right, and `txl_lightning.testing.check_memory` tells whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from txl_lightning import registry
from txl_lightning.types import Aux, Segment, Slots, State, Tap, lane_where


class LayerHandle(Protocol):
    """What `write` may ask of the layer it belongs to."""

    def frozen_attention(self, h_BTD: Tensor, m_BSD: Tensor) -> Tensor:
        """(B, T, H K): content attention of h over m, no positions, no mask, the layer's weights cut out of the graph.

        Args:
            h_BTD: what queries are made from: `Tap.h_BTD`, under `model.norm_queries=false` `Tap.x_BTD`; its own graph
                is kept.
            m_BSD: un-normalised layer inputs, as in `Tap.x_BTD`; normalised here under pre-norm; its graph is kept.
        """

    def project_slots(self, hidden_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, K) of un-normalised layer inputs, for a state in projected form."""


class MemoryStrategy(nn.Module):
    """Memory of one layer. Owns parameters (gates, compressors), never state.

    Attributes:
        gradient: "stop": the state carries no graph; "carry": it does, up to `trainer.bptt_segments` segments, and
            `MemoryConfig.carries` of its configuration must be true (it is with the key gradient=carry).
        ages: "contiguous": slot j of S has age S - j, so the plain relative shift applies; "any": look ages up.
        own_limit: the largest distance at which the layer's tokens see others of their own segment; None: any.
        max_age: the largest age one of its slots can have (sizes the distance table); 0: it offers no slots, or none
            that has a position.
        needs_usage: `Tap.usage_BS` is wanted (rules out attention that never forms its weights).
        inner_resets: can serve documents that start inside a segment.
        token_by_token: reading one token after the other is the same as reading the segment at once: `slots` looks at
            the state and at how many tokens there are, `residual` and `side` look at each token alone. Then generation
            reads each token once; else it reads the segment under way again for every token. On a GPU these two are
            recorded once and replayed, if no value decides on the host what they compute.
        layer_parallel: a token sees the last `max_age` tokens before its segment, `own_limit` back at most, as they
            were when they were read, and several segments may be written at once: then evaluation runs each layer over
            many segments (`model.layerwise`). The bias of the first token says which slots are there.
        extendable: may be built with a longer memory at evaluation than at training.
    """

    gradient: str = "stop"
    ages: str = "contiguous"
    own_limit: int | None = None
    max_age: int = 0
    needs_usage: bool = False
    inner_resets: bool = False
    token_by_token: bool = False
    layer_parallel: bool = False
    extendable: ClassVar[bool] = True

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        """The state of `batch` fresh lanes, all zeros where `initial` says nothing. Fixes shapes and dtypes.

        Args:
            batch: lanes B; dim 0 of every tensor.
            form: "hidden" (training: keep layer inputs) or "projected" (evaluation: keep keys and values).
            device, dtype: of activations; accumulators stay float32 whatever dtype says (and sum in float32 only where
                autocast is off: it rounds the factors of a matrix product, not what they are added to).
        """
        return {}

    def initial(self) -> State:
        """Learned start values per key, without the lane dimension; zeros for keys that are not named."""
        return {}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots | None:
        """Keys and values to read in the layer's softmax, or None."""
        return None

    def residual(self, state: State, x_BED: Tensor, segment: Segment) -> Tensor:
        """The layer's input with what memory adds to it, token by token.

        Args:
            x_BED: all E tokens the layer runs over: the T of the segment and a token memory's around them.
        """
        return x_BED

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, Tensor | None]:
        """Heads' outputs (B, H, T, K) after mixing in memory, and an extra (B, T, D) beside them or None."""
        return heads_BHTK, None

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        """The next state. Must not change the old one, must ignore tokens beyond `segment.length`."""
        return state, Aux()

    def fill(self, state: State) -> Tensor | None:
        """(B,) share of the memory that is in use, 0 to 1, for the monitor; None if it has no such notion."""
        return None


class TokenMemory(nn.Module):
    """Memory of the whole model that lives in extra input tokens (Recurrent Memory Transformer).

    Attributes:
        n_prefix, n_suffix: tokens put before and after the segment. Prefix tokens see one another in both directions
            and are seen by all; suffix tokens see one another in both directions and every real token.
        prefix_reads_slots, suffix_reads_slots: whether these tokens see the layers' memory slots.
        token_by_token: `wrap` leaves the real tokens as they are; as in MemoryStrategy.
        gradient, inner_resets, extendable: as in MemoryStrategy.
    """

    n_prefix: int = 0
    n_suffix: int = 0
    inner_resets: bool = False
    token_by_token: bool = False
    prefix_reads_slots: bool = True
    suffix_reads_slots: bool = True
    gradient: str = "carry"
    extendable: ClassVar[bool] = True

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        """As in MemoryStrategy."""
        raise NotImplementedError

    def initial(self) -> State:
        """As in MemoryStrategy."""
        return {}

    def wrap(self, state: State, x_BTD: Tensor, segment: Segment) -> Tensor:
        """(B, n_prefix + T + n_suffix, D) the embeddings with the extra tokens around them."""
        raise NotImplementedError

    def write(self, state: State, hidden: Tensor, segment: Segment) -> State:
        """The next state from the last layer's output (B, n_prefix + T + n_suffix, D)."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of a whole model: what a registered name builds.

    `layers[i]` lists the strategies of layer i: their slots are concatenated in this order, and at most one of them
    may override `side`.

    Raises:
        ValueError: a layer has two strategies that override `side`.
    """

    layers: list[dict[str, MemoryStrategy]]
    tokens: TokenMemory | None = None

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            beside = [name for name, part in layer.items() if type(part).side is not MemoryStrategy.side]
            if len(beside) > 1:
                raise ValueError(f"{' and '.join(beside)} both read beside attention in layer {index}")


class BuildPlan(Protocol):
    """`build(config, model_config) -> MemoryPlan`."""

    def __call__(self, config: Any, model: Any) -> MemoryPlan: ...


def register(name: str, *, config: type, paper: str = "") -> Callable[[Any], Any]:
    """Decorator for a `build(config, model_config) -> MemoryPlan`; third parties do it behind the entry point group
    `txl_lightning.memory`."""
    return registry.memories.register(name, config=config, paper=paper)


def plan_per_layer(config: Any, model: Any, make: Callable[[], MemoryStrategy]) -> MemoryPlan:
    """The usual plan: one strategy, called by its name, in each of `config.layers`."""
    chosen = config.layer_indices(model.n_layer)
    name = config.name.rpartition(":")[2]  # of package.module:Attribute the attribute; dots divide the state's keys
    return MemoryPlan(layers=[{name: make()} if index in chosen else {} for index in range(model.n_layer)])


def fresh_state(
    part: MemoryStrategy | TokenMemory, batch: int, *, form: str, device: torch.device, dtype: torch.dtype
) -> State:
    """A state as it is right after a reset: learned start values where there are any, else zeros."""
    state = part.init_state(batch, form=form, device=device, dtype=dtype)
    start = part.initial()
    return {
        key: start[key].detach().to(old).expand_as(old).clone() if key in start else old for key, old in state.items()
    }


def reset_lanes(part: MemoryStrategy | TokenMemory, state: State, reset_B: Tensor) -> State:
    """Put the lanes that start anew back to their start values; learned ones keep their graph."""
    start = part.initial()
    # learned start values keep their place in the graph, so that no parameter is left without gradient
    if (may_look(reset_B) if start else on_hand(reset_B)) and not reset_B.any():
        return state
    zero = {
        key: start[key].to(old.dtype).expand_as(old) if key in start else torch.zeros_like(old)
        for key, old in state.items()
    }
    return {key: lane_where(reset_B, zero[key], old) for key, old in state.items()}


def keep_dead(new: State, old: State, length_B: Tensor) -> State:
    """The new state, but the old one bit for bit in lanes without tokens."""
    alive = length_B > 0
    if on_hand(alive) and alive.all():
        return new
    return {key: lane_where(alive, new[key], old[key]) for key in new}


def full_precision(device: torch.device) -> torch.autocast:
    """A context in which float32 products stay float32: autocast would round their factors."""
    # shapes without numbers have no autocast of their own
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def may_look(mask_B: Tensor) -> bool:
    """Whether the values of a mask may decide what is computed, so that nothing is copied in vain.

    Only where that waits for no device, changes no graph and leaves no parameter without gradient.
    """
    return on_hand(mask_B) and not torch.is_grad_enabled()


def on_hand(mask_B: Tensor) -> bool:
    """The same where either way gives the same values and gradients."""
    holds_numbers = getattr(mask_B, "fake_mode", None) is None
    return mask_B.device.type == "cpu" and holds_numbers and not torch.compiler.is_compiling()


_given_up: ContextVar[bool] = ContextVar("given_up", default=False)


@contextmanager
def giving_up() -> Iterator[None]:
    """While this lasts nobody needs the old states any more, so a write may put the new one in their place.

    With a graph they are needed still.
    """
    token = _given_up.set(not torch.is_grad_enabled())
    try:
        yield
    finally:
        _given_up.reset(token)


def is_given_up() -> bool:
    """Whether a write may change the state it is given; only for the last thing that it does with it."""
    return not torch.compiler.is_compiling() and _given_up.get()


def keep_last(old_BMx: Tensor, new_BTx: Tensor, length_B: Tensor, *, in_place: bool = False) -> Tensor:
    """The last M rows of old followed by the first `length` rows of new, per lane, in one gather.

    Args:
        old_BMx: (B, M, ...) rows held so far, newest last.
        new_BTx: (B, T, ...) rows of this segment.
        length_B: (B,) how many rows of new are real.
        in_place: old may be changed and given back, where all lanes move equally far.
    """
    size = old_BMx.shape[1]
    if on_hand(length_B) and (length_B == length_B[:1]).all():
        n_new = int(length_B[0])
        fresh = new_BTx[:, max(0, n_new - size) : n_new].to(old_BMx.dtype)
        if in_place:
            return _moved_up(old_BMx, fresh)
        return torch.cat([old_BMx[:, min(n_new, size) :], fresh], dim=1)
    rows = torch.cat([old_BMx, new_BTx.to(old_BMx.dtype)], dim=1)
    index = length_B[:, None] + torch.arange(size, device=length_B.device)  # (B, M)
    index = index.view(*index.shape, *([1] * (rows.dim() - 2))).expand(-1, -1, *rows.shape[2:])
    return rows.gather(1, index)


def _moved_up(rows_BMx: Tensor, fresh_BNx: Tensor, *, block: int = 256) -> Tensor:
    """The same tensor with its rows N places nearer to the start and new ones behind them, block by block."""
    n_new, stay = fresh_BNx.shape[1], rows_BMx.shape[1] - fresh_BNx.shape[1]
    for start in range(0, stay, block):
        end = min(stay, start + block)
        rows_BMx[:, start:end] = rows_BMx[:, start + n_new : end + n_new].clone()
    rows_BMx[:, stay:] = fresh_BNx
    return rows_BMx


__all__ = [
    "Aux",
    "LayerHandle",
    "MemoryPlan",
    "MemoryStrategy",
    "Segment",
    "Slots",
    "State",
    "Tap",
    "TokenMemory",
    "fresh_state",
    "full_precision",
    "giving_up",
    "is_given_up",
    "keep_dead",
    "keep_last",
    "plan_per_layer",
    "register",
    "reset_lanes",
]
