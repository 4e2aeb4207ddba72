"""A function recorded once and replayed: on a GPU one launch (a CUDA graph) in place of hundreds.

A replay does what was done when it was recorded, with the same memory: what the host decided then stays decided, and
every tensor is read and written where it was. So a recorded function works on static tensors, never looks at their
values, and is recorded anew when one of them has moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from txl_lightning.model.tables import autocast_type

_logger = logging.getLogger(__name__)
_said: set[str] = set()


class Recorder(Protocol):
    """Records one function and replays it."""

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a function until nothing happens in it for the first time, and note down what it does.

        Returns:
            the tensor that each replay writes its result to.

        Raises:
            RuntimeError: it cannot be recorded.
        """

    def replay(self) -> None:
        """Do it again; nothing waits for the device."""


class CudaRecorder:
    """A `torch.cuda.CUDAGraph` with a memory pool of its own.

    A capture that fails leaves torch's generator behind as if it went on, and the next dropout raises. So what waits
    for the device is looked for before, in a run that torch ends there.

    Args:
        device: where the function runs.
    """

    warm_ups = 2  # libraries make their handles and workspaces meanwhile

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        with torch.cuda.device(self.device):
            here, aside = torch.cuda.current_stream(), _side_stream(self.device)
            aside.wait_stream(here)
            try:
                with torch.cuda.stream(aside):
                    for _ in range(self.warm_ups):
                        run()
                    with _no_waiting():
                        run()
                self.graph = torch.cuda.CUDAGraph()
                # other threads (data is pinned in one) may go on calling CUDA meanwhile
                with torch.cuda.graph(self.graph, stream=aside, capture_error_mode="thread_local"):
                    return run()
            finally:
                torch.cuda.set_stream(here)  # torch stays on the other one where a capture fails at its end
                here.wait_stream(aside)

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """What makes the host wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace for each stream that it ever met."""
    return torch.cuda.Stream(device)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""Who records, by type of device; elsewhere nothing is recorded."""


class Captured:
    """A recorded function of a few tensors.

    Args:
        recorder: a new one.
        function: of tensors.
        idle: inputs of the shapes and types to come, with which it may run any number of times: it changes nothing
            then that a later run would not write over.
    """

    def __init__(self, recorder: Recorder, function: Callable[..., Tensor], idle: Sequence[Tensor]) -> None:
        self.inputs, self.recorder = [tensor.clone() for tensor in idle], recorder
        dtype = autocast_type(idle[0].device)
        # not with its cache: weights would be rounded once, outside, into memory that is soon another's
        with torch.autocast(idle[0].device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            self.output = recorder.record(lambda: function(*self.inputs))

    def __call__(self, given: Sequence[Tensor]) -> Tensor:
        """What the function gives; the caller's to keep."""
        for static, new in zip(self.inputs, given, strict=True):
            static.copy_(new)
        self.recorder.replay()
        return self.output.clone()


class Places:
    """Where a module's weights and buffers lie."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        owners = [own for part in self._parts for own in (part._parameters, part._buffers)]
        named = [(own, name, tensor) for own in owners for name, tensor in own.items() if tensor is not None]
        self._places = [(own, name, tensor.data_ptr()) for own, name, tensor in named]
        self._held = [tensor.detach() for _, _, tensor in named]  # so that no address is given to another tensor

    def moved(self) -> bool:
        """Whether one of them lies elsewhere now; new values in the old place are no move."""
        return any((now := own.get(name)) is None or now.data_ptr() != place for own, name, place in self._places)

    def exchanged(self, module: nn.Module) -> bool:
        """Whether it has other modules inside; takes longer than `moved`, which does not see that."""
        parts = list(module.modules())
        return len(parts) != len(self._parts) or any(a is not b for a, b in zip(parts, self._parts, strict=True))


class Graphs:
    """Recordings of one function over the same buffers and the weights of one module.

    Args:
        make: makes a recorder; None: nothing is recorded.
    """

    def __init__(self, make: Callable[[], Recorder] | None) -> None:
        self._make = make
        self._module: nn.Module | None = None
        self._places: Places | None = None
        self._kinds: dict[Hashable, Captured] = {}

    @property
    def records(self) -> bool:
        """Whether anything is recorded at all."""
        return self._make is not None

    def run(
        self,
        module: nn.Module,
        kind: Hashable,
        function: Callable[..., Tensor],
        given: Sequence[Tensor],
        *,
        idle: Sequence[Tensor],
    ) -> Tensor | None:
        """What the function gives, or None where it has to be called as it is.

        A function that cannot be recorded is not tried again, which is said once.

        Args:
            module: whose weights the function reads.
            kind: all else that decides what the function does.
            function, idle: as in `Captured`.
            given: its inputs.
        """
        if self._make is None or torch.is_grad_enabled() or module.training:
            return None
        if self._places is None or self._module is not module or self._places.moved():
            self.drop()
            self._module, self._places = module, Places(module)
        kind = (kind, torch.is_inference_mode_enabled(), autocast_type(given[0].device))
        if kind not in self._kinds:
            try:
                self._kinds[kind] = Captured(self._make(), function, idle)
            except RuntimeError as error:
                self._make = None
                reason, *_ = str(error).split("\n")
                _say(f"tokens are read without a recorded graph, which takes longer: {reason}")
                return None
        return self._kinds[kind](given)

    def look_over(self, module: nn.Module) -> None:
        """To be called now and then: drop what was recorded with other modules."""
        if self._kinds and self._places is not None and self._places.exchanged(module):
            self._places = None

    def drop(self) -> None:
        """Record anew: something that was read lies elsewhere now."""
        self._kinds.clear()


def recorder_for(device: torch.device, *, wanted: bool | None) -> Callable[[], Recorder] | None:
    """Who records what runs on a device; None: nobody.

    Args:
        device: where it runs.
        wanted: None: wherever something can be recorded.

    Raises:
        ValueError: it is wanted where nothing can be recorded.
    """
    make = RECORDERS.get(device.type)
    if make is None and wanted:
        raise ValueError(f"capture=True: nothing can be recorded on {device.type}, only on {', '.join(RECORDERS)}")
    return None if make is None or wanted is False else lambda: make(device)


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _logger.warning(text)
