"""How sure a score is: bootstrap over documents.

Documents are drawn with replacement, as many as there are, and the mean loss of what was drawn is taken anew; the
middle 95 % of these means are the interval. Scores of several settings are drawn together, so that their difference has
an interval of its own, which is narrower. A text of few documents is cut into pieces that stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from txl_lightning.data.vocab import Tokens

LEAST, PIECE = 20, 1000
"""With fewer documents than the first, pieces of so many targets stand for them, or shorter ones to make so many."""

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Nats per token; the loss, or how much it lies above that of the first setting."""

    low: float
    high: float
    units: int  # documents or pieces
    cut: bool  # they are pieces
    resamples: int
    level: float = LEVEL

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def units_of(tokens: Tokens, *, separator: int | None) -> tuple[npt.NDArray[np.int64], bool]:
    """(N - 1,) the document of each target, counted from 0, and whether pieces stand for documents.

    A separator is the last target of its document.
    """
    ended = np.asarray(tokens[:-1]) == separator if separator is not None else np.zeros(len(tokens) - 1, dtype=bool)
    document = np.cumsum(ended)
    if document[-1] - document[0] + 1 >= LEAST:
        return document - document[0], False
    n_target = len(tokens) - 1
    return np.arange(n_target) // max(1, min(PIECE, n_target // LEAST)), True


def intervals(
    nats: Sequence[npt.NDArray[Any]], unit_N: npt.NDArray[np.int64], *, cut: bool, resamples: int, seed: int
) -> tuple[list[Interval], list[Interval]]:
    """The interval of each setting's mean loss, and of its difference to the first setting's.

    Args:
        nats: per setting (N - 1,) losses of the same targets.
        unit_N: the document of each target.
        cut: whether these are pieces.
        resamples: how often is drawn.
        seed: what is drawn.
    """
    count = np.bincount(unit_N)
    sums = np.stack([np.bincount(unit_N, weights=one) for one in nats])  # (settings, documents)
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, len(sums)))
    for row in range(resamples):
        drawn = rng.integers(len(count), size=len(count))
        means[row] = sums[:, drawn].sum(axis=1) / count[drawn].sum()
    edges = [50 * (1 - LEVEL), 50 * (1 + LEVEL)]

    def of(values: npt.NDArray[Any]) -> Interval:
        low, high = np.percentile(values, edges)
        return Interval(low=float(low), high=float(high), units=len(count), cut=cut, resamples=resamples)

    return [of(column) for column in means.T], [of(column - means[:, 0]) for column in means.T]
