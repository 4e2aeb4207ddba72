"""The tiny model a strategy is put in, the tokens it reads, and the watch kept on its calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from txl_lightning import registry
from txl_lightning.config import Config, DataConfig, ModelConfig
from txl_lightning.memory.base import MemoryPlan, MemoryStrategy, TokenMemory
from txl_lightning.model.transformer import ModelOutput, TransformerXL
from txl_lightning.testing.verdict import LawBroken
from txl_lightning.types import Segment, Slots, State

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""What rounding may do, relative to 1 + |value|."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything a law needs to try a strategy. Models made here have the same weights every time."""

    build: Callable[[Any, ModelConfig], MemoryPlan]
    config: Any  # the strategy's own keys
    longer: Any  # the same with a longer memory; None: the strategy has no key for it
    model: ModelConfig
    segment_len: int
    batch_size: int
    warm_segments: int  # read before a law looks: memory must be in full use by then
    bptt_segments: int  # segments whose graph a "carry" strategy may keep
    lossless: bool
    compiled: bool
    both_losses: tuple[str, ...]
    dtype: torch.dtype
    mixed: bool
    device: torch.device
    seed: int
    long_run: int = 200  # segments of law 8
    warm: dict[Any, State] = field(default_factory=dict, compare=False)  # warm states by how they were made

    @property
    def tolerance(self) -> float:
        """What rounding may do in this dtype."""
        return TOLERANCE[torch.bfloat16 if self.mixed else self.dtype]

    def make(self, *, plain: bool = False, longer: bool = False, watched: bool = True, **changes: Any) -> TransformerXL:
        """The model with the strategy in it, all parameters moved off their initial values, as training does.

        Args:
            plain: without any memory.
            longer: with the longer memory.
            watched: look over the strategy's shoulder; False leaves its methods as they are, for the compiler.
            changes: keys of the model's configuration.
        """
        model_config = dataclasses.replace(self.model, **changes)
        data = DataConfig(segment_len=self.segment_len, batch_size=self.batch_size)
        none = registry.memories.get("none")
        with self.seeded():
            build, config = (
                (none.build, none.config()) if plain else (self.build, self.longer if longer else self.config)
            )
            plan = build(config, model_config)
            if not isinstance(plan, MemoryPlan):
                raise TypeError(f"build returned a {type(plan).__name__}; it must return a MemoryPlan")
            model = TransformerXL(Config(model=model_config, memory=none.config(), data=data), plan=plan)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn(parameter.shape))
        model = model.to(device=self.device, dtype=self.dtype).eval()
        if self.mixed:
            model.forward = torch.autocast(self.device.type, dtype=torch.bfloat16)(model.forward)  # type: ignore[method-assign]
            model.init_state = functools.partial(model.init_state, dtype=torch.bfloat16)  # type: ignore[method-assign]
        if watched:
            for _, part in model.memory_parts():
                watch(part)
        return model

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """The same random numbers every time; the caller's generators are put back."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield

    def stream(self, n_segment: int, *, variant: int = 0, lanes: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Inputs and next tokens (B, T) of consecutive segments; another variant is another text."""
        generator = torch.Generator().manual_seed(1000 * self.seed + variant)
        size = (lanes or self.batch_size, n_segment * self.segment_len + 1)
        text = torch.randint(self.model.vocab_size, size, generator=generator).to(self.device)
        cuts = range(0, n_segment * self.segment_len, self.segment_len)
        end = self.segment_len
        return [(text[:, i : i + end], text[:, i + 1 : i + end + 1]) for i in cuts]

    def segment(
        self, *, reset: bool | list[int] = False, length: list[int] | None = None, lanes: int | None = None
    ) -> Segment:
        """One segment's facts: `reset` is for all lanes or a list of lanes, `length` for each (None: all T)."""
        batch = lanes or self.batch_size
        resets = [lane in reset for lane in range(batch)] if isinstance(reset, list) else [reset] * batch
        lengths = length if length is not None else [self.segment_len] * batch
        return Segment(
            reset=torch.tensor(resets, device=self.device),
            length=torch.tensor(lengths, dtype=torch.int64, device=self.device),
        )

    def mixed_segments(self, n_segment: int) -> list[Segment]:
        """All lanes start; then each lane is now short (by one token, or of one), now dead, now starts anew."""
        facts = [self.segment(reset=True)]
        for i in range(1, n_segment):
            lane, full = i % self.batch_size, [self.segment_len] * self.batch_size
            if i % 3 == 1:
                full[lane] = 1 if i % 2 == 0 else max(1, self.segment_len - 1)
            if i % 3 == 2:
                full[lane] = 0
            facts.append(self.segment(reset=[lane] if i % 3 == 0 else False, length=full))
        return facts

    def warm_state(self, model: TransformerXL, *, form: str = "hidden", variant: int = 0) -> State:
        """The state after `warm_segments`; the first lanes started later than the last, so their fills differ.

        Read once for each kind of model and kept for the laws that follow; the caller gets tensors of its own.
        """
        made_by = (form, variant, model.training, model.config, self.dtype)
        if made_by not in self.warm:
            self.warm[made_by] = self._read_warm(model, form=form, variant=variant)
        return {key: tensor.clone() for key, tensor in self.warm[made_by].items()}

    def _read_warm(self, model: TransformerXL, *, form: str, variant: int) -> State:
        state = model.init_state(self.batch_size, form=form)
        with torch.no_grad():
            for i, (tokens, targets) in enumerate(self.stream(self.warm_segments, variant=variant)):
                late = i < min(self.batch_size - 1, self.warm_segments // 2)
                state = model(
                    tokens, state, self.segment(reset=True if i == 0 else [i] if late else False), targets
                ).state
        return state

    def ragged(self, *, turn: int = 0) -> list[int]:
        """A length for each lane, of the five there are: full, one token less, none, one token, half.

        Args:
            turn: the first lane's place in that list.
        """
        size = self.segment_len
        lengths = (size, max(1, size - 1), 0, 1, max(1, size // 2))
        return [lengths[(lane + turn) % 5] for lane in range(self.batch_size)]

    def gradients(
        self,
        model: TransformerXL,
        state: State,
        batches: list[tuple[Tensor, Tensor]],
        segments: list[Segment],
    ) -> dict[str, Tensor]:
        """Results of the last segment and the gradients of all losses, with the graph kept between the segments.

        Raises:
            LawBroken: a forward took a parameter out of training.
        """
        total = torch.zeros((), device=self.device)
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        with self.seeded():
            for (tokens, targets), segment in zip(batches, segments, strict=True):
                out = model(tokens, state, segment, targets)
                assert out.losses_BT is not None
                total = total + out.losses_BT.mean() + sum(out.aux_losses.values())
                state = out.state
            demand_trainable(model, parameters)
            found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        named = {f"gradient of {name}": grad for name, grad in zip(parameters, found, strict=True) if grad is not None}
        return {**results(out), **named}


def demand_trainable(model: TransformerXL, names: Iterable[str]) -> None:
    """Parameters that were trainable before a forward are so after it.

    Raises:
        LawBroken: one of them is not (`weight.detach_()` does that, for good).
    """
    parameters = dict(model.named_parameters())
    lost = [name for name in names if not parameters[name].requires_grad]
    if lost:
        raise LawBroken(9, f"forward took requires_grad from {', '.join(lost)}")


def results(out: ModelOutput) -> dict[str, Tensor]:
    """Everything a forward gives, by name, without its graph."""
    assert out.losses_BT is not None
    found = {"losses": out.losses_BT, "hidden": out.hidden_BTD}
    found.update({f"state {key}": tensor for key, tensor in out.state.items()})
    found.update({f"auxiliary loss {key}": loss for key, loss in out.aux_losses.items()})
    return {name: tensor.detach() for name, tensor in found.items()}


def run(model: TransformerXL, state: State, batch: tuple[Tensor, Tensor], segment: Segment) -> dict[str, Tensor]:
    """`results` of one segment read without gradient."""
    tokens, targets = batch
    with torch.no_grad():
        return results(model(tokens, state, segment, targets))


def lanes_of(found: dict[str, Tensor], lanes: list[int]) -> dict[str, Tensor]:
    """The same results for some lanes only; what belongs to no lane is left out."""
    return {name: tensor[lanes] for name, tensor in found.items() if tensor.dim()}


def watch(part: MemoryStrategy | TokenMemory) -> None:
    """Make every call of a strategy check what it must not change and what it must return."""
    for name in ("residual", "slots", "side", "write", "wrap"):
        if hasattr(part, name):
            setattr(part, name, _watched(part, name, getattr(part, name)))


def _watched(part: MemoryStrategy | TokenMemory, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    title = f"{type(part).__name__}.{name}"

    def call(state: State, *args: Any) -> Any:
        before = {key: (tensor, tensor._version, tensor.detach().clone()) for key, tensor in state.items()}
        given = [
            value for arg in args for value in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(value, Tensor)
        ]
        versions = [tensor._version for tensor in given]
        result = method(state, *args)
        for key, (tensor, version, copy) in before.items():
            same = state.get(key) is tensor and tensor._version == version
            if not same or not torch.equal(tensor, copy):
                raise LawBroken(1, f"{title} changed state {key} in place")
        if state.keys() != before.keys():
            raise LawBroken(1, f"{title} changed the keys of the state it was given")
        if [tensor._version for tensor in given] != versions:
            raise LawBroken(1, f"{title} changed one of its arguments in place")
        if name == "write":
            _check_written(title, state, result[0] if isinstance(part, MemoryStrategy) else result)
        if name == "slots" and result is not None and isinstance(part, MemoryStrategy):
            _check_slots(title, part, result)
        return result

    return call


def _check_written(title: str, old: State, new: State) -> None:
    if new.keys() != old.keys():
        raise LawBroken(2, f"{title} returned keys {sorted(new)}, the state has {sorted(old)}")
    for key, tensor in old.items():
        if new[key].shape != tensor.shape:
            raise LawBroken(2, f"{title}: {key} was {tuple(tensor.shape)} and is {tuple(new[key].shape)}")
        if new[key].dtype != tensor.dtype:
            raise LawBroken(2, f"{title}: {key} was {tensor.dtype} and is {new[key].dtype}")


def _check_slots(title: str, part: MemoryStrategy, slots: Slots) -> None:
    """What a strategy declares about its slots is so."""
    if (slots.hidden is None) == (slots.keys_values is None):
        raise LawBroken(2, f"{title} must set exactly one of hidden and keys_values")
    n_slot = slots.age.shape[1]
    placed = slots.age if slots.positioned is None else slots.age[:, slots.positioned]
    youngest, oldest = (int(placed.min()), int(placed.max())) if placed.numel() else (1, 0)
    if youngest < 1 or oldest > part.max_age:
        raise LawBroken(2, f"{title}: ages go from {youngest} to {oldest}, allowed are 1 to max_age={part.max_age}")
    falling = torch.arange(n_slot, 0, -1, device=slots.age.device).expand_as(slots.age)
    if part.ages == "contiguous" and not torch.equal(slots.age, falling):
        raise LawBroken(2, f"{title}: ages are declared contiguous but are not {n_slot}, {n_slot - 1}, ..., 1")
    if slots.bias.shape[-1] != n_slot:
        raise LawBroken(2, f"{title}: {n_slot} slots but a bias for {slots.bias.shape[-1]}")
