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

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from txl_lightning import registry
from txl_lightning.config import DataConfig, key
from txl_lightning.data.corpora import SPLITS, Scan
from txl_lightning.data.vocab import Tokens, as_text, digest_of, dtype_for, register
from txl_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RecallConfig(DataConfig):
    """Keys of `data=recall`; an episode's size follows from segment_len, which is a part of the text here."""

    name: str = key("recall", "made-up pairs of key and value, asked for some segments later")
    distance: int = key(4, "segments from where pairs are shown to where they are asked for", minimum=1)
    pairs: int = key(2, "pairs of an episode", minimum=1)
    shows: int = key(2, "times each pair is shown in the first segment", minimum=1)
    keys: int = key(8, "different keys there are", minimum=1)
    values: int = key(8, "different values there are: guessing is right in one of so many answers", minimum=2)
    fillers: int = key(4, "different symbols that fill the rest", minimum=1)
    episodes: int = key(32768, "episodes of the training split; a multiple of batch_size", minimum=1)
    test_episodes: int = key(512, "episodes of the valid and of the test split; a multiple of batch_size", minimum=1)
    draw: int = key(0, "which episodes: another number, another text of the same kind", minimum=0)

    def check(self) -> None:
        needed = max(2 * self.pairs * self.shows, 2 * self.pairs + 1)
        if needed > self.segment_len:
            rule = f"{self.pairs} pairs shown {self.shows} times need a segment of {needed} tokens"
            raise self.refuse("segment_len", rule, f"set it to {needed} or more, or lower data.pairs or data.shows")
        if self.pairs > self.keys:
            raise self.refuse("pairs", f"must be <= data.keys={self.keys}: keys of an episode differ", "raise that")
        for name in ("episodes", "test_episodes"):
            if getattr(self, name) % self.batch_size:
                rule = f"must be a multiple of data.batch_size={self.batch_size}, so that lanes begin with an episode"
                raise self.refuse(name, rule, "change one of them")
        if self.shuffle != "none" or self.segment_len_std:
            name = "shuffle" if self.shuffle != "none" else "segment_len_std"
            raise self.refuse(name, "would move pairs across the borders of segments", "leave it out: all is random")

    @property
    def episode_len(self) -> int:
        """Tokens of an episode."""
        return (self.distance + 1) * self.segment_len

    def documents_begin_segments(self, *, lanes: int, segment_len: int) -> bool:
        whole_lanes = self.episodes % lanes == 0 == self.test_episodes % lanes
        return whole_lanes and self.episode_len % segment_len == 0

    @property
    def chance(self) -> float:
        """Share of answers that guessing gets right."""
        return 1 / self.values


@register
class RecallVocab:
    """`end`, fillers f0 f1 ..., keys k0 k1 ..., values v0 v1 ..., in this order.

    Args:
        fillers, keys, values: how many of each there are.
    """

    name: ClassVar[str] = "recall"
    unit: ClassVar[str] = "token"
    separator: ClassVar[int] = 0
    rule: ClassVar[str] = "id 0 ends an episode; then fillers, keys and values"

    def __init__(self, *, fillers: int, keys: int, values: int) -> None:
        self.fillers, self.keys, self.values = (
            range(1, 1 + fillers),
            range(1 + fillers, 1 + fillers + keys),
            range(1 + fillers + keys, 1 + fillers + keys + values),
        )
        spelt = [f"{letter}{i}" for letter, n in (("f", fillers), ("k", keys), ("v", values)) for i in range(n)]
        self.words = ["end", *spelt]
        self.size = len(self.words)
        self.dtype = dtype_for(self.size)

    @property
    def digest(self) -> str:
        return digest_of(self.to_dict())

    def encode(self, text: str | bytes) -> Tokens:
        """(N,) ids of the words between white space. Raises ConfigError: one is none of ours."""
        ids = {word: i for i, word in enumerate(self.words)}
        found = as_text(text).split()
        for word in found:
            if word not in ids:
                cure = f"use end, f0 to {self.words[self.fillers[-1]]}, k0 to {self.words[self.keys[-1]]} and v0 to "
                raise ConfigError("text", word, "is no symbol of this vocabulary", cure + self.words[-1])
        return np.array([ids[word] for word in found], dtype=self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.words[int(token)] for token in ids).replace("end ", "end\n")

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        return (f" {self.words[int(token)]}" for token in ids)

    def to_dict(self) -> dict[str, Any]:
        counts = {"fillers": len(self.fillers), "keys": len(self.keys), "values": len(self.values)}
        return {"name": self.name, **counts}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecallVocab:
        return cls(**{name: int(values[name]) for name in ("fillers", "keys", "values")})


