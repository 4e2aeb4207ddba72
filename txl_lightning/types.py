"""Values that pass between data, model, memory and training: segments, batches, slots, states.

Shape letters used in the whole package: B lanes, T tokens of a segment, M memory length, S slots,
D model width, H heads, K width of a head (Dh in the papers), L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Memory of all lanes as a flat dict; dim 0 of every tensor is the lane, shapes and dtypes never change."""


class Segment(NamedTuple):
    """What the data says about each lane of one segment. Tensors only, so graphs stay static."""

    reset: Tensor  # (B,) bool: this lane starts a new stream at token 0
    length: Tensor  # (B,) int64: real tokens, 0..T; 0 = the lane has ended and its state must not move
    document: Tensor | None = None  # (B, T) int64 document number; None: tokens of a lane are one document

    @classmethod
    def full(cls, tokens_BT: Tensor) -> Segment:
        """Every lane continues and has all T tokens."""
        batch, length = tokens_BT.shape
        device = tokens_BT.device
        return cls(
            reset=torch.zeros(batch, dtype=torch.bool, device=device),
            length=torch.full((batch,), length, dtype=torch.int64, device=device),
        )

    def since_start(self, before_B: Tensor) -> Tensor:
        """(B,) tokens of each lane since it last started anew, after this segment.

        Args:
            before_B: (B,) the same count before it, 0 where the lane resets.
        """
        if self.document is None:
            return before_B + self.length
        last = (self.length - 1).clamp(min=0)[:, None]
        same = (self.document == self.document.gather(1, last)) & self.mask(self.document.shape[1])
        count = same.sum(dim=1)  # tokens of the document that the segment ends in
        return torch.where(count < self.length, count, before_B + self.length)

    def mask(self, n_token: int) -> Tensor:
        """(B, T) bool, True on real tokens."""
        return torch.arange(n_token, device=self.length.device) < self.length[:, None]


class Position(NamedTuple):
    """Where in the data a batch stands. Plain integers: reading them never waits for the device."""

    epoch: int  # passes over the data finished before this batch
    segment: int  # index of this batch within the pass


@dataclass(frozen=True)
class Chunk:
    """One of several equal, contiguous shares of the lanes; by default all of them."""

    index: int = 0
    count: int = 1

    def of(self, tensor_Bx: Tensor) -> Tensor:
        """(B / count, ...) this share of (B, ...), without copying; all of it is the tensor itself."""
        if self.count == 1:
            return tensor_Bx
        lanes = tensor_Bx.shape[0] // self.count
        return tensor_Bx[self.index * lanes : (self.index + 1) * lanes]


class Batch(NamedTuple):
    """One segment of every lane this rank owns."""

    tokens_BT: Tensor  # (B, T) int64 inputs; anything beyond Segment.length is padding
    targets_BT: Tensor  # (B, T) int64 the token after each input
    segment: Segment
    n_target: int  # scored targets of this step over ALL lanes of all ranks
    position: Position
    target_counts: tuple[int, ...] | None = None  # targets in each cluster of the vocabulary, where they are known

    def share(self, chunk: Chunk) -> Batch:
        """The same segment of fewer lanes; `n_target` still counts all."""
        if chunk.count == 1:
            return self
        reset, length, document = self.segment
        return self._replace(
            tokens_BT=chunk.of(self.tokens_BT),
            targets_BT=chunk.of(self.targets_BT),
            segment=Segment(chunk.of(reset), chunk.of(length), None if document is None else chunk.of(document)),
            target_counts=None,
        )


class Slots(NamedTuple):
    """Extra keys and values a layer reads in its own softmax. Exactly one of hidden, keys_values is set."""

    hidden: Tensor | None  # (B, S, D) layer inputs, un-normalised: projected with the CURRENT weights
    keys_values: tuple[Tensor, Tensor] | None  # (B, H, S, K) each, projected, without position
    # (1|B, S) int64 tokens from the slot to the first token of the segment (>= 1): distance = age + t, where t counts
    # the prefix of a token memory too
    age: Tensor
    bias: Tensor  # (1|B, 1|H, 1|T, S) float, additive; MASKED where empty; may carry gradient; causal in t
    positioned: Tensor | None = None  # (S,) bool; False: no position term, always visible. None: all True
    farthest: Tensor | None = None  # (S,) int64: distance = min(age + t, farthest). None: it grows with every token


class Tap(NamedTuple):
    """What a layer lets its memory see: the T real tokens of the segment under way, never the extra memory tokens."""

    x_BTD: Tensor  # layer input, un-normalised, with what `residual` added
    h_BTD: Tensor  # what queries, keys and values were projected from (normalised under pre-norm)
    q_BHTK: Tensor  # content queries, without u, v or position
    k_BHTK: Tensor  # content keys, without position
    v_BHTK: Tensor
    slot_k_BHSK: Tensor | None = None  # keys of this strategy's own slots
    slot_v_BHSK: Tensor | None = None
    y_BTD: Tensor | None = None  # the layer's output; None while `side` runs (it is not there yet)
    usage_BS: Tensor | None = None  # float32 attention each of its slots received, summed over heads and real queries
    usage_BT: Tensor | None = None  # the same for the segment's own tokens; both only where declared
    suffix_BND: Tensor | None = None  # the layer's output at the model's suffix memory tokens, if it has any
    before_BTD: Tensor | None = None  # the layer's input as it was before this strategy's own `residual`


class Aux(NamedTuple):
    """What a write reports besides the new state. The keys must be the same in every step."""

    # 0-dim, already weighted; added to the training loss. Each a sum over lanes divided by Segment.length.sum(): so a
    # lane adds the same whichever lanes it shares a rank or a chunk with
    losses: Mapping[str, Tensor] = {}
    metrics: Mapping[str, Tensor] = {}  # 0-dim, detached


MASKED = -1e30
"""Additive bias of an absent slot. Finite: no NaN in a fully masked row; overflows to -inf in fp16, as it should."""


def detach(state: State) -> State:
    """The same state without its graph; tensors that have none are the same ones."""
    return {key: tensor.detach() if tensor.requires_grad else tensor for key, tensor in state.items()}


def n_byte(state: State) -> int:
    """Bytes that a state takes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def overwrite(place: State, *, new: State) -> None:
    """Copy a state to where another of the same shapes lies, but for what lies there already."""
    for key, tensor in new.items():
        if tensor.data_ptr() != place[key].data_ptr():
            place[key].copy_(tensor)


def lane_where(mask_B: Tensor, then: Tensor, otherwise: Tensor) -> Tensor:
    """Per lane one of two tensors of shape (B, ...)."""
    return torch.where(mask_B.view(-1, *([1] * (otherwise.dim() - 1))), then, otherwise)
