"""What only a GPU can show of training: captured steps are training, and nothing waits for the device in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch._dynamo.utils import counters

from tests.test_capture import CASES, built
from tests.test_late import OBSERVERS
from tests.test_reading import MORE, read, segments
from tests.test_resume import config_of, saved, train, unequal
from tests.tiny import tiny_config
from txl_lightning.commands import fit as fit_command
from txl_lightning.evaluation.losses import on_device
from txl_lightning.training.module import EndOfBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns of its own imports, and that tf32 is off
]
CUDA = ["trainer.accelerator=cuda", "trainer.val_check_interval=7"]


@pytest.fixture(autouse=True)
def as_users_train(poisoned_memory: None) -> Iterator[None]:
    """Some versions of torch capture no graph that adds up by index while they are asked to be deterministic."""
    torch.use_deterministic_algorithms(False)
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("memory", ["cache", "compressive", "tokens", "knn"])
def test_captured_steps_train_as_plain_ones(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [*CUDA, f"memory={memory}", "model.dropout=0", "model.dropatt=0"]
    found = [train(config_of(tmp_path, how, *keys, f"trainer.compile={how}"), monkeypatch) for how in ("false", "auto")]
    assert not found[0][1].module._forward.captured and found[1][1].module._forward.captured
    assert not counters["inductor"]["cudagraph_skips"], "torch has compiled, but captured nothing"
    torch.testing.assert_close(torch.tensor(found[1][0]), torch.tensor(found[0][0]), rtol=1e-3, atol=1e-4)


def test_captured_steps_train_under_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [*CUDA, "strategy=ddp", "trainer.devices=1", "model.dropout=0", "model.dropatt=0"]
    found = [train(config_of(tmp_path, how, *keys, f"trainer.compile={how}"), monkeypatch) for how in ("false", "auto")]
    assert not counters["inductor"]["cudagraph_skips"]
    torch.testing.assert_close(torch.tensor(found[1][0]), torch.tensor(found[0][0]), rtol=1e-3, atol=1e-4)


def test_captured_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: the generators go on where they were."""
    train(config_of(tmp_path, "whole", *CUDA), monkeypatch)
    train(config_of(tmp_path, "parts", *CUDA, "trainer.stop_at_step=9"), monkeypatch)
    train(config_of(tmp_path, "parts", *CUDA), monkeypatch, resume=True)
    whole, parts = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    assert unequal(whole["txl_lightning"]["ranks"][0]["rng"], parts["txl_lightning"]["ranks"][0]["rng"]) == []
    for one, other in zip(whole["state_dict"].values(), parts["state_dict"].values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["none", "cache", "window", "compressive", "tokens", "knn", "block_recurrent", "clusters"]
)
def test_a_recorded_segment_is_the_plain_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, as evaluation reads; another model is built behind it from the same memory."""
    for more, keys in MORE.items():
        monkeypatch.setitem(CASES, more, keys)
    model = built(tiny_config(tmp_path, "data.segment_len=4").to_dict(), name).float().cuda()
    batches = [on_device(batch, model.device) for batch in segments()]
    found = [read(model, batches, capture=how) for how in (True, False)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_validation_between_captured_steps_changes_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: a validation is recorded between two replays, and draws nothing."""
    keys = ["trainer.accelerator=cuda", "trainer.log_every_n_steps=1000"]
    runs = [
        train(config_of(tmp_path, str(every), *keys, f"trainer.val_check_interval={every}"), monkeypatch)[0]
        for every in (3, 1000)
    ]
    torch.testing.assert_close(torch.tensor(runs[0]), torch.tensor(runs[1]), rtol=1e-3, atol=1e-4)


class Refusing(L.Callback):
    """Lets torch refuse whatever waits for the device, in steps between two points of the curves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        original = EndOfBatch.on_train_batch_end

        def last(own: Any, *rest: Any) -> None:
            original(own, *rest)
            torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(EndOfBatch, "on_train_batch_end", last)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 4 and module.next_point() is None:
            self.steps += 1
            torch.cuda.set_sync_debug_mode("error")


@pytest.mark.parametrize("how", ["auto", "false"])
def test_no_step_between_two_points_waits(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["trainer.accelerator=cuda", "trainer.val_check_interval=1000", f"callbacks=[{OBSERVERS}]"]
    watched, build = Refusing(monkeypatch), fit_command.build_trainer
    monkeypatch.setattr(  # without the observer of losses, which waits for each
        fit_command, "build_trainer", lambda *a, callbacks, **kw: build(*a, callbacks=[watched, *callbacks], **kw)
    )
    try:
        fit_command.fit(config_of(tmp_path, "run", *keys, f"trainer.compile={how}"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched.steps >= 9
