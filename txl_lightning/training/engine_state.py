"""DeepSpeed's engine takes over weights and optimizer state that were stored in one piece.

What DeepSpeed can load is what the same rank of as many ranks under the same stage has written. So here the rank's own
state is taken, its numbers are replaced by this rank's shares of the stored ones, and the engine is given it as if it
had been read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from txl_lightning.checkpoints import shares, zero
from txl_lightning.checkpoints.shares import Layout
from txl_lightning.training.optim import parameter_groups


def take_over(engine: Any, saved: Mapping[str, Any]) -> None:
    """Fill the engine, which has made no step yet. Every rank must call it.

    Args:
        engine: DeepSpeed's, of any stage.
        saved: `state_dict`, `optimizer_states` and `global_step` as one process stores them.
    """
    weights, optimizer = saved["state_dict"], saved["optimizer_states"][0]
    state = _by_name(engine.module, optimizer)
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.checkpoint_event_prologue()  # every parameter is divided
        _load_buffers(engine.module, weights)
    else:
        engine.module.load_state_dict(weights)
    if engine.zero_optimization_stage():
        _load_shares(engine, weights, state, optimizer["param_groups"])
    elif hasattr(engine.optimizer, "fp32_groups"):  # it computes in half precision
        _load_copies(engine, weights, optimizer)
    else:
        engine.optimizer.load_state_dict(optimizer)
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.checkpoint_event_epilogue()
    engine.global_steps = saved["global_step"]
    engine.global_samples = engine.global_steps * engine.train_batch_size()


def is_as_stored(engine: Any, folder: Path) -> bool:
    """Whether a folder holds just what this engine would store: as many shares, of the same vectors."""
    there = zero.read_layouts(folder)
    return there == (layouts(engine) if engine.zero_optimization_stage() else [])


def layouts(engine: Any) -> list[Layout]:
    """How the engine's optimizer holds its flat vectors, under stages 1 to 3."""
    optimizer, shapes = engine.optimizer, engine._get_zero_param_shapes()
    ranks = torch.distributed.get_world_size(optimizer.dp_process_group)
    return shares.layouts_of(_own_state(engine), shapes, ranks=ranks)


def _own_state(engine: Any) -> dict[str, Any]:
    return dict(engine.optimizer.state_dict())


def _load_shares(
    engine: Any,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    own, rank = _own_state(engine), torch.distributed.get_rank(engine.optimizer.dp_process_group)
    vectors, inner = "fp32_flat_groups", "optimizer_state_dict"
    if vectors not in own:
        vectors, inner = "single_partition_of_fp32_groups", "base_optimizer_state"
    wanted = layouts(engine)
    own[vectors] = [
        layout.cut({name: weights[name].float() for name in _names(layout)}, rank=rank) for layout in wanted
    ]
    cut = {number: shares.cut_state(layout, state, rank=rank) for number, layout in enumerate(wanted)}
    own[inner] = {
        "state": {number: held for number, held in cut.items() if held},
        "param_groups": [
            {**theirs, "params": ours["params"]}
            for theirs, ours in zip(groups, own[inner]["param_groups"], strict=True)
        ],
    }
    engine.optimizer.load_state_dict({rank: own}, load_optimizer_states=True, load_from_fp32_weights=True)


def _load_copies(engine: Any, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> None:
    """ZeRO 0 in half precision: the optimizer has float32 copies of whole weights."""
    named = [[name for name, _ in group] for group in parameter_groups(engine.module.named_parameters()) if group]
    own = _own_state(engine)
    own["fp32_groups"] = [[weights[name].float() for name in group] for group in named]
    own["optimizer_state_dict"] = optimizer
    engine.optimizer.load_state_dict(own)


def _names(layout: Layout) -> list[str]:
    return [place.name for place in layout.places]


def _by_name(module: nn.Module, optimizer: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The optimizer's state of each parameter that has some; in it they have numbers, group by group."""
    ordered = [name for group in parameter_groups(_shaped(module)) for name, _ in group]
    return {ordered[number]: held for number, held in optimizer["state"].items()}


def _shaped(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters by name, with the shapes they have as a whole: under ZeRO 3 they are empty here."""
    return [
        (name, torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta"))
        for name, parameter in module.named_parameters()
    ]


def _load_buffers(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, buffer in module.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])
