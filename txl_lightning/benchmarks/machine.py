"""What figures were measured on, and what the device can do at best."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from txl_lightning.benchmarks.timing import Task
from txl_lightning.benchmarks.workloads import precision_of, state_dtype
from txl_lightning.config import Config
from txl_lightning.training.trainer import device_kind

SIDE = {"cpu": 1024, "cuda": 8192, "mps": 4096}


def products(config: Config) -> Task:
    """One large matrix product in the precision of training: the most FLOP/s that a model can hope for."""
    kind = device_kind(config)
    side, dtype = SIDE[kind], precision_of(config) or state_dtype(config)
    left, right = (torch.randn(side, side, device=kind, dtype=dtype) for _ in range(2))
    return Task(
        part="peak", label="matrix product", run=lambda: left @ right, amount=2.0 * side**3, unit="FLOP",
        facts={"side": side, "dtype": str(dtype).removeprefix("torch.")},
    )  # fmt: skip


def facts(config: Config) -> dict[str, Any]:
    """Date, device, versions, and how busy the machine is with other things."""
    kind = device_kind(config)
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if kind == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 2)
    for name in ("torch", "lightning", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
