"""`txl fit dry_run=true`: what a run needs, without training and without allocating it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from txl_lightning.commands.output import bytes_in_words
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.lanes import LaneLayout
from txl_lightning.data.store import Meta, sample, survey
from txl_lightning.training.footprint import Footprint, footprint
from txl_lightning.training.optim import optimizer_bytes
from txl_lightning.training.trainer import device_kind, resolve_precision
from txl_lightning.training.trouble import what_saves_memory
from txl_lightning.training.zero import Held, held_by_rank


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes per rank, and the length of a pass."""

    parameters: int  # number of them, not bytes, with those of the memory
    memory_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    state_bytes: int
    state_share: float  # of it that is on the device during a step
    activation_bytes: int
    steps_per_epoch: int  # once accumulation has begun
    epochs: float  # in max_steps
    available_bytes: int | None  # on the device; None: it does not say
    host_bytes: int = 0  # in main memory, where what is computed with on the device is kept
    local_ranks: int = 1  # of this machine
    machine_bytes: int | None = None  # main memory, for all of them. None: it does not say

    @property
    def total_bytes(self) -> int:
        """All of it at the highest point of a step."""
        weights = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return weights + round(self.state_bytes * self.state_share) + self.activation_bytes


def needs(config: Config) -> Needs:
    """Measure a training step on shapes alone.

    Raises:
        ConfigError: it is more than the device has.
    """
    keys, kind, precision = config.trainer, device_kind(config), resolve_precision(config)
    ranks = keys.devices * keys.num_nodes
    targets_BT = some_targets(config, config.data.batch_size // ranks)
    elsewhere = config.memory.offload == "cpu" and kind != "cpu"
    step = footprint(
        config, targets_BT, precision=precision, kind=kind, chunks=keys.lane_chunks, state_stays=not elsewhere
    )
    # before the segment and after it, and of a step over several batches before the first
    copies = 3 if keys.accumulate_grad_batches > keys.bptt_segments else 2
    held = _held(config, step, ranks=ranks, kind=kind, precision=precision)
    segments = segments_per_epoch(config, survey(config.data))
    alone = min(keys.accumulate_from_step, keys.max_steps)
    steps_per_epoch = -(-segments // keys.accumulate_grad_batches)
    found = Needs(
        parameters=step.parameters,
        memory_parameters=step.parameters - config.model.num_params(),
        parameter_bytes=held.parameter_bytes,
        gradient_bytes=held.gradient_bytes,
        optimizer_bytes=held.optimizer_bytes,
        host_bytes=held.host_bytes + (copies * step.state_bytes if elsewhere else 0),
        state_bytes=step.state_bytes,
        state_share=1 / keys.lane_chunks if elsewhere else 1.0,
        activation_bytes=step.activation_bytes,
        steps_per_epoch=steps_per_epoch,
        epochs=alone / segments + (keys.max_steps - alone) / steps_per_epoch,
        available_bytes=_available(kind),
        local_ranks=keys.devices,
        machine_bytes=_available("cpu"),
    )
    _refuse_too_much(found, config, kind=kind)
    return found


def _held(config: Config, step: Footprint, *, ranks: int, kind: str, precision: str) -> Held:
    """What weights, gradients and optimizer take on one rank; DeepSpeed makes the weights bfloat16 in bf16-mixed."""
    keys = config.strategy
    half = keys.sharded and precision == "bf16-mixed"
    return held_by_rank(
        stage=keys.stage,
        offload_optimizer=keys.offload_optimizer and kind != "cpu",
        offload_parameters=keys.offload_parameters and kind != "cpu",
        ranks=ranks,
        parameters=step.parameters,
        parameter_bytes=step.parameter_bytes // 2 if half else step.parameter_bytes,
        optimizer_bytes=optimizer_bytes(step.parameter_bytes, config.optim),
    )


def _refuse_too_much(found: Needs, config: Config, *, kind: str) -> None:
    """The device has room for a step, and main memory for what all ranks of this machine keep there."""
    here = found.total_bytes
    if kind != "cpu" and found.available_bytes is not None and here > found.available_bytes:
        rule = (
            f"a step needs {bytes_in_words(here)} per rank and the device has {bytes_in_words(found.available_bytes)}"
        )
        raise ConfigError("data.batch_size", config.data.batch_size, rule, what_saves_memory(config))
    own = found.host_bytes + (here if kind == "cpu" else 0)
    if found.machine_bytes is None or own * found.local_ranks <= found.machine_bytes:
        return
    needed, ranks = bytes_in_words(own), found.local_ranks
    everybody = f", {bytes_in_words(own * ranks)} for the {ranks} ranks here," if ranks > 1 else ""
    rule = f"a step needs {needed} per rank{everybody} and the machine has {bytes_in_words(found.machine_bytes)}"
    if kind == "cpu":
        raise ConfigError("data.batch_size", config.data.batch_size, f"{rule} of memory", what_saves_memory(config))
    cure = "take fewer ranks per machine, or keep memory and optimizer on the devices"
    raise ConfigError("trainer.devices", ranks, f"{rule} of main memory", cure)


def show_needs(config: Config) -> None:
    """Print the table."""
    found = needs(config)
    table = Table(title="what each rank needs", show_header=False)
    table.add_row("number of parameters", f"{found.parameters:,}")
    table.add_row("of them the memory's own", f"{found.memory_parameters:,}")
    labels = {
        "parameter": "parameters",
        "gradient": "gradients",
        "optimizer": "optimizer",
        "state": "memory state",
        "activation": "activations",
        "total": "together",
    }
    for name, label in labels.items():
        table.add_row(label, bytes_in_words(getattr(found, f"{name}_bytes")))
    if found.host_bytes:
        table.add_row("in main memory instead", bytes_in_words(found.host_bytes))
    table.add_row("optimizer steps per epoch", f"{found.steps_per_epoch:,}")
    table.add_row("epochs in max_steps", f"{found.epochs:.2f}")
    Console().print(table)


def some_targets(config: Config, lanes: int) -> Tensor:
    """(B, T) tokens from the start of the text: the cost of an adaptive softmax depends on how rare they are."""
    size = (lanes, config.data.segment_len)
    _, found = sample(config.data, n_token=size[0] * size[1])
    return torch.from_numpy(np.resize(found.astype(np.int64), size))


def segments_per_epoch(config: Config, meta: Meta) -> int:
    """Segments of a pass over the training split."""
    n_token, keys = meta.require("train"), config.data
    layout = LaneLayout(
        n_token=n_token,
        lanes=keys.batch_size,
        used=keys.batch_size,
        segment_len=keys.segment_len,
        segment_len_std=keys.segment_len_std,
        seed=config.seed,
    )
    return layout.n_segment


def _available(kind: str) -> int | None:
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    if kind == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
