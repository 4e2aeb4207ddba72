"""What is held of the segments under way while tokens are read one by one (`model.decoding`).

Per layer the keys and values of what memory offers, followed by those of the tokens read so far, and what memory will
be told when the segment is full; and where each lane stands. Everything lies in static buffers that change in place.
Between two writes no row of memory is moved or projected.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from txl_lightning.memory.base import MemoryStrategy, may_look
from txl_lightning.model.block import Block, Layout, join_farthest, join_lanes, join_positioned
from txl_lightning.model.capture import Graphs
from txl_lightning.model.positions import DistanceTable
from txl_lightning.model.tables import Tables
from txl_lightning.types import Segment, State, lane_where

KEPT = ("x", "h", "q", "k", "v", "y")
"""What a memory's write is told of each token, in the order of `types.Tap` (and y, the layer's output)."""

OF_HEADS = ("q", "k", "v")
"""Those of them that are (B, H, T, K); the others are (B, T, D)."""


class Offer(NamedTuple):
    """What the memories of a layer offer for a whole segment, side by side."""

    parts: dict[str, tuple[int, Tensor, Tensor]]
    bias: Tensor
    age: Tensor
    contiguous: bool
    positioned: Tensor | None
    farthest: Tensor | None


def offer_of(layer: Block, states: dict[str, State], segment: Segment, x_BTD: Tensor) -> Offer:
    slots = layer.slots_of(states, x_BTD, segment, plain_layout(x_BTD))
    found, parts, start = list(slots.values()), {}, 0
    for name, part in slots.items():
        parts[name] = (start, *layer.keys_values(name, part))
        start += part.age.shape[1]
    if not found:
        nothing = x_BTD.new_zeros(1, 1, 1, 0, dtype=torch.float32)
        return Offer({}, nothing, torch.zeros(1, 0, dtype=torch.int64, device=x_BTD.device), True, None, None)
    lanes, heads, rows = (max(part.bias.shape[dim] for part in found) for dim in range(3))
    return Offer(
        parts=parts,
        bias=torch.cat([part.bias.float().expand(lanes, heads, rows, -1) for part in found], dim=-1),
        age=join_lanes([part.age for part in found], dim=1),
        contiguous=len(found) == 1 and layer.memories[next(iter(slots))].ages == "contiguous",
        positioned=join_positioned(found),
        farthest=join_farthest(found),
    )


def make_buffers(
    layer: Block, offer: Offer, states: dict[str, State], table: DistanceTable, x_BTD: Tensor, n_own: int
) -> LayerBuffers:
    """Empty buffers of the sizes a layer needs."""
    batch, n_token, width = x_BTD.shape
    heads, n_key = (layer.attention.n_head, layer.attention.d_head), offer.age.shape[1] + n_own
    asked = layer.reads_beside or layer.adds_to_input
    beside = [name for name, part in layer.named_memories() if type(part).side is not MemoryStrategy.side]
    widths = {name: heads[0] * heads[1] if name in OF_HEADS else width for name in KEPT} if states else {}
    if layer.adds_to_input:
        widths.update({f"before.{name}": width for name in states})
    ends = list(itertools.accumulate(widths.values()))
    return LayerBuffers(
        keys_BHKP=x_BTD.new_zeros(batch, *heads, n_key),
        values_BHKP=x_BTD.new_zeros(batch, *heads, n_key),
        told_BTN=x_BTD.new_zeros(batch, n_token, ends[-1] if ends else 0),
        parts={name: slice(end - size, end) for (name, size), end in zip(widths.items(), ends, strict=True)},
        n_head=heads[0],
        reads_beside=layer.reads_beside,
        adds_to_input=layer.adds_to_input,
        usage_BP=torch.zeros(batch, n_key if layer.wants_usage else 0, device=x_BTD.device),
        states={name: {key: old.clone() for key, old in state.items() if asked} for name, state in states.items()},
        slots={name: (at, k.clone(), v.clone()) for name, (at, k, v) in offer.parts.items() if name in beside},
        beside=beside,
        bias=offer.bias.clone(),
        age=offer.age.clone(),
        contiguous=offer.contiguous,
        positioned=None if offer.positioned is None else offer.positioned.clone(),
        farthest=None if offer.farthest is None else offer.farthest.clone(),
        table=table,
    )


@dataclass
class LayerBuffers:
    """One layer of the segment under way; S slots, E places of its own (those of prefix tokens first)."""

    keys_BHKP: Tensor  # S + E, as the position's `keys_at` gives them
    values_BHKP: Tensor
    told_BTN: Tensor  # what memory will be told of each token, side by side
    parts: dict[str, slice]  # of them, by `KEPT` and `before.<strategy>`; none where nobody wants to know
    n_head: int
    reads_beside: bool  # as those of `Block`
    adds_to_input: bool
    usage_BP: Tensor  # float32 attention that each key received; empty where nobody wants it
    states: dict[str, State]  # by strategy, after resets, for `side` and `residual`; empty where a layer has neither
    slots: dict[str, tuple[int, Tensor, Tensor]]  # where a strategy's slots begin, and their keys and values
    beside: list[str]  # strategies with a `side`, which is told of them: these stay where they are
    bias: Tensor  # (1|B, 1|H, 1|T, S) of the slots
    age: Tensor  # (1|B, S)
    contiguous: bool  # ages are S, ..., 1
    positioned: Tensor | None  # (S,)
    farthest: Tensor | None  # (S,)
    table: DistanceTable
    written_from: dict[str, State] = field(default_factory=dict)  # states after resets: what `write` starts from
    all_seen: bool = False  # every slot is there for every token, as far as may be looked at

    @property
    def n_slot(self) -> int:
        """S."""
        return self.age.shape[1]

    @property
    def by_distance(self) -> bool:
        """Whether key p of S + T stands p places behind the oldest slot, each with a position."""
        return self.contiguous and self.positioned is None and self.farthest is None

    def told(self, name: str) -> Tensor:
        """One part of what memory is told, (B, T, D) or (B, H, T, K)."""
        part = self.told_BTN[..., self.parts[name]]
        return part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) if name in OF_HEADS else part

    def take(self, layer: Block, states: dict[str, State], offer: Offer, started_B: Tensor) -> None:
        """Copy what memory offers; every tensor that `step` reads stays where it is."""
        self.written_from = states
        for name, (start, k, v) in offer.parts.items():
            if name in self.beside:
                self.slots[name][1].copy_(k)
                self.slots[name][2].copy_(v)
            else:
                self.slots[name] = (start, k, v)
        for old, new in zip((self.bias, self.age, self.positioned, self.farthest), offer[1:3] + offer[4:], strict=True):
            if old is not None and new is not None:
                old.copy_(new)
        self.all_seen = may_look(offer.bias) and not offer.bias.any()
        self.usage_BP.masked_fill_(started_B[:, None], 0)
        for name, kept in self.states.items():
            for key, tensor in kept.items():
                tensor.copy_(states[name][key])
        for start, k, v in offer.parts.values():
            part = slice(start, start + k.shape[2])
            turned = layer.attention.position.keys_at(k.to(self.keys_BHKP.dtype), -offer.age[:, part])
            self.keys_BHKP[..., part] = turned.transpose(-1, -2)
            self.values_BHKP[..., part] = v.transpose(-1, -2)


@dataclass
class Partial:
    """The segment under way of every lane. Its buffers belong to who made it and change in place."""

    tokens_BT: Tensor  # int64
    reset_B: Tensor  # bool: the segment began with an empty memory
    place_B: Tensor  # int64: tokens read of it, 0..T-1
    document_BT: Tensor | None  # int64 number of each token's document within the segment; None: it does not matter
    layers: list[LayerBuffers]
    tables: Tables
    n_prefix: int  # memory tokens before those of a segment
    reset: str  # where memory starts anew, as `memory.reset`
    count: list[int]  # what `place_B` says, for decisions that must not wait for the device
    unread: list[bool]  # lanes whose memory is to be read before their next token
    graphs: Graphs  # of the step, where it is recorded

    def __post_init__(self) -> None:
        self._all_B = torch.ones_like(self.reset_B)
        self._none_B = torch.zeros_like(self.reset_B)

    @property
    def segment_len(self) -> int:
        """T."""
        return self.tokens_BT.shape[1]

    def mask(self, lanes: Sequence[bool]) -> Tensor:
        """(B,) bool on the device, not to be changed."""
        if all(lanes):
            return self._all_B
        return sent(lanes, self.place_B.device) if any(lanes) else self._none_B

    def segment(self, length_B: Tensor) -> Segment:
        """The facts of the segments under way, if so many of their tokens are meant."""
        return Segment(reset=self.reset_B.clone(), length=length_B, document=self.document_BT)

    def receive(self, token_B: Tensor, starts_B: Tensor) -> None:
        """Put a token at each lane's place; `starts_B`: a document begins with it."""
        place = self.place_B[:, None]
        self.tokens_BT.scatter_(1, place, token_B[:, None])
        if self.document_BT is not None:
            before = self.document_BT.gather(1, (place - 1).clamp(min=0))
            self.document_BT.scatter_(1, place, before * (place > 0) + (starts_B[:, None] & (place > 0)))

    def stand(self, tokens_BT: Tensor, length: Sequence[int], document_BT: Tensor | None) -> None:
        """Say what lanes have read of their segments; lanes with length 0 have read nothing new.

        Args:
            tokens_BT: (B, N) from the segments' first tokens on, N <= T.
            length: (B,) how many of them there are.
            document_BT: (B, N) their documents.
        """
        length_B = sent(length, self.place_B.device)
        moved_B = length_B > 0
        put(self.tokens_BT[:, : tokens_BT.shape[1]], tokens_BT, moved_B)
        if self.document_BT is not None and document_BT is not None:
            put(self.document_BT[:, : tokens_BT.shape[1]], document_BT, moved_B)
        self.place_B.copy_(torch.where(moved_B, length_B, self.place_B))
        self.count = [now or before for now, before in zip(length, self.count, strict=True)]

    def restart(self, full: Sequence[bool]) -> None:
        """Put lanes to the beginning of their next segment; their memory is to be read."""
        self.place_B.masked_fill_(self.mask(full), 0)
        self.count = [0 if ended else count for ended, count in zip(full, self.count, strict=True)]
        self.unread = [ended or unread for ended, unread in zip(full, self.unread, strict=True)]


def plain_layout(x_BTD: Tensor) -> Layout:
    """Of tokens without memory tokens around them, where nobody asks for the mask."""
    return Layout(0, x_BTD.shape[1], 0, mask=torch.zeros((), device=x_BTD.device), hide_slots=None)


def sent(values: Sequence[object], device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host as a tensor on a device, which is not waited for; `dtype`: by default theirs."""
    if device.type != "cuda":
        return torch.tensor(values, device=device, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def put(buffer: Tensor, new: Tensor, lanes_B: Tensor) -> None:
    """Overwrite a part of a buffer in some lanes."""
    buffer.copy_(lane_where(lanes_B, new.to(buffer.dtype), buffer))
