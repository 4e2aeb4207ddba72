"""How fast training is, and what it waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler

from txl_lightning import registry
from txl_lightning.comparison import flops, peak
from txl_lightning.config import Section, key

KNOWN_TFLOPS = {"A100": 312, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989}
"""What their maker says of dense products of 16-bit numbers, by a part of the device's name; the first that fits."""

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig(Section):
    """Keys of `callbacks.throughput`."""

    section = "callbacks.throughput"

    peak_tflops: float | None = key(
        None,
        "10^12 operations per second that one device can do in this precision; null: known for some GPUs in 16 bit",
        above=0,
    )


@registry.callbacks.register("throughput", config=ThroughputConfig)
class Throughput(L.Callback):
    """Logs at each point of the curves:

    perf/tokens_per_second   targets read for training per second since the last point, over all ranks, without
                             validation; also those of steps that were skipped, which take their time too
    perf/mfu                 model FLOPs utilisation: matrix products of the model that those tokens take, forward and
                             backward (recomputation not counted), as a share of what all devices could do; only where
                             the peak is given (`peak_tflops`) or known
    perf/peak_memory_gb      10^9 bytes at the highest point since the process began, of the rank with most: allocated
                             on a GPU, else resident on the CPU with all of Python; only where the system tells
    perf/data_wait           share of the training time since the last point that went by waiting for the next batch, of
                             the first rank; only where the Trainer has no profiler of its own
    """

    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config
        self._tokens, self._seconds = 0, 0.0
        self._wait = WaitTimer()
        self._flops_per_second = 0.0  # that one token per second takes of all devices' peak; 0: not known

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and type(trainer.profiler) is PassThroughProfiler:
            trainer.profiler = self._wait

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.profiler is self._wait:
            trainer.profiler = PassThroughProfiler()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._tokens, self._seconds = pl_module.clock.tokens, pl_module.clock.seconds
        self._wait.take()
        limit = self._peak(pl_module)
        if limit is not None:
            self._flops_per_second = flops.count(pl_module.config).training / (limit * 1e12 * trainer.world_size)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.logs_now():
            return
        tokens, seconds = pl_module.clock.tokens, pl_module.clock.seconds
        if tokens > self._tokens:
            pl_module.log_curves(self._figures(trainer, pl_module, tokens - self._tokens, seconds - self._seconds))
        self._tokens, self._seconds = tokens, seconds

    def _figures(self, trainer: Any, module: Any, tokens: int, seconds: float) -> dict[str, Any]:
        rate, waited = tokens / seconds, self._wait.take()
        found: dict[str, Any] = {"perf/tokens_per_second": rate}
        if self._flops_per_second:
            found["perf/mfu"] = rate * self._flops_per_second
        highest = peak.read(module.device.type)
        if highest is not None:
            found |= module.over_ranks({"perf/peak_memory_gb": torch.tensor(highest / GB)}, by="max")
        if trainer.profiler is self._wait:
            found["perf/data_wait"] = waited / seconds
        return found

    def _peak(self, module: Any) -> float | None:
        """10^12 operations per second of a device."""
        if self.config.peak_tflops is not None:
            return self.config.peak_tflops
        if module.device.type != "cuda" or "16" not in str(module.trainer.precision):
            return None
        name = torch.cuda.get_device_name(module.device)
        return next((float(tflops) for part, tflops in KNOWN_TFLOPS.items() if part in name), None)


class WaitTimer(PassThroughProfiler):
    """A profiler that times the wait for the next training batch and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._since: float | None = None
        self._waited = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self._since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next") and self._since is not None:
            self._waited, self._since = self._waited + time.perf_counter() - self._since, None

    def take(self) -> float:
        """Seconds waited since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited
