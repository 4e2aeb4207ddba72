"""The corpus `recall`: made up, to see what a memory keeps. Pairs are shown, and asked for segments later.

An episode is distance + 1 segments of segment_len tokens T, all random (`data.draw` says which):

    first segment   each pair `shows` times, in a new order each time: key value ... key value ...
    in between      fillers only
    last segment    each pair once more, in a new order; after a key its value is the answer
    last token      `end`, which closes the episode

Places are random; between pairs stand fillers, drawn from symbols of their own. Keys of an episode differ from one
another, values are drawn independently, so who remembers nothing is right in one of `values` answers.

A split holds episodes * (distance + 1) * T + 1 tokens, so that lanes begin where episodes do and segments where
segments do. After Arora et al. 2023, arXiv:2312.04927 (MQAR), cut into segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.episodes import Episodes, EpisodesConfig, RecallVocab, place, shuffled
from txl_lightning.data.vocab import Tokens

__all__ = ["Recall", "RecallConfig", "RecallVocab"]


@dataclass(frozen=True, kw_only=True)
class RecallConfig(EpisodesConfig):
    """Keys of `data=recall`."""

    kept: ClassVar[tuple[str, ...]] = ("distance", "pairs", "shows")

    name: str = key("recall", "made-up pairs of key and value, asked for some segments later")
    distance: int = key(4, "segments from where pairs are shown to where they are asked for", minimum=1)
    pairs: int = key(2, "pairs of an episode", minimum=1)
    shows: int = key(2, "times each pair is shown in the first segment", minimum=1)
    keys: int = key(8, "different keys there are", minimum=1)
    fillers: int = key(4, "different symbols that fill the rest", minimum=1)

    def check(self) -> None:
        needed = max(2 * self.pairs * self.shows, 2 * self.pairs + 1)
        if needed > self.segment_len:
            rule = f"{self.pairs} pairs shown {self.shows} times need a segment of {needed} tokens"
            raise self.refuse("segment_len", rule, f"set it to {needed} or more, or lower data.pairs or data.shows")
        if self.pairs > self.keys:
            raise self.refuse("pairs", f"must be <= data.keys={self.keys}: keys of an episode differ", "raise that")
        super().check()

    @property
    def n_segment(self) -> int:
        return self.distance + 1

    @property
    def n_answer(self) -> int:
        return self.pairs

    @property
    def answer_from(self) -> int:
        return self.distance * self.segment_len

    @property
    def vocab(self) -> RecallVocab:
        return RecallVocab(fillers=self.fillers, keys=self.keys, values=self.values)


@registry.corpora.register("recall", config=RecallConfig)
class Recall(Episodes):
    """Pairs, fillers, and the pairs again."""

    Config = RecallConfig
    name: ClassVar[str] = "recall"
    config: RecallConfig

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        keys = self.config
        fillers = self.vocab.fillers
        text = rng.integers(fillers.start, fillers.stop, (count, keys.distance + 1, keys.segment_len))
        chosen = rng.random((count, keys.keys)).argsort(axis=1)[:, : keys.pairs] + self.vocab.keys.start
        values = rng.integers(self.vocab.values.start, self.vocab.values.stop, chosen.shape)
        pairs = np.stack([chosen, values], axis=2)  # (count, pairs, 2)
        shown = np.concatenate([shuffled(pairs, rng) for _ in range(keys.shows)], axis=1)
        place(text[:, 0], shown, rng)
        place(text[:, -1, :-1], shuffled(pairs, rng), rng)
        text[:, -1, -1] = self.vocab.separator
        return text.reshape(count, -1).astype(self.vocab.dtype)
