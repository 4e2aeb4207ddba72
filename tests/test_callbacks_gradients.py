"""Norms of the gradient by group, against a backward pass of the test's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from tests.points import watched
from tests.tiny import tiny_config
from txl_lightning.callbacks.gradient_norms import group_of


class Backward(L.Callback):
    """Gradients of the latest two segments' mean loss, without Lightning, from the weights before the step."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.parts = [*self.parts[-1:], (copy.deepcopy(pl_module.model), batch, pl_module.lanes.current("train"))]

    def norms(self) -> dict[str, float]:
        sums: dict[str, torch.Tensor] = {}
        count = sum(int(batch.segment.length.sum()) for _, batch, _ in self.parts)
        for model, batch, state in self.parts:
            model.zero_grad()
            loss = model(batch.tokens_BT, state, batch.segment, batch.targets_BT).losses_BT.sum() / count
            loss.backward()
            for name, weight in model.named_parameters():
                sums[name] = sums.get(name, 0) + weight.grad
        found: dict[str, float] = {}
        for name, gradient in sums.items():
            found[group_of(name)] = found.get(group_of(name), 0.0) + float(gradient.double().square().sum())
        return {group: total**0.5 for group, total in found.items()}


def test_norms_are_those_of_the_step_before_clipping(tmp_path: Path) -> None:
    keys = ["trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=2", "optim.clip=0.01", "memory=knn"]
    still = ["model.dropout=0", "model.dropatt=0", "trainer.max_steps=8"]
    every = ["callbacks=gradient_norms", "callbacks.gradient_norms.every_n_steps=4"]
    direct = Backward()
    points, _ = watched(tiny_config(tmp_path, *keys, *still, *every, "memory.mem_len=32"), direct)
    groups = ["embedding", "L0", "L1", "memory", "softmax", "rest"]
    curves = {group: points.curve(f"optim/grad_norm/{group}") for group in groups}
    assert all(list(curve) == [4, 8] for curve in curves.values())
    assert {group: curve[8] for group, curve in curves.items()} == pytest.approx(direct.norms(), rel=1e-4)
    total = sum(curve[8] ** 2 for curve in curves.values()) ** 0.5
    assert total == pytest.approx(points.curve("optim/grad_norm")[8], rel=1e-5) and total > 0.01


def test_groups() -> None:
    names = {"embedding.tables.0.weight": "embedding", "layers.11.attention.qkv.weight": "L11", "u": "rest",
             "layers.3.memories.knn.gate": "memory", "tokens.start": "memory",
             "softmax.biases.0": "softmax"}  # fmt: skip
    assert {name: group_of(name) for name in names} == names
