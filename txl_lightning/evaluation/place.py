"""Loss by position in the segment, with the memory and without it: the same weights whose memory starts anew with each.

The first tokens of a segment have no context but memory. What they lose without it is context fragmentation
(Dai et al. 2019, arXiv:1901.02860, section 3.1).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from txl_lightning.config import Config
from txl_lightning.data.vocab import Tokens
from txl_lightning.evaluation.losses import Losses, stretch_losses
from txl_lightning.model.transformer import TransformerXL


@dataclass(frozen=True, kw_only=True)
class ByPlace:
    """Mean losses at each place of a segment, in nats."""

    place: list[int]  # tokens of the segment that were read, from 1
    n_target: list[int]
    loss: list[float]
    loss_without: list[float]  # memory starts anew with each segment
    mean: float
    mean_without: float
    segment_len: int
    memory: dict[str, Any]
    split: str
    data_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def both_ways(config: Config, model: TransformerXL, tokens: Tokens, *, separator: int | None) -> tuple[Losses, Losses]:
    """Losses of the same targets with the memory and without it."""
    return (
        stretch_losses(config, model, tokens, separator=separator),
        stretch_losses(config, model, tokens, separator=separator, anew=True),
    )


def measure_by_place(
    config: Config, model: TransformerXL, tokens: Tokens, *, separator: int | None, split: str, data_fingerprint: str
) -> ByPlace:
    """Read a text twice and take means over its segments.

    Args:
        config: lanes and segments.
        model: in evaluation mode.
        tokens: (N,) ids.
        separator: the id that ends a document; needed with memory.reset=document.
        split: what the text is, for the result.
        data_fingerprint: the same.
    """
    own, cold = both_ways(config, model, tokens, separator=separator)
    count = np.bincount(own.place)[1:]
    means = [np.bincount(own.place, weights=losses.nats)[1:] / count for losses in (own, cold)]
    return ByPlace(
        place=list(range(1, len(count) + 1)),
        n_target=count.tolist(),
        loss=means[0].tolist(),
        loss_without=means[1].tolist(),
        mean=float(own.nats.mean(dtype=np.float64)),
        mean_without=float(cold.nats.mean(dtype=np.float64)),
        segment_len=config.eval_segment_len,
        memory=config.memory.to_dict(),
        split=split,
        data_fingerprint=data_fingerprint,
    )
