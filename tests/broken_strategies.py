"""Memories with one realistic fault each, to see that `check_memory` finds it and names the right law.

Most are Transformer-XL's cache with a few lines changed. All are classes with `Config` and `build`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from txl_lightning.config import ModelConfig
from txl_lightning.memory.base import (
    Aux,
    LayerHandle,
    MemoryPlan,
    Segment,
    Slots,
    State,
    Tap,
    keep_last,
    plan_per_layer,
)
from txl_lightning.memory.cache import Cache, CacheConfig


class Faulty(Cache):
    """A sound cache so far."""

    Config = CacheConfig

    def __init__(self, config: CacheConfig, model: ModelConfig) -> None:
        super().__init__(mem_len=config.mem_len, d_model=model.d_model, n_head=model.n_head, d_head=model.d_head)

    @classmethod
    def build(cls, config: CacheConfig, model: ModelConfig) -> MemoryPlan:
        return plan_per_layer(config, model, lambda: cls(config, model))


class WritesInPlace(Faulty):
    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        for key, tensor in state.items():
            tensor.copy_(new[key])
        return state, aux


class EditsTheDict(Faulty):
    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        state.update(new)
        return state, aux


class KeepsStateOnItself(Faulty):
    """The declared state is there and correct, but what is read is what was last written, by whomever."""

    seen: Tensor | None = None

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        slots = super().slots(state, x_BTD, segment)
        if self.seen is None or slots.hidden is None or self.seen.shape != slots.hidden.shape:
            return slots
        return slots._replace(hidden=self.seen)

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        self.seen = new.get("hidden")
        return new, aux


class KeepsAList(Faulty):
    """Statistics for later, gathered in a list that nobody empties."""

    def __init__(self, config: CacheConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.norms: list[Tensor] = []

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        self.norms.append(tap.x_BTD.detach().norm())
        return super().write(state, tap, layer, segment)


class Grows(Faulty):
    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        key, row = ("hidden", tap.x_BTD) if "hidden" in state else ("keys", tap.k_BHTK.transpose(1, 2))
        return {**new, key: torch.cat([state[key], row.detach()], dim=1)}, aux


class ForgetsTheDtype(Faulty):
    """Harmless in float32, which is why it is not noticed."""

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in new.items()}, aux


class AsksTheData(Faulty):
    """A branch on what a tensor holds: one graph for each answer, and a wait for the device."""

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        slots = super().slots(state, x_BTD, segment)
        return (
            slots._replace(bias=torch.zeros_like(slots.bias)) if bool(state["filled"].min() == self.max_age) else slots
        )


class ClaimsToBeContiguous(Faulty):
    """Newest first, as in a stack, but declared contiguous: every distance would be wrong."""

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        slots = super().slots(state, x_BTD, segment)
        hidden = slots.hidden.flip(1) if slots.hidden is not None else None
        return slots._replace(hidden=hidden, age=slots.age.flip(1), bias=slots.bias.flip(-1))


class MixesLanes(Faulty):
    """Normalises with a statistic of the batch."""

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        slots = super().slots(state, x_BTD, segment)
        return slots if slots.hidden is None else slots._replace(hidden=slots.hidden - slots.hidden.mean(dim=0))


class SharesOneMemory(Faulty):
    """Every lane reads the first lane's memory."""

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        first = {key: tensor[:1].expand_as(tensor) for key, tensor in state.items()}
        return super().slots(first, x_BTD, segment)


class CountsDown(Faulty):
    """Counts free slots: a reset sets the count to 0, which says that all are in use."""

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        state = super().init_state(batch, form=form, device=device, dtype=dtype)
        return {**state, "filled": state["filled"] + self.max_age}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        return super().slots({**state, "filled": self.max_age - state["filled"]}, x_BTD, segment)

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        return {**new, "filled": (state["filled"] - segment.length).clamp(min=0)}, aux


