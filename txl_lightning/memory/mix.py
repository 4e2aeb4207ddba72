"""Several memories in one model: each part is a strategy with its own keys and layers.

In a layer with several parts their slots stand side by side in one softmax, in the order of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txl_lightning import registry
from txl_lightning.config import MemoryConfig, ModelConfig, build_named, key
from txl_lightning.errors import keys_renamed
from txl_lightning.memory.base import MemoryPlan, MemoryStrategy, register


@dataclass(frozen=True, kw_only=True)
class MixConfig(MemoryConfig):
    """Keys of `memory=mix`."""

    name: str = key("mix", "several strategies in one model")
    parts: Any = key(
        [{"name": "cache", "layers": "all"}],
        "strategies with their keys, e.g. [{name: cache, layers: [0], mem_len: 256}, {name: cache, layers: [1]}]",
    )

    def check(self) -> None:
        if not isinstance(self.parts, tuple) or not all(isinstance(part, Mapping) for part in self.parts):
            cure = "for example 'memory.parts=[{name: cache, layers: all}]'"
            raise self.refuse("parts", "must be a list of groups of keys", cure)
        if not self.parts:
            raise self.refuse("parts", "is empty", "name a strategy or use memory=none")
        if any(part.get("name") == "mix" for part in self.parts):
            raise self.refuse("parts", "a mix cannot hold a mix", "list its parts directly")
        if any("reset" in part for part in self.parts):
            rule = "memory starts anew in all parts at once, so a part has no reset of its own"
            raise self.refuse("parts", rule, "set memory.reset")
        if any("offload" in part for part in self.parts):
            raise self.refuse("parts", "the memory of all parts is kept in one place", "set memory.offload")
        self.configs()

    def configs(self) -> list[MemoryConfig]:
        """The typed configuration of each part."""
        return [build_named("memory", part, path=_place(i)) for i, part in enumerate(self.parts)]

    def layer_spans(self, model: ModelConfig, *, segment_len: int) -> list[float] | None:
        """Of each layer the largest of its parts."""
        parts = [part.layer_spans(model, segment_len=segment_len) for part in self.configs()]
        if any(math.inf in spans for spans in parts if spans):
            return [math.inf] * model.n_layer
        known = [spans for spans in parts if spans is not None]
        return [max(spans) for spans in zip(*known, strict=True)] if len(known) == len(parts) else None

    @property
    def reaches_back(self) -> bool:
        return any(part.reaches_back for part in self.configs())

    @property
    def has_state(self) -> bool:
        return any(part.has_state for part in self.configs())

    @property
    def carries(self) -> bool:
        return any(part.carries for part in self.configs())

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        for index, part in enumerate(self.configs()):
            with keys_renamed("memory", to=_place(index)):
                part.check_fit(model, segment_len=segment_len)
        build(self, model)  # refuses parts that collide


@register("mix", config=MixConfig)
def build(config: MixConfig, model: ModelConfig) -> MemoryPlan:
    """The parts' plans laid over one another."""
    layers: list[dict[str, MemoryStrategy]] = [{} for _ in range(model.n_layer)]
    tokens = None
    for position, part in enumerate(config.configs()):
        with keys_renamed("memory", to=_place(position)):
            plan = registry.memories.get(part.name).build(part, model)
        if plan.tokens is not None and tokens is not None:
            raise config.refuse("parts", "two parts add memory tokens to the input", "keep one of them")
        tokens = plan.tokens if plan.tokens is not None else tokens
        for index, strategies in enumerate(plan.layers):
            _merge(layers[index], strategies, index=index, config=config)
    try:
        return MemoryPlan(layers=layers, tokens=tokens)
    except ValueError as error:
        raise config.refuse("parts", str(error), "give them different layers") from error


def _place(index: int) -> str:
    """What the keys of a part are called in messages."""
    return f"memory.parts[{index}]"


def _merge(layer: dict[str, MemoryStrategy], more: dict[str, MemoryStrategy], *, index: int, config: MixConfig) -> None:
    for name, strategy in more.items():
        if name in layer:
            raise config.refuse("parts", f"layer {index} has two memories called {name}", "give them different layers")
        layer[name] = strategy
