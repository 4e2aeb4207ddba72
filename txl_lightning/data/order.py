"""The order of training: documents or lines of a stream in a new order each epoch, and segments of varying length.

Both follow from (seed, epoch) alone, so every rank, worker process and resumed run finds the same. They are drawn from
numpy's raw bit streams, which its versions keep (what `Generator.permutation` makes of them may change).

A shuffled stream has the same N tokens as the corpus, each once: its units one behind the other. Only the first token
of the first unit is no target. Nothing is copied: an index of the units says where each position is on disk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from txl_lightning.data.vocab import ByteVocab, SymbolVocab, Tokens, Vocab, WordVocab
from txl_lightning.errors import ConfigError

CHUNK = 2**22  # tokens looked at in one go

NEWLINE = 10
BOTH_SIDES = "<S>"  # the marker that may stand before and behind a sentence

SHORTEST = 5  # tokens of a segment, as in the authors' variable-length iterator
HALVED = 0.05  # share of segments that are drawn around half the length, likewise

Counts = npt.NDArray[np.int64]
Borders = npt.NDArray[Any]
"""(units + 1,) ascending positions, 0 and N among them: unit i is tokens borders[i] <= position < borders[i + 1]."""


def check_unit(vocab: Vocab, *, unit: str, n_document: int) -> None:
    """Raise ConfigError unless tokens of this vocabulary tell where such units end and there are several.

    Args:
        vocab: of the corpus.
        unit: "document" or "line".
        n_document: documents of the training split.
    """
    _marks(vocab, unit)
    if unit == "document" and n_document < 2:
        raise _alone(unit)


def units_of(tokens: Tokens, vocab: Vocab, *, unit: str) -> Borders:
    """Where the documents or lines of a stream lie.

    A line ends with its newline or end-of-line token; a separator behind that belongs to it, any other ends a line too.

    Raises:
        ConfigError: the vocabulary does not tell where they end, or there is but one.
    """
    ends, joined = _marks(vocab, unit)
    borders = find_units(tokens, ends=ends, joined=joined, paired=_opens_lines(tokens, vocab))
    if len(borders) <= 2:
        raise _alone(unit)
    return borders


def _marks(vocab: Vocab, unit: str) -> tuple[tuple[int, ...], int | None]:
    """Ids that end a unit, and which of them joins a unit that has just ended."""
    separator = getattr(vocab, "separator", None)
    if unit == "document" and separator is not None:
        return (separator,), None
    if unit == "line" and isinstance(vocab, ByteVocab):
        return (NEWLINE, vocab.separator), vocab.separator
    if unit == "line" and isinstance(vocab, SymbolVocab) and vocab.table[NEWLINE] >= 0:
        return (int(vocab.table[NEWLINE]),), None
    if unit == "line" and isinstance(vocab, WordVocab):
        return (vocab.ids[vocab.end],), None
    raise _refusal(unit, f"the vocabulary {vocab.name} of this corpus does not tell where a {unit} ends")


def _opens_lines(tokens: Tokens, vocab: Vocab) -> bool:
    """Whether the marker that ends a sentence also stands before each, as in lm1b by the authors' TensorFlow code."""
    if not isinstance(vocab, WordVocab) or vocab.end != BOTH_SIDES:
        return False
    marks = np.flatnonzero(np.asarray(tokens[:CHUNK]) == vocab.ids[vocab.end])
    return len(marks) > 2 and marks[0] == 0 and marks[2] == marks[1] + 1


def _alone(unit: str) -> ConfigError:
    return _refusal(unit, f"the training split is a single {unit}: there is nothing to shuffle")


def _refusal(unit: str, rule: str) -> ConfigError:
    other = "line" if unit == "document" else "document"
    return ConfigError("data.shuffle", unit, rule, f"set data.shuffle=none, or data.shuffle={other} if it has those")


