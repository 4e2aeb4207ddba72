"""Relative effective context length, RECL: how much context models of one group make use of.

Dai et al. 2019, arXiv:1901.02860, section 4.3 and appendix C. With l_i(c, t) the loss of model i at target t after
exactly c tokens,

    b(c, t) = min_i l_i(c, t)                                     the group's baseline
    T       = the share r of targets where b(c, t) is largest     hardest for the short context, found anew for each c
    f_i(c, c') = mean over T of min(b(c, t), l_i(c', t))
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

c grows by steps of d from c_0 until g_i(c, c + d) < 0.01; that c is the RECL of model i. As b <= l_i, f_i(c, c) is the
mean of b over T, the same for all. The paper prints "go to step 1" at the end of its loop, which would start over; the
step after it is meant. It prints neither d nor c_0: its values are multiples of 100, so both are 100 here.

RECL depends on who is in the group. Values of different groups cannot be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from txl_lightning.config import POSITIONS, Config
from txl_lightning.data.vocab import Tokens
from txl_lightning.evaluation.losses import Counts, context_losses
from txl_lightning.model.transformer import TransformerXL

THRESHOLD = 0.01
"""Smallest gain that counts as one."""

LossesAt = Callable[[int], npt.NDArray[Any]]
"""Context c to the losses (models, targets) of the group, in nats; the targets are the same for all c."""


@dataclass(frozen=True, kw_only=True)
class Effective:
    """The RECL of one model for one r."""

    length: int  # tokens
    open_end: bool  # the longest context that was tried still gained, so the RECL may be larger
    gains: list[float]  # g from c_0 on, step by step, the last of them below the threshold unless open_end


@dataclass(frozen=True, kw_only=True)
class Member:
    """One model of the group."""

    ckpt: str
    parameters: int
    position: str
    memory: dict[str, Any]
    segment_len: int  # tokens read at a time
    longest: int | None  # context it can read at most; longer ones are the same to it; None: any


@dataclass(frozen=True, kw_only=True)
class Recl:
    """The group's RECL, and what it depends on."""

    members: list[Member]
    shares: list[float]  # r
    effective: list[list[Effective]]  # by share and member
    start: int  # c_0
    step: int
    longest: int
    block: int  # targets per reading: contexts of c ... c + block - 1; 1: exact
    n_target: int
    contexts: list[int]  # those that were measured
    losses: list[list[float]]  # mean nats by member and context
    split: str
    data_fingerprint: str
    threshold: float = THRESHOLD

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def gains(short_IN: npt.NDArray[Any], long_IN: npt.NDArray[Any], *, share: float) -> npt.NDArray[np.float64]:
    """(I,) g_i(c, c') of each model.

    Args:
        short_IN: l_i(c, t).
        long_IN: l_i(c', t), for the same targets.
        share: r.
    """
    baseline = short_IN.min(axis=0).astype(np.float64)
    count = max(1, round(share * len(baseline)))
    hardest = np.argsort(-baseline, kind="stable")[:count]
    before = baseline[hardest].mean()
    after = np.minimum(baseline[hardest], long_IN[:, hardest]).mean(axis=1)
    return np.asarray(1 - np.exp(after - before))


def effective_lengths(
    losses_at: LossesAt, *, share: float, start: int, step: int, longest: int, threshold: float = THRESHOLD
) -> list[Effective]:
    """The RECL of each model of a group.

    Args:
        losses_at: the group's losses after c tokens; called for c_0, c_0 + d, ... as far as needed.
        share: r.
        start: c_0, in tokens.
        step: d, in tokens.
        longest: no context is longer than this.
        threshold: smallest gain that counts.
    """
    n_model = len(losses_at(start))
    length, found = [0] * n_model, [[] for _ in range(n_model)]  # type: list[int], list[list[float]]
    context = start
    while not all(length) and context + step <= longest:
        now = gains(losses_at(context), losses_at(context + step), share=share)
        for index, gain in enumerate(now.tolist()):
            if not length[index]:
                found[index].append(gain)
                length[index] = context if gain < threshold else 0
        context += step
    return [
        Effective(length=ended or context, open_end=not ended, gains=of_model)
        for ended, of_model in zip(length, found, strict=True)
    ]


def longest_context(config: Config) -> int | None:
    """Tokens of context that a model's positions can tell apart; None: any.

    Positions that number the tokens of one segment are as long as the segments of training.
    """
    return None if POSITIONS[config.model.position] else config.data.segment_len


def block_starts(*, n_token: int, n_target: int, block: int, longest: int) -> Counts:
    """(n,) first target of each block: evenly over the text, each with `longest` tokens before it.

    The text has to hold `longest` + n_target + block tokens.
    """
    count = -(-n_target // block)
    assert n_token >= longest + count * block
    return np.linspace(longest, n_token - block, count).astype(np.int64)


def read_member(
    config: Config, model: TransformerXL, tokens: Tokens, firsts: Counts, *, context: int, block: int
) -> npt.NDArray[Any]:
    """(targets,) l_i(c, t) of one model.

    A model without memory reads its context as one segment, no longer than its positions go; others read it segment by
    segment.
    """
    longest = longest_context(config)
    if longest is not None:
        context = max(1, min(context, longest - block + 1))
    segment_len = config.eval_segment_len if config.memory.has_state else context + block - 1
    return context_losses(model, tokens, firsts, context=context, block=block, segment_len=segment_len).ravel()


class Group:
    """Models that are read once per context."""

    def __init__(self, configs: Sequence[Config], models: Sequence[Any], tokens: Tokens, firsts: Counts, block: int):
        self.configs, self.models, self.tokens = configs, models, tokens
        self.firsts, self.block = firsts, block
        self.known: dict[int, npt.NDArray[Any]] = {}

    def losses_at(self, context: int) -> npt.NDArray[Any]:
        """(models, targets)"""
        if context not in self.known:
            self.known[context] = np.stack(
                [
                    read_member(config, model, self.tokens, self.firsts, context=context, block=self.block)
                    for config, model in zip(self.configs, self.models, strict=True)
                ]
            )
        return self.known[context]


def measure_recl(
    group: Group,
    members: list[Member],
    *,
    shares: Sequence[float],
    start: int,
    step: int,
    longest: int,
    split: str,
    data_fingerprint: str,
) -> Recl:
    """The procedure for each share r, over the same losses."""
    effective = [
        effective_lengths(group.losses_at, share=share, start=start, step=step, longest=longest) for share in shares
    ]
    contexts = sorted(group.known)
    means = np.stack([group.known[context].mean(axis=1, dtype=np.float64) for context in contexts], axis=1)
    return Recl(
        members=members,
        shares=list(shares),
        effective=effective,
        start=start,
        step=step,
        longest=longest,
        block=group.block,
        n_target=len(group.firsts) * group.block,
        contexts=contexts,
        losses=means.tolist(),
        split=split,
        data_fingerprint=data_fingerprint,
    )
