"""Evaluation over lengths of memory, segment and clamped distances: the best on valid, reported on test.

The paper tunes all three at evaluation (Dai et al. 2019, arXiv:1901.02860, section 4.1 and appendix D). Chosen on
the split that is reported, they would flatter the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from txl_lightning.config import Config
from txl_lightning.data.vocab import Tokens
from txl_lightning.evaluation.losses import stretch_losses
from txl_lightning.model.transformer import TransformerXL


@dataclass(frozen=True, kw_only=True)
class Try:
    """One combination and its loss on valid, in nats per token."""

    mem_len: int | None  # None: the memory has no such key
    segment_len: int
    clamp_len: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All combinations, the best of them, and its loss on test."""

    tries: list[Try]
    best: Try
    test_loss: float
    test_loss_as_trained: float
    n_valid: int  # targets
    n_test: int
    memory: dict[str, Any]
    data_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def combinations(
    config: Config, *, mem_lens: Sequence[int], segment_lens: Sequence[int], clamp_lens: Sequence[int]
) -> list[Config]:
    """A configuration for each combination; an empty list stands for the value that is there.

    Raises:
        ConfigError: one of them is none that the model can have.
    """
    mems: Sequence[int | None] = mem_lens or [None]
    found = []
    for mem, segment, clamp in product(
        mems, segment_lens or [config.eval_segment_len], clamp_lens or [config.model.clamp_len]
    ):
        changed: dict[str, Any] = {} if mem is None else {"mem_len": mem}
        found.append(
            replace(
                config,
                memory=replace(config.memory, **changed),
                eval=replace(config.eval, segment_len=segment),
                model=replace(config.model, clamp_len=clamp),
            )
        )
    return found


def measure_sweep(
    config: Config,
    tried: Sequence[Config],
    load: Callable[[Config], TransformerXL],
    *,
    valid: Tokens,
    test: Tokens,
    separator: int | None,
    data_fingerprint: str,
) -> Sweep:
    """Read valid with each combination, and test with the best one.

    Args:
        config: as the checkpoint was trained.
        tried: from `combinations`.
        load: gives the model for a configuration, in evaluation mode.
        valid, test: (N,) ids.
        separator: the id that ends a document; needed with memory.reset=document.
        data_fingerprint: for the result.
    """

    def loss(of: Config, tokens: Tokens) -> float:
        return float(stretch_losses(of, load(of), tokens, separator=separator).nats.mean(dtype=np.float64))

    tries = [_try(one, loss(one, valid)) for one in tried]
    index = min(range(len(tries)), key=lambda i: tries[i].loss)
    return Sweep(
        tries=tries,
        best=tries[index],
        test_loss=loss(tried[index], test),
        test_loss_as_trained=loss(config, test),
        n_valid=len(valid) - 1,
        n_test=len(test) - 1,
        memory=config.memory.to_dict(),
        data_fingerprint=data_fingerprint,
    )


def _try(config: Config, loss: float) -> Try:
    return Try(
        mem_len=getattr(config.memory, "mem_len", None),
        segment_len=config.eval_segment_len,
        clamp_len=config.model.clamp_len,
        loss=loss,
    )
