"""What attention with memory costs beside full attention over the same tokens, and how far back it then looks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from txl_lightning import registry
from txl_lightning.config import Config, Section
from txl_lightning.memory.base import MemoryStrategy, fresh_state
from txl_lightning.memory.knn import Knn
from txl_lightning.types import Segment


@dataclass(frozen=True, kw_only=True)
class CostMeterConfig(Section):
    """Nothing to set: it logs at `trainer.log_every_n_steps`."""

    section = "callbacks.cost_meter"


@registry.callbacks.register("cost_meter", config=CostMeterConfig)
class CostMeter(L.Callback):
    """Logs at each point of the curves, over the training lanes of all ranks:

    cost/scores                attention scores of a layer and head since the reset, mean over lanes: a segment of
                               W tokens costs W (W + min(M, n)), where n tokens of its lane came before it and M is what
                               a layer reads beside its own tokens, mean over layers
    cost/full_scores           N^2, those of full attention over the N tokens that the lane was trained on since the
                               reset, mean over lanes
    cost/saving_percent        100 (1 - scores / full scores), of the sums over lanes
    cost/effective_context     tokens that can have fed a segment's last output: all N, or the segment and the memory's
                               reach, if that is less; mean over lanes. Not where the memory has no formula of its reach
    cost/context_share         the same as a share of N
    cost/context_per_layer     the same in multiples of what a single layer would reach

    M counts slots and memory tokens, and for knn the keys that are searched. What is read beside attention at a cost
    that does not depend on length (associative, titans, ...) is not counted, nor is what was read in a step that was
    skipped (`trainer.on_divergence`): memory holds none of it. A lane that goes on from a checkpoint is taken to have
    read whole segments. Nothing is logged of model=lstm, which has no scores.
    """

    def __init__(self, config: CostMeterConfig) -> None:
        self.config = config
        self._counts = True  # whether there is attention
        self._beside: Counter[int] = Counter()
        self._tokens: Tensor | None = None  # (B,) int64 since the lane's reset
        self._scores: Tensor | None = None  # (B,) int64, summed over layers
        self._before: tuple[Tensor, Tensor] | None = None  # both of them as the optimizer step under way began
        self._anew: Tensor | None = None  # (B,) bool: lanes that started anew in it

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._counts = pl_module.config.model.architecture == "transformer"
        self._beside = read_beside(pl_module.config) if self._counts else Counter()
        self._tokens = self._scores = self._before = self._anew = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._counts:
            return
        for part in batch if isinstance(batch, list) else [batch]:
            self._count(part.segment)
        if pl_module.at_border:
            if pl_module.left_out:
                self._take_back()
            if self._tokens is None:
                self._begin(pl_module)
            self._before = None if self._tokens is None or self._scores is None else (self._tokens, self._scores)
            self._anew = None
        if pl_module.logs_now() and self._tokens is not None:
            pl_module.log_curves(self._figures(pl_module))

    def _begin(self, module: Any) -> None:
        """Take over what the lanes have read before anything was counted; nothing if they hold nothing yet."""
        state = module.lanes.current("train")
        if state is not None:
            self._tokens = age = state["age"].to(module.device, copy=True)  # the next step may overwrite it
            self._scores = scores_so_far(age, self._beside, segment_len=module.config.data.segment_len)

    def _count(self, segment: Segment) -> None:
        if self._tokens is None or self._scores is None:
            return
        before, done = (torch.where(segment.reset, 0, part) for part in (self._tokens, self._scores))
        after = segment.since_start(before)
        anew = after < before + segment.length  # a document began inside the segment
        before, done = (torch.where(anew, 0, part) for part in (before, done))
        n_new = torch.where(anew, after, segment.length)
        alive = segment.length > 0
        self._scores = torch.where(alive, done + segment_scores(n_new, before, self._beside), self._scores)
        self._tokens = torch.where(alive, after, self._tokens)
        began = alive & (segment.reset | anew)
        self._anew = began if self._anew is None else self._anew | began

    def _take_back(self) -> None:
        """The step was skipped: lanes stand where they stood, and those that started anew in it have read nothing."""
        if self._before is None or self._anew is None:
            self._tokens = self._scores = None
            return
        self._tokens, self._scores = (torch.where(self._anew, 0, part) for part in self._before)

    def _figures(self, module: Any) -> dict[str, Tensor]:
        assert self._tokens is not None and self._scores is not None
        tokens = self._tokens.to(module.train_loss.wide)
        sums = {
            "lanes": (tokens > 0).sum(),
            "tokens": tokens.sum(),
            "scores": self._scores.sum() / self._beside.total(),
            "full": tokens.square().sum(),
        }
        reach, one_layer = reaches(module.config)
        if reach is not None and one_layer is not None:
            segment_len = module.config.data.segment_len
            sums["context"] = tokens.clamp(max=segment_len + reach).sum()
            sums["alone"] = tokens.clamp(max=segment_len + one_layer).sum()
        sums = module.over_ranks({name: value.to(tokens.dtype) for name, value in sums.items()}, by="sum")
        if not sums["lanes"]:  # all have just been taken back
            return {}
        found = {
            "cost/scores": sums["scores"] / sums["lanes"],
            "cost/full_scores": sums["full"] / sums["lanes"],
            "cost/saving_percent": 100 * (1 - sums["scores"] / sums["full"]),
        }
        if "context" in sums:
            found["cost/effective_context"] = sums["context"] / sums["lanes"]
            found["cost/context_share"] = sums["context"] / sums["tokens"]
            found["cost/context_per_layer"] = sums["context"] / sums["alone"]
        return found


def read_beside(config: Config) -> Counter[int]:
    """How many layers read how many keys beside the tokens of their segment. Builds the memory without numbers."""
    with torch.device("meta"), torch.no_grad():
        plan = registry.memories.get(config.memory.name).build(config.memory, config.model)
        extra = 0 if plan.tokens is None else plan.tokens.n_prefix
        return Counter(extra + sum(_keys(memory, config) for memory in layer.values()) for layer in plan.layers)


def _keys(memory: MemoryStrategy, config: Config) -> int:
    if isinstance(memory, Knn):
        return memory.mem_len
    tokens = torch.zeros(1, config.data.segment_len, dtype=torch.int64)
    x = torch.zeros(*tokens.shape, config.model.d_model)
    state = fresh_state(memory, 1, form="hidden", device=x.device, dtype=x.dtype)
    slots = memory.slots(state, x, Segment.full(tokens))
    return 0 if slots is None else slots.age.shape[1]


def segment_scores(n_new: Tensor, before: Tensor, beside: Counter[int]) -> Tensor:
    """(B,) scores of n_new tokens that came after `before` others of their lane, summed over layers."""
    total = torch.zeros_like(n_new)
    for keys, layers in beside.items():
        total = total + layers * n_new * (n_new + before.clamp(max=keys))
    return total


def scores_so_far(tokens: Tensor, beside: Counter[int], *, segment_len: int) -> Tensor:
    """(B,) the same since the reset, if so many tokens were read in whole segments and what is left over."""
    whole, rest = tokens // segment_len, tokens % segment_len
    total = segment_scores(rest, whole * segment_len, beside)
    for keys, layers in beside.items():
        growing = whole.clamp(max=keys // segment_len + 1)  # segments before which memory is not full
        read = segment_len * (growing * (growing - 1)).div(2, rounding_mode="floor") + (whole - growing) * keys
        total = total + layers * segment_len * (whole * segment_len + read)
    return total


def reaches(config: Config) -> tuple[float | None, float | None]:
    """Tokens before a segment that its first token can depend on, through all layers and through the farthest one."""
    reach = config.memory.reach(config.model, segment_len=config.data.segment_len)
    spans = config.memory.layer_spans(config.model, segment_len=config.data.segment_len)
    if reach is None or spans is None:
        return None, None
    return reach, min(reach, max(spans, default=0)) if reach < math.inf else max(spans)
