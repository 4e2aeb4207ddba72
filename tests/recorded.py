"""What a CUDA graph does, on a CPU: every operation of a function is noted down once, and then done again and again
with the same arguments on the same memory, whatever the host would decide by now.

As on a GPU, recording itself changes nothing, what would wait for the device or read memory of the host is refused, and
a weight that was exchanged for another is still read where it lay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
WAITS = {  # shapes or branches that depend on values, and what brings numbers of the host along
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select", "bincount"),
    *("lift_fresh", "lift", "_unique2", "unique_dim", "unique_consecutive", "allclose", "_assert_async"),
}


class Refused(RuntimeError):
    """What CUDA would not record."""


class Call(NamedTuple):
    """One operation; its tensors are aliases, made when it was recorded."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    def again(self) -> None:
        made = self.operation(*self.args, **self.kwargs)
        for old, new in zip(self.results, tensors(made), strict=True):
            if place(old) != place(new):
                old.copy_(new)


class StandIn:
    """In place of `capture.CudaRecorder`.

    Attributes:
        read: where the tensors lie that a replay reads and did not make itself.
        replays: how often it was replayed.
    """

    replaying = False

    def __init__(self, device: torch.device) -> None:
        self.calls: list[Call] = []
        self.read: set[int] = set()
        self.replays = 0

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        for _ in range(2):
            run()
        noting = Noting()
        try:
            with HostReads(), noting:
                output = run()
        finally:
            for tensor, before in reversed(noting.changed):
                tensor.copy_(before)
        self.calls, self.read = noting.calls, noting.read
        for tensor in (tensor for call in self.calls for tensor in call.results if place(tensor) in noting.made):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)  # nothing is computed before the first replay
        return output

    def replay(self) -> None:
        self.replays += 1
        StandIn.replaying = True
        with torch.autocast("cpu", enabled=False):  # what was recorded is rounded already
            for call in self.calls:
                call.again()
        StandIn.replaying = False


class Noting(TorchDispatchMode):
    """Notes every operation down, in its smallest parts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.made: dict[int, Tensor] = {}  # by place, which stays theirs
        self.read: set[int] = set()
        self.changed: list[tuple[Tensor, Tensor]] = []  # with what stood there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") in WAITS or looks_up_by_mask(func, args):
            raise Refused(f"{func} waits for the device")
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        args, kwargs = tree_map_only(Tensor, alias, (args, kwargs))
        for tensor in tensors((args, kwargs)):
            if place(tensor) not in self.made:
                self.read.add(place(tensor))
        for tensor in written(func, args, kwargs):
            if place(tensor) not in self.made:
                self.changed.append((tensor, tensor.clone()))
        result = func(*args, **kwargs)
        results = [alias(tensor) for tensor in tensors(result)]
        known = {place(tensor) for tensor in tensors((args, kwargs))}
        self.made.update({place(tensor): tensor for tensor in results if place(tensor) not in known})
        self.calls.append(Call(func, args, kwargs, results))
        return result


class HostReads(TorchFunctionMode):
    """Refuses what reads a tensor on the host, which the CPU does behind torch's back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.refuse(func.__name__)
        return func(*args, **(kwargs or {}))

    def refuse(self, name: str) -> None:
        raise Refused(f"Tensor.{name} waits for the device")


def looks_up_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask, of which as many numbers are found as it holds True."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("index") and len(args) > 1 and any(i.dtype == torch.bool for i in tensors(args[1]))


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes."""
    for index, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield from tensors(args[index] if index < len(args) else kwargs.get(declared.name))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def alias(tensor: Tensor) -> Tensor:
    """The same memory, also when the tensor is given other data."""
    return tensor.detach()


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
