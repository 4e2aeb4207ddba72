"""No memory: every segment starts cold, as in a plain segment-wise Transformer."""

from __future__ import annotations

from dataclasses import dataclass

from txl_lightning.config import MemoryConfig, ModelConfig, key
from txl_lightning.memory.base import MemoryPlan, register


@dataclass(frozen=True, kw_only=True)
class NoneConfig(MemoryConfig):
    """Nothing to set."""

    name: str = key("none", "no memory")

    def layer_spans(self, model: ModelConfig, *, segment_len: int) -> list[float]:
        return [0] * model.n_layer


@register("none", config=NoneConfig)
def build(config: NoneConfig, model: ModelConfig) -> MemoryPlan:
    """A plan without a strategy in any layer."""
    return MemoryPlan(layers=[{} for _ in range(model.n_layer)])
