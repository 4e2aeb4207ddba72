"""How sure a mean loss is: the bootstrap over documents (Efron 1979; paired over models, as Koehn 2004, W04-3250).

Losses of one document go together, so documents are drawn, with replacement, as many as there are; a draw's score is
the sum of its losses by the number of its targets. The interval holds the middle share of all draws' scores. Models
that scored the same text share the draws, and what is measured is their difference, whose interval is much smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from txl_lightning.data.vocab import Tokens

Nats = npt.NDArray[np.float64]

BLOCK = 1000
"""Tokens of a piece where the text has too few documents to be drawn from."""

FEWEST = 20
"""Documents there must be, else pieces are drawn."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and the interval around it, in nats per token."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Units:
    """What is drawn.

    Attributes:
        unit_N: (N - 1,) the number of each target's unit, rising.
        name: "document" or "piece".
        count: how many there are.
    """

    unit_N: npt.NDArray[np.int64]
    name: str
    count: int


def units_of(tokens: Tokens, *, separator: int | None) -> Units:
    """Documents, whose ends the separator marks (its own loss counts to the document it ends); else pieces of `BLOCK`.

    Args:
        tokens: (N,) ids; targets are all but the first.
        separator: the id that ends a document; None: there is none.
    """
    targets = np.asarray(tokens[1:])
    if separator is not None:
        ended = np.cumsum(targets == separator)
        document = np.concatenate([[0], ended[:-1]])
        if document[-1] + 1 >= FEWEST:
            return Units(unit_N=document, name="document", count=int(document[-1]) + 1)
    piece = np.arange(len(targets)) // BLOCK
    return Units(unit_N=piece, name="piece", count=int(piece[-1]) + 1)


def draw(units: Units, *, samples: int, seed: int) -> npt.NDArray[np.float64]:
    """(samples, units) how often each unit is in each draw."""
    share = np.full(units.count, 1 / units.count)
    return np.random.default_rng(seed).multinomial(units.count, share, size=samples).astype(np.float64)


def interval(nats: Nats, units: Units, draws: npt.NDArray[np.float64], *, level: float = 0.95) -> Interval:
    """The mean loss and the interval that holds a share `level` of the draws.

    Args:
        nats: (N - 1,) losses of the targets, or differences of losses.
        units: what was drawn.
        draws: (samples, units) from `draw`.
        level: 0 to 1.
    """
    sums = np.bincount(units.unit_N, weights=nats, minlength=units.count)
    counts = np.bincount(units.unit_N, minlength=units.count)
    scores = (draws @ sums) / (draws @ counts)
    low, high = np.quantile(scores, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=float(nats.mean()), low=float(low), high=float(high))
