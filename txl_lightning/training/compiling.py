"""Whether the model is compiled for training (`trainer.compile`).

Training has one shape, so one compilation serves all its steps. Evaluation and generation have many, so they run as
they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.exc import TorchDynamoException

from txl_lightning.config import ConfigError, TrainerConfig
from txl_lightning.model.backends import why_not_compiled
from txl_lightning.model.transformer import ModelOutput, TransformerXL
from txl_lightning.training.lane_state import put
from txl_lightning.types import State

_logger = logging.getLogger(__name__)


class Forward(NamedTuple):
    """What training calls."""

    read: Callable[..., ModelOutput]  # as `TransformerXL.forward`
    captured: bool  # as CUDA graphs: memory has to stay where it is, and gradients are overwritten by the next step

    def kept(self, new: State, *, place: State) -> State:
        """Memory as the next step reads it, for a loop of one's own; place: that of the step before, {} at first."""
        return put(new, place=place) if self.captured else new


def training_forward(model: TransformerXL, keys: TrainerConfig, *, kind: str) -> Forward:
    """What training calls: the model, or the same compiled.

    "auto" compiles on CUDA. On a CPU attention in chunks (`model.chunked`) is faster than compiled code, which cannot
    use it. Where there is no compiler the model runs as it is, which is said once.

    On CUDA a step that is one forward and one backward pass is captured as CUDA graphs, which takes the time between
    kernels away. Where gradients of several passes are added up, the graphs would overwrite those of the pass before.

    Args:
        model: stays as it is; what is compiled shares its weights.
        keys: `compile` says whether, the others what a step is made of.
        kind: of the device.
    """
    wanted = keys.compile
    if wanted is False or (wanted == "auto" and kind != "cuda"):
        return Forward(model, captured=False)
    if (reason := why_not_compiled(kind)) is not None:
        _logger.warning(f"trainer.compile={_typed(wanted)}: {reason}; training runs as it is")
        return Forward(model, captured=False)
    captured = kind == "cuda" and keys.accumulate_grad_batches * keys.lane_chunks == 1
    compiled = torch.compile(model, dynamic=False, mode="reduce-overhead" if captured else None)
    return Forward(_Compiled(model, compiled, captured=captured, forgiving=wanted == "auto"), captured=captured)


class _Compiled:
    """A compiled model, or the model itself from where the compiler fails on; torch compiles at the first call.

    Args:
        model: as it is.
        compiled: the same.
        captured: as CUDA graphs.
        forgiving: go on with the model as it is; else the compiler's error is raised.
    """

    def __init__(
        self, model: TransformerXL, compiled: Callable[..., ModelOutput], *, captured: bool, forgiving: bool
    ) -> None:
        self.model, self.run, self.captured, self.forgiving = model, compiled, captured, forgiving

    def __call__(self, *args: Any, **more: Any) -> ModelOutput:
        if self.captured:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            # where torch cuts the graph at DDP's buckets, some of its versions refuse an autograd.Function
            with torch._dynamo.config.patch(optimize_ddp=False):
                return self.run(*args, **more)
        except TorchDynamoException as error:
            if not self.forgiving:
                raise
            why = " ".join(str(error).splitlines()[:2])  # who failed, and at what
            _logger.warning(f"trainer.compile=auto: {why}; training runs as it is")
            self.run = self.model
            return self.model(*args, **more)


def check_compile(wanted: str | bool, *, deepspeed: bool) -> None:
    """Refuse to compile what DeepSpeed's engine runs: it replaces the weights of ZeRO 3 behind the compiler's back.

    Raises:
        ConfigError: it was asked for.
    """
    if wanted is True and deepspeed:
        rule = "DeepSpeed's engine moves weights while the model runs"
        raise ConfigError("trainer.compile", "true", rule, "set it to false, or train with strategy=ddp")


def _typed(wanted: str | bool) -> str:
    return wanted if isinstance(wanted, str) else str(wanted).lower()
