"""Cached evaluation scores every target once, with the context it promises."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_config
from txl_lightning import TextDataModule, TransformerXL
from txl_lightning.config import ConfigError
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.training.metrics import TokenLoss, scores


def model_of(config) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from uniform predictions
    return model


def one_pass(model: TransformerXL, config, split: str = "test") -> float:
    """Mean loss when the whole split is one segment of one lane."""
    stream = torch.from_numpy(TextDataModule(config).data.splits[split].astype("int64"))[None]
    with torch.no_grad():
        out = model(stream[:, :-1], model.init_state(1), None, stream[:, 1:])
    return out.losses_BT.double().mean().item()


@pytest.mark.parametrize("segment_len", [1, 7, 16, 64, 500])
def test_segment_length_does_not_matter_when_memory_holds_everything(segment_len: int, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "memory.mem_len=300", "eval.batch_size=1", f"eval.segment_len={segment_len}")
    model = model_of(config)
    found = evaluate(config, model, split="test")
    assert found.n_target == len(TextDataModule(config).data.splits["test"]) - 1
    assert found.scores["loss"] == pytest.approx(one_pass(model, config), abs=1e-5)
    assert found.scores["bits_per_byte"] == pytest.approx(found.scores["loss"] / math.log(2))
    assert found.scores["ppl"] == pytest.approx(math.exp(found.scores["loss"]))


def test_every_target_is_scored_with_lanes_that_do_not_fit(tmp_path: Path) -> None:
    """With cold segments of one token the context is the token alone, however the split is cut into lanes."""
    found = []
    for lanes in (1, 3, 4, 7):
        config = tiny_config(tmp_path, "memory=none", f"eval.batch_size={lanes}", "eval.segment_len=1")
        found.append(evaluate(config, model_of(config), split="test"))
    assert {score.n_target for score in found} == {found[0].n_target}
    for score in found[1:]:
        assert score.scores["loss"] == pytest.approx(found[0].scores["loss"], abs=1e-6)


def test_short_split_uses_fewer_lanes(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "eval.batch_size=4", "eval.segment_len=150")
    model = model_of(config)
    found = evaluate(config, model, split="valid")
    assert (found.n_lane, found.batch_size) == (1, 4)
    stream = torch.from_numpy(TextDataModule(config).data.splits["valid"].astype("int64"))[None]
    state, total = model.init_state(1), 0.0
    for start in range(0, stream.shape[1] - 1, 150):
        inputs, targets = stream[:, :-1][:, start : start + 150], stream[:, 1:][:, start : start + 150]
        with torch.no_grad():
            out = model(inputs, state, None, targets)
        state, total = out.state, total + out.losses_BT.sum().item()
    assert found.scores["loss"] == pytest.approx(total / (stream.shape[1] - 1), rel=1e-5)


def test_segments_longer_than_the_split_cost_no_padding(tmp_path: Path) -> None:
    long = tiny_config(tmp_path, "eval.segment_len=1000000000", "eval.batch_size=1")
    model = model_of(long)
    assert evaluate(long, model, split="test").scores["loss"] == pytest.approx(one_pass(model, long), abs=1e-5)


def test_no_memory_is_the_same_said_in_two_ways(tmp_path: Path) -> None:
    zero = tiny_config(tmp_path, "memory.mem_len=0", "eval.segment_len=8")
    none = tiny_config(tmp_path, "memory=none", "eval.segment_len=8")
    assert evaluate(zero, model_of(zero), split="test").scores == evaluate(none, model_of(none), split="test").scores


def test_memory_can_be_longer_than_in_training(tmp_path: Path) -> None:
    long = tiny_config(tmp_path, "memory.mem_len=250", "model.clamp_len=40", "eval.segment_len=8", "eval.batch_size=1")
    model = model_of(long)
    assert evaluate(long, model, split="test").scores["loss"] == pytest.approx(one_pass(model, long), abs=1e-5)


def test_absent_split_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "data.ratios=[1.0,0,0]")
    with pytest.raises(ConfigError, match="split=test"):
        evaluate(config, model_of(config), split="test")


def test_token_loss_is_sum_by_count() -> None:
    metric = TokenLoss()
    metric.update(torch.tensor(6.0), torch.tensor(2))
    metric.update(torch.tensor(1.0), torch.tensor(5))
    assert metric.compute().item() == 1.0  # not the mean of 3 and 0.2
    assert scores(1.0, "word") == {"loss": 1.0, "bits_per_word": 1 / math.log(2), "ppl": math.e}
