"""What is logged: every curve, at optimizer steps, with figures computed independently."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.tiny import tiny_config
from txl_lightning import TextDataModule, TransformerXLModule, registry
from txl_lightning.commands import fit as fit_command
from txl_lightning.training import clock
from txl_lightning.training.trainer import build_trainer

ALL = "callbacks=[memory_monitor,text_samples,throughput]"


@pytest.fixture
def events(tmp_path: Path) -> EventAccumulator:
    config = tiny_config(
        tmp_path, ALL, "trainer.val_check_interval=16", "trainer.accumulate_grad_batches=2", "logger=[tensorboard,csv]"
    )
    fit_command.fit(config)
    found = EventAccumulator(str(tmp_path / "run"), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return found


def test_tensorboard_has_every_curve_at_optimizer_steps(events: EventAccumulator, tmp_path: Path) -> None:
    scalars = set(events.Tags()["scalars"])
    for stage in ("train", "val"):
        assert {f"{stage}/loss", f"{stage}/bits_per_byte", f"{stage}/ppl"} <= scalars
    assert {"optim/lr", "optim/grad_norm", "perf/tokens_per_second"} <= scalars
    assert {f"memory/cache/{figure}/L{layer}" for figure in ("fill", "norm") for layer in (0, 1)} <= scalars
    for name in ("train/loss", "optim/lr", "perf/tokens_per_second", "memory/cache/fill/L0"):
        assert [point.step for point in events.Scalars(name)] == [5, 10, 15, 20], name
    texts = [tag for tag in events.Tags()["tensors"] if "samples/text" in tag]
    assert len(texts) == 1 and len(events.Tensors(texts[0])) == 3  # after 16 and 32 batches and at the end
    text = events.Tensors(texts[0])[0].tensor_proto.string_val[0].decode()
    assert "⟶" in text
    assert any("hparams" in tag for tag in _plugins(tmp_path / "run"))
    for place in (tmp_path / "run", tmp_path / "run" / "csv"):
        assert yaml.safe_load((place / "hparams.yaml").read_text())["optim"]["lr"] == 3e-3


def _plugins(run: Path) -> list[str]:
    found = EventAccumulator(str(run))
    found.Reload()
    return list(found.PluginTagToContent("hparams"))


def test_csv_has_the_same_figures(events: EventAccumulator, tmp_path: Path) -> None:
    with (tmp_path / "run" / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    scalars = events.Scalars("train/loss")
    assert [float(row["train/loss"]) for row in rows] == pytest.approx([point.value for point in scalars], rel=1e-5)


class Direct(L.Callback):
    """Computes what the monitor should have logged, from nothing but the state."""

    def __init__(self) -> None:
        self.fill: list[float] = []
        self.norm: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = pl_module.lanes.current("train")
        hidden = state["layers.1.cache.hidden"]
        read = (batch.position.segment + 1) * batch.tokens_BT.shape[1]
        self.fill.append(min(1.0, read / hidden.shape[1]))
        self.norm.append((hidden.double() ** 2).mean().sqrt().item())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_memory_monitor_tells_fill_and_norm(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "memory.mem_len=56", "trainer.max_steps=6", "trainer.log_every_n_steps=1")
    monitor = registry.callbacks.get("memory_monitor")
    direct = Direct()
    trainer = build_trainer(config, callbacks=[monitor.build(monitor.config()), direct])
    trainer.fit(TransformerXLModule(config), TextDataModule(config))
    seen = direct.logged[1:]
    assert [row["memory/cache/fill/L1"] for row in seen] == pytest.approx(direct.fill)
    assert direct.fill == pytest.approx([16 / 56, 32 / 56, 48 / 56, 1, 1, 1])
    assert [row["memory/cache/norm/L1"] for row in seen] == pytest.approx(direct.norm, rel=1e-5)


def test_nothing_about_memory_is_logged_without_one(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "memory=none", "trainer.max_steps=2", "trainer.log_every_n_steps=1")
    monitor = registry.callbacks.get("memory_monitor")
    trainer = build_trainer(config, callbacks=[monitor.build(monitor.config())])
    trainer.fit(TransformerXLModule(config), TextDataModule(config))
    assert not [name for name in trainer.callback_metrics if name.startswith("memory/")]
    assert "train/loss" in trainer.callback_metrics


def test_throughput_counts_targets_per_training_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that a training step moves by 0.5 s and a validation batch by 100 s."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    class Hands(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            now[0] += 0.5

        def on_validation_batch_start(self, *_: Any) -> None:
            now[0] += 100.0

    config = tiny_config(tmp_path, "trainer.max_steps=5", "trainer.log_every_n_steps=2", "trainer.val_check_interval=3")
    module, throughput = TransformerXLModule(config), registry.callbacks.get("throughput")
    trainer = build_trainer(config, callbacks=[Hands(), throughput.build(throughput.config())])
    trainer.fit(module, TextDataModule(config))
    assert (module.clock.tokens, module.clock.seconds) == (5 * 4 * 16, 2.5)
    assert module.clock.rate() == 4 * 16 / 0.5
    # callbacks run before the module counts the batch under way: from step 2 to step 4 there are two steps all the same
    assert float(trainer.callback_metrics["perf/tokens_per_second"]) == 4 * 16 / 0.5


def test_train_loss_is_the_mean_since_the_last_point(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "trainer.max_steps=6", "trainer.log_every_n_steps=3")
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            losses.append(outputs["loss"].item())

    module = TransformerXLModule(config)
    trainer = build_trainer(config, callbacks=[Losses()])
    trainer.fit(module, TextDataModule(config))
    assert module.scores["train"]["loss"] == pytest.approx(sum(losses[3:]) / 3, rel=1e-6)


def test_a_sample_needs_no_global_random_numbers(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, ALL)
    module = TransformerXLModule(config)
    samples = registry.callbacks.get("text_samples").build(config.callbacks["text_samples"])
    before = torch.get_rng_state()
    module.train()
    assert len(samples._sample(module, [65, 66])) == 128
    assert torch.equal(before, torch.get_rng_state()) and module.model.training
