"""One token after the other: each is projected once, and memory is written once per full segment.

The segment under way lives in static buffers (`model.partial`), which `step` fills in place. Lanes may stand at
different places of their segments.

The plain twin is `TransformerXL.forward` over the segment under way, which `generation` falls back to where
`steppable` says that a memory cannot be read token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from txl_lightning.memory.base import may_look
from txl_lightning.model.block import Block, Layout, Read, substate
from txl_lightning.model.capture import Graphs, recorder_for
from txl_lightning.model.inference import gathered
from txl_lightning.model.partial import KEPT, LayerBuffers, Partial, make_buffers, offer_of, plain_layout, put, sent
from txl_lightning.model.positions import Biases, RotaryPosition
from txl_lightning.model.tables import Tables
from txl_lightning.types import MASKED, Segment, Slots, State, Tap, lane_where

if TYPE_CHECKING:
    from txl_lightning.model.transformer import TransformerXL


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
        found += layer.slots_of(states, x, segment, plain_layout(x)).values()
    return found


def begin(
    model: TransformerXL, state: State, *, segment_len: int, tables: Tables, reset: str, capture: bool | None
) -> Partial:
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
        graphs=Graphs(recorder_for(model.device, wanted=capture)),
    )


def step(
    model: TransformerXL,
    token_B: Tensor,
    state: State,
    partial: Partial,
    *,
    active: Sequence[bool] | None,
    starts: Sequence[bool] | None,
    log_probs: bool,
) -> tuple[Tensor, State]:
    """As `TransformerXL.step`."""
    active = active if active is not None else [True] * len(partial.count)
    starts = starts if starts is not None else [False] * len(partial.count)
    load(model, state, partial, starts, lanes=active)
    given = (token_B, partial.mask(starts), partial.mask(active))
    first = [on and not count for on, count in zip(active, partial.count, strict=True)]
    if partial.n_prefix and any(first):  # the memory tokens before a segment are read before its first token
        partial.receive(*given[:2])
        segment = partial.segment(partial.mask(first).long())
        read(model, partial.tokens_BT[:, :1], state, segment, partial, full=[False] * len(first))
    found = _next(model, partial, given, log_probs=log_probs)
    partial.count = [count + on for count, on in zip(partial.count, active, strict=True)]
    full = [count == partial.segment_len for count in partial.count]
    if any(full):
        state = write(model, state, partial, full_B=partial.mask(full))
        partial.restart(full)
    return found, state


def _next(model: TransformerXL, partial: Partial, given: tuple[Tensor, Tensor, Tensor], *, log_probs: bool) -> Tensor:
    """What one more token gives, by a recorded graph where there is one.

    Args:
        given: (B,) each: the tokens, whether a document begins with them, and whether they are read.
        log_probs: as in `TransformerXL.step`.
    """

    def read_on(token_B: Tensor, starts_B: Tensor, active_B: Tensor, place: int | None = None) -> Tensor:
        partial.receive(token_B, starts_B)
        hidden_BD = advance(model, token_B, partial, active_B=active_B, place=place)
        return model.log_probs(hidden_BD[:, None])[:, 0] if log_probs else hidden_BD

    nobody = partial.mask([False] * len(partial.count))  # what inactive lanes write, their next token writes over
    found = partial.graphs.run(model, log_probs, read_on, given, idle=(given[0], nobody, nobody))
    if found is not None:
        return found
    alike = may_look(given[0]) and len(set(partial.count)) == 1
    return read_on(*given, place=partial.count[0] + partial.n_prefix if alike else None)


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
    partial.graphs.look_over(model)
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
        offer = offer_of(layer, states, segment, x_BTD)
        own = table.for_slots(offer.age.shape[1] if offer.contiguous else layer.oldest, n_own)
        own = partial.tables.projected(layer.attention.position, own)
        if len(partial.layers) <= index:
            partial.layers.append(make_buffers(layer, offer, states, own, x_BTD, n_own))
        elif not own.same_place(partial.layers[index].table):  # other weights projected it
            partial.layers[index].table = own
            partial.graphs.drop()
        partial.layers[index].take(layer, states, offer, unread_B)
    partial.unread = [unread and not on for unread, on in zip(partial.unread, lanes, strict=True)]


def advance(model: TransformerXL, token_B: Tensor, partial: Partial, *, active_B: Tensor, place: int | None) -> Tensor:
    """(B, D) hidden states of one more token of each lane, which `receive` has put in its place.

    Everything it reads and changes stays where it is from one call to the next, and nothing waits for the device, so
    with `place` None it can be captured as a graph.

    Args:
        place: that of all lanes among their own keys, memory tokens' among them; None: shapes must not depend on it.
    """
    now = Moment(model, partial, active_B, place)
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
    full_B = sent(full, tokens_BT.device)
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
    put(buffers.keys_BHKP[..., own], keys, lanes_B)
    put(buffers.values_BHKP[..., own], made.v_BHEK[:, :, :n_own].transpose(-1, -2), lanes_B)
    if made.usage_BP is not None:
        n_key = buffers.n_slot + n_own
        put(buffers.usage_BP[:, :n_key], made.usage_BP[:, :n_key], lanes_B)
    for name, tap in made.taps.items():
        told = dict(zip(KEPT, (tap.x_BTD, tap.h_BTD, tap.q_BHTK, tap.k_BHTK, tap.v_BHTK, tap.y_BTD), strict=True))
        for kept, tensor in {**told, f"before.{name}": tap.before_BTD}.items():
            if kept in buffers.parts and tensor is not None:
                rows = buffers.told(kept)
                put(rows.narrow(rows.dim() - 2, 0, layout.n_token), tensor, lanes_B)


class Moment:
    """What is the same for all layers at one token: where each lane stands, and what it sees."""

    def __init__(self, model: TransformerXL, partial: Partial, active_B: Tensor, place: int | None) -> None:
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
        self.place = place  # as in `advance`
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
    _put_at(buffers.values_BHKP, v.transpose(-1, -2), own_B, dim=3, place=now.place_of(buffers))
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
    keys, values = buffers.keys_BHKP.flatten(0, 1), buffers.values_BHKP.flatten(0, 1)
    if now.place is not None and by_row is not None and buffers.by_distance:
        seen = buffers.n_slot + now.place + 1
        keys, values = keys[..., :seen], values[..., :seen]
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
    return torch.bmm(values, weights.transpose(1, 2)).view(batch, n_head, 1, width)


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