def find_units(tokens: Tokens, *, ends: tuple[int, ...], joined: int | None = None, paired: bool = False) -> Borders:
    """Where the units of a stream lie; one pass over it, a chunk at a time.

    Args:
        tokens: (N,) ids.
        ends: ids after which a unit ends; what follows the last of them is a unit too.
        joined: one of `ends` that stays with another of them right before it, a separator behind a newline say.
        paired: every other end opens a unit instead, the first one too.
    """
    found: list[Borders] = []
    dtype = np.uint32 if len(tokens) < 2**32 else np.int64
    for start in range(0, len(tokens), CHUNK):
        chunk = np.asarray(tokens[start : start + CHUNK + 1])  # and the token after it
        closes = np.isin(chunk, ends)
        if joined is not None:
            closes[:-1] &= (chunk[1:] != joined) | (chunk[:-1] == joined)
        found.append((np.flatnonzero(closes[:CHUNK]) + (start + 1)).astype(dtype))
    inner = np.concatenate(found)[int(paired) :: 1 + int(paired)]
    inner = np.concatenate([np.zeros(1, dtype), inner])
    return inner if inner[-1] == len(tokens) else np.append(inner, np.array(len(tokens), dtype))


class Shuffled:
    """One epoch's order of the units: where each position of the shuffled stream is in the stream on disk."""

    def __init__(self, borders: Borders, *, seed: int, epoch: int) -> None:
        order = np.argsort(_raw(len(borders) - 1, seed, epoch, 0), kind="stable")
        if borders[1] == 1:  # a lone mark that opens the stream stays where it is, the first <S> of lm1b say
            order = np.concatenate(([0], order[order > 0]))
        self._ends = np.cumsum(np.diff(borders)[order], dtype=borders.dtype)  # of the units as they are read
        begins = np.concatenate(([0], self._ends[:-1]))
        self._shift = borders[:-1][order].astype(np.int64) - begins.astype(np.int64)

    def locate(self, positions: Counts) -> Counts:
        """Positions on disk of positions in the shuffled stream; any shape."""
        # in the type of the index, or numpy would convert all of it
        unit = np.searchsorted(self._ends, positions.astype(self._ends.dtype), side="right")
        return positions + self._shift[unit]


@lru_cache(maxsize=4)
def segment_borders(*, total: int, longest: int, std: float, seed: int, epoch: int) -> Counts:
    """(segments + 1,) ascending offsets 0..total that cut the longest lane into segments of varying length.

    Each length is drawn around `longest` (in one of twenty cases around half of it) and clipped to 5..longest, as in
    the authors' variable-length training. The lengths are drawn once from the seed and come in another order each
    epoch, so that all epochs have equally many segments.

    Args:
        total: tokens of the longest lane.
        longest: tokens of the longest segment.
        std: standard deviation in tokens before clipping.
        seed, epoch: what the order follows from.
    """
    lengths = _lengths(total=total, longest=longest, std=std, seed=seed)
    order = np.argsort(_raw(len(lengths), seed, epoch, 1), kind="stable")
    return np.concatenate(([0], np.cumsum(lengths[order])))


def _lengths(*, total: int, longest: int, std: float, seed: int) -> Counts:
    """Lengths that sum to `total`; the last one takes what is left."""
    block = total // longest + 16
    drawn = np.empty(0, dtype=np.int64)
    while drawn.sum() < total:
        kind, first, second = _uniform(3 * block, seed, len(drawn), 2).reshape(3, block)
        normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)  # Box-Muller
        mean = np.where(kind < HALVED, longest / 2, longest)
        fresh = np.clip((mean + std * normal).astype(np.int64), min(SHORTEST, longest), longest)
        drawn = np.concatenate([drawn, fresh])
    ends = np.cumsum(drawn)
    count = int(np.searchsorted(ends, total)) + 1
    lengths = drawn[:count].copy()
    lengths[-1] -= ends[count - 1] - total
    return lengths


def _raw(count: int, *entropy: int) -> npt.NDArray[np.uint64]:
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)


def _uniform(count: int, *entropy: int) -> npt.NDArray[np.float64]:
    """Numbers 0 <= x < 1."""
    return (_raw(count, *entropy) >> np.uint64(11)).astype(np.float64) * 2.0**-53
