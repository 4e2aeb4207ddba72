"""The corpus `passkey`: made up, a key and its value hidden in noise and asked for at the end.

An episode is `segments` segments of noise with `needles` needles in it, each a key and `value_len` values, at random
places (or the one needle at `depth`). At its end stand `queries` of the needles again, where each value is an answer,
and `end`. Needles that are not asked for distract. Noise, keys and values have symbols of their own; keys of an episode
differ, values are drawn independently: who remembers nothing is right in one of `values`, and has a whole needle in one
of values^value_len.

The passkey of Mohtashami & Jaggi 2023, arXiv:2305.16300, for models too small to read its text.
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
class PasskeyConfig(EpisodesConfig):
    """Keys of `data=passkey`."""

    kept: ClassVar[tuple[str, ...]] = ("segments", "needles", "queries", "value_len", "depth")

    name: str = key("passkey", "a made-up key and value hidden in noise, asked for at the end")
    segments: int = key(4, "segments of an episode", minimum=1)
    needles: int = key(1, "keys with a value that are hidden; those that are not asked for distract", minimum=1)
    queries: int = key(1, "needles that are asked for", minimum=1)
    value_len: int = key(5, "values that a key has", minimum=1)
    depth: float | None = key(
        None, "where the needle that is asked for stands: 0 first, 1 last; null: anywhere", minimum=0, maximum=1
    )
    keys: int = key(8, "different keys there are", minimum=1)
    fillers: int = key(4, "different symbols that make the noise", minimum=1)

    def check(self) -> None:
        if self.queries > self.needles:
            raise self.refuse("queries", f"must be <= data.needles={self.needles}", "lower it, or raise that")
        if self.needles > self.keys:
            raise self.refuse("needles", f"must be <= data.keys={self.keys}: keys of an episode differ", "raise that")
        if self.depth is not None and self.needles > 1:
            raise self.refuse("depth", f"data.needles={self.needles} stand at random places", "set that to 1")
        needed = (self.needles + self.queries) * self.needle_len + 1
        if needed > self.episode_len:
            rule = f"needles, queries and end need {needed} tokens, and an episode has {self.episode_len}"
            raise self.refuse("segments", rule, f"set it to {-(-needed // self.segment_len)} or more")
        super().check()

    @property
    def needle_len(self) -> int:
        """Tokens of a needle."""
        return 1 + self.value_len

    @property
    def n_segment(self) -> int:
        return self.segments

    @property
    def n_answer(self) -> int:
        return self.queries * self.value_len

    @property
    def answer_from(self) -> int:
        return self.episode_len - 1 - self.queries * self.needle_len

    @property
    def vocab(self) -> RecallVocab:
        return RecallVocab(fillers=self.fillers, keys=self.keys, values=self.values)


@registry.corpora.register("passkey", config=PasskeyConfig)
class Passkey(Episodes):
    """Noise with needles in it, and the questions."""

    Config = PasskeyConfig
    name: ClassVar[str] = "passkey"
    config: PasskeyConfig

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        keys, vocab = self.config, self.vocab
        text = rng.integers(vocab.fillers.start, vocab.fillers.stop, (count, keys.episode_len))
        chosen = rng.random((count, keys.keys)).argsort(axis=1)[:, : keys.needles] + vocab.keys.start
        values = rng.integers(vocab.values.start, vocab.values.stop, (*chosen.shape, keys.value_len))
        needles = np.concatenate([chosen[..., None], values], axis=2)  # (count, needles, 1 + value_len)
        noise = text[:, : keys.answer_from]
        if keys.depth is None:
            place(noise, needles, rng)
        else:
            first = round(keys.depth * (keys.answer_from - keys.needle_len))
            noise[:, first : first + keys.needle_len] = needles[:, 0]
        asked = rng.random((count, keys.needles)).argsort(axis=1)[:, : keys.queries, None]
        text[:, keys.answer_from : -1] = np.take_along_axis(needles, asked, axis=1).reshape(count, -1)
        text[:, -1] = vocab.separator
        return text.astype(vocab.dtype)
