"""Losses of single targets: what every protocol that looks closer than at a mean builds on.

`stretch_losses` reads text as evaluation does, in lanes with the memory carried along. `context_losses` gives single
targets a context of an exact length: memory starts anew, so many tokens are read, the next ones are scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl_lightning.build import segments_at_once
from txl_lightning.config import Config
from txl_lightning.data.lanes import LaneLoader, used_lanes
from txl_lightning.data.vocab import Tokens
from txl_lightning.model.reading import Reader
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Batch, Segment, State

Nats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]

TOKENS_AT_ONCE = 8192
"""Tokens of all lanes that `context_losses` has under way: what bounds its memory."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Every target of a stretch of text in its order; target i is token i + 1."""

    nats: Nats  # (N - 1,)
    place: Counts  # (N - 1,) how many tokens of its segment were read before the target, from 1
    age: Counts  # (N - 1,) how many tokens its lane had read since it last started anew, from 1
    n_lane: int


@torch.no_grad()
def stretch_losses(
    config: Config, model: TransformerXL, tokens: Tokens, *, separator: int | None, anew: bool = False
) -> Losses:
    """Losses of all targets of a text, read in lanes with the memory carried along, as `txl eval` reads it.

    Args:
        config: lanes, segment length and where memory starts anew.
        model: in evaluation mode.
        tokens: (N,) ids.
        separator: the id that ends a document; needed with memory.reset=document.
        anew: memory starts anew with each segment as well. Documents stay apart inside segments if they did.
    """
    if anew and config.memory.reset != "document":
        config = replace(config, memory=replace(config.memory, reset="segment"))
    loader = _lanes_of(config, tokens, separator=separator)
    start_B, reader = loader.layout.starts(), Reader(model)
    state = model.init_state(loader.layout.lanes, form="projected")
    nats = np.zeros(len(tokens) - 1, dtype=np.float32)
    place, age = np.zeros((2, len(tokens) - 1), dtype=np.int64)
    ages_B = np.zeros(len(start_B), dtype=np.int64)
    for group in loader:
        batches = [on_device(batch, model.device) for batch in (group if isinstance(group, list) else [group])]
        batches = [_anew(batch) for batch in batches] if anew else batches
        losses_BN, state = _read(reader, batches, state)
        losses = losses_BN.float().cpu().split(loader.layout.segment_len, dim=1)
        for batch, losses_BT in zip(batches, losses, strict=True):
            age_BT = _ages(batch, ages_B)
            ages_B = age_BT[:, -1]
            first, _ = loader.layout.span(batch.position.segment, epoch=0)
            for lane, length in enumerate(batch.segment.length.tolist()):
                span = slice(start_B[lane] + first, start_B[lane] + first + length)
                nats[span], age[span] = losses_BT[lane, :length].numpy(), age_BT[lane, :length]
                place[span] = np.arange(1, length + 1)
    return Losses(nats=nats, place=place, age=age, n_lane=len(start_B))


