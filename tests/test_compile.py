"""`trainer.compile`: what training calls, where it is compiled, and what is said where it cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config, train
from txl_lightning.cli import main
from txl_lightning.config import load
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training import compiling
from txl_lightning.training.compiling import training_forward


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How often the compiled model was called and with what it was made; it is the model itself."""
    made: list[dict[str, Any]] = []

    def compile_(model: Any, **how: Any) -> Any:
        made.append({"calls": 0, **how})

        def call(*args: Any, **more: Any) -> Any:
            made[-1]["calls"] += 1
            return model(*args, **more)

        return call

    monkeypatch.setattr(compiling.torch, "compile", compile_)
    return made


@pytest.mark.parametrize(
    ("wanted", "kind", "does"),
    [
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        (True, "cpu", True),
        (False, "cuda", False),
        ("auto", "mps", False),
    ],
)
def test_where_it_compiles(
    wanted: Any, kind: str, does: bool, compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: None)
    model = TransformerXL(load(["model.n_layer=1", "model.d_model=8"]))
    assert (training_forward(model, wanted, kind=kind) is not model) == does
    assert compiled == ([{"calls": 0, "dynamic": False}] if does else [])


@pytest.mark.parametrize("wanted", ["auto", True])
def test_without_a_compiler_it_says_so_and_goes_on(
    wanted: Any, compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: "there is no C compiler (gcc)")
    model = TransformerXL(load(["model.n_layer=1", "model.d_model=8"]))
    with caplog.at_level(logging.WARNING):
        assert training_forward(model, wanted, kind="cuda") is model
    (said,) = [line.getMessage() for line in caplog.records if "trainer.compile" in line.getMessage()]
    name = "auto" if wanted == "auto" else "true"
    assert said == f"trainer.compile={name}: there is no C compiler (gcc); training runs as it is"


def test_training_calls_what_was_compiled_and_validation_does_not(
    compiled: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, "trainer.compile=true", "trainer.val_check_interval=5", "trainer.max_steps=10")
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: None)
    losses, fitted = train(config, monkeypatch)
    assert compiled == [{"calls": 10, "dynamic": False}]
    assert len(losses) == 10
    assert not [name for name in fitted.module.state_dict() if not name.startswith("model.")]


def test_deepspeed_is_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "strategy=deepspeed_zero1", "trainer.compile=true", "trainer.accelerator=cpu"]) == 2
    assert "trainer.compile=true: DeepSpeed's engine moves weights" in capsys.readouterr().err


def test_other_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "trainer.compile=always"]) == 2
    assert "trainer.compile=always: no such choice" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_training_is_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for number, wanted in enumerate(("false", "true")):
        (tmp_path / str(number)).mkdir()
        config = tiny_config(tmp_path / str(number), f"trainer.compile={wanted}", "trainer.max_steps=10")
        runs.append(torch.tensor(train(config, monkeypatch)[0]))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=1e-4)
