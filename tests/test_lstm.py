"""`model=lstm`: the arithmetic of torch's LSTM, on our lanes, resumed and evaluated like any other model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.points import watched
from tests.tiny import tiny_config, train
from txl_lightning.build import check_schedule
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.cli import main
from txl_lightning.config import Config, ConfigError, load
from txl_lightning.data.store import prepare
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.evaluation.reach import measure_reach
from txl_lightning.generation import Session
from txl_lightning.model.architectures import make_model
from txl_lightning.model.lstm import LSTM
from txl_lightning.types import Segment

WIDTH = 24


def tiny_lstm(tmp_path: Path, *keys: str) -> Config:
    """`tests.tiny` with an LSTM in place of its model."""
    model = load(["model=lstm", f"model.d_model={WIDTH}"]).model
    return dataclasses.replace(tiny_config(tmp_path, "memory=none", *keys), model=model)


def far_from_zero(config: Config) -> LSTM:
    torch.manual_seed(0)
    model = make_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def torchs(model: LSTM) -> torch.nn.LSTM:
    """torch's own with the same weights."""
    theirs = torch.nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            getattr(theirs, f"weight_ih_l{index}").copy_(layer.of_input.weight)
            getattr(theirs, f"weight_hh_l{index}").copy_(layer.of_state.weight)
            getattr(theirs, f"bias_ih_l{index}").copy_(layer.of_input.bias)
            getattr(theirs, f"bias_hh_l{index}").zero_()
    return theirs


def test_outputs_and_gradients_are_torchs(tmp_path: Path) -> None:
    model = far_from_zero(tiny_lstm(tmp_path))
    theirs, tokens = torchs(model), torch.randint(257, (3, 13))
    x = model.embedding(tokens)
    out = model(tokens, model.init_state(3))
    expected, (h, c) = theirs(x)
    assert torch.allclose(out.hidden_BTD, expected, atol=1e-6)
    for index in (0, 1):
        assert torch.allclose(out.state[f"layers.{index}.h"], h[index], atol=1e-6)
        assert torch.allclose(out.state[f"layers.{index}.c"], c[index], atol=1e-6)
    out.hidden_BTD.pow(2).sum().backward(retain_graph=True)
    expected.pow(2).sum().backward()
    for index, layer in enumerate(model.layers):
        pairs = ((layer.of_input.weight, "ih"), (layer.of_state.weight, "hh"))
        for ours, name in pairs:
            assert torch.allclose(ours.grad, getattr(theirs, f"weight_{name}_l{index}").grad, rtol=1e-4, atol=1e-6)


def test_segment_by_segment_is_one_long_pass(tmp_path: Path) -> None:
    model = far_from_zero(tiny_lstm(tmp_path)).double()
    tokens = torch.randint(257, (2, 50))
    with torch.no_grad():
        whole = model(tokens[:, :-1], model.init_state(2), None, tokens[:, 1:]).losses_BT
        state, losses = model.init_state(2), []
        for start in range(0, 49, 8):
            out = model(tokens[:, :-1][:, start : start + 8], state, None, tokens[:, 1:][:, start : start + 8])
            state, losses = out.state, [*losses, out.losses_BT]
    assert torch.allclose(torch.cat(losses, dim=1), whole, atol=1e-9)


def test_lanes_start_anew_end_and_rest(tmp_path: Path) -> None:
    model = far_from_zero(tiny_lstm(tmp_path))
    tokens = torch.randint(257, (4, 6))
    with torch.no_grad():
        before = model(torch.randint(257, (4, 6)), model.init_state(4)).state
        facts = Segment(torch.tensor([False, True, False, True]), torch.tensor([6, 6, 4, 0]))
        out = model(tokens, before, facts, tokens)
        short = model(tokens[2:3, :4], {name: part[2:3] for name, part in before.items()})
        fresh = model(tokens[1:2], model.init_state(1))
    for name, part in out.state.items():
        assert torch.equal(part[3], before[name][3])  # a lane without tokens does not even reset
        assert torch.allclose(part[2].double(), short.state[name][0].double(), atol=1e-6)
        assert torch.allclose(part[1].double(), fresh.state[name][0].double(), atol=1e-6)
        assert not torch.equal(part[0], before[name][0])
    assert out.state["age"].tolist() == [12, 6, 10, 6]
    assert (out.losses_BT[2, 4:] == 0).all() and (out.losses_BT[3] == 0).all()


def test_documents_begin_inside_a_segment(tmp_path: Path) -> None:
    model = far_from_zero(tiny_lstm(tmp_path))
    tokens = torch.randint(257, (1, 9))
    facts = Segment.full(tokens)._replace(document=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]))
    with torch.no_grad():
        out = model(tokens, model.init_state(1), facts)
        alone = model(tokens[:, 4:], model.init_state(1))
    assert torch.allclose(out.hidden_BTD[:, 4:], alone.hidden_BTD, atol=1e-6)
    assert torch.allclose(out.state["layers.1.c"], alone.state["layers.1.c"], atol=1e-6)
    assert out.state["age"].item() == 5


def test_the_cell_stays_in_float32(tmp_path: Path) -> None:
    model = far_from_zero(tiny_lstm(tmp_path))
    state = model.init_state(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randint(257, (2, 5)), state)
    kinds = {name: part.dtype for name, part in state.items()}
    assert kinds == {name: part.dtype for name, part in out.state.items()}
    assert kinds["layers.0.c"] == torch.float32 and kinds["layers.0.h"] == torch.bfloat16


