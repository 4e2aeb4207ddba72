"""One token after the other: each is projected once, and memory is written once per full segment.

The segment under way lives in static buffers, which `step` fills in place: per layer the keys and values of what
memory offers, followed by those of the tokens read so far, and what memory will be told when the segment is full.
Lanes may stand at different places of their segments. Between two writes no row of memory is moved or projected.

The plain twin is `TransformerXL.forward` over the segment under way, which `generation` falls back to where
`steppable` says that a memory cannot be read token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from txl_lightning.memory.base import may_look
from txl_lightning.model.block import Block, Layout, Read, join_farthest, join_lanes, join_positioned, substate
from txl_lightning.model.inference import gathered
from txl_lightning.model.positions import Biases, DistanceTable, RotaryPosition
from txl_lightning.model.tables import Tables
from txl_lightning.types import MASKED, Segment, Slots, State, Tap, lane_where

if TYPE_CHECKING:
    from txl_lightning.model.transformer import TransformerXL

KEPT = ("x", "h", "q", "k", "v", "y")
"""What a memory's write is told of each token, in the order of `types.Tap` (and y, the layer's output)."""

OF_HEADS = ("q", "k", "v")
"""Those of them that are (B, H, T, K); the others are (B, T, D)."""


@dataclass
class LayerBuffers:
    """One layer of the segment under way; S slots, E places of its own (those of prefix tokens first)."""

    keys_BHKP: Tensor  # S + E, as the position's `keys_at` gives them
    values_BHPK: Tensor
    told_BTN: Tensor  # what memory will be told of each token, side by side
    parts: dict[str, slice]  # of them, by `KEPT` and `before.<strategy>`; none where nobody wants to know
    n_head: int
    reads_beside: bool  # as those of `Block`
    adds_to_input: bool
    usage_BP: Tensor  # float32 attention that each key received; empty where nobody wants it
    states: dict[str, State]  # by strategy, after resets, for `side` and `residual`; empty where a layer has neither
    slots: dict[str, tuple[int, Tensor, Tensor]]  # where a strategy's slots begin, and their keys and values
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

    def take(self, layer: Block, states: dict[str, State], offer: _Offer, started_B: Tensor) -> None:
        """Copy what memory offers; every tensor that `step` reads stays where it is."""
        self.written_from, self.slots = states, offer.parts
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
            self.values_BHPK[:, :, part] = v


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

    @property
    def segment_len(self) -> int:
        """T."""
        return self.tokens_BT.shape[1]

    def mask(self, lanes: Sequence[bool]) -> Tensor:
        """(B,) bool on the device."""
        return torch.tensor(lanes, device=self.place_B.device)

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
        length_B = torch.tensor(length, device=self.place_B.device)
        moved_B = length_B > 0
        _put(self.tokens_BT[:, : tokens_BT.shape[1]], tokens_BT, moved_B)
        if self.document_BT is not None and document_BT is not None:
            _put(self.document_BT[:, : tokens_BT.shape[1]], document_BT, moved_B)
        self.place_B.copy_(torch.where(moved_B, length_B, self.place_B))
        self.count = [now or before for now, before in zip(length, self.count, strict=True)]

    def restart(self, full: Sequence[bool]) -> None:
        """Put lanes to the beginning of their next segment; their memory is to be read."""
        self.place_B.masked_fill_(self.mask(full), 0)
        self.count = [0 if ended else count for ended, count in zip(full, self.count, strict=True)]
        self.unread = [ended or unread for ended, unread in zip(full, self.unread, strict=True)]


def steppable(model: TransformerXL, *, documents: bool) -> bool:
    """Whether `step` gives what `forward` gives.

    Args:
        documents: memory starts anew with each document, also inside a segment.
    """
    if model.config.architecture != "transformer":
        return False
    parts = [part for _, part in model.memory_parts()]
    if model.needs_whole_segments or model.config.attention == "reference":
        return False
    if not all(part.token_by_token for part in parts):
        return False
    blocks = model.blocks()
    if documents and (model.tokens is not None or any(layer.reads_beside or layer.adds_to_input for layer in blocks)):
        return False
    if isinstance(blocks[0].attention.position, RotaryPosition):  # it turns keys by their places once per segment
        slots = _fresh_slots(model)
        return all(part.farthest is None and part.positioned is None for part in slots)
    return True


def _fresh_slots(model: TransformerXL) -> list[Slots]:
    state = model.init_state(1, form="projected")
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    x, segment = model.embedding(token), Segment.full(token)
    found: list[Slots] = []
    for index, layer in enumerate(model.blocks()):
        _, states = layer.states_of(substate(state, f"layers.{index}"), segment)
        found += layer.slots_of(states, x, segment, _layout(x)).values()
    return found


def begin(model: TransformerXL, state: State, *, segment_len: int, tables: Tables, reset: str) -> Partial:
    """As `TransformerXL.begin`."""
    assert not model.training, "tokens are read one by one in evaluation mode only"
    if not steppable(model, documents=reset == "document"):
        raise ValueError("this memory or position cannot be read token by token: use generation.Session")
    batch = len(state["age"])
    zeros = torch.zeros(batch, segment_len, dtype=torch.int64, device=model.device)
    return Partial(
        tokens_BT=zeros,
        reset_B=torch.zeros_like(zeros[:, 0], dtype=torch.bool),
        place_B=torch.zeros_like(zeros[:, 0]),
        document_BT=zeros.clone() if reset == "document" else None,
        layers=[],
        tables=tables,
        n_prefix=0 if model.tokens is None else model.tokens.n_prefix,
        reset=reset,
        count=[0] * batch,
        unread=[True] * batch,
    )


def step(
    model: TransformerXL,
    token_B: Tensor,
    state: State,
    partial: Partial,
    *,
    active: Sequence[bool] | None,
    starts: Sequence[bool] | None,
) -> tuple[Tensor, State]:
    """As `TransformerXL.step`."""
    active = active if active is not None else [True] * len(partial.count)
    starts = starts if starts is not None else [False] * len(partial.count)
    load(model, state, partial, starts, lanes=active)
    partial.receive(token_B, partial.mask(starts))
    first = [on and not count for on, count in zip(active, partial.count, strict=True)]
    if partial.n_prefix and any(first):  # the memory tokens before a segment are read before its first token
        segment = partial.segment(partial.mask(first).long())
        read(model, partial.tokens_BT[:, :1], state, segment, partial, full=[False] * len(first))
    hidden_BD = advance(model, token_B, partial, active_B=partial.mask(active))
    partial.count = [count + on for count, on in zip(partial.count, active, strict=True)]
    full = [count == partial.segment_len for count in partial.count]
    if any(full):
        state = write(model, state, partial, full_B=partial.mask(full))
        partial.restart(full)
    return hidden_BD, state


def load(
    model: TransformerXL, state: State, partial: Partial, starts: Sequence[bool], *, lanes: Sequence[bool]
) -> None:
    """Copy what memory offers, if there are lanes that have to read it.

    Args:
        starts: lanes whose next token begins a document.
        lanes: those that read a token now; of the others it is not known yet whether their segment starts anew.
    """
    reading = [unread and on for unread, on in zip(partial.unread, lanes, strict=True)]
    if partial.layers and not any(reading):
        return
    unread_B, anew = partial.mask(reading), torch.zeros_like(partial.reset_B)
    if partial.reset != "epoch":
        anew = torch.ones_like(anew) if partial.reset == "segment" else partial.mask(starts)
    partial.reset_B.copy_(torch.where(unread_B, anew, partial.reset_B))
    segment = partial.segment(torch.full_like(partial.place_B, partial.segment_len))
    n_own = partial.n_prefix + partial.segment_len
    # what is offered depends on the number of tokens alone: that is what `token_by_token` says
    x_BTD = torch.zeros(1, dtype=model.dtype, device=model.device)
    x_BTD = x_BTD.expand(len(anew), partial.segment_len, model.config.d_model)
    table = model.distances(n_token=n_own, ahead=0, device=model.device, tables=partial.tables)
    for index, layer in enumerate(model.blocks()):
        _, states = layer.states_of(substate(state, f"layers.{index}"), segment)
        offer = _offer(layer, states, segment, x_BTD)
        if len(partial.layers) <= index:
            own = table.for_slots(offer.age.shape[1] if offer.contiguous else layer.oldest, n_own)
            own = partial.tables.projected(layer.attention.position, own)
            partial.layers.append(_buffers(layer, offer, states, own, x_BTD, n_own))
        partial.layers[index].take(layer, states, offer, unread_B)
    partial.unread = [unread and not on for unread, on in zip(partial.unread, lanes, strict=True)]


def advance(model: TransformerXL, token_B: Tensor, partial: Partial, *, active_B: Tensor) -> Tensor:
    """(B, D) hidden states of one more token of each lane, which `receive` has put in its place.

    Everything it reads and changes stays where it is from one call to the next, and nothing waits for the device, so
    it can be captured as a graph.
    """
    now = Moment(model, partial, active_B)
    if may_look(token_B) and len(set(partial.count)) == 1:
        now.place = partial.count[0] + partial.n_prefix
    x = model.embedding(token_B[:, None])
    for layer, buffers in zip(model.blocks(), partial.layers, strict=True):
        x = _step_layer(layer, x, buffers, now, model.shared_biases)
    partial.place_B.add_(active_B)
    return model.left(x)[:, 0]


def write(model: TransformerXL, state: State, partial: Partial, *, full_B: Tensor) -> State:
    """The memory after the segments of the lanes that are full; other lanes keep theirs."""
    segment = partial.segment(torch.where(full_B, partial.segment_len, 0))
    if model.tokens is not None:  # tokens behind the segment see all of it: they are read when it is there
        return model(partial.tokens_BT, state, segment, tables=partial.tables).state
    new: State = {}
    for index, (layer, buffers) in enumerate(zip(model.blocks(), partial.layers, strict=True)):
        taps = {name: _tap(buffers, name, layer) for name, _ in layer.named_memories()}
        own = substate(state, f"layers.{index}")
        given = {name: substate(own, name) for name, _ in layer.named_memories()}
        written, _ = layer.write(given, buffers.written_from, taps, segment)
        new.update({f"layers.{index}.{key}": tensor for key, tensor in written.items()})
    return model.completed(new, state, partial.tokens_BT, segment)


def read(
    model: TransformerXL,
    tokens_BT: Tensor,
    state: State,
    segment: Segment,
    partial: Partial | None,
    *,
    full: Sequence[bool],
    tables: Tables | None = None,
) -> tuple[Tensor, State]:
    """Read segments under way from their first token on, all their tokens at once.

    Args:
        tokens_BT: (B, T) int64; T may be less than a whole segment.
        state: memory before them.
        segment: their facts; lanes of length 0 stand by.
        partial: takes over what was made of lanes that are not full; None: nobody wants it.
        full: lanes whose segment is complete; their memory is written.
        tables: where projected distances are kept; `partial`'s where there is one.

    Returns:
        (B, T, D) hidden states for `log_probs`, and the memory.
    """
    tables = tables if partial is None else partial.tables
    full_B = torch.tensor(full, device=tokens_BT.device)
    if model.config.architecture != "transformer":
        out = model(tokens_BT, state, segment)
        return out.hidden_BTD, {name: lane_where(full_B, out.state[name], part) for name, part in state.items()}
    done = segment._replace(length=torch.where(full_B, segment.length, 0))
    x, layout, table = model.entered(tokens_BT, state, segment, tables)
    new: State = {}
    for index, layer in enumerate(model.blocks()):
        made = layer.read(x, substate(state, f"layers.{index}"), segment, layout, table, model.shared_biases, tables)
        x = made.y_BED
        if any(full):
            written, _ = layer.write(made.given, made.states, made.taps, done)
            new.update({f"layers.{index}.{key}": tensor for key, tensor in written.items()})
        if partial is not None and not all(full):
            _fill(layer, partial.layers[index], made, layout, lanes_B=(segment.length > 0) & ~full_B)
    state = model.completed(new, state, x, done) if any(full) else state
    return model.left(layout.real(x, 1)), state


def _fill(layer: Block, buffers: LayerBuffers, made: Read, layout: Layout, *, lanes_B: Tensor) -> None:
    """Take over what a layer made of the segments under way of some lanes."""
    n_own = layout.n_prefix + layout.n_token
    own = slice(buffers.n_slot, buffers.n_slot + n_own)
    place = torch.arange(n_own, device=lanes_B.device)[None]
    keys = layer.attention.position.keys_at(made.k_BHEK[:, :, :n_own], place).transpose(-1, -2)
    _put(buffers.keys_BHKP[..., own], keys, lanes_B)
    _put(buffers.values_BHPK[:, :, own], made.v_BHEK[:, :, :n_own], lanes_B)
    if made.usage_BP is not None:
        n_key = buffers.n_slot + n_own
        _put(buffers.usage_BP[:, :n_key], made.usage_BP[:, :n_key], lanes_B)
    for name, tap in made.taps.items():
        told = dict(zip(KEPT, (tap.x_BTD, tap.h_BTD, tap.q_BHTK, tap.k_BHTK, tap.v_BHTK, tap.y_BTD), strict=True))
        for kept, tensor in {**told, f"before.{name}": tap.before_BTD}.items():
            if kept in buffers.parts and tensor is not None:
                rows = buffers.told(kept)
                _put(rows.narrow(rows.dim() - 2, 0, layout.n_token), tensor, lanes_B)


class Moment:
    """What is the same for all layers at one token: where each lane stands, and what it sees."""

    def __init__(self, model: TransformerXL, partial: Partial, active_B: Tensor) -> None:
        self.place_B, self.active_B, self.limit = partial.place_B.clone(), active_B, model.limit
        self.n_prefix = partial.n_prefix
        self.own_B = self.place_B + self.n_prefix
        self.own = torch.arange(self.n_prefix + partial.segment_len, device=self.place_B.device)
        self.layout = Layout(0, 1, 0, mask=torch.zeros((), device=self.place_B.device), hide_slots=None)
        self.later_B1: Tensor | None = None  # memory is of an earlier document
        self.other_BE: Tensor | None = None  # own tokens that are
        if partial.document_BT is not None:  # no memory tokens then: they cannot start anew inside a segment
            number = partial.document_BT.gather(1, self.place_B[:, None])
            self.later_B1, self.other_BE = number > 0, partial.document_BT < number
        self.segment = Segment(reset=torch.zeros_like(active_B), length=torch.ones_like(self.place_B))
        self.place: int | None = None  # that of all lanes among their own keys, where shapes may depend on it
        self._masks: dict[int | None, Tensor] = {}
        self._rows: dict[int, Tensor] = {}

    def own_mask(self, limit: int | None) -> Tensor:
        """(B, 1, 1, E) additive."""
        if limit not in self._masks:
            back = self.own_B[:, None] - self.own  # (B, E)
            hidden = back < 0 if self.other_BE is None else (back < 0) | self.other_BE
            if limit is not None:
                hidden = hidden | (self.own >= self.n_prefix) & (back > limit)
            zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
            self._masks[limit] = zeros.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[limit]

    def place_of(self, buffers: LayerBuffers) -> int | None:
        """Where all lanes' token stands among a layer's keys; None: they differ, or shapes must not depend on it."""
        return None if self.place is None else buffers.n_slot + self.place

    def positioned(self, buffers: LayerBuffers) -> Tensor | None:
        """(P,) which keys have a position; None: all."""
        if buffers.positioned is None:
            return None
        return torch.cat([buffers.positioned, buffers.positioned.new_ones(len(self.own))])

    def sees_all(self, buffers: LayerBuffers, own_limit: int | None) -> bool:
        """Whether the token surely sees every slot and every token before it."""
        return buffers.all_seen and self.other_BE is None and self.limit is None and own_limit is None

    def row(self, buffers: LayerBuffers) -> Tensor:
        """(B, 1, P) the row of the distance table of each key."""
        alike = buffers.contiguous and buffers.farthest is None
        known = self._rows.get(buffers.n_slot) if alike else None
        if known is not None:
            return known
        to_slots = buffers.age + self.own_B[:, None]
        if buffers.farthest is not None:
            to_slots = to_slots.minimum(buffers.farthest)
        distance = torch.cat([to_slots, self.own_B[:, None] - self.own], dim=1)
        row = (buffers.table.first - distance).clamp(min=0, max=buffers.table.first)[:, None]
        if alike:
            self._rows[buffers.n_slot] = row
        return row

    def bias(self, buffers: LayerBuffers, own_limit: int | None, dtype: torch.dtype) -> Tensor:
        """(B, 1|H, 1, P) additive, of slots and own tokens."""
        bias = buffers.bias
        if bias.shape[2] > 1:
            lanes = torch.arange(len(self.place_B), device=bias.device)
            bias = bias.expand(len(lanes), -1, -1, -1)[lanes, :, self.place_B][:, :, None]
        if self.later_B1 is not None:
            bias = bias.masked_fill(self.later_B1[:, None, None], MASKED)
        if self.limit is not None:
            far = buffers.age + self.own_B[:, None] > self.limit
            if buffers.positioned is not None:
                far = far & buffers.positioned
            bias = bias.masked_fill(far[:, None, None], MASKED)
        limits = [limit for limit in (self.limit, own_limit) if limit is not None]
        own = self.own_mask(min(limits, default=None))
        bias = bias.expand(len(own), -1, -1, -1)
        return torch.cat([bias, own.expand(-1, bias.shape[1], -1, -1)], dim=-1).to(dtype)


def _step_layer(layer: Block, x: Tensor, buffers: LayerBuffers, now: Moment, shared: Biases | None) -> Tensor:
    """(B, 1, D) the layer's output for one token."""
    before: dict[str, Tensor] = {}
    if buffers.adds_to_input:
        for name, memory in layer.named_memories():
            before[f"before.{name}"] = x
            x = memory.residual(buffers.states[name], x, now.segment)
    h, q, k, v = layer.projected(x)
    own_B = now.own_B + buffers.n_slot
    turned = layer.attention.position.keys_at(k, now.own_B[:, None]).transpose(-1, -2)
    _put_at(buffers.keys_BHKP, turned, own_B, dim=3, place=now.place_of(buffers))
    _put_at(buffers.values_BHPK, v, own_B, dim=2, place=now.place_of(buffers))
    heads, extra = _attend(layer, q, buffers, now, shared), None
    if buffers.reads_beside:
        tap = Tap(x, h, q, k, v)
        taps = {name: _with_slots(tap, buffers, name) for name, _ in layer.named_memories()}
        heads, extra = layer.side(buffers.states, taps, heads, now.segment, now.layout)
    y = layer.after_attention(x, layer.attention.merge(heads), extra)
    if buffers.parts:
        told = [part.transpose(1, 2).flatten(2) if part.dim() == 4 else part for part in (x, h, q, k, v, y)]
        place = None if now.place is None else now.place - now.n_prefix
        _put_at(buffers.told_BTN, torch.cat([*told, *before.values()], dim=-1), now.place_B, dim=1, place=place)
    return y


