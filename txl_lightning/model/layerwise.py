"""Many segments at once, layer by layer: evaluation of known tokens.

Where memory is a cache or a window, layer n of a segment needs only what layer n - 1 made of this segment and of those
before it, all of which is known when the tokens are. So each layer runs over a chunk of many segments at once. What a
token sees stays what it sees segment by segment, a staircase: its own segment up to itself, and the M tokens before
the segment's first one,

    query p of the segment that begins at s sees key c  iff  s - M <= c <= p

so the scores that are computed are a band around the diagonal, block of queries by block. Memory is read before the
chunk and written behind it. The plain twin is `TransformerXL.forward`, segment after segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_lightning.memory.base import may_look
from txl_lightning.model.block import Block, Layout, substate
from txl_lightning.model.positions import DistanceTable, Mask, Reading
from txl_lightning.model.tables import Tables
from txl_lightning.types import Segment, State, Tap

if TYPE_CHECKING:
    from txl_lightning.model.transformer import ModelOutput, TransformerXL

QUERIES = {"cpu": 128}
"""About how many queries are scored at once, by kind of device: those of a CPU fit its caches."""

MANY_QUERIES = 1024
"""The same elsewhere."""


class Chunk(NamedTuple):
    """Several segments that follow one another, T tokens each; N in all."""

    segment: Segment  # facts of all of them as one; documents counted through, where memory starts anew in between
    segment_len: int
    n_block: int  # queries scored at once, whole segments

    @classmethod
    def of(cls, segments: Sequence[Segment], *, segment_len: int) -> Chunk:
        """Join segments.

        Args:
            segments: (B,) facts of each. Only a lane's last segment with tokens may be short.
            segment_len: T.
        """
        length = torch.stack([segment.length for segment in segments]).sum(dim=0)
        again = torch.stack([segment.reset for segment in segments])[1:].any()  # waits for the device, once per chunk
        inner = segments[0].document is not None or bool(again)
        document = _documents(segments, segment_len=segment_len) if inner else None
        wanted = QUERIES.get(length.device.type, MANY_QUERIES)
        n_block = segment_len * max(1, min(wanted // segment_len, len(segments)))
        return cls(Segment(segments[0].reset, length, document), segment_len, n_block)


def _documents(segments: Sequence[Segment], *, segment_len: int) -> Tensor:
    """(B, N) the number of the stream that each token belongs to; 0 goes on from before the chunk."""
    begins = []
    for index, segment in enumerate(segments):
        first = segment.reset[:, None] if index else torch.zeros_like(segment.reset[:, None])
        inside = torch.zeros_like(first.expand(-1, segment_len - 1))
        if segment.document is not None:
            inside = segment.document.diff(dim=1) > 0
        begins.append(torch.cat([first, inside], dim=1))
    return torch.cat(begins, dim=1).cumsum(dim=1)


def read(
    model: TransformerXL,
    tokens_BN: Tensor,
    state: State,
    chunk: Chunk,
    targets_BN: Tensor | None = None,
    *,
    tables: Tables,
) -> ModelOutput:
    """As `TransformerXL.forward` over one segment after the other: losses, hidden states, and the state behind them.

    Args:
        model: in evaluation mode; its strategies are `layer_parallel`.
        tokens_BN: (B, N) int64, N = segments times T.
        state: in projected form.
        chunk: the segments.
        targets_BN: (B, N) next tokens, to get losses.
        tables: where projected distances are kept.
    """
    from txl_lightning.model.transformer import ModelOutput

    segment = chunk.segment
    x = model.embedding(tokens_BN)
    table = model.distances(n_token=chunk.n_block, ahead=0, device=x.device, tables=tables)
    bands = Bands(chunk, n_token=tokens_BN.shape[1], limit=model.limit)
    new: State = {}
    for index, layer in enumerate(model.blocks()):
        x, written = _layer(layer, x, substate(state, f"layers.{index}"), bands, table, model, tables)
        new.update({f"layers.{index}.{key}": tensor for key, tensor in written.items()})
    hidden = model.left(x)
    losses = model.masked_losses(hidden, targets_BN, segment)
    return ModelOutput(losses, hidden, model.completed(new, state, x, segment), {}, {})


class Bands:
    """What the queries of a block see of the keys before and in it, by size of memory."""

    def __init__(self, chunk: Chunk, *, n_token: int, limit: int | None) -> None:
        self.chunk, self.n_token, self.limit = chunk, n_token, limit
        self._known: dict[tuple[int, int, int | None], Tensor] = {}

    def blocks(self) -> list[tuple[int, int]]:
        """First query of each block, and the one behind its last."""
        size = self.chunk.n_block
        return [(start, min(start + size, self.n_token)) for start in range(0, self.n_token, size)]

    def bias(self, start: int, end: int, slots: Tensor, own_limit: int | None) -> Tensor:
        """(1|B, 1, R, M + R) additive, for the queries from `start` to `end`; their keys begin M before them.

        Args:
            slots: (1|B, 1, 1, M) bias of the slots before the chunk: which of them are there.
            own_limit: largest distance at which the layer's tokens see one another; None: any.
        """
        n_slot = slots.shape[-1]
        limits = [limit for limit in (self.limit, own_limit) if limit is not None]
        bias = self._band(n_slot, end - start, min(limits, default=None), slots.device)
        if start < n_slot and not (may_look(slots) and not slots.any()):
            bias = bias + F.pad(slots[..., start:], (0, start + bias.shape[-1] - n_slot))
        document = self.chunk.segment.document
        if document is not None:
            of_keys = F.pad(document, (n_slot, 0))[:, start : n_slot + end]  # slots are of what goes on from before
            other = of_keys[:, None] != document[:, start:end, None]
            bias = bias.expand(len(other), -1, -1, -1).masked_fill(other[:, None], float("-inf"))
        return bias

    def _band(self, n_slot: int, n_query: int, limit: int | None, device: torch.device) -> Tensor:
        key = (n_slot, n_query, limit)
        if key not in self._known:
            query = torch.arange(n_query, device=device)[:, None]
            back = n_slot + query - torch.arange(n_slot + n_query, device=device)  # distance
            since = query % self.chunk.segment_len
            hidden = (back < 0) | (back > n_slot + since)
            if limit is not None:
                hidden = hidden | (back > limit)
            zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=device)
            self._known[key] = zeros.masked_fill_(hidden, float("-inf"))[None, None]
        return self._known[key]


def _layer(
    layer: Block, x: Tensor, state: State, bands: Bands, table: DistanceTable, model: TransformerXL, tables: Tables
) -> tuple[Tensor, State]:
    """The layer's output (B, N, D) and what its memory writes."""
    segment = bands.chunk.segment
    given, states = layer.states_of(state, segment)
    h, q, k, v = layer.projected(x)
    slots = layer.slots_of(states, x[:, :1], segment._replace(document=None), _layout(x[:, :1]))
    bias = x.new_zeros(1, 1, 1, 0, dtype=torch.float32)
    keys, values = k, v
    for name, part in slots.items():  # one at most
        slot_k, slot_v = layer.keys_values(name, part)
        keys, values = torch.cat([slot_k.to(k.dtype), k], dim=2), torch.cat([slot_v.to(v.dtype), v], dim=2)
        bias = part.bias.float()
    n_slot, heads, way = bias.shape[-1], [], layer.way(x)
    for start, end in bands.blocks():
        seen = bands.bias(start, end, bias, layer.own_limit).to(k.dtype)
        reading = Reading(
            k_BHPK=keys[:, :, start : n_slot + end],
            v_BHPK=values[:, :, start : n_slot + end],
            bias=None if way == "triton" else seen,
            age=None,
            positioned=None,
            n_slot=n_slot,
            mask=Mask(seen[..., :n_slot] if n_slot else None, seen[..., n_slot:]) if way == "triton" else None,
        )
        own = table.for_slots(n_slot, end - start)
        heads.append(layer.attend(q[:, :, start:end], reading, own, model.shared_biases, tables, way=way)[0])
    y = layer.after_attention(x, layer.attention.merge(torch.cat(heads, dim=2)), None)
    tap = Tap(x, h, q, k, v, y_BTD=y, before_BTD=x)
    written, _ = layer.write(given, states, {name: tap for name, _ in layer.named_memories()}, segment)
    return y, written


def _layout(x_BTD: Tensor) -> Layout:
    return Layout(0, x_BTD.shape[1], 0, mask=torch.zeros((), device=x_BTD.device), hide_slots=None)
