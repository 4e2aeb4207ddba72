"""Which way attention is computed (`model.attention`), chosen by device, type of numbers and what a layer needs.

    reference   the four terms written out, distances looked up pair by pair: what the others are tested against
    shift       the same sums by matrix products and a relative shift (a look-up where ages are not contiguous)
    compiled    `shift` through torch.compile
    triton      kernels that store nothing of size T times S (`model/kernels/`); for the positions of `FUSED`

All but `triton` form the attention weights of all pairs.
"""

from __future__ import annotations

import logging
import os
import shutil
from typing import NamedTuple

import torch
from torch import Tensor

from txl_lightning.config import ConfigError
from txl_lightning.model import kernels

FUSED = ("transformer_xl", "none", "absolute", "absolute_per_layer")
"""Values of `model.position` whose scores the kernels compute."""

_LARGEST_HEAD = 256
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_logger = logging.getLogger(__name__)
_said: set[str] = set()


class Need(NamedTuple):
    """What a layer asks of a backend."""

    device: torch.device
    dtype: torch.dtype  # of queries, keys and values
    d_head: int
    position: str  # `model.position`
    weights: bool  # whether the attention weights themselves are wanted

    @classmethod
    def of(cls, x: Tensor, *, d_head: int, position: str, weights: bool) -> Need:
        """That of a layer with this input: its products are of autocast's type where that is on."""
        kind = x.device.type
        cast = kind != "meta" and torch.is_autocast_enabled(kind)
        return cls(x.device, torch.get_autocast_dtype(kind) if cast else x.dtype, d_head, position, weights)


def choose(wanted: str, need: Need) -> str:
    """The way to compute attention: "reference", "shift", "compiled" or "triton".

    What is asked for and cannot be is said once, as is what "auto" chose.

    Raises:
        ConfigError: `triton` is asked for where its kernels cannot run at all.
    """
    if wanted == "auto":
        chosen = _fastest(need)
        _say(logging.INFO, f"model.attention=auto: {chosen} on {need.device.type} in {need.dtype}")
        return chosen
    if wanted == "triton":
        check_backend(wanted, need.device.type)
        if (reason := _misfit(need)) is not None:
            chosen = _plain(need)
            _say(logging.WARNING, f"model.attention=triton: {reason}; {chosen} instead")
            return chosen
    if wanted == "compiled" and (reason := _no_compiler(need.device.type)) is not None:
        _say(logging.WARNING, f"model.attention=compiled: {reason}; shift instead")
        return "shift"
    return wanted


def check_backend(wanted: str, device_type: str) -> None:
    """The backend asked for exists on a device of this type.

    Raises:
        ConfigError: it does not.
    """
    if wanted == "triton" and (reason := _no_kernels(device_type)) is not None:
        raise ConfigError("model.attention", wanted, reason, "set model.attention=auto")


def _fastest(need: Need) -> str:
    """Measured on a CPU (docs/benchmarks.md); on CUDA the one that stores least, if it can."""
    if need.device.type != "cuda":
        return "shift"
    fits = _misfit(need) is None and _no_kernels("cuda") is None
    return "triton" if fits else _plain(need)


def _plain(need: Need) -> str:
    """The fastest way that forms the weights."""
    return "compiled" if need.device.type == "cuda" and _no_compiler("cuda") is None else "shift"


def _misfit(need: Need) -> str | None:
    """Why the kernels cannot serve this layer, wherever they run; None: they can."""
    if need.weights:
        return "a memory wants to see the attention weights, which are never formed"
    if need.position not in FUSED:
        return f"there is none for model.position={need.position}"
    if need.dtype not in _TYPES:
        return f"there is none for {need.dtype}"
    if need.d_head > _LARGEST_HEAD:
        return f"heads are wider than {_LARGEST_HEAD}"
    return None


@torch.compiler.assume_constant_result
def _no_kernels(device_type: str) -> str | None:
    if (reason := kernels.why_not(device_type)) is not None:
        return reason
    return _no_compiler(device_type) if device_type == "cuda" and not kernels.interpreted() else None


def why_not_compiled(device_type: str) -> str | None:
    """Why nothing can be compiled for a device; None: it can."""
    return _no_compiler(device_type)


@torch.compiler.assume_constant_result  # looks at files, which dynamo cannot follow
def _no_compiler(device_type: str) -> str | None:
    """Why code cannot be compiled for a device; None: it can."""
    if device_type == "cuda":
        if (reason := kernels.why_not("cuda")) is not None:
            return reason
        names = [os.environ.get("CC"), "gcc", "clang", "cc"]
    elif device_type == "cpu":
        names = [os.environ.get("CXX"), "g++", "clang++"]
    else:
        return f"nothing is compiled for {device_type}"
    if any(name and shutil.which(name) for name in names):
        return None
    return f"there is no C compiler ({', '.join(filter(None, names))})"


def _say(level: int, text: str) -> None:
    if not torch.compiler.is_compiling() and text not in _said:
        _said.add(text)
        _logger.log(level, text)
