"""Whether the model is compiled for training (`trainer.compile`).

Training has one shape, so one compilation serves all its steps. Evaluation and generation have many, so they run as
they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from txl_lightning.config import ConfigError
from txl_lightning.model.backends import why_not_compiled
from txl_lightning.model.transformer import TransformerXL

_logger = logging.getLogger(__name__)


def training_forward(model: TransformerXL, wanted: str | bool, *, kind: str) -> Callable[..., Any]:
    """What training calls: the model, or the same compiled.

    "auto" compiles on CUDA. On a CPU attention in chunks (`model.chunked`) is faster than compiled code, which cannot
    use it. Where there is no compiler the model runs as it is, which is said once.

    Args:
        model: stays as it is; what is compiled shares its weights.
        wanted: `trainer.compile`.
        kind: of the device.
    """
    if wanted is False or (wanted == "auto" and kind != "cuda"):
        return model
    if (reason := why_not_compiled(kind)) is not None:
        _logger.warning(f"trainer.compile={_typed(wanted)}: {reason}; training runs as it is")
        return model
    return torch.compile(model, dynamic=False)


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
