"""A memory strategy outside this repository, complete: one more slot per layer, the mean of all the lane has read.

Later tokens weigh more: a token counts half as much once `half_life` further ones were read. Put the file into a
package of your own; CONTRIBUTING.md says how `txl` finds it. Then: txl fit memory=running_mean memory.half_life=200
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from txl_lightning.config import LayerMemoryConfig, ModelConfig, key
from txl_lightning.memory.base import (
    Aux,
    LayerHandle,
    MemoryPlan,
    MemoryStrategy,
    Segment,
    Slots,
    State,
    Tap,
    plan_per_layer,
    register,
)
from txl_lightning.types import MASKED


@dataclass(frozen=True, kw_only=True)
class RunningMeanConfig(LayerMemoryConfig):  # brings memory.layers; a MemoryConfig has name, reset, offload
    """Keys of `memory=running_mean`: each has a default, a help text and, where there is one, a rule."""

    name: str = key("running_mean", "a mean of all tokens so far, the latest weigh most")
    half_life: float = key(64.0, "tokens after which one counts half", above=0)


class RunningMean(MemoryStrategy):
    """State, float32, for each of B lanes: total (B, D), the weighted sum of layer inputs; weight (B,), of weights."""

    ages = "any"  # our one slot is a summary, not the token right before the segment
    max_age = 0  # it has no position; the largest age of slots that have one would stand here

    def __init__(self, *, half_life: float, d_model: int) -> None:
        super().__init__()
        self.decay, self.d_model = 0.5 ** (1 / half_life), d_model

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        # sums stay float32 whatever the activations are; `form` may be ignored: a mean is never kept as keys and values
        total = torch.zeros(batch, self.d_model, device=device)
        return {"total": total, "weight": torch.zeros(batch, device=device)}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        weight_B = state["weight"]
        mean_BD = state["total"] / weight_B.clamp(min=1)[:, None]  # a lane that has read anything has weight >= 1
        bias = torch.where(weight_B > 0, 0.0, MASKED)[:, None, None, None]  # a fresh lane has no such slot
        age = torch.ones(1, 1, dtype=torch.int64, device=x_BTD.device)
        no_position = torch.zeros(1, dtype=torch.bool, device=x_BTD.device)
        return Slots(
            hidden=mean_BD[:, None].to(x_BTD.dtype), keys_values=None, age=age, bias=bias, positioned=no_position
        )

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        n_token, length_B = tap.x_BTD.shape[1], segment.length
        later_BT = length_B[:, None] - 1 - torch.arange(n_token, device=length_B.device)  # real tokens after this one
        share_BT = torch.where(later_BT >= 0, self.decay ** later_BT.clamp(min=0), 0.0)  # padding counts nothing
        kept_B = self.decay**length_B
        read_BD = (share_BT[..., None] * tap.x_BTD.detach().float()).sum(dim=1)  # detached: gradient = "stop"
        total = state["total"] * kept_B[:, None] + read_BD
        return {"total": total, "weight": state["weight"] * kept_B + share_BT.sum(dim=1)}, Aux()


@register("running_mean", config=RunningMeanConfig)  # paper="Author et al. YEAR, arXiv:NUMBER" where there is one
def build(config: RunningMeanConfig, model: ModelConfig) -> MemoryPlan:
    """One strategy of its own in each of `config.layers`."""
    return plan_per_layer(config, model, lambda: RunningMean(half_life=config.half_life, d_model=model.d_model))