def _attend(layer: Block, q: Tensor, buffers: LayerBuffers, now: Moment, shared: Biases | None) -> Tensor:
    """(B, H, 1, K): one query of each lane over all keys, those that are not there yet masked or left out."""
    position = layer.attention.position
    content, by_row = position.parts(q, buffers.table, position.biases(shared), place_BT=now.own_B[:, None])
    batch, n_head, _, width = q.shape
    keys, values = buffers.keys_BHKP.flatten(0, 1), buffers.values_BHPK.flatten(0, 1)
    if now.place is not None and by_row is not None and buffers.by_distance:
        seen = buffers.n_slot + now.place + 1
        keys, values = keys[..., :seen], values[:, :seen]
        bias = by_row.narrow(-1, buffers.table.first - seen + 1, seen)  # row of distance seen - 1, and on
        if not now.sees_all(buffers, layer.own_limit):
            bias = bias + now.bias(buffers, layer.own_limit, q.dtype)[..., :seen]
    else:
        bias = now.bias(buffers, layer.own_limit, q.dtype)
        if by_row is not None:
            bias = gathered(by_row, now.row(buffers), now.positioned(buffers)).add_(bias)
    bias = bias.expand(batch, n_head, 1, -1).reshape(batch * n_head, 1, -1)
    weights = torch.baddbmm(bias, content.reshape(-1, 1, width), keys, alpha=position.scale).softmax(dim=-1)
    if layer.wants_usage:
        received = weights.view(batch, n_head, -1).sum(dim=1).float()
        buffers.usage_BP[:, : received.shape[1]].add_(received * now.active_B[:, None])
    return torch.bmm(weights, values).view(batch, n_head, 1, width)


