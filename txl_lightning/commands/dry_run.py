"""`txl fit dry_run=true`: what a run needs, without training and without allocating it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from txl_lightning.commands.output import bytes_in_words
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.lanes import LaneLayout
from txl_lightning.data.store import Meta, sample, survey
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training.optim import optimizer_bytes
from txl_lightning.training.trainer import device_kind, resolve_precision
from txl_lightning.types import Chunk, n_byte


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
    activation_bytes: int  # of one chunk of lanes
    steps_per_epoch: int  # once accumulation has begun
    epochs: float  # in max_steps
    available_bytes: int | None  # None: the device does not say

    @property
    def total_bytes(self) -> int:
        """All of it at the end of a forward pass, the highest point."""
        weights = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return weights + round(2 * self.state_bytes * self.state_share) + self.activation_bytes


def needs(config: Config) -> Needs:
    """Measure a training step on shapes alone.

    Raises:
        ConfigError: it is more than the device has.
    """
    lanes = config.data.batch_size // (config.trainer.devices * config.trainer.num_nodes)
    precision = resolve_precision(config)
    dtype = {"16": torch.float16, "bf": torch.bfloat16}.get(precision[:2], torch.float32)
    with torch.device("meta"):
        model = TransformerXL(config)
    if precision == "bf16-true":
        model = model.to(torch.bfloat16)
    state = model.init_state(lanes, dtype=torch.bfloat16 if "bf16" in precision else torch.float32)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    segments, keys = segments_per_epoch(config, survey(config.data)), config.trainer
    alone = min(keys.accumulate_from_step, keys.max_steps)
    steps_per_epoch = -(-segments // keys.accumulate_grad_batches)
    chunk = {key: Chunk(0, keys.lane_chunks).of(tensor) for key, tensor in state.items()}
    one_segment = _saved_for_backward(model, chunk, config, mixed=precision.endswith("mixed"), dtype=dtype)
    elsewhere = config.memory.offload == "cpu" and device_kind(config) != "cpu"
    found = Needs(
        parameters=count,
        memory_parameters=count - config.model.num_params(),
        **_weight_bytes(config, weights, bf16=precision == "bf16-mixed"),
        state_bytes=n_byte(state),
        state_share=1 / keys.lane_chunks if elsewhere else 1.0,
        activation_bytes=one_segment * keys.bptt_segments,  # one backward pass goes through all of them
        steps_per_epoch=steps_per_epoch,
        epochs=alone / segments + (keys.max_steps - alone) / steps_per_epoch,
        available_bytes=_available(device_kind(config)),
    )
    if found.available_bytes is not None and found.total_bytes > found.available_bytes:
        needed, there = bytes_in_words(found.total_bytes), bytes_in_words(found.available_bytes)
        rule = f"a step needs {needed} per rank and the device has {there}"
        cure = (
            "raise trainer.lane_chunks, lower data.batch_size, data.segment_len or memory.mem_len, "
            "or set model.checkpointing=true"
        )
        raise ConfigError("data.batch_size", config.data.batch_size, rule, cure)
    return found


def _weight_bytes(config: Config, weights: int, *, bf16: bool) -> dict[str, int]:
    """What parameters, gradients and optimizer take on the device of one rank.

    Args:
        config: the whole configuration.
        weights: bytes of all parameters.
        bf16: DeepSpeed turns them to bfloat16.
    """
    keys, own = config.strategy, weights
    optimizer = optimizer_bytes(weights, config.optim)
    if keys.sharded and (bf16 or keys.stage):
        own = weights // 2 if bf16 else weights
        optimizer += weights  # the float32 copy that is updated
    if keys.offload_optimizer and device_kind(config) != "cpu":
        optimizer = 0
    stage = keys.stage or 0
    share = config.trainer.devices * config.trainer.num_nodes
    return {
        "parameter_bytes": own if stage < 3 else -(-own // share),
        "gradient_bytes": own if stage < 2 else -(-own // share),
        "optimizer_bytes": optimizer if stage < 1 else -(-optimizer // share),
    }


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
    table.add_row("optimizer steps per epoch", f"{found.steps_per_epoch:,}")
    table.add_row("epochs in max_steps", f"{found.epochs:.2f}")
    Console().print(table)


def _saved_for_backward(
    model: TransformerXL, state: dict[str, Tensor], config: Config, *, mixed: bool, dtype: torch.dtype
) -> int:
    """Bytes of distinct tensors that autograd keeps during one forward pass, parameters not counted."""
    own = {id(parameter) for parameter in model.parameters()}
    kept: dict[Any, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._base is not None else tensor
        if id(base) not in own:
            storage = base.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
        return tensor

    lanes = state["age"].shape[0]
    targets = some_targets(config, lanes)
    tokens = targets.to("meta")
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=dtype, enabled=mixed):
            out = model(tokens, state, None, targets)
        assert out.losses_BT is not None
        loss = out.losses_BT.sum()
    assert loss.requires_grad  # keeps the graph, and so every storage, alive until here
    return sum(kept.values())


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
