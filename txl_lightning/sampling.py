"""How a token is chosen among those the model offers, and where a text ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from txl_lightning.data.vocab import Vocab


class Choice(NamedTuple):
    """A token and the log-probability, in nats, that the model gave it: before temperature and all else."""

    token: int
    log_prob: float


class SamplingRule:
    """A penalty for what was there lately, then temperature, then top-k, then top-p.

    Args:
        temperature: divides log-probabilities; 0 takes the likeliest token.
        top_k: only this many likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together hold this probability (at least one); 1: all.
        repetition_penalty: multiplies the log-probability of each token that is among the latest
            `repetition_window` ones, once however often it is there; 1: none. It is the penalty of Keskar et al. 2019
            (arXiv:1909.05858, section 4.1), which divides scores, for scores that are never positive.
        repetition_window: tokens it looks back.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        repetition_window: int = 64,
    ) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.repetition_penalty, self.repetition_window = repetition_penalty, repetition_window

    def choose(self, log_probs_V: Tensor, generator: torch.Generator, *, recent: Sequence[int] = ()) -> int:
        """One token.

        Args:
            log_probs_V: of every token.
            generator: what chance is drawn from.
            recent: the tokens before, the latest last.
        """
        scores_V = self.penalised(log_probs_V.cpu().double(), recent)  # in this order: mps has no float64
        if self.temperature == 0:
            return int(scores_V.argmax())
        probability = self.keep(scores_V / self.temperature).softmax(dim=-1)
        return int(torch.multinomial(probability, 1, generator=generator))

    def penalised(self, log_probs_V: Tensor, recent: Sequence[int]) -> Tensor:
        """The log-probabilities with those of recent tokens made smaller."""
        seen = sorted(set(recent[-self.repetition_window :]))
        if self.repetition_penalty == 1 or not seen:
            return log_probs_V
        index = torch.tensor(seen)
        return log_probs_V.index_copy(0, index, log_probs_V[index] * self.repetition_penalty)

    def keep(self, scores_V: Tensor) -> Tensor:
        """The scores with -inf for tokens that are out."""
        if 0 < self.top_k < len(scores_V):
            least = scores_V.topk(self.top_k).values[-1]
            scores_V = scores_V.masked_fill(scores_V < least, float("-inf"))
        if self.top_p < 1:
            ordered, index = scores_V.sort(descending=True)
            before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
            scores_V = scores_V.index_fill(0, index[before >= self.top_p], float("-inf"))
        return scores_V


def cut(text: str, stops: Sequence[str]) -> str:
    """The text as far as the first of the stop strings."""
    found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(found)] if found else text


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Text as it comes, as far as the first of the stop strings.

    What may be the beginning of one waits until it is known. No piece is asked for once a stop string is there.
    """
    held = ""
    for piece in pieces:
        held += piece
        if (text := cut(held, stops)) != held:
            yield text
            return
        waiting = _may_go_on(held, stops)
        yield held[: len(held) - waiting]
        held = held[len(held) - waiting :]
    yield held


def _may_go_on(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of a stop string."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )


def has_stopped(tokens: Sequence[int], *, vocab: Vocab, stops: Sequence[str]) -> bool:
    """Whether a stop string ends in the latest token."""
    if not stops or not tokens:
        return False
    # a character has up to four bytes, and a token at least one; two tokens more are the surroundings
    tail = 4 * max(map(len, stops)) + 2
    text = vocab.decode(tokens[-tail:])
    return any(stop in text for stop in stops)