@registry.corpora.register("recall", config=RecallConfig)
class Recall:
    """Random episodes. Each split has a generator of its own, so none depends on the sizes of the others."""

    Config = RecallConfig
    name: ClassVar[str] = "recall"
    rule_version: ClassVar[int] = 1

    def __init__(self, config: RecallConfig) -> None:
        self.config = config
        self.vocab = RecallVocab(fillers=config.fillers, keys=config.keys, values=config.values)

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """There are no sources."""
        return ()

    def scan(self) -> Scan:
        counts = {split: self.config.episodes if split == "train" else self.config.test_episodes for split in SPLITS}
        tokens = {split: n * self.config.episode_len + 1 for split, n in counts.items()}
        names = ("distance", "pairs", "shows", "segment_len", "draw")
        details = {**{name: getattr(self.config, name) for name in names}, "chance": self.config.chance}
        return Scan(
            vocab=self.vocab,
            content=hashlib.sha256(repr((details, counts)).encode()).hexdigest(),
            rule="each drawn by itself",
            documents=counts,
            tokens=tokens,
            bytes={split: n * self.vocab.dtype.itemsize for split, n in tokens.items()},
            details=details,
        )

    def stream(self, scan: Scan) -> Iterator[tuple[str, Tokens]]:
        for number, split in enumerate(SPLITS):
            rng = np.random.default_rng([self.config.draw, number])
            left = scan.documents[split]
            while left:
                count = min(left, 4096)
                yield split, self._episodes(count, rng).ravel()
                left -= count
            yield split, np.zeros(1, dtype=self.vocab.dtype)  # the target of the last input: one more `end`

    def _episodes(self, count: int, rng: np.random.Generator) -> Tokens:
        """(count, episode_len) ids."""
        keys = self.config
        fillers = self.vocab.fillers
        text = rng.integers(fillers.start, fillers.stop, (count, keys.distance + 1, keys.segment_len))
        chosen = rng.random((count, keys.keys)).argsort(axis=1)[:, : keys.pairs] + self.vocab.keys.start
        values = rng.integers(self.vocab.values.start, self.vocab.values.stop, chosen.shape)
        pairs = np.stack([chosen, values], axis=2)  # (count, pairs, 2)
        shown = np.concatenate([_shuffled(pairs, rng) for _ in range(keys.shows)], axis=1)
        _place(text[:, 0], shown, rng)
        _place(text[:, -1, :-1], _shuffled(pairs, rng), rng)
        text[:, -1, -1] = self.vocab.separator
        return text.reshape(count, -1).astype(self.vocab.dtype)


def _shuffled(pairs: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
    """(count, pairs, 2) each row's pairs in an order of its own."""
    order = rng.random(pairs.shape[:2]).argsort(axis=1)
    return np.take_along_axis(pairs, order[:, :, None], axis=1)


def _place(text: npt.NDArray[Any], pairs: npt.NDArray[Any], rng: np.random.Generator) -> None:
    """Write the pairs (count, n, 2) into the segments (count, T), in their order, at random places."""
    count, n_pair, _ = pairs.shape
    n_unit = text.shape[1] - n_pair  # a pair or a filler
    unit = np.sort(rng.random((count, n_unit)).argsort(axis=1)[:, :n_pair], axis=1)
    first = unit + np.arange(n_pair)  # every pair before it takes one place more
    row = np.arange(count)[:, None]
    text[row, first], text[row, first + 1] = pairs[..., 0], pairs[..., 1]