def test_parameters_are_counted_without_building(tmp_path: Path) -> None:
    for keys in ([], ["model.bias=false"], ["model.tie_weights=false", "model.n_layer=3"]):
        config = load(["model=lstm", *keys])
        assert config.model.num_params() == sum(weight.numel() for weight in make_model(config).parameters())
    small, lstm = load([]).model.num_params(), load(["model=lstm"]).model.num_params()
    assert abs(lstm / small - 1) < 0.01


def test_it_trains_resumes_bit_for_bit_and_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fitted = train(tiny_lstm(tmp_path, "optim.lr=2e-2"), monkeypatch)
    assert np.mean(whole[-3:]) < np.mean(whole[:3]) - 0.5
    stop = tiny_lstm(tmp_path, "optim.lr=2e-2", "trainer.stop_at_step=5", f"run_dir={tmp_path / 'cut'}")
    train(stop, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "resume=cut", "trainer.accelerator=cpu"]) == 0
    one, other = load_checkpoint("run"), load_checkpoint("cut")
    assert isinstance(one, LSTM)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    config = tiny_lstm(tmp_path, "eval.batch_size=1", "eval.segment_len=7")
    tokens = torch.from_numpy(prepare(config.data, training=False).splits["test"].astype(np.int64))[None]
    with torch.no_grad():
        losses = one(tokens[:, :-1], one.init_state(1), None, tokens[:, 1:]).losses_BT
    assert evaluate(config, one, split="test").scores["loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
    cold = tiny_lstm(tmp_path, "eval.batch_size=1", "eval.segment_len=7", "memory.reset=segment")
    assert evaluate(cold, one, split="test").scores["loss"] > losses.mean().item() + 1e-4
    assert fitted is not None


def test_attention_s_observers_have_nothing_to_say(tmp_path: Path) -> None:
    callbacks = "callbacks=[attention_maps,cost_meter,loss_by_position,memory_benefit]"
    keys = ("trainer.log_every_n_steps=1", "callbacks.attention_maps.every_n_steps=1", "trainer.max_steps=2")
    points, _ = watched(tiny_lstm(tmp_path, callbacks, *keys, "trainer.val_check_interval=2"))
    names = {name for _, row in points.rows for name in row}
    assert not any(name.startswith("cost/") for name in names)
    assert "memory/benefit/nats" in names and "val/loss_by_position/0" in names


def test_its_lanes_can_be_warmed(tmp_path: Path) -> None:
    config = tiny_lstm(tmp_path)
    keys = dataclasses.replace(config.eval, warm=2 * config.eval_segment_len)
    warmed = dataclasses.replace(config, eval=keys)
    cold, warm = (evaluate(own, make_model(own).eval(), split="valid").scores["loss"] for own in (config, warmed))
    assert cold != warm
    with pytest.raises(ConfigError, match=r"memory\.reset=segment keeps nothing"):
        dataclasses.replace(warmed, memory=dataclasses.replace(config.memory, reset="segment"))


def test_it_samples_with_its_state_carried_along(tmp_path: Path) -> None:
    model = far_from_zero(tiny_lstm(tmp_path))
    text = torch.randint(257, (40,)).tolist()
    session, pieces = Session(model, separator=256), Session(model, separator=256)
    session.feed(text)
    for start in range(0, 40, 7):
        pieces.feed(text[start : start + 7])
    with torch.no_grad():
        expected = model.log_probs(model(torch.tensor([text]), model.init_state(1)).hidden_BTD[:, -1:])[0, 0]
    assert torch.allclose(session.log_probs_V, expected, atol=1e-5)
    assert torch.allclose(pieces.log_probs_V, expected, atol=1e-5)


def test_it_reaches_back_without_bound(tmp_path: Path) -> None:
    config = tiny_lstm(tmp_path, "data.segment_len=4")
    found = measure_reach(config, far_from_zero(config), segments=3)
    assert found.formula == float("inf") and found.tokens == 12
    cold = tiny_lstm(tmp_path, "data.segment_len=4", "memory.reset=segment")
    assert (found := measure_reach(cold, far_from_zero(cold), segments=3)).tokens == found.formula == 0


def test_what_it_has_not_is_refused() -> None:
    assert load(["model=lstm", "experiment=enwik8_base"]).memory.name == "none"
    for keys, rule in (
        (["model=lstm", "memory=cache"], "has no layers that memory=cache could live in"),
        (["model=lstm", "model.n_head=2"], "n_head=2: model.architecture=lstm has no such part; leave it out"),
        (["model=lstm", "model.clamp_len=9"], "clamp_len=9: model.architecture=lstm has no such part"),
    ):
        with pytest.raises(ConfigError, match=rule):
            load(keys)
    with pytest.raises(ConfigError, match="architecture=lstm reads token by token"):
        check_schedule(load(["model=lstm", "eval.schedule=layers"]))


def test_dry_run_counts_its_state(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("to be or not to be " * 400)
    keys = ["model=lstm", "model.d_model=32", "data=text", "data.path=a.txt", "data.batch_size=4", "data.segment_len=8"]
    assert main(["fit", *keys, "trainer.precision=32-true", "trainer.accelerator=cpu", "dry_run=true"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{4 * (2 * 2 * 32 * 4 + 8) / 2**10:.4g} KiB" in shown
