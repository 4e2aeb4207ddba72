"""A memory strategy driven without a model: random taps, and the calls in the order the model makes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_lightning.config import ModelConfig
from txl_lightning.memory.base import MemoryStrategy, keep_dead, reset_lanes
from txl_lightning.types import Segment, State, Tap

MODEL = ModelConfig(n_layer=1, d_model=6, n_head=2, d_head=4, d_inner=5, vocab_size=7)
"""H K differs from D, so that mixing them up shows."""


class Facts(NamedTuple):
    """One segment: which lanes start anew, and how many tokens each has."""

    reset: list[bool]
    length: list[int]

    def segment(self) -> Segment:
        return Segment(reset=torch.tensor(self.reset), length=torch.tensor(self.length))


STORY = [
    Facts([True] * 3, [4, 4, 4]),
    Facts([False] * 3, [4, 2, 4]),
    Facts([False] * 3, [4, 4, 0]),
    Facts([False, True, False], [4, 3, 1]),
    Facts([False, False, True], [1, 4, 4]),
    Facts([True, False, True], [4, 4, 0]),
    Facts([False] * 3, [4, 4, 4]),
]
"""Three lanes of four tokens a segment: full, short, dead, starting anew, and dead although said to start anew."""


def random_tap(seed: int, *, n_token: int = 4, n_lane: int = 3, n_suffix: int = 0, model: ModelConfig = MODEL) -> Tap:
    """Values of a layer that no model made, float64, all with gradient; heads of a group are copies."""
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    width, per_group = (n_lane, n_token, model.d_model), model.n_head // model.kv_heads
    q = rows(n_lane, model.n_head, n_token, model.d_head)
    k, v = (rows(n_lane, model.kv_heads, n_token, model.d_head) for _ in range(2))
    if per_group > 1:
        k, v = k.repeat_interleave(per_group, dim=1), v.repeat_interleave(per_group, dim=1)
    return Tap(
        x_BTD=rows(*width),
        h_BTD=rows(*width),
        q_BHTK=q,
        k_BHTK=k,
        v_BHTK=v,
        y_BTD=rows(*width),
        suffix_BND=rows(n_lane, n_suffix, model.d_model) if n_suffix else None,
        before_BTD=rows(*width),
    )


def fresh(part: MemoryStrategy, *, n_lane: int = 3, form: str = "hidden") -> State:
    """The state before the first segment of `STORY`, which resets every lane."""
    return part.init_state(n_lane, form=form, device=torch.device("cpu"), dtype=torch.float64)


def started(part: MemoryStrategy, state: State, facts: Facts) -> State:
    """The state as the strategy gets it: lanes that start anew are back at their start."""
    return reset_lanes(part, state, facts.segment().reset)


def written(part: MemoryStrategy, state: State, tap: Tap, facts: Facts, *, layer: Any = None) -> State:
    """The state that the model keeps after the segment."""
    new, _ = part.write(started(part, state, facts), tap, layer, facts.segment())
    return keep_dead(new, state, facts.segment().length)


def moved(part: MemoryStrategy, *, seed: int = 0) -> MemoryStrategy:
    """The strategy in float64 with every parameter off its initial value."""
    torch.manual_seed(seed)
    part = part.double()
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return part
