"""The corpus `selective_copy`: made up, symbols scattered in noise and to be repeated in their order.

An episode is `segments` segments: `symbols` values at random places in noise, the key k0, the same values in order,
each an answer, and `end`. Gu & Dao 2023, arXiv:2312.00752, appendix E, cut into segments (theirs: 4,096 tokens and 16
symbols out of 14 values, so 16 segments of 256).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.episodes import Episodes, EpisodesConfig, RecallVocab, place
from txl_lightning.data.vocab import Tokens


@dataclass(frozen=True, kw_only=True)
class SelectiveCopyConfig(EpisodesConfig):
    """Keys of `data=selective_copy`."""

    kept: ClassVar[tuple[str, ...]] = ("segments", "symbols")

    name: str = key("selective_copy", "made-up symbols in noise, to be repeated in their order")
    segments: int = key(4, "segments of an episode", minimum=1)
    symbols: int = key(4, "values to be repeated", minimum=1)

    def check(self) -> None:
        needed = 2 * self.symbols + 2
        if needed > self.episode_len:
            rule = f"{self.symbols} symbols twice, a key and end need {needed} tokens, and an episode has "
            cure = f"set it to {-(-needed // self.segment_len)} or more"
            raise self.refuse("segments", rule + str(self.episode_len), cure)
        super().check()

    @property
    def n_segment(self) -> int:
        return self.segments

    @property
    def n_answer(self) -> int:
        return self.symbols

    @property
    def answer_from(self) -> int:
        return self.episode_len - 1 - self.symbols

    @property
    def vocab(self) -> RecallVocab:
        return RecallVocab(fillers=1, keys=1, values=self.values)


@registry.corpora.register("selective_copy", config=SelectiveCopyConfig)
class SelectiveCopy(Episodes):
    """Symbols in noise, and the symbols alone."""

    Config = SelectiveCopyConfig
    name: ClassVar[str] = "selective_copy"
    config: SelectiveCopyConfig

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        keys, vocab = self.config, self.vocab
        text = np.full((count, keys.episode_len), vocab.fillers.start)
        values = rng.integers(vocab.values.start, vocab.values.stop, (count, keys.symbols))
        place(text[:, : keys.answer_from - 1], values[..., None], rng)
        text[:, keys.answer_from - 1] = vocab.keys.start
        text[:, keys.answer_from : -1] = values
        text[:, -1] = vocab.separator
        return text.astype(vocab.dtype)
