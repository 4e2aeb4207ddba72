"""How far back a model can look: one token is changed, and a later segment's first token is compared bit for bit.

In float64, so that no influence is lost to rounding. What is compared is the last layer's output (and so the loss of
that token): it has seen nothing of its own segment, only memory. The distance of the token that was changed is counted
from there, so 1 is the last token of the segment before.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from txl_lightning.config import Config
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment

SEGMENTS = 20
"""Segments that are tried where nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far back one token still matters."""

    tokens: int  # distance of the farthest token that changes the output; 0: none does
    tried: int  # distance of the farthest token that was changed
    segments: int  # segments read before the one that is compared
    segment_len: int
    formula: float | None  # what the memory's design says; infinite: unbounded; None: it does not say
    memory: dict[str, Any]
    n_layer: int

    @property
    def to_the_end(self) -> bool:
        """Whether even the farthest token that was tried matters, so that the reach may be larger."""
        return self.tokens == self.tried

    def to_dict(self) -> dict[str, Any]:
        """Plain containers; an unbounded formula is the word."""
        formula = "unbounded" if self.formula == math.inf else self.formula
        return {**asdict(self), "formula": formula, "to_the_end": self.to_the_end}


def segments_for(formula: float | None, *, segment_len: int) -> int:
    """Segments to read: 20, or more where the formula reaches farther than that."""
    if formula is None or formula == math.inf:
        return SEGMENTS
    return max(SEGMENTS, math.ceil(formula / segment_len) + 1)


def measure_reach(config: Config, model: TransformerXL, *, segments: int | None = None) -> Reach:
    """Measure it on random tokens.

    First all tokens of one segment are changed, each segment in a lane of its own; then, in the farthest segment that
    matters, one token in each lane. So 2 (segments + T) lanes are read.

    Args:
        config: segment length and memory.
        model: its weights; turned into float64 and evaluation mode.
        segments: segments to read before the one that is compared; None: as `segments_for` says.
    """
    model.double().eval()
    segment_len = config.eval_segment_len
    formula = config.memory.reach(config.model, segment_len=segment_len)
    if config.model.architecture == "lstm" and config.memory.reset != "segment":
        formula = math.inf
    segments = segments_for(formula, segment_len=segment_len) if segments is None else segments
    probe = _Probe(config, model, segments=segments)
    return Reach(
        tokens=probe.farthest(),
        tried=segments * segment_len,
        segments=segments,
        segment_len=segment_len,
        formula=formula,
        memory=config.memory.to_dict(),
        n_layer=config.model.n_layer,
    )


class _Probe:
    """One text, read with and without changes."""

    def __init__(self, config: Config, model: TransformerXL, *, segments: int) -> None:
        self.model, self.segments, self.segment_len = model, segments, config.eval_segment_len
        self.each_anew = config.memory.reset == "segment"
        generator = torch.Generator().manual_seed(config.seed)
        size = (segments + 1) * self.segment_len
        self.text = torch.randint(config.model.vocab_size, (size,), generator=generator)
        shift = torch.randint(1, config.model.vocab_size, (size,), generator=generator)
        self.other = (self.text + shift) % config.model.vocab_size  # differs everywhere

    def farthest(self) -> int:
        place = torch.arange(len(self.text))
        border = self.segments * self.segment_len
        of_segment = place // self.segment_len == torch.arange(self.segments)[:, None]
        for segment in self._matter(of_segment).nonzero().flatten().tolist():
            first = segment * self.segment_len
            tokens = torch.arange(first, first + self.segment_len)
            matter = self._matter(place == tokens[:, None])
            if matter.any():
                return border - int(tokens[matter][0])
        return 0

    @torch.no_grad()
    def _matter(self, changed_BN: Tensor) -> Tensor:
        """(B,) whether the output differs after changes in these places, one lane for each set of them."""
        plain = self._output(self.text.expand(len(changed_BN), -1))
        return (self._output(torch.where(changed_BN, self.other, self.text)) != plain).any(dim=1)

    def _output(self, text_BN: Tensor) -> Tensor:
        """(B, D) of the last segment's first token. The same shapes in every call, so equal lanes are bit-equal."""
        lanes = len(text_BN)
        state = self.model.init_state(lanes, form="projected")
        length = torch.full((lanes,), self.segment_len)
        for number, tokens in enumerate(text_BN.split(self.segment_len, dim=1)):
            reset = torch.full((lanes,), number == 0 or self.each_anew)
            out = self.model(tokens, state, Segment(reset=reset, length=length))
            state = out.state
        return out.hidden_BTD[:, 0]