def _put_at(buffer: Tensor, new: Tensor, place_B: Tensor, *, dim: int, place: int | None) -> None:
    """Overwrite one entry along a dimension, each lane's at its own place; `place`: that of all, where it is known."""
    if place is not None:
        buffer.narrow(dim, place, 1).copy_(new)
        return
    index = place_B.view(-1, *[1] * (buffer.dim() - 1)).expand_as(new)
    buffer.scatter_(dim, index, new.to(buffer.dtype))


def _with_slots(tap: Tap, buffers: LayerBuffers, name: str) -> Tap:
    if name not in buffers.slots:
        return tap
    _, k, v = buffers.slots[name]
    return tap._replace(slot_k_BHSK=k, slot_v_BHSK=v)


def _tap(buffers: LayerBuffers, name: str, layer: Block) -> Tap:
    """What a strategy's write is told of the whole segment."""
    x, h, q, k, v, y = (buffers.told(kept) for kept in KEPT)
    before = buffers.told(f"before.{name}") if f"before.{name}" in buffers.parts else x
    tap = _with_slots(Tap(x, h, q, k, v, y_BTD=y, before_BTD=before), buffers, name)
    if not layer.memories[name].needs_usage:
        return tap
    tap = tap._replace(usage_BT=buffers.usage_BP[:, buffers.usage_BP.shape[1] - x.shape[1] :])
    if name not in buffers.slots:
        return tap
    start, slot_k, _ = buffers.slots[name]
    return tap._replace(usage_BS=buffers.usage_BP[:, start : start + slot_k.shape[2]])


