"""Bytes of a training step, without allocating it: the step runs on tensors that have shapes and no numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from txl_lightning.config import Config
from txl_lightning.model.architectures import make_model
from txl_lightning.model.softmax import target_counts
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import State, detach, n_byte


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one rank's step needs, in bytes unless said otherwise.

    Attributes:
        parameters: number of them, with those of the memory.
        parameter_bytes: of the weights that are trained.
        state_bytes: memory of the rank's lanes.
        activation_bytes: at the highest point of forward and backward pass, all that is there beside the weights,
            their gradients and the memory before the segment.
    """

    parameters: int
    parameter_bytes: int
    state_bytes: int
    activation_bytes: int


def footprint(
    config: Config, targets_BT: Tensor, *, precision: str, kind: str, chunks: int = 1, state_stays: bool = True
) -> Footprint:
    """Run a step of one rank's lanes forward and backward on shapes alone.

    Args:
        config: the whole configuration.
        targets_BT: (B, T) tokens on the CPU: the cost of an adaptive softmax depends on how rare they are.
        precision: Lightning's name.
        kind: of the device, which decides how some operations are done: "cpu", "cuda".
        chunks: parts that the lanes are read in, one after the other; they divide B.
        state_stays: the memory of all chunks is on the device, not only that of the one being read.
    """
    targets_BT = targets_BT[: len(targets_BT) // chunks]
    device = torch.device(kind if kind == "cuda" else "cpu")
    window = config.trainer.bptt_segments
    # a step over several batches can be taken back, to the memory before its first one
    kept = chunks if config.trainer.accumulate_grad_batches > window else 0
    counts = target_counts(targets_BT, cutoffs=config.model.cutoffs)
    live = LiveBytes()
    with FakeTensorMode(), device, _default_dtype(torch.bfloat16 if precision == "bf16-true" else torch.float32):
        model = make_model(config).train()
        state = model.init_state(len(targets_BT), dtype=torch.bfloat16 if "bf16" in precision else torch.float32)
        tokens_BT = torch.zeros(targets_BT.shape, dtype=torch.int64)
        weights = list(model.parameters())
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        live.start([*weights, *(weight.grad for weight in weights), *model.buffers(), *state.values(), tokens_BT])
        with live:
            _step(model, state, tokens_BT, counts, window=window, precision=precision)
    return Footprint(
        parameters=sum(weight.numel() for weight in weights),
        parameter_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        state_bytes=n_byte(state) * chunks,
        # with the new memory of the chunks that were read
        activation_bytes=live.peak + n_byte(state) * (chunks - 1 + kept if state_stays else 0),
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As lightning's precision does around a model in half precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _step(
    model: TransformerXL, state: State, tokens_BT: Tensor, counts: Sequence[int], *, window: int, precision: str
) -> None:
    """What the training step of the module does: one backward pass through a window of segments."""
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    loss: Any = 0
    for _ in range(window):
        with torch.autocast(tokens_BT.device.type, dtype=dtype, enabled=precision.endswith("mixed")):
            out = model(tokens_BT, state, None, tokens_BT, target_counts=counts)
            assert out.losses_BT is not None
            loss = loss + out.losses_BT.sum() + sum(out.aux_losses.values())
        state = out.state
    state = detach(state)  # kept until the step is made; nothing else is
    del out
    loss.backward()


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make and how many bytes of them are there at a time.

    Attributes:
        now, peak: bytes made since `start`, and the most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def start(self, present: Iterable[Tensor]) -> None:
        """Count from here, without tensors that are there already."""
        for tensor in present:
            self._follow(tensor)
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        if place in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[place]
            self.now -= size

        self._known[place] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
