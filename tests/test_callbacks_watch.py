"""Warnings of runs that go wrong, and figures of speed, with numbers put in by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from tests.points import watched
from tests.tiny import tiny_config
from txl_lightning import registry
from txl_lightning.comparison import peak
from txl_lightning.config import Config
from txl_lightning.training import clock


class Stage:
    """Enough of a trainer and a module to show points to a callback."""

    def __init__(self, losses: list[float | None], norms: list[float]) -> None:
        self.losses, self.norms, self.global_step, self.is_global_zero = losses, norms, 0, True
        self.figures: list[dict[str, float]] = []

    def logs_now(self) -> bool:
        return True

    def mean_loss(self) -> float | None:
        return self.losses[self.global_step - 1]

    def latest_grad_norm(self) -> torch.Tensor:
        return torch.tensor(self.norms[self.global_step - 1])

    def log_curves(self, figures: dict[str, float]) -> None:
        self.figures.append(figures)

    def play(self, **keys: Any) -> None:
        entry = registry.callbacks.get("early_divergence")
        callback = entry.build(entry.config(**keys))
        callback.on_train_start(self, self)
        for step in range(1, len(self.losses) + 1):
            self.global_step = step
            callback.on_train_batch_end(self, self, None, None, 0)


def test_a_loss_that_stays_above_its_lowest_is_told_once_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    losses = [3.0, 2.0, 2.6, 2.4, 2.6, 2.7, 3.0, 2.0, None, 2.6, 2.6]
    stage = Stage(losses, [1.0] * len(losses))
    stage.play(loss_rise=0.5, points=2)
    rises = [round(row["warn/loss_rise"], 6) for row in stage.figures if "warn/loss_rise" in row]
    assert rises == [0, 0, 0.6, 0.4, 0.6, 0.7, 1.0, 0, 0.6, 0.6]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in said] == [" step 6", " step 11"]
    assert said[0] == (
        "warning: step 6: train/loss 2.700 has been more than 0.5 above its lowest 2.000 for 2 points; "
        "lower optim.lr, raise optim.warmup_steps or lower optim.clip"
    )


def test_what_is_no_number_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    nan, inf = float("nan"), float("inf")
    stage = Stage([2.0, *[nan] * 3, *[2.0] * 8], [*[1.0] * 7, nan, inf, nan, 1.0, 1.5])
    stage.play(points=3)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in said] == [" step 4", " step 10"]
    assert stage.figures[-1]["warn/grad_ratio"] == 1.5  # against a median of numbers alone


def test_a_gradient_that_jumps_is_told_against_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    norms = [1.0, 2.0, 3.0, 2.0, 2.0, 30.0, 8.0, 50.0]
    stage = Stage([1.0] * len(norms), norms)
    stage.play(points=1)
    ratios = [row.get("warn/grad_ratio") for row in stage.figures]
    assert ratios == [None] * 5 + [15.0, 4.0, 25.0]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "step 6: the gradient norm 30 has been more than 10.0 times the usual 2" in said[0]


def test_its_figures_are_those_of_the_curves(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "callbacks=early_divergence", "trainer.log_every_n_steps=2")
    points, _ = watched(config)
    losses = points.curve("train/loss")
    lowest = float("inf")
    for step, loss in losses.items():
        lowest = min(lowest, loss)
        assert points.curve("warn/loss_rise")[step] == pytest.approx(loss - lowest, abs=1e-12)
    assert len(losses) == 10 and list(points.curve("warn/grad_ratio")) == [12, 14, 16, 18, 20]


class Hands(L.Callback):
    """Move a clock: a training step takes half a second, a validation batch a hundred."""

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def on_train_batch_start(self, *_: Any) -> None:
        self.now[0] += 0.5

    def on_validation_batch_start(self, *_: Any) -> None:
        self.now[0] += 100.0


class Fetching(L.Callback):
    """Let each training batch be waited for by a quarter of a second."""

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loader, now = trainer.train_dataloader, self.now
        original = loader._batch

        def slow(*args: Any) -> Any:
            now[0] += 0.25
            return original(*args)

        loader._batch = slow


def test_speed_utilisation_memory_and_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "read", lambda kind: 3_000_000_000)
    config = tiny_config(
        tmp_path, "callbacks=throughput", "callbacks.throughput.peak_tflops=0.001", "trainer.max_steps=8",
        "trainer.log_every_n_steps=2", "trainer.val_check_interval=3", "model.n_head=2", "memory=none",
    )  # fmt: skip
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    points, _ = watched(config, Hands(now), Fetching(now))
    rates = points.curve("perf/tokens_per_second")
    # the callback sees a step before the module counts it: from step 2 to step 4 there are two steps all the same
    assert rates[4] == rates[6] == pytest.approx(2 * 64 / 1.5)
    assert points.curve("perf/peak_memory_gb")[4] == 3
    assert points.curve("perf/data_wait")[4] == pytest.approx(0.5 / 1.5)
    assert points.curve("perf/mfu")[4] == pytest.approx(rates[4] * flops_per_token(config) / 1e9, rel=1e-6)


def flops_per_token(config: Config) -> float:
    """Matrix products by hand, forward and backward, of a plain model without memory: 2 for a product and its sum."""
    model, size = config.model, config.data.segment_len
    wide, heads, inner = model.d_model, model.n_head * model.d_head, model.d_inner
    weights = wide * 3 * heads + heads * wide + 2 * wide * inner
    pairs = size * heads + (size + 1) * heads + size * heads  # scores by content and by row, values
    rows = (size + 1) * wide * heads / (size * config.data.batch_size)  # distances, once for all lanes
    backward_too = 3 * (model.n_layer * (weights + pairs) + wide * model.vocab_size)
    return 2 * (backward_too + model.n_layer * 2 * rows)  # nothing learns behind the distances


def test_without_a_peak_there_is_no_utilisation_and_a_profiler_of_one_s_own_stays(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "callbacks=throughput", "trainer.max_steps=4", "trainer.log_every_n_steps=2")

    class Own(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainer.profiler = SimpleProfiler()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert type(trainer.profiler) is SimpleProfiler
            trainer.profiler = PassThroughProfiler()  # it has a lot to say

    points, _ = watched(config, Own())
    row = points.rows[0][1]
    assert "perf/tokens_per_second" in row and "perf/mfu" not in row and "perf/data_wait" not in row