class _Offer(NamedTuple):
    """What the memories of a layer offer for a whole segment, side by side."""

    parts: dict[str, tuple[int, Tensor, Tensor]]
    bias: Tensor
    age: Tensor
    contiguous: bool
    positioned: Tensor | None
    farthest: Tensor | None


def _offer(layer: Block, states: dict[str, State], segment: Segment, x_BTD: Tensor) -> _Offer:
    slots = layer.slots_of(states, x_BTD, segment, _layout(x_BTD))
    found, parts, start = list(slots.values()), {}, 0
    for name, part in slots.items():
        parts[name] = (start, *layer.keys_values(name, part))
        start += part.age.shape[1]
    if not found:
        nothing = x_BTD.new_zeros(1, 1, 1, 0, dtype=torch.float32)
        return _Offer({}, nothing, torch.zeros(1, 0, dtype=torch.int64, device=x_BTD.device), True, None, None)
    lanes, heads, rows = (max(part.bias.shape[dim] for part in found) for dim in range(3))
    return _Offer(
        parts=parts,
        bias=torch.cat([part.bias.float().expand(lanes, heads, rows, -1) for part in found], dim=-1),
        age=join_lanes([part.age for part in found], dim=1),
        contiguous=len(found) == 1 and layer.memories[next(iter(slots))].ages == "contiguous",
        positioned=join_positioned(found),
        farthest=join_farthest(found),
    )


