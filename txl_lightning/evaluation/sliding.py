"""Cached evaluation against the sliding window without cache: their losses, and the time they take per token.

The sliding window (Al-Rfou et al. 2018, arXiv:1808.04444) reads, for every target anew, the L tokens before it as one
segment. The cache reads each token once and keeps L states. Transformer-XL's Table 9 compares them, in one lane.

Where both see the same, their losses agree: where the text so far is no longer than L, so that memory holds all of it;
and, in a model of one layer, everywhere, with a window as long as memory and the part of the segment that was read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from txl_lightning.config import Config, build_named
from txl_lightning.data.vocab import Tokens
from txl_lightning.model.reading import Reader
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Batch, Position, Segment

PUBLISHED = {800: 363.0, 1800: 773.0, 2800: 1409.0, 3800: 1874.0}
"""Transformer-XL's Table 9: attention length to speed-up over a vanilla model of the same size on one GPU."""

SEGMENTS = 4  # of the cache that are timed


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Both ways at one attention length L."""

    length: int
    cached_seconds: float  # per token, median of the segments
    sliding_seconds: float  # per token, median of the windows
    speedup: float
    published: float | None
    cached_loss: float  # nats per token, over the targets of the windows
    sliding_loss: float
    n_same: int  # targets at which both see the same context
    difference: float  # largest one of the losses there, in nats


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """All lengths, and what they depend on."""

    paces: list[Pace]
    segment_len: int
    windows: int
    n_layer: int
    split: str
    device: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def tokens_needed(length: int, *, segment_len: int) -> int:
    """Tokens of text that an attention length takes: memory is filled, then segments are timed."""
    return length + SEGMENTS * segment_len + 1


def with_cache(config: Config, length: int) -> Config:
    """The same model with memory for `length` tokens."""
    return replace(config, memory=replace(config.memory, mem_len=length))  # type: ignore[call-arg]


def without_cache(config: Config) -> Config:
    """The same model that reads its segment only."""
    return replace(
        config,
        memory=build_named("memory", {"name": "none"}, path="memory"),
        model=replace(config.model, same_length=False),
    )


def measure_sliding(
    config: Config,
    load: Callable[[Config], TransformerXL],
    tokens: Tokens,
    *,
    lengths: Sequence[int],
    windows: int,
    split: str,
) -> Sliding:
    """Read the start of a text both ways.

    Args:
        config: of a model with memory=cache; its mem_len is replaced.
        load: gives the model for a configuration, in evaluation mode.
        tokens: (N,) ids, `tokens_needed` of the longest length.
        lengths: attention lengths L.
        windows: targets that the sliding window scores, per length.
        split: what the text is, for the result.
    """
    plain = load(without_cache(config))
    text = torch.from_numpy(np.asarray(tokens).astype(np.int64)).to(plain.device)
    paces = [_pace(config, load(with_cache(config, length)), plain, text, length, windows) for length in lengths]
    return Sliding(
        paces=paces,
        segment_len=config.eval_segment_len,
        windows=windows,
        n_layer=config.model.n_layer,
        split=split,
        device=str(plain.device),
        threads=torch.get_num_threads(),
    )


@torch.no_grad()
def _pace(config: Config, cached: TransformerXL, plain: TransformerXL, text: Tensor, length: int, windows: int) -> Pace:
    segment_len = config.eval_segment_len
    n_token = tokens_needed(length, segment_len=segment_len)
    losses_N, seconds = _read_cached(cached, text[:n_token], segment_len=segment_len)
    paces = [spent / read for spent, read in seconds[-SEGMENTS:]]
    targets = np.linspace(length, n_token - 1, windows + 1, dtype=int)[1:].tolist()  # the first one read warms up
    window = _Window(plain, text)
    window.loss(targets[0], length)
    found, spent = zip(*(window.loss(target, length) for target in targets), strict=True)
    same = [(target, target) for target in np.linspace(1, length - 1, min(windows, length - 1), dtype=int).tolist()]
    if config.model.n_layer == 1 and not config.model.same_length:
        same += [(target, min(target, length + (target - 1) % segment_len + 1)) for target in targets]
    gaps = [abs(window.loss(target, size)[0] - float(losses_N[target - 1])) for target, size in same]
    return Pace(
        length=length,
        cached_seconds=statistics.median(paces),
        sliding_seconds=statistics.median(spent),
        speedup=statistics.median(spent) / statistics.median(paces),
        published=PUBLISHED.get(length),
        cached_loss=statistics.fmean(float(losses_N[target - 1]) for target in targets),
        sliding_loss=statistics.fmean(found),
        n_same=len(gaps),
        difference=max(gaps),
    )


def _read_cached(model: TransformerXL, text_N: Tensor, *, segment_len: int) -> tuple[Tensor, list[tuple[float, int]]]:
    """(N - 1,) losses in one lane, and seconds and tokens of each segment."""
    state, reader, losses, seconds = model.init_state(1, form="projected"), Reader(model), [], []
    for start in range(0, len(text_N) - 1, segment_len):
        inputs = text_N[None, start : min(start + segment_len, len(text_N) - 1)]
        targets = text_N[None, start + 1 : start + 1 + inputs.shape[1]]
        segment = Segment.full(inputs)._replace(reset=torch.tensor([start == 0], device=inputs.device))
        began = _now(model)
        losses_BT, state = reader.read(Batch(inputs, targets, segment, targets.numel(), Position(0, 0)), state)
        seconds.append((_now(model) - began, inputs.shape[1]))
        losses.append(losses_BT[0])
    return torch.cat(losses), seconds


class _Window:
    """Reads the tokens before a target as one segment, and scores the target alone."""

    def __init__(self, model: TransformerXL, text_N: Tensor) -> None:
        self.model, self.text, self.tables = model, text_N[None], Tables()

    def loss(self, target: int, size: int) -> tuple[float, float]:
        """Nats of the token at position `target` after the `size` tokens before it, and seconds."""
        began = _now(self.model)
        inputs = self.text[:, target - size : target]
        hidden = self.model(inputs, self.model.init_state(1, form="projected"), tables=self.tables).hidden_BTD[:, -1:]
        loss = float(self.model.softmax.losses(hidden, self.text[:, target : target + 1]))
        return loss, _now(self.model) - began


def _now(model: TransformerXL) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
