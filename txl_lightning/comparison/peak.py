"""The highest point of this process's memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path

import torch


def start(kind: str) -> None:
    """Forget earlier peaks and give back what is free; `kind`: of the device that is measured."""
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # earlier runs left pages that are free but resident
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def read(kind: str) -> int | None:
    """Bytes at the highest point since `start`: allocated on the GPU, or resident on the CPU with all of Python and
    torch; None where the system does not tell."""
    if kind == "cuda":
        return torch.cuda.max_memory_allocated()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return None
