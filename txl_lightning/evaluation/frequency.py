"""What memory gains for rare words and for frequent ones.

A word's frequency is how often it stands in the training split. With a vocabulary of words each target is a word;
elsewhere words are what stands between white space, and a word's loss is the sum over its tokens, the white space in
front of it included. The gain is that of the same weights over memory that starts anew with each segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from txl_lightning.data.vocab import Tokens, Vocab
from txl_lightning.evaluation.losses import Losses, pieces_of


class Word(NamedTuple):
    """A word and its tokens, from first up to and without end."""

    text: str
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Words that stand least to most times in the training split; losses in nats per word."""

    least: int
    most: int
    words: int
    loss: float
    loss_without: float
    ppl_change: float  # e^(loss - loss_without) - 1: -0.2 is a fifth less


@dataclass(frozen=True, kw_only=True)
class ByFrequency:
    """All buckets that hold words, and what they depend on."""

    buckets: list[Bucket]
    words: int
    segment_len: int
    memory: dict[str, Any]
    split: str
    data_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def words_of(tokens: Tokens, vocab: Vocab) -> Iterator[Word]:
    """The words of a text in their order."""
    if vocab.unit == "word":
        for index, piece in enumerate(pieces_of(vocab, tokens)):
            yield Word(piece.strip() or "\n", index, index + 1)
        return
    text, first, end = "", 0, 0
    for index, piece in enumerate(pieces_of(vocab, tokens)):
        begins = text.strip() and (piece[:1].isspace() or text[-1:].isspace())
        if begins:
            yield Word(text.strip(), first, index)
            text, first = "", index
        text, end = text + piece, index + 1
    if text.strip():
        yield Word(text.strip(), first, end)


def count_words(tokens: Tokens, vocab: Vocab) -> Counter[str]:
    """How often each word stands in a text."""
    return Counter(word.text for word in words_of(tokens, vocab))


def by_frequency(tokens: Tokens, vocab: Vocab, counts: Mapping[str, int], *, own: Losses, cold: Losses) -> list[Bucket]:
    """Means by frequency: 0, 1-9, 10-99, 100-999, ...

    Args:
        tokens: (N,) ids of the text that was read.
        vocab: what they stand for.
        counts: of words in the training split.
        own, cold: its losses with memory, and without.
    """
    ends = np.concatenate([[0.0], np.cumsum(own.nats, dtype=np.float64)])
    cold_ends = np.concatenate([[0.0], np.cumsum(cold.nats, dtype=np.float64)])
    sums: dict[int, list[float]] = {}
    for word in words_of(tokens, vocab):
        if word.first == 0:  # nothing scores the first token
            continue
        size = len(str(counts[word.text])) if counts.get(word.text) else 0
        total = sums.setdefault(size, [0, 0.0, 0.0])
        total[0] += 1
        total[1] += ends[word.end - 1] - ends[word.first - 1]
        total[2] += cold_ends[word.end - 1] - cold_ends[word.first - 1]
    return [_bucket(size, *sums[size]) for size in sorted(sums)]


def _bucket(size: int, words: float, loss: float, cold: float) -> Bucket:
    return Bucket(
        least=10 ** (size - 1) if size else 0,
        most=10**size - 1,
        words=int(words),
        loss=loss / words,
        loss_without=cold / words,
        ppl_change=float(np.expm1((loss - cold) / words)),
    )
