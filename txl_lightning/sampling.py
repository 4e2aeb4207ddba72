"""How a token is chosen among those the model offers, and where a text ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from txl_lightning.data.vocab import Vocab
from txl_lightning.model.partial import sent


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

    def choose(
        self, log_probs_BV: Tensor, generators: Sequence[torch.Generator], *, recent: Sequence[Sequence[int]]
    ) -> list[Choice]:
        """One token of each lane: the first whose share and those before it pass a number drawn from 0 to 1.

        On a GPU it is waited for once, when the tokens are told.

        Args:
            log_probs_BV: of every token.
            generators: each lane's, on the CPU: what chance is drawn from.
            recent: the tokens before, the latest last.

        Raises:
            RuntimeError: the log-probabilities are not numbers.
        """
        at = log_probs_BV if stays(log_probs_BV) else log_probs_BV.cpu()
        scores_BV = self._all_penalised(at.double(), recent)  # in this order: mps has no float64
        if self.temperature == 0:
            token_B1 = scores_BV.argmax(dim=-1, keepdim=True)
        else:
            share_BV = self.keep(scores_BV / self.temperature).softmax(dim=-1)
            token_B1 = drawn_from(share_BV, sent(chance(generators), at.device, dtype=torch.float64)[:, None])
        told = torch.cat([token_B1.double(), at.gather(1, token_B1).double()], dim=1).tolist()
        if any(math.isnan(log_prob) for _, log_prob in told):
            raise RuntimeError("no token can be chosen: the model's log-probabilities are not numbers")
        return [Choice(int(token), log_prob) for token, log_prob in told]

    def _all_penalised(self, scores_BV: Tensor, recent: Sequence[Sequence[int]]) -> Tensor:
        if self.repetition_penalty == 1:
            return scores_BV
        rows = zip(scores_BV, recent, strict=True)
        return torch.stack([self.penalised(scores_V, tokens) for scores_V, tokens in rows])

    def penalised(self, log_probs_V: Tensor, recent: Sequence[int]) -> Tensor:
        """The log-probabilities with those of recent tokens made smaller."""
        seen = sorted(set(list(recent)[-self.repetition_window :]))
        if self.repetition_penalty == 1 or not seen:
            return log_probs_V
        index = sent(seen, log_probs_V.device)
        return log_probs_V.index_copy(0, index, log_probs_V[index] * self.repetition_penalty)

    def keep(self, scores: Tensor) -> Tensor:
        """The scores with -inf for tokens that are out."""
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if self.top_p < 1:
            ordered, index = scores.sort(descending=True, dim=-1)
            shares = ordered.softmax(dim=-1)
            out = shares.cumsum(dim=-1) - shares >= self.top_p
            scores = torch.empty_like(scores).scatter(-1, index, ordered.masked_fill(out, float("-inf")))
        return scores


def stays(log_probs: Tensor) -> bool:
    """Whether tokens are chosen where the log-probabilities are: on CUDA, unless torch refuses running sums there."""
    return log_probs.is_cuda and not torch.are_deterministic_algorithms_enabled()


def chance(generators: Sequence[torch.Generator]) -> list[float]:
    """A number of each generator, from 0 to below 1."""
    return [float(torch.rand((), generator=generator, dtype=torch.float64)) for generator in generators]


def drawn_from(share_BV: Tensor, drawn_B1: Tensor) -> Tensor:
    """(B, 1) int64: in each lane the first token up to which the shares add up to more than a number from 0 to 1.

    So token v is found with probability share_v, and never one whose share is 0.
    """
    sums = share_BV.cumsum(dim=-1)
    whole = sums[:, -1:]
    wanted = torch.minimum(drawn_B1 * whole, whole.nextafter(torch.zeros_like(whole)))
    return torch.searchsorted(sums, wanted, right=True).clamp(max=sums.shape[1] - 1)  # beyond it where sums are NaN


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
