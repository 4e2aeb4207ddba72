"""What made-up corpora share: episodes of equal length that ask for what they showed, drawn at random.

An episode ends with `end`; a split holds episodes * episode_len + 1 tokens, so that lanes begin where episodes do and
segments where segments do. What can be an answer is drawn from symbols of its own, `values`; answers stand at the
places from `answer_from` on.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from txl_lightning.config import DataConfig, key
from txl_lightning.data.corpora import SPLITS, Scan
from txl_lightning.data.vocab import Tokens, as_text, digest_of, dtype_for, register
from txl_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EpisodesConfig(DataConfig):
    """Keys of every made-up corpus; an episode's size follows from segment_len, which is a part of the text here."""

    kept: ClassVar[tuple[str, ...]] = ()  # keys that decide an episode, beside segment_len and draw

    values: int = key(8, "different values there are: guessing is right in one of so many answers", minimum=2)
    episodes: int = key(32768, "episodes of the training split; a multiple of batch_size", minimum=1)
    test_episodes: int = key(512, "episodes of the valid and of the test split; a multiple of batch_size", minimum=1)
    draw: int = key(0, "which episodes: another number, another text of the same kind", minimum=0)

    def check(self) -> None:
        for name in ("episodes", "test_episodes"):
            if getattr(self, name) % self.batch_size:
                rule = f"must be a multiple of data.batch_size={self.batch_size}, so that lanes begin with an episode"
                raise self.refuse(name, rule, "change one of them")
        if self.shuffle != "none" or self.segment_len_std:
            name = "shuffle" if self.shuffle != "none" else "segment_len_std"
            raise self.refuse(name, "would move episodes across the borders of segments", "leave it out: all is random")

    @property
    def n_segment(self) -> int:
        """Segments of an episode."""
        raise NotImplementedError

    @property
    def n_answer(self) -> int:
        """Answers of an episode."""
        raise NotImplementedError

    @property
    def answer_from(self) -> int:
        """Place in the episode from where on each value is an answer."""
        raise NotImplementedError

    @property
    def vocab(self) -> RecallVocab:
        """Its symbols."""
        raise NotImplementedError

    @property
    def episode_len(self) -> int:
        """Tokens of an episode."""
        return self.n_segment * self.segment_len

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


class Episodes(ABC):
    """Random episodes. Each split has a generator of its own, so none depends on the sizes of the others."""

    name: ClassVar[str]
    rule_version: ClassVar[int] = 1

    def __init__(self, config: EpisodesConfig) -> None:
        self.config, self.vocab = config, config.vocab

    @abstractmethod
    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        """(count, episode_len) ids."""

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """There are no sources."""
        return ()

    def scan(self) -> Scan:
        config = self.config
        counts = {split: config.episodes if split == "train" else config.test_episodes for split in SPLITS}
        tokens = {split: n * config.episode_len + 1 for split, n in counts.items()}
        names = (*config.kept, "segment_len", "draw")
        details = {**{name: getattr(config, name) for name in names}, "chance": config.chance}
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
                yield split, self.draw(count, rng).ravel()
                left -= count
            yield split, np.zeros(1, dtype=self.vocab.dtype)  # the target of the last input: one more `end`


def place(text: npt.NDArray[Any], parts: npt.NDArray[Any], rng: np.random.Generator) -> None:
    """Write the parts (count, n, size) into the rows (count, N) of a text, in their order, at random places."""
    count, n_part, size = parts.shape
    n_unit = text.shape[1] - n_part * (size - 1)  # a part or a filler
    unit = np.sort(rng.random((count, n_unit)).argsort(axis=1)[:, :n_part], axis=1)
    first = unit + np.arange(n_part) * (size - 1)  # every part before it takes so many places more
    row = np.arange(count)[:, None]
    for offset in range(size):
        text[row, first + offset] = parts[..., offset]


def shuffled(parts: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
    """(count, n, size) each row's parts in an order of its own."""
    order = rng.random(parts.shape[:2]).argsort(axis=1)
    return np.take_along_axis(parts, order[:, :, None], axis=1)
