"""Attention of one segment, computed by the `reference` and shown to an observer layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from txl_lightning.memory.knn import Knn
from txl_lightning.model.attention import Attention
from txl_lightning.model.positions import (
    Biases,
    DistanceTable,
    Reading,
    TransformerXLPosition,
    distance_rows,
    reference_terms,
)
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import MASKED, Segment, State, Tap

TERMS = {"a": "content_content", "b": "content_position", "c": "u_content", "d": "v_position"}
"""The four terms of Dai et al. 2019, section 3.3, by letter: q.k, q.r, u.k, v.r."""


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What one layer's real queries saw. Keys are the memory's slots first, then its memory tokens, then the segment.

    Attributes:
        layer: its index.
        weights_BHTP: attention of each head; rows sum to 1.
        terms_BHTP: the terms of the score by name, scaled, for position `transformer_xl`.
        distance_BTP: tokens from a key to its query; -1: the key has no place (memory tokens, slots without position).
        visible_BTP: pairs that are not masked.
        n_memory: keys that are memory: the first ones.
    """

    layer: int
    weights_BHTP: Tensor
    terms_BHTP: dict[str, Tensor]
    distance_BTP: Tensor
    visible_BTP: Tensor
    n_memory: int


@contextmanager
def attention_seen(model: TransformerXL, look: Callable[[LayerAttention], None]) -> Iterator[None]:
    """While it lasts, the model computes attention as `model.attention=reference` does and shows it, layer by layer."""
    n_prefix, n_suffix = (0, 0) if model.tokens is None else (model.tokens.n_prefix, model.tokens.n_suffix)
    blocks = model.blocks()
    for index, block in enumerate(blocks):
        seen = partial(_attend, block.attention, index, look, n_prefix, n_suffix)
        vars(block)["way"] = _reference  # found before the methods of the class
        vars(block.attention)["attend"] = seen
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["way"], vars(block.attention)["attend"]


@contextmanager
def hits_seen(model: TransformerXL, look: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While it lasts, layers that search (knn) show the ages (B, H, T, top_k) of what they find; 0: nothing."""
    found = [
        (index, memory)
        for index, block in enumerate(model.blocks())
        for _, memory in block.named_memories()
        if isinstance(memory, Knn)
    ]
    for index, memory in found:
        vars(memory)["side"] = partial(_side, memory, index, look)
    try:
        yield
    finally:
        for _, memory in found:
            del vars(memory)["side"]


def _reference(x: Tensor) -> str:
    return "reference"


def _side(
    memory: Knn,
    layer: int,
    look: Callable[[int, Tensor], None],
    state: State,
    tap: Tap,
    heads: Tensor,
    segment: Segment,
) -> tuple[Tensor, None]:
    look(layer, memory.hit_ages(state, tap.q_BHTK))
    return type(memory).side(memory, state, tap, heads, segment)


def _attend(
    attention: Attention,
    layer: int,
    look: Callable[[LayerAttention], None],
    n_prefix: int,
    n_suffix: int,
    q_BHTK: Tensor,
    read: Reading,
    table: DistanceTable,
    biases: Biases,
    *,
    way: str,
    weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `Attention.attend`, with a look at what is behind it."""
    assert read.bias is not None
    terms = _terms(attention, q_BHTK, read, table, biases)
    plain = sum(terms.values()) if terms else attention.position.scores(q_BHTK, read, table, biases)
    found = torch.softmax((plain + read.bias).float(), dim=-1)
    end = q_BHTK.shape[2] - n_suffix
    real = slice(n_prefix, end)
    n_key = read.k_BHPK.shape[2] - n_suffix
    look(
        LayerAttention(
            layer=layer,
            weights_BHTP=found[:, :, real, :n_key],
            terms_BHTP={TERMS[name]: term.expand_as(found)[:, :, real, :n_key].float() for name, term in terms.items()},
            distance_BTP=_distances(read, table, n_prefix, n_token=q_BHTK.shape[2])[:, real, :n_key],
            visible_BTP=(read.bias > MASKED / 2).any(dim=1).expand(-1, q_BHTK.shape[2], -1)[:, real, :n_key],
            n_memory=read.n_slot + n_prefix,
        )
    )
    return found.to(read.v_BHPK.dtype) @ read.v_BHPK, found if weights else None


def _terms(
    attention: Attention, q_BHTK: Tensor, read: Reading, table: DistanceTable, biases: Biases
) -> dict[str, Tensor]:
    position = attention.position
    if not isinstance(position, TransformerXLPosition):
        return {}
    r, (u, v), _ = position.projected(table, biases, dtype=q_BHTK.dtype)
    row, positioned = distance_rows(read, table, n_token=q_BHTK.shape[2]), read.positioned_keys()
    parts = reference_terms(q_BHTK, read.k_BHPK, r, Biases(u, v), row=row, positioned=positioned)
    return {name: parts[name] * position.scale for name in position.terms}


def _distances(read: Reading, table: DistanceTable, n_prefix: int, *, n_token: int) -> Tensor:
    """(1|B, E, P) distances, -1 where a key has no place."""
    distance = (table.first - distance_rows(read, table, n_token=n_token)).clamp(min=0)
    if (positioned := read.positioned_keys()) is not None:
        distance = distance.masked_fill(~positioned, -1)
    key = torch.arange(distance.shape[-1], device=distance.device) - read.n_slot
    return distance.masked_fill((key >= 0) & (key < n_prefix), -1)
