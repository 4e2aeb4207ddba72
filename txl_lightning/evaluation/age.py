"""Loss by the age of the context: tokens that were read since memory started anew.

A fixed cohort: only documents that reach into the oldest bucket, so that every document is in every bucket and buckets
differ by nothing but age. The same weights read each segment three times: with their memory, with memory that starts
anew, and with the memory of the neighbouring lane. The last says whether memory's content helps, or that there is some.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl_lightning.config import Config
from txl_lightning.data.vocab import Tokens
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment, State

WAYS = ("own", "anew", "swapped")


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Targets after first ... last tokens; means in nats, differences with their standard error over documents."""

    first: int
    last: int
    loss: float
    benefit: float  # loss with memory that starts anew minus loss
    benefit_error: float
    content: float  # loss with the neighbour's memory minus loss
    content_error: float


@dataclass(frozen=True, kw_only=True)
class ByAge:
    """All buckets, and what they depend on."""

    buckets: list[Bucket]
    documents: int
    cut: bool  # the text is one document, and was cut into pieces
    segment_len: int
    memory: dict[str, Any]
    split: str
    data_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def cohort_of(tokens: Tokens, *, longest: int, separator: int | None) -> tuple[npt.NDArray[np.int64], bool]:
    """(documents, longest) the start of every document that has so many tokens, and whether the text had to be cut.

    A text of a single document is cut into pieces that follow one another.
    """
    ends = np.flatnonzero(np.asarray(tokens[:-1]) == separator) + 1 if separator is not None else np.empty(0, int)
    cut = len(ends) == 0
    starts = np.arange(0, len(tokens), longest) if cut else np.concatenate([[0], ends])
    room = np.diff(np.append(starts, len(tokens)))
    chosen = starts[room >= longest]
    return np.asarray(tokens)[chosen[:, None] + np.arange(longest)].astype(np.int64), cut


@torch.no_grad()
def cohort_losses(
    model: TransformerXL, text_BN: npt.NDArray[np.int64], *, segment_len: int, lanes: int
) -> dict[str, npt.NDArray[np.float32]]:
    """(documents, N - 1) losses by way of reading.

    Args:
        model: in evaluation mode.
        text_BN: (documents, N) two documents at least, each a lane.
        segment_len: tokens T.
        lanes: documents read side by side, about.
    """
    parts = np.array_split(text_BN, -(-len(text_BN) // max(2, lanes)))
    found = [_read(model, torch.from_numpy(part).to(model.device), segment_len=segment_len) for part in parts]
    return {way: np.concatenate([part[way] for part in found]) for way in WAYS}


def _read(model: TransformerXL, text_BN: Tensor, *, segment_len: int) -> dict[str, npt.NDArray[np.float32]]:
    inputs, targets = text_BN[:, :-1], text_BN[:, 1:]
    fresh = model.init_state(len(text_BN), form="projected")
    state, tables = fresh, Tables()
    losses: dict[str, list[Tensor]] = {way: [] for way in WAYS}
    for start in range(0, inputs.shape[1], segment_len):
        read = inputs[:, start : start + segment_len]
        starts = torch.full((len(read),), True, device=read.device)
        goes_on = Segment.full(read)
        begins = goes_on._replace(reset=starts)
        first = start == 0
        ways: dict[str, tuple[State, Segment]] = {
            "own": (state, begins if first else goes_on),
            "anew": (fresh, begins),
            "swapped": ({name: part.roll(1, 0) for name, part in state.items()}, begins if first else goes_on),
        }
        for way, (given, segment) in ways.items():
            out = model(read, given, segment, targets[:, start : start + segment_len], tables=tables)
            losses[way].append(out.losses_BT)
            state = out.state if way == "own" else state
    return {way: torch.cat(parts, dim=1).float().cpu().numpy() for way, parts in losses.items()}


def measure_by_age(
    config: Config,
    model: TransformerXL,
    text_BN: npt.NDArray[np.int64],
    *,
    cut: bool,
    split: str,
    data_fingerprint: str,
) -> ByAge:
    """Read a cohort and take means in buckets of ages 1, 2-3, 4-7, ...

    Args:
        config: lanes and segments.
        model: in evaluation mode.
        text_BN: (documents, N), from `cohort_of`; N a power of two.
        cut: whether they are pieces of one document.
        split: what the text is, for the result.
        data_fingerprint: the same.
    """
    losses = cohort_losses(model, text_BN, segment_len=config.eval_segment_len, lanes=config.eval_batch_size)
    edges = [2**k for k in range(text_BN.shape[1].bit_length())]
    return ByAge(
        buckets=[_bucket(losses, first=first, end=end) for first, end in pairwise(edges)],
        documents=len(text_BN),
        cut=cut,
        segment_len=config.eval_segment_len,
        memory=config.memory.to_dict(),
        split=split,
        data_fingerprint=data_fingerprint,
    )


def _bucket(losses: dict[str, npt.NDArray[np.float32]], *, first: int, end: int) -> Bucket:
    """The target after `a` tokens stands at a - 1."""
    own, anew, swapped = (losses[way][:, first - 1 : end - 1].mean(axis=1, dtype=np.float64) for way in WAYS)
    n = len(own)
    return Bucket(
        first=first,
        last=end - 1,
        loss=float(own.mean()),
        benefit=float((anew - own).mean()),
        benefit_error=float((anew - own).std(ddof=1) / n**0.5),
        content=float((swapped - own).mean()),
        content_error=float((swapped - own).std(ddof=1) / n**0.5),
    )
