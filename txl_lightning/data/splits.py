"""Cutting one token stream into train, valid and test by ratios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

SPLITS = ("train", "valid", "test")

FEW = 20
"""With fewer documents than this, whole ones cannot follow the ratios: the stream is cut anywhere."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One split: tokens start <= position < end of the stream."""

    start: int
    end: int
    documents: int  # whole ones, or with a byte cut also those of which it holds a part
    separators: int


def cut_at_documents(
    ends: Iterable[npt.NDArray[Any]], *, n_document: int, n_token: int, ratios: Sequence[float]
) -> dict[str, Piece]:
    """Each cut is the first end of a document at or after its share of tokens; no wanted split stays empty.

    Args:
        ends: positions just behind each document's separator, ascending, in arrays of any size.
        n_document, n_token: of the whole stream.
        ratios: shares of train, valid and test; they sum to 1.
    """
    wanted = [name for name, ratio in zip(SPLITS, ratios, strict=True) if ratio > 0]
    shares = list(accumulate(ratio for ratio in ratios if ratio > 0))
    cuts: list[tuple[int, int]] = [(0, 0)]  # (documents, tokens) before the cut
    seen = 0
    for array in ends:
        if len(cuts) == len(wanted):
            break
        while len(cuts) < len(wanted):
            lowest = cuts[-1][0]  # index of the first document this split may end with
            highest = n_document - (len(wanted) - len(cuts)) - 1
            nearest = int(np.searchsorted(array, shares[len(cuts) - 1] * n_token))
            index = min(max(nearest, lowest - seen), highest - seen)
            if index >= len(array):
                break
            cuts.append((seen + index + 1, int(array[index])))
        seen += len(array)
    cuts.append((n_document, n_token))
    return {
        name: Piece(start=cuts[i][1], end=cuts[i + 1][1], documents=count, separators=count)
        for i, name in enumerate(wanted)
        if (count := cuts[i + 1][0] - cuts[i][0])
    }


def cut_at_bytes(ends: npt.NDArray[Any], *, n_token: int, ratios: Sequence[float]) -> dict[str, Piece]:
    """Each cut is at its share of tokens, wherever that falls. A split of one token, which could not be scored, goes to
    the split before it.

    Args:
        ends: positions just behind each document's separator, ascending.
        n_token: of the whole stream.
        ratios: shares of train, valid and test; they sum to 1.
    """
    cuts = [0]
    for i, share in enumerate(accumulate(ratios)):
        cuts.append(round(share * n_token) if any(ratios[i + 1 :]) else n_token)
    for i in (3, 2):
        if cuts[i] - cuts[i - 1] == 1:
            cuts[i - 1] = cuts[i]
    pieces = {}
    for name, start, end in zip(SPLITS, cuts, cuts[1:], strict=False):
        if end > start:
            closed = np.searchsorted(ends, [start, end], side="right")  # documents that end by then
            open_at_end = int(np.searchsorted(ends, end) == closed[1])
            separators = int(closed[1] - closed[0])
            pieces[name] = Piece(start=start, end=end, documents=separators + open_at_end, separators=separators)
    return pieces
