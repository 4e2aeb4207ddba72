"""Floating-point operations of one training step, counted on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from txl_lightning.commands.dry_run import some_targets
from txl_lightning.config import Config
from txl_lightning.model.architectures import make_model


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Per token; a product and its sum are two. Matrix products only, as torch counts them."""

    forward: float
    training: float  # forward and backward
    parameters: int


def count(config: Config) -> Flops:
    """Run a segment forward and backward without numbers."""
    return count_reading(config, some_targets(config, config.data.batch_size))


def count_reading(config: Config, targets_BT: Tensor) -> Flops:
    """The same where the targets (B, T) are given; the cost of an adaptive softmax depends on how rare they are."""
    lanes = len(targets_BT)
    with torch.device("meta"):
        model = make_model(config)
    model.train()
    state = model.init_state(lanes, dtype=torch.float32)
    counter = FlopCounterMode(display=False)
    with counter:
        out = model(targets_BT.to("meta"), state, None, targets_BT)
        forward = counter.get_total_flops()
        assert out.losses_BT is not None
        (out.losses_BT.sum() + sum(out.aux_losses.values())).backward()
    n_token = targets_BT.numel()
    return Flops(
        forward=forward / n_token,
        training=counter.get_total_flops() / n_token,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
