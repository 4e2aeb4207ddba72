"""What the keys of every memory strategy are; each adds its own in its own file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from txl_lightning.model_config import ModelConfig
from txl_lightning.section import Section, key


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section):
    """What every memory strategy has; each adds its own keys in its own file."""

    section: ClassVar[str] = "memory"
    unbounded: ClassVar[bool] = False  # each segment makes the state anew from the last one, so nothing falls out of it
    size_key: ClassVar[str | None] = None  # the key its state grows with; None: the state has one size

    name: str = key("none", "memory strategy: see `txl strategies`")
    reset: str = key(
        "epoch",
        "where memory starts anew: with each pass over the text, with each document (also inside a segment), or with "
        "each segment",
        choices=("epoch", "document", "segment"),
    )
    offload: str = key(
        "none",
        "where the lanes' memory is between steps: on the device, or in (page-locked) memory of the cpu, whence each "
        "step fetches that of the lanes it reads",
        choices=("none", "cpu"),
    )

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        """Rules between this memory, the model and the segment. Raises ConfigError."""

    def reach(self, model: ModelConfig, *, segment_len: int) -> float | None:
        """Tokens before a segment that its first token can depend on; infinite: unbounded; None: no formula known."""
        if self.reset == "segment":
            return 0
        spans = self.layer_spans(model, segment_len=segment_len)
        return None if spans is None else reach_of(spans, segment_len=segment_len)

    def layer_spans(self, model: ModelConfig, *, segment_len: int) -> list[float] | None:
        """For each layer the age of the oldest token whose layer input can be in its memory when a segment begins.

        0: nothing is; infinite: its age has no bound; None: no formula known. Layers see all of their own segment.
        """
        return [math.inf] * model.n_layer if self.unbounded else None

    @property
    def reaches_back(self) -> bool:
        """Whether layers read slots that have a distance (any memory with `mem_len`, unless it says otherwise).

        Known before anything is built; `check_memory` compares it with `MemoryStrategy.max_age` (law 2).
        """
        return getattr(self, "mem_len", 0) > 0

    @property
    def has_state(self) -> bool:
        """Whether anything is carried from segment to segment."""
        return self.name != "none" and getattr(self, "mem_len", 1) > 0

    @property
    def why_stateless(self) -> str:
        """The setting that lets nothing be carried, where `has_state` is false."""
        return "memory.mem_len=0" if getattr(self, "mem_len", None) == 0 else f"memory={self.name}"

    @property
    def carries(self) -> bool:
        """Whether the graph may cross from one segment to the next (as the key `gradient` says, if there is one).

        Known before anything is built; `check_memory` compares it with `gradient` of what is built (law 8).
        """
        return getattr(self, "gradient", "stop") == "carry"


def reach_of(spans: Sequence[float], *, segment_len: int) -> float:
    """Tokens before a segment that its first token can depend on, from each layer's span.

    What stands in memory at age a was read in the segment that began ceil(a / T) T tokens back, and had seen all that
    the layers below had seen there. In the first layer it is the token itself.
    """
    reach: float = 0
    for index, span in enumerate(spans):
        if span == math.inf:
            return math.inf
        if span:
            reach = span if index == 0 else reach + -(-span // segment_len) * segment_len
    return reach


@dataclass(frozen=True, kw_only=True)
class LayerMemoryConfig(MemoryConfig):
    """A strategy that lives in some or all layers."""

    words: ClassVar[tuple[str, ...]] = ("all",)  # what `layers` may be beside a list

    layers: Any = key("all", "layers that have this memory: all, or a list of indices from 0")

    def check(self) -> None:
        wanted = self.layers
        if wanted in self.words:
            return
        if not isinstance(wanted, tuple) or not all(type(i) is int and i >= 0 for i in wanted):
            rule = f"must be {' or '.join(self.words)} or a list of indices >= 0"
            raise self.refuse("layers", rule, "for example [0,2]")
        if not wanted:
            raise self.refuse("layers", "is empty, so no layer would have this memory", "use memory=none")
        if len(set(wanted)) != len(wanted):
            raise self.refuse("layers", "names a layer twice", "name each layer once")

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        self.layer_indices(model.n_layer)

    def span(self, model: ModelConfig, *, segment_len: int) -> float | None:
        """What `layer_spans` says of each layer that has this memory."""
        return math.inf if self.unbounded else None

    def layer_spans(self, model: ModelConfig, *, segment_len: int) -> list[float] | None:
        span = self.span(model, segment_len=segment_len)
        if span is None:
            return None
        chosen = self.layer_indices(model.n_layer)
        return [span if index in chosen else 0 for index in range(model.n_layer)]

    def layer_indices(self, n_layer: int) -> list[int]:
        """The layers this memory is in, of a model of n_layer layers."""
        if self.layers == "all":
            return list(range(n_layer))
        if any(index >= n_layer for index in self.layers):
            raise self.refuse("layers", f"the model has layers 0 to {n_layer - 1}", "leave the others out")
        return sorted(self.layers)


@dataclass(frozen=True, kw_only=True)
class UpperLayerMemoryConfig(LayerMemoryConfig):
    """A strategy that lives in one layer, three quarters of the way up, unless told otherwise."""

    words: ClassVar[tuple[str, ...]] = ("auto", "all")

    layers: Any = key(
        "auto", "layers that have this memory: auto (one, of index floor(0.75 n_layer)), all, or a list of indices"
    )

    def layer_indices(self, n_layer: int) -> list[int]:
        return [3 * n_layer // 4] if self.layers == "auto" else super().layer_indices(n_layer)