class StartIsNotLearned(Faulty):
    """A learned start value that is cut from the graph on its way."""

    def __init__(self, config: CacheConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.start = nn.Parameter(torch.zeros(config.mem_len, model.d_model))

    def initial(self) -> State:
        return {"hidden": self.start}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        return super().slots({key: tensor.detach() for key, tensor in state.items()}, x_BTD, segment)


class ShiftsByT(Faulty):
    """Writes all T rows of a short segment, padding too."""

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        whole = segment._replace(length=torch.full_like(segment.length, tap.x_BTD.shape[1]))
        return super().write(state, tap, layer, whole)


class CountsPadding(Faulty):
    """Rows are right, but empty ones are read once padding has passed, for it counts as filling them."""

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        read = state["filled"] + torch.where(segment.length > 0, tap.x_BTD.shape[1], 0)
        return {**new, "filled": read.clamp(max=self.max_age)}, aux


class ReadsItsOwnSegment(Faulty):
    """Writes before it reads."""

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        if "hidden" not in state:
            return super().slots(state, x_BTD, segment)
        hidden = keep_last(state["hidden"], x_BTD, segment.length)
        filled = (state["filled"] + segment.length).clamp(max=self.max_age)
        return super().slots({"hidden": hidden, "filled": filled}, x_BTD, segment)


class IgnoresItsState(Faulty):
    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        return super().slots({key: torch.zeros_like(tensor) for key, tensor in state.items()}, x_BTD, segment)


class DoesNotDetach(Faulty):
    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        if "hidden" in state:
            new["hidden"] = keep_last(state["hidden"], tap.x_BTD, segment.length)
        return new, aux


class DetachesALocalName(Faulty):
    """Says that the graph crosses the border; a detach on the way stops it."""

    def __init__(self, config: CacheConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.gradient = "carry"

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, aux = super().write(state, tap, layer, segment)
        return {key: tensor.detach() for key, tensor in new.items()}, aux


class FreezesTheLayer(Faulty):
    """Detaches a live weight in place when memory overflows: the layer never learns again."""

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        weights: Any = layer
        weights.attention.qkv.weight.detach_()
        return super().write(state, tap, layer, segment)


class HasAnIdleParameter(Faulty):
    def __init__(self, config: CacheConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.idle = nn.Parameter(torch.zeros(3))


class AuxiliaryLossReachesTheModel(Faulty):
    """A loss of its own on rows that still have their graph."""

    def __init__(self, config: CacheConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.guess = nn.Linear(model.d_model, model.d_model)

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        new, _ = super().write(state, tap, layer, segment)
        real = segment.mask(tap.x_BTD.shape[1])[..., None]
        return new, Aux(losses={"guess": ((self.guess(tap.x_BTD) - tap.x_BTD) * real).square().mean()})


class StateIsAParameter(Faulty):
    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        state = super().init_state(batch, form=form, device=device, dtype=dtype)
        return {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in state.items()}


class ProjectsSomethingElse(Faulty):
    """Keeps queries where keys should be; training never sees it."""

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        return super().write(state, tap._replace(k_BHTK=tap.q_BHTK), layer, segment)


class IsOneTokenOlder(Faulty):
    """Every distance is one too large: trains well, and is not what it says."""

    ages = "any"

    def __init__(self, config: CacheConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.size, self.max_age = config.mem_len, config.mem_len + 1

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        state = super().init_state(batch, form=form, device=device, dtype=dtype)
        return {key: tensor[:, : self.size] if tensor.dim() > 1 else tensor for key, tensor in state.items()}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        slots = super().slots(state, x_BTD, segment)
        return slots._replace(age=slots.age[:, : self.size], bias=slots.bias[..., 1:])


class EvaluationLeaks(Faulty):
    """Keeps a running mean in the class while it evaluates, and uses it in training."""

    mean: ClassVar[dict[str, Tensor]] = {}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        slots = super().slots(state, x_BTD, segment)
        if slots.hidden is None or "mean" not in self.mean:
            return slots
        return slots._replace(hidden=slots.hidden + self.mean["mean"])

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        if not self.training and "keys" in state:
            self.mean["mean"] = tap.x_BTD.detach().mean(dim=(0, 1))
        return super().write(state, tap, layer, segment)
