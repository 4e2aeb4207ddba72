"""One layer: attention that reads memory, a feed-forward part, and the memory's write.

    post-norm (the paper)   y = LN(x + Attention(x));      z = LN(y + FFN(y))
    pre-norm                y = x + Attention(LN(x));      z = y + FFN(LN(y))

E is the number of tokens the layer runs over: T, plus the extra tokens of a token memory where the model has one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from txl_lightning.config import ModelConfig
from txl_lightning.memory.base import MemoryStrategy, keep_dead, reset_lanes
from txl_lightning.model import chunked, inference
from txl_lightning.model.attention import Attention
from txl_lightning.model.parts import frozen_norm, make_dropout, make_feed_forward, make_norm
from txl_lightning.model.positions import Biases, DistanceTable, Mask, Reading
from txl_lightning.model.tables import Tables
from txl_lightning.types import MASKED, Aux, Segment, Slots, State, Tap


class Layout(NamedTuple):
    """Which of the E tokens are real, and what they see of one another. The same for every layer."""

    n_prefix: int
    n_token: int
    n_suffix: int
    mask: Tensor | None  # (1|B, 1, E, E) additive; None: no layer needs it written out
    hide_slots: Tensor | None  # (E, 1) bool: tokens that must not see memory slots
    limit: int | None = None  # largest distance that is seen; None: any

    def real(self, x: Tensor, dim: int) -> Tensor:
        """The T real tokens along one dimension."""
        return x if not (self.n_prefix or self.n_suffix) else x.narrow(dim, self.n_prefix, self.n_token)

    def within(self, limit: int | None) -> Layout:
        """The same, but real tokens see others of the segment `limit` tokens back at most."""
        if limit is None or self.mask is None:
            return self
        row = torch.arange(self.mask.shape[-1], device=self.mask.device)
        real = (row >= self.n_prefix) & (row < self.n_prefix + self.n_token)
        far = real[:, None] & real & (row[:, None] - row > limit)
        return self._replace(mask=self.mask.masked_fill(far, float("-inf")))

    def put_real(self, whole: Tensor, real: Tensor, dim: int) -> Tensor:
        """`whole` with its real tokens exchanged."""
        if not (self.n_prefix or self.n_suffix):
            return real
        end = self.n_prefix + self.n_token
        after = whole.narrow(dim, end, self.n_suffix)
        return torch.cat([whole.narrow(dim, 0, self.n_prefix), real, after], dim=dim)


class Read(NamedTuple):
    """What a layer made of its tokens, and everything its memories need to write."""

    y_BED: Tensor  # the layer's output
    given: dict[str, State]  # states by strategy, as they were handed in
    states: dict[str, State]  # the same after resets
    taps: dict[str, Tap]
    k_BHEK: Tensor  # of all tokens, memory tokens too
    v_BHEK: Tensor
    usage_BP: Tensor | None  # attention that each key received; None where nobody asks


class Block(nn.Module):
    """A Transformer-XL layer with the memory strategies that live in it."""

    def __init__(self, config: ModelConfig, memories: dict[str, MemoryStrategy]) -> None:
        super().__init__()
        self.pre_norm, self.norm_queries = config.pre_norm, config.norm_queries
        self.attention = Attention(config)
        self.attention_norm = make_norm(config)
        self.feed_forward = make_feed_forward(config)
        self.feed_forward_norm = make_norm(config)
        self.dropout = make_dropout(config)
        self.memories = nn.ModuleDict(memories)
        self.oldest = max([0, *(memory.max_age for memory in memories.values())])  # age of the oldest slot it may read
        limits = [memory.own_limit for memory in memories.values() if memory.own_limit is not None]
        self.own_limit = min(limits, default=None)

    def forward(
        self,
        x_BED: Tensor,
        state: State,
        segment: Segment,
        layout: Layout,
        table: DistanceTable,
        shared: Biases | None,
        tables: Tables | None = None,
    ) -> tuple[Tensor, State, Aux]:
        """The layer's output (B, E, D), its memory's next state (keys `<strategy>.<key>`), and what it reports."""
        made = self.read(x_BED, state, segment, layout, table, shared, tables)
        return made.y_BED, *self.write(made.given, made.states, made.taps, segment)

    def read(
        self,
        x_BED: Tensor,
        state: State,
        segment: Segment,
        layout: Layout,
        table: DistanceTable,
        shared: Biases | None,
        tables: Tables | None = None,
    ) -> Read:
        """What `forward` does before memory is written."""
        way = self.way(x_BED)
        if way != "triton" or layout.n_prefix or layout.n_suffix:
            layout = layout.within(self.own_limit)
        given, states = self.states_of(state, segment)
        before: dict[str, Tensor] = {}
        for name, memory in self.named_memories():
            before[name] = layout.real(x_BED, 1)
            x_BED = memory.residual(states[name], x_BED, segment)
        x_BED = layout.put_real(x_BED, self.attention.position.at_layer(layout.real(x_BED, 1)), 1)
        h, q, k, v = self.projected(x_BED)
        slots = self.slots_of(states, x_BED, segment, layout)
        apart = way == "shift" and self.reads_apart(q, slots)
        read, parts = self.joined(slots, k, v, segment, layout, spread=way != "triton", apart=apart)
        table = table.for_slots(read.n_slot if read.age is None else self.oldest, q.shape[2])
        heads, weights = self.attend(q, read, table, shared, tables, way=way)
        tap = Tap(*(layout.real(t, 1) for t in (x_BED, h)), *(layout.real(t, 2) for t in (q, k, v)))
        usage = self._usage(weights, segment, layout)
        taps = {name: self._tap(tap, name, parts.get(name), usage, layout) for name, _ in self.named_memories()}
        taps = {name: own._replace(before_BTD=before[name]) for name, own in taps.items()}
        heads, extra = self.side(states, taps, heads, segment, layout)
        y = self.after_attention(x_BED, self.attention.merge(heads), extra)
        suffix = y[:, y.shape[1] - layout.n_suffix :] if layout.n_suffix else None
        taps = {name: tap._replace(y_BTD=layout.real(y, 1), suffix_BND=suffix) for name, tap in taps.items()}
        return Read(y, given, states, taps, k, v, usage)

    def projected(self, x_BED: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What queries, keys and values are made from (B, E, D), and these (B, H, E, K)."""
        h = self.attention_norm(x_BED) if self.pre_norm else x_BED
        return h, *self.attention.project(h, None if self.norm_queries else x_BED)

    def way(self, x: Tensor) -> str:
        """How this layer's attention is computed for inputs like x."""
        return self.attention.way(x, weights=self.wants_usage)

    def frozen_attention(self, h_BTD: Tensor, m_BSD: Tensor) -> Tensor:
        """As `LayerHandle.frozen_attention`."""
        norm = self.attention_norm
        h_BTD, m_BSD = h_BTD.to(norm.weight.dtype), m_BSD.to(norm.weight.dtype)
        if self.pre_norm:
            m_BSD = frozen_norm(norm, m_BSD)
        return self.attention.frozen(h_BTD, m_BSD)

    def project_slots(self, hidden_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """As `LayerHandle.project_slots`."""
        hidden_BSD = hidden_BSD.to(self.attention_norm.weight.dtype)
        return self.attention.project_slots(self.attention_norm(hidden_BSD) if self.pre_norm else hidden_BSD)

    def states_of(self, state: State, segment: Segment) -> tuple[dict[str, State], dict[str, State]]:
        """States by strategy as they are given, and with the lanes that start anew put back."""
        given = {name: substate(state, name) for name, _ in self.named_memories()}
        return given, {name: reset_lanes(memory, given[name], segment.reset) for name, memory in self.named_memories()}

    def named_memories(self) -> list[tuple[str, MemoryStrategy]]:
        """The strategies of this layer by name, in the order in which their slots are read."""
        return list(self.memories.items())  # type: ignore[arg-type]

    def slots_of(self, states: dict[str, State], x: Tensor, segment: Segment, layout: Layout) -> dict[str, Slots]:
        """What each strategy offers, by name."""
        found = {}
        for name, memory in self.named_memories():
            slots = memory.slots(states[name], layout.real(x, 1), segment)
            if slots is not None:
                found[name] = slots
        return found

    def reads_apart(self, q: Tensor, slots: dict[str, Slots]) -> bool:
        """Whether `attend` takes slots and segment apart."""
        contiguous = all(
            self.memories[name].ages == "contiguous" and part.positioned is None and part.farthest is None
            for name, part in slots.items()
        )
        if self.wants_usage:
            return False
        return inference.reads_apart(self.attention, q, list(slots.values()), contiguous=contiguous)

    def joined(
        self,
        slots: dict[str, Slots],
        k: Tensor,
        v: Tensor,
        segment: Segment,
        layout: Layout,
        *,
        spread: bool,
        apart: bool = False,
    ) -> tuple[Reading, dict[str, tuple[int, Tensor, Tensor]]]:
        """All slots and the segment side by side (or apart), and where each strategy's slots begin among them."""
        keys, values, parts, start, found = [], [], {}, 0, list(slots.values())
        for name, part in slots.items():
            slot_k, slot_v = self.keys_values(name, part)
            parts[name] = (start, slot_k, slot_v)
            start += slot_k.shape[2]
            keys.append(slot_k if apart else slot_k.to(k.dtype))
            values.append(slot_v if apart else slot_v.to(v.dtype))
        contiguous = len(slots) <= 1 and all(self.memories[name].ages == "contiguous" for name in slots)
        if contiguous and start > self.oldest:
            raise ValueError(f"memory {', '.join(slots)} offers {start} slots but declares max_age={self.oldest}")
        if apart:
            bias, mask = _own_bias(layout, dtype=k.dtype), Mask(_slot_bias(found[0], segment, layout))
        elif spread:
            bias, mask = _join_bias(found, segment, layout, dtype=k.dtype), None
        else:
            bias, mask = None, _join_mask(found, segment, layout, own_limit=self.own_limit)
        reading = Reading(
            k_BHPK=torch.cat([*keys, k], dim=2) if keys and not apart else k,
            v_BHPK=torch.cat([*values, v], dim=2) if values and not apart else v,
            bias=bias,
            age=None if contiguous else join_lanes([part.age for part in found], dim=1),
            positioned=join_positioned(found),
            n_slot=start,
            farthest=join_farthest(found),
            mask=mask,
            before=(keys[0], values[0]) if apart else None,
        )
        return reading, parts

    def keys_values(self, name: str, slots: Slots) -> tuple[Tensor, Tensor]:
        """(B, H, S, K) each, of a strategy's slots."""
        if slots.keys_values is not None:
            return slots.keys_values
        assert slots.hidden is not None, f"memory {name} offers slots without hidden states or keys and values"
        return self.project_slots(slots.hidden)

    def attend(
        self,
        q: Tensor,
        read: Reading,
        table: DistanceTable,
        shared: Biases | None,
        tables: Tables | None,
        *,
        way: str = "shift",
    ) -> tuple[Tensor, Tensor | None]:
        """Heads' outputs, and the weights where a strategy asks for them. `way`: as `way` gave it."""
        biases = self.attention.position.biases(shared)
        if tables is not None:
            table = tables.projected(self.attention.position, table)
        if read.before is not None:
            return inference.by_heads(self.attention, q, read, table, biases), None
        if way == "shift" and not self.wants_usage and inference.can_fuse(self.attention, q, read):
            return inference.fused(self.attention, q, read, table, biases), None
        if way == "shift" and not self.wants_usage and chunked.can_chunk(self.attention, q, read):
            return chunked.chunked(self.attention, q, read, table, biases), None
        return self.attention.attend(q, read, table, biases, way=way, weights=self.wants_usage)

    @property
    def reads_beside(self) -> bool:
        """Whether a strategy reads beside attention."""
        return any(type(memory).side is not MemoryStrategy.side for _, memory in self.named_memories())

    @property
    def adds_to_input(self) -> bool:
        """Whether a strategy changes the layer's input."""
        return any(type(memory).residual is not MemoryStrategy.residual for _, memory in self.named_memories())

    @property
    def wants_usage(self) -> bool:
        """Whether a strategy asks how much attention each key received."""
        return any(memory.needs_usage for _, memory in self.named_memories())

    def _usage(self, weights_BHEP: Tensor | None, segment: Segment, layout: Layout) -> Tensor | None:
        """(B, P) float32 attention that each key received from real queries, where a strategy asks for it."""
        if weights_BHEP is None:
            return None
        real = segment.mask(layout.n_token)[:, None, :, None]
        return (layout.real(weights_BHEP, 2).detach().float() * real).sum(dim=(1, 2))

    def _tap(
        self, tap: Tap, name: str, part: tuple[int, Tensor, Tensor] | None, usage_BP: Tensor | None, layout: Layout
    ) -> Tap:
        """What this one strategy sees: its own slots, and their usage if it declares the need."""
        wanted = usage_BP if self.memories[name].needs_usage else None
        if wanted is not None:
            own = wanted[:, wanted.shape[1] - layout.n_suffix - layout.n_token :][:, : layout.n_token]
            tap = tap._replace(usage_BT=own)
        if part is None:
            return tap
        start, slot_k, slot_v = part
        usage = wanted[:, start : start + slot_k.shape[2]] if wanted is not None else None
        return tap._replace(slot_k_BHSK=slot_k, slot_v_BHSK=slot_v, usage_BS=usage)

    def side(
        self, states: dict[str, State], taps: dict[str, Tap], heads: Tensor, segment: Segment, layout: Layout
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs with what strategies read beside attention, and what they add to its result."""
        extra = None
        for name, memory in self.named_memories():
            real = layout.real(heads, 2)
            mixed, added = memory.side(states[name], taps[name], real, segment)
            heads = heads if mixed is real else layout.put_real(heads, mixed.to(heads.dtype), 2)
            extra = added if added is not None else extra
        if extra is not None:
            whole = extra.new_zeros(extra.shape[0], heads.shape[2], extra.shape[2])
            extra = layout.put_real(whole, extra, 1)
        return heads, extra

    def after_attention(self, x: Tensor, attended: Tensor, extra: Tensor | None) -> Tensor:
        """The layer's output."""
        attended = self.dropout(attended if extra is None else attended + extra)
        if self.pre_norm:
            y = x + attended
            return y + self.feed_forward(self.feed_forward_norm(y))
        y = self.attention_norm(x + attended)
        return self.feed_forward_norm(y + self.feed_forward(y))

    def write(
        self, given: dict[str, State], states: dict[str, State], taps: dict[str, Tap], segment: Segment
    ) -> tuple[State, Aux]:
        """The next states; `given` is what they were before resets: a lane without tokens does not even reset."""
        state: State = {}
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        for name, memory in self.named_memories():
            new, aux = memory.write(states[name], taps[name], self, segment)
            new = keep_dead(new, given[name], segment.length)
            state.update({f"{name}.{key}": tensor for key, tensor in new.items()})
            losses.update({f"{name}/{key}": loss for key, loss in aux.losses.items()})
            metrics.update({f"{name}/{key}": metric.detach() for key, metric in aux.metrics.items()})
        return state, Aux(losses=losses, metrics=metrics)


def substate(state: State, part: str) -> State:
    """The keys of one part of a flat state, without the part's name."""
    return {key.removeprefix(f"{part}."): tensor for key, tensor in state.items() if key.startswith(f"{part}.")}


def join_lanes(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors whose lane dimension is 1 or B."""
    lanes = max(tensor.shape[0] for tensor in tensors)
    return torch.cat([tensor.expand(lanes, *tensor.shape[1:]) for tensor in tensors], dim=dim)


def _join_bias(slots: list[Slots], segment: Segment, layout: Layout, *, dtype: torch.dtype) -> Tensor:
    """(1|B, 1|H, E, P) the slots' biases beside the mask of the tokens among themselves."""
    parts = [_slot_bias(part, segment, layout).to(dtype) for part in slots]
    return _side_by_side([*parts, _own_bias(layout, dtype=dtype)])


def _own_bias(layout: Layout, *, dtype: torch.dtype) -> Tensor:
    """(1|B, 1, E, E) the mask of the tokens among themselves."""
    assert layout.mask is not None
    return layout.mask.to(dtype)


def _slot_bias(slots: Slots, segment: Segment, layout: Layout) -> Tensor:
    """(1|B, 1|H, 1|E, S) what is added to the scores of a strategy's slots."""
    return _bias_of_all_tokens(_limited(slots, segment, layout), segment, layout)


def _join_mask(slots: list[Slots], segment: Segment, layout: Layout, *, own_limit: int | None) -> Mask:
    """The same, not spread out. Extra tokens follow rules of their own, so with them everything is written out."""
    if layout.n_prefix or layout.n_suffix:
        parts = [_slot_bias(part, segment, layout) for part in slots]
        return Mask(_side_by_side(parts) if parts else None, layout.mask)
    limits = [limit for limit in (layout.limit, own_limit) if limit is not None]
    return Mask(
        _side_by_side([part.bias for part in slots]) if slots else None,
        document=segment.document,
        slot_limit=layout.limit,
        own_limit=min(limits, default=None),
    )


def _side_by_side(biases: list[Tensor]) -> Tensor:
    """One bias of all keys; what is the same for all lanes, heads or tokens stays one where it is so for all."""
    lanes, n_head, rows = (max(part.shape[dim] for part in biases) for dim in (0, 1, 2))
    wide = torch.promote_types(biases[0].dtype, torch.float32) if len({part.dtype for part in biases}) > 1 else None
    same = [part if wide is None else part.to(wide) for part in biases]
    return torch.cat([part.expand(lanes, n_head, rows, -1) for part in same], dim=-1)


def _limited(slots: Slots, segment: Segment, layout: Layout) -> Tensor:
    """The bias of a strategy's slots, masked for tokens that are too far from them or of a later document.

    Slots without position are never too far.
    """
    bias = slots.bias
    if segment.document is not None:
        later = segment.document != segment.document[:, :1]  # (B, T)
        bias = bias.expand(len(later), -1, -1, -1).masked_fill(later[:, None, :, None], MASKED)
    if layout.limit is None:
        return bias
    step = torch.arange(layout.n_token, device=slots.age.device) + layout.n_prefix
    far = slots.age[:, None, None] + step[:, None] > layout.limit  # (1|B, 1, T, S)
    if slots.positioned is not None:
        far = far & slots.positioned
    return bias.masked_fill(far, MASKED)


def _bias_of_all_tokens(bias: Tensor, segment: Segment, layout: Layout) -> Tensor:
    """A slot bias given for T real tokens (or for all at once), stretched over the extra tokens around them.

    Prefix tokens see what the first real token sees, suffix tokens what the last real one of their lane sees.
    """
    if bias.shape[2] > 1 and layout.n_suffix:
        bias = bias.expand(segment.length.shape[0], -1, -1, -1)
        last = (segment.length - 1).clamp(min=0)[:, None, None, None]
        after = bias.gather(2, last.expand(-1, bias.shape[1], layout.n_suffix, bias.shape[3]))
        bias = torch.cat([bias, after], dim=2)
    if bias.shape[2] > 1 and layout.n_prefix:
        bias = torch.cat([bias[:, :, :1].expand(-1, -1, layout.n_prefix, -1), bias], dim=2)
    if layout.hide_slots is not None:
        rows = layout.hide_slots.shape[0]
        bias = bias.expand(-1, -1, rows, -1).masked_fill(layout.hide_slots, float("-inf"))
    return bias


def join_positioned(slots: list[Slots]) -> Tensor | None:
    """(S,) bool over all slots, or None when all have a position."""
    if all(part.positioned is None for part in slots):
        return None
    ones = [part.age.new_ones(part.age.shape[1], dtype=torch.bool) for part in slots]
    return torch.cat(
        [part.positioned if part.positioned is not None else one for part, one in zip(slots, ones, strict=True)]
    )


def join_farthest(slots: list[Slots]) -> Tensor | None:
    """(S,) int64 over all slots, or None when every distance grows with every token."""
    if all(part.farthest is None for part in slots):
        return None
    never = [torch.full_like(part.age[0], torch.iinfo(torch.int32).max) for part in slots]
    return torch.cat(
        [part.farthest if part.farthest is not None else far for part, far in zip(slots, never, strict=True)]
    )
