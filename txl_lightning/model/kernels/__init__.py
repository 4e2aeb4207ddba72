"""Four-term relative attention that stores nothing of size T times S. Importing `relative` needs Triton."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU (the environment variable TRITON_INTERPRET)."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on")


def on_device(like: Tensor) -> AbstractContextManager[Any]:
    """Where kernels are to be launched: Triton takes the current device, whatever its operands are on."""
    return torch.cuda.device_of(like) if like.is_cuda else nullcontext()


def why_not(device_type: str) -> str | None:
    """What keeps the kernels from running on a device of this type; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type != "cuda" and not interpreted():
        return f"its kernels need a CUDA device, not {device_type}"
    return None
