"""How ZeRO cuts weights and averages of an optimizer into shares of ranks, and how they are put together again.

DeepSpeed gives the optimizer flat vectors, each of the parameters of one group (under stage 3 groups above 1e9 numbers
are several vectors). Stages 1 and 2 lay the parameters one after the other and cut the whole into as many equal shares
as there are ranks; stage 3 cuts each parameter, and a rank's vector is its shares of them, one after the other. Both
fill up what does not divide. Whatever has no element for each parameter (a step count) is the same in all shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a vector: from `start` of the whole one (stages 1, 2) or of each rank's (stage 3)."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One flat vector and its shares.

    Attributes:
        places: of its parameters, in order.
        ranks: that share it.
        share: elements of each rank.
        divides_each: each parameter is cut (stage 3), not the whole.
    """

    places: tuple[Place, ...]
    ranks: int
    share: int
    divides_each: bool

    def cut(self, values: Mapping[str, Tensor], *, rank: int) -> Tensor:
        """A rank's share (share,) of values by the names of parameters; what is filled up is 0."""
        first = next(iter(values.values()))
        share = torch.zeros(self.share, dtype=first.dtype)
        for place in self.places:
            own, there = self._piece(place, rank)
            share[there] = values[place.name].reshape(-1)[own].to(first.dtype)
        return share

    def join(self, shares: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and its values, in its shape, from the shares of all ranks in their order."""
        for place in self.places:
            whole = shares[0].new_empty(place.numel)
            for rank, share in enumerate(shares):
                own, there = self._piece(place, rank)
                whole[own] = share[there]
            yield place.name, whole.view(place.shape)

    def _piece(self, place: Place, rank: int) -> tuple[slice, slice]:
        """Elements of a parameter that a rank has, and where they are in its share."""
        if self.divides_each:
            size = math.ceil(place.numel / self.ranks)
            first, stop = (min(number * size, place.numel) for number in (rank, rank + 1))
            return slice(first, stop), slice(place.start, place.start + stop - first)
        begin, end = rank * self.share, (rank + 1) * self.share
        first, stop = (min(max(edge, begin), end) for edge in (place.start, place.start + place.numel))
        return slice(first - place.start, stop - place.start), slice(first - begin, stop - begin)


def one_after_the_other(
    shapes: Mapping[str, Sequence[int]], *, ranks: int, share: int, paddings: Sequence[int] = ()
) -> Layout:
    """The layout of stages 1 and 2. `paddings`: elements left free behind each parameter; none by default."""
    places, start = [], 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        places.append(Place(name, tuple(shape), start))
        start += math.prod(shape) + padding
    return Layout(places=tuple(places), ranks=ranks, share=share, divides_each=False)


def side_by_side(shapes: Mapping[str, Sequence[int]], *, ranks: int) -> Layout:
    """The layout of stage 3."""
    places, start = [], 0
    for name, shape in shapes.items():
        places.append(Place(name, tuple(shape), start))
        start += math.ceil(math.prod(shape) / ranks)
    return Layout(places=tuple(places), ranks=ranks, share=start, divides_each=True)


def joined_state(layout: Layout, states: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """An optimizer's state of each parameter, by name, from that of all ranks' shares of one vector."""
    found: dict[str, dict[str, Any]] = {place.name: {} for place in layout.places}
    for key, held in states[0].items():
        if isinstance(held, Tensor) and held.dim():
            for name, whole in layout.join([state[key] for state in states]):
                found[name][key] = whole
        else:
            for own in found.values():
                own[key] = held.clone() if isinstance(held, Tensor) else held
    return found


def cut_state(layout: Layout, states: Mapping[str, Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
    """An optimizer's state of a rank's share of one vector, from that of each parameter.

    A parameter without any state has had no gradient yet: its averages are 0.
    """
    held = [(place, states.get(place.name, {})) for place in layout.places]
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for _, state in held for key in state):
        values = {place.name: state[key] for place, state in held if key in state}
        first = next(iter(values.values()))
        if any(isinstance(value, Tensor) and value.dim() for value in values.values()):  # one has no dimensions itself
            zeros = {place.name: torch.zeros(place.shape, dtype=first.dtype) for place, _ in held}
            found[key] = layout.cut({**zeros, **values}, rank=rank)
        else:
            found[key] = first
    return found


def layouts_of(held: Mapping[str, Any], shapes: Sequence[Mapping[str, Sequence[int]]], *, ranks: int) -> list[Layout]:
    """The layouts of a folder's vectors.

    Args:
        held: what a rank stored of its optimizer.
        shapes: of the parameters of each vector, by name.
        ranks: that wrote the folder.
    """
    if "fp32_flat_groups" in held:
        return [side_by_side(own, ranks=ranks) for own in shapes]
    paddings = held.get("param_alignment_paddings") or [()] * len(shapes)
    vectors = held["single_partition_of_fp32_groups"]
    cropped = held["group_paddings"] if "zero_stage" in held else [0] * len(vectors)  # one of its optimizers crops none
    sizes = [vector.numel() + padding for vector, padding in zip(vectors, cropped, strict=True)]
    return [
        one_after_the_other(own, ranks=ranks, share=size, paddings=free)
        for own, size, free in zip(shapes, sizes, paddings, strict=True)
    ]


def one_optimizer(shards: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer as torch's has it that nobody divided.

    Args:
        shards: what each rank stored of its optimizer, in the order of ranks.
        model: what the first rank stored of the model: names and shapes of the parameters of each vector.
    """
    own = [shard.get("base_optimizer_state", shard.get("optimizer_state_dict")) for shard in shards]
    groups, layouts = own[0]["param_groups"], layouts_of(shards[0], model["param_shapes"], ranks=len(shards))
    order = {name: number for number, name in enumerate(model["module"])}
    state: dict[int, Any] = {}
    joined = []
    for group in groups:
        found: dict[str, dict[str, Any]] = {}
        for vector in group["params"]:
            found |= joined_state(layouts[vector], [rank["state"].get(vector, {}) for rank in own])
        first = len(state)
        for name in sorted(found, key=order.__getitem__):
            state[len(state)] = found[name]
        joined.append({**group, "params": list(range(first, len(state)))})
    return {"state": {number: held for number, held in state.items() if held}, "param_groups": joined}
