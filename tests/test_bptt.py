"""How far back a loss reaches, measured; and that windows of segments change nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from tests.test_accumulation import fit
from tests.tiny import StopAt, tiny_config
from txl_lightning import TransformerXLModule
from txl_lightning.config import Config, ConfigError

CARRY = ["memory.gradient=carry", "memory.mem_len=64"]


def windows(k: int, *more: str) -> list[str]:
    return ["trainer.accumulate_grad_batches=4", f"trainer.bptt_segments={k}", *more]


class Reach(L.Callback):
    """Which segments of each window get gradient from the loss of which: `reach[i]` lists them for segment i."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[list[int]]] = []
        self.inputs: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        original = TransformerXLModule._share_of_step

        def spy(module: Any, out: Any, batch: Any) -> torch.Tensor:
            self.losses.append(original(module, out, batch))
            return self.losses[-1]

        monkeypatch.setattr(TransformerXLModule, "_share_of_step", spy)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.model.embedding.register_forward_hook(lambda module, given, x: self.inputs.append(x))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        found = []
        for each in self.losses:
            grads = torch.autograd.grad(each, self.inputs, retain_graph=True, allow_unused=True)
            found.append([i for i, grad in enumerate(grads) if grad is not None and grad.abs().sum() > 0])
        self.steps.append(found)
        self.inputs.clear()
        self.losses.clear()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_loss_reaches_to_the_start_of_its_window_and_no_further(
    k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, *windows(k, "trainer.max_steps=3"), *CARRY)
    reach = Reach(monkeypatch)
    fit(config, reach)
    assert len(reach.steps) == 3 * 4 // k
    assert all(found == [list(range(i + 1)) for i in range(k)] for found in reach.steps)


def test_the_reach_may_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, *windows(4, "trainer.bptt_grow_steps=2", "trainer.max_steps=7"), *CARRY)
    reach = Reach(monkeypatch)
    fit(config, reach)
    grown = {1: [[0], [1], [2], [3]], 2: [[0], [0, 1], [2], [2, 3]], 3: [[0], [0, 1], [0, 1, 2], [3]]}
    grown[4] = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert reach.steps == [grown[n] for n in (1, 1, 2, 2, 3, 3, 4)]


def weights_of(config: Config, *callbacks: L.Callback, ckpt: Path | None = None) -> dict[str, torch.Tensor]:
    return dict(fit(config, *callbacks, ckpt=ckpt)[0].state_dict())


def test_only_the_graph_depends_on_the_window(tmp_path: Path) -> None:
    """With a memory that carries nothing windows are not allowed; a carried graph is all that they change."""
    two = ["memory=mix", "memory.parts=[{name: cache, gradient: carry, layers: [0]}, {name: cache, layers: [1]}]"]
    stop = ["memory=mix", "memory.parts=[{name: cache, layers: [0]}, {name: cache, layers: [1]}]"]
    runs = [
        weights_of(tiny_config(tmp_path, "trainer.max_steps=6", *keys))
        for keys in (windows(1, *stop), windows(1, *two), windows(4, *two))
    ]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert any(not torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


@pytest.mark.parametrize("stop", [3, 9, 11])
def test_a_resumed_run_equals_one_that_never_stopped(stop: int, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *windows(2, "trainer.max_steps=20", "data.num_workers=1"), *CARRY)
    whole = weights_of(config)
    _, trainer = fit(config, StopAt(stop))
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    again = weights_of(config, ckpt=tmp_path / "stopped.ckpt")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["trainer.bptt_segments=3", "trainer.accumulate_grad_batches=4", *CARRY],
            r"^trainer.bptt_segments=3: must divide",
        ),
        (["trainer.bptt_segments=2", *CARRY], r"must divide trainer.accumulate_grad_batches=1.*; set .*=2 too$"),
        (windows(2), r"^trainer.bptt_segments=2: memory=cache carries no gradient"),
        (windows(2, "memory=window"), r"^trainer.bptt_segments=2: memory=window carries no gradient"),
        (windows(2, "memory=none"), r"^trainer.bptt_segments=2: memory=none carries no gradient"),
        (windows(1, "trainer.bptt_grow_steps=5", *CARRY), r"^trainer.bptt_grow_steps=5: .* nothing to grow to"),
        (windows(2, "trainer.accumulate_from_step=5", *CARRY), r"^trainer.bptt_segments=2: .*begins with steps of one"),
    ],
)
def test_windows_that_cannot_be_are_refused(keys: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, *keys)