def _buffers(
    layer: Block, offer: _Offer, states: dict[str, State], table: DistanceTable, x_BTD: Tensor, n_own: int
) -> LayerBuffers:
    """Empty buffers of the sizes a layer needs."""
    batch, n_token, width = x_BTD.shape
    heads, n_key = (layer.attention.n_head, layer.attention.d_head), offer.age.shape[1] + n_own
    asked = layer.reads_beside or layer.adds_to_input
    widths = {name: heads[0] * heads[1] if name in OF_HEADS else width for name in KEPT} if states else {}
    if layer.adds_to_input:
        widths.update({f"before.{name}": width for name in states})
    ends = list(itertools.accumulate(widths.values()))
    return LayerBuffers(
        keys_BHKP=x_BTD.new_zeros(batch, *heads, n_key),
        values_BHPK=x_BTD.new_zeros(batch, heads[0], n_key, heads[1]),
        told_BTN=x_BTD.new_zeros(batch, n_token, ends[-1] if ends else 0),
        parts={name: slice(end - size, end) for (name, size), end in zip(widths.items(), ends, strict=True)},
        n_head=heads[0],
        reads_beside=layer.reads_beside,
        adds_to_input=layer.adds_to_input,
        usage_BP=torch.zeros(batch, n_key if layer.wants_usage else 0, device=x_BTD.device),
        states={name: {key: old.clone() for key, old in state.items() if asked} for name, state in states.items()},
        slots={},
        bias=offer.bias.clone(),
        age=offer.age.clone(),
        contiguous=offer.contiguous,
        positioned=None if offer.positioned is None else offer.positioned.clone(),
        farthest=None if offer.farthest is None else offer.farthest.clone(),
        table=table,
    )


def _layout(x_BTD: Tensor) -> Layout:
    """Of tokens without memory tokens around them, where nobody asks for the mask."""
    return Layout(0, x_BTD.shape[1], 0, mask=torch.zeros((), device=x_BTD.device), hide_slots=None)


def _put(buffer: Tensor, new: Tensor, lanes_B: Tensor) -> None:
    """Overwrite a part of a buffer in some lanes."""
    buffer.copy_(lane_where(lanes_B, new.to(buffer.dtype), buffer))