@torch.no_grad()
def context_losses(
    model: TransformerXL, tokens: Tokens, firsts: Counts, *, context: int, block: int = 1, segment_len: int
) -> Nats:
    """(n, block) losses of the targets at `firsts` and behind, each first one with a context of `context` tokens.

    Memory starts anew, context + block - 1 tokens are read segment by segment, and the last `block` targets are scored:
    their contexts are context, context + 1, ... context + block - 1 tokens. With block 1 all are exact.

    Args:
        model: in evaluation mode.
        tokens: (N,) ids.
        firsts: (n,) position of the first target of each block; at least `context`.
        context: tokens read before it.
        block: targets scored per reading.
        segment_len: tokens T that are read at a time.
    """
    assert firsts.min() >= context and firsts.max() + block <= len(tokens)
    n_token = context + block - 1
    tables, found = Tables(), np.zeros((len(firsts), block), dtype=np.float32)
    lanes = max(1, TOKENS_AT_ONCE // min(n_token, segment_len))
    for start in range(0, len(firsts), lanes):
        part = firsts[start : start + lanes, None] - context + np.arange(n_token + 1)  # (B, n_token + 1)
        window = torch.from_numpy(np.asarray(tokens[part]).astype(np.int64)).to(model.device)
        found[start : start + lanes] = _last_losses(model, window, block, segment_len, tables)
    return found


def _last_losses(model: TransformerXL, window_BN: Tensor, block: int, segment_len: int, tables: Tables) -> Nats:
    """(B, block) losses of the last targets of each lane, whose memory is fresh."""
    inputs, targets = window_BN[:, :-1], window_BN[:, 1:]
    state, losses = model.init_state(len(window_BN), form="projected"), []
    n_token = inputs.shape[1]
    for start in range(0, n_token, segment_len):
        end = min(start + segment_len, n_token)
        scored = targets[:, start:end] if end > n_token - block else None
        out = model(
            inputs[:, start:end], state, _segment(inputs[:, start:end], first=start == 0), scored, tables=tables
        )
        state = out.state
        losses += [] if out.losses_BT is None else [out.losses_BT]
    return np.asarray(torch.cat(losses, dim=1)[:, -block:].float().cpu().numpy())


def _segment(tokens_BT: Tensor, *, first: bool) -> Segment:
    whole = Segment.full(tokens_BT)
    return whole._replace(reset=torch.full_like(whole.reset, first))


def _lanes_of(config: Config, tokens: Tokens, *, separator: int | None) -> LaneLoader:
    """As the datamodule's lanes of evaluation; segments are no longer than the longest lane."""
    lanes = used_lanes(len(tokens), lanes=config.eval_batch_size, segment_len=config.eval_segment_len)
    segment_len = min(config.eval_segment_len, -(-(len(tokens) - 1) // lanes))
    at_once = segments_at_once(config, lanes=lanes, segment_len=segment_len)
    whole = (len(tokens) - 1) % (lanes * segment_len) == 0
    begin = whole and config.data.documents_begin_segments(lanes=lanes, segment_len=segment_len)
    return LaneLoader(
        tokens,
        segment_len=segment_len,
        lanes=lanes,
        used_lanes=lanes,
        reset=config.memory.reset,
        separator=separator,
        inner_documents=not begin,
        group=at_once if at_once > 1 else 0,
        key=config.eval_batch_key,
    )


def _read(reader: Reader, batches: list[Batch], state: State) -> tuple[Tensor, State]:
    if len(batches) == 1:
        return reader.read(batches[0], state)
    out = reader.model.read_by_layers(
        torch.cat([batch.tokens_BT for batch in batches], dim=1),
        state,
        [batch.segment for batch in batches],
        torch.cat([batch.targets_BT for batch in batches], dim=1),
        tables=reader.tables,
    )
    assert out.losses_BT is not None
    return out.losses_BT, out.state


def _anew(batch: Batch) -> Batch:
    return batch._replace(segment=batch.segment._replace(reset=torch.ones_like(batch.segment.reset)))


def _ages(batch: Batch, before_B: Counts) -> Counts:
    """(B, T) tokens read since the lane last started anew, this one included."""
    n_token = batch.tokens_BT.shape[1]
    reset_B, document = batch.segment.reset.cpu().numpy(), batch.segment.document
    count = np.where(reset_B, 0, before_B)[:, None] + np.arange(1, n_token + 1)
    if document is None:
        return np.asarray(count)
    begins = np.diff(document.cpu().numpy(), axis=1, prepend=document[:, :1].cpu().numpy()) > 0
    at_begin = np.maximum.accumulate(np.where(begins, count - 1, 0), axis=1)
    return np.asarray(count - at_begin)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The same segment with its tensors on a device."""
    segment = batch.segment
    document = None if segment.document is None else segment.document.to(device)
    moved = segment._replace(reset=segment.reset.to(device), length=segment.length.to(device), document=document)
    return batch._replace(tokens_BT=batch.tokens_BT.to(device), targets_BT=batch.targets_BT.to(device), segment=moved)


def pieces_of(vocab: Any, tokens: Tokens) -> Iterator[str]:
    """The text of each token; together they are the text. What is not yet a whole character waits for a later token."""
    held: str | None = None
    given = vocab.stream(tokens)
    for _ in range(len(tokens)):
        if held is not None:
            yield held
        held = next(given, "")
    if held is not None:
        yield held + "".join(given)
