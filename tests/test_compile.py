"""`trainer.compile`: what training calls, where it is compiled, and what is said where it cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import get_static_address_type

from tests.points import watched
from tests.tiny import tiny_config, train
from txl_lightning.cli import main
from txl_lightning.config import TrainerConfig, load
from txl_lightning.model.transformer import ModelOutput, TransformerXL
from txl_lightning.training import compiling, module
from txl_lightning.training.compiling import Forward, training_forward
from txl_lightning.types import Segment, State


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
    ("wanted", "kind", "how"),
    [
        ("auto", "cpu", None),
        ("auto", "cuda", "reduce-overhead"),
        (True, "cpu", "default"),
        (True, "cuda", "reduce-overhead"),
        (False, "cuda", None),
        ("auto", "mps", None),
    ],
)
def test_where_it_compiles(
    wanted: Any, kind: str, how: str | None, compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: None)
    model = TransformerXL(load(["model.n_layer=1", "model.d_model=8"]))
    forward = training_forward(model, TrainerConfig(compile=wanted), kind=kind)
    assert (forward.read is not model) == (how is not None)
    assert forward.captured == (how == "reduce-overhead")
    mode = how if how == "reduce-overhead" else None
    assert compiled == ([{"calls": 0, "dynamic": False, "mode": mode}] if how else [])


@pytest.mark.parametrize("keys", [{"accumulate_grad_batches": 2}, {"lane_chunks": 2}])
def test_what_adds_gradients_up_is_not_captured(
    keys: dict[str, int], compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: None)
    model = TransformerXL(load(["model.n_layer=1", "model.d_model=8"]))
    assert not training_forward(model, TrainerConfig(**keys), kind="cuda").captured  # type: ignore[arg-type]
    assert compiled == [{"calls": 0, "dynamic": False, "mode": None}]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_graph_is_not_cut_at_the_buckets_of_ddp(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: None)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda: seen.append(torch._dynamo.config.optimize_ddp))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    before = torch._dynamo.config.optimize_ddp
    training_forward(TransformerXL(load(["model.n_layer=1"])), TrainerConfig(compile=True), kind=kind).read()
    assert seen == [False] and torch._dynamo.config.optimize_ddp is before


@pytest.mark.parametrize("wanted", ["auto", True])
def test_without_a_compiler_it_says_so_and_goes_on(
    wanted: Any, compiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: "there is no C compiler (gcc)")
    model = TransformerXL(load(["model.n_layer=1", "model.d_model=8"]))
    with caplog.at_level(logging.WARNING):
        assert training_forward(model, TrainerConfig(compile=wanted), kind="cuda") == Forward(model, captured=False)
    (said,) = [line.getMessage() for line in caplog.records if "trainer.compile" in line.getMessage()]
    name = "auto" if wanted == "auto" else "true"
    assert said == f"trainer.compile={name}: there is no C compiler (gcc); training runs as it is"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wanted", ["auto", True])
def test_where_the_compiler_fails_auto_goes_on_without_it(
    wanted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: None)
    broken = lambda graph, inputs: 1 / 0  # noqa: E731
    compile_ = torch.compile
    monkeypatch.setattr(compiling.torch, "compile", lambda model, **_: compile_(model, backend=broken))
    model = TransformerXL(load(["model.n_layer=1", "model.d_model=8"])).eval()
    forward, tokens = training_forward(model, TrainerConfig(compile=wanted), kind="cuda"), torch.zeros(1, 3).long()
    if wanted is True:
        with pytest.raises(RuntimeError, match="division by zero"):
            forward.read(tokens, model.init_state(1))
        return
    with caplog.at_level(logging.WARNING):
        found = [forward.read(tokens, model.init_state(1)).hidden_BTD for _ in range(2)]
    assert torch.equal(found[0], model(tokens, model.init_state(1)).hidden_BTD) and torch.equal(*found)
    (said,) = [line.getMessage() for line in caplog.records if "trainer.compile" in line.getMessage()]
    assert "division by zero" in said and said.endswith("training runs as it is")


def test_training_calls_what_was_compiled_and_validation_does_not(
    compiled: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, "trainer.compile=true", "trainer.val_check_interval=5", "trainer.max_steps=10")
    monkeypatch.setattr(compiling, "why_not_compiled", lambda _: None)
    losses, fitted = train(config, monkeypatch)
    assert compiled == [{"calls": 10, "dynamic": False, "mode": None}]
    assert len(losses) == 10
    assert not [name for name in fitted.module.state_dict() if not name.startswith("model.")]


class Overwriting:
    """What the captured graphs of a training step do: they read memory at one address and overwrite what they gave."""

    def __init__(self, model: TransformerXL) -> None:
        self.model, self.given, self.places = model, [], set()  # type: ignore[var-annotated]

    def __call__(
        self, tokens: torch.Tensor, state: State, segment: Segment, targets: torch.Tensor, **more: Any
    ) -> ModelOutput:
        assert all(weight.grad is None for weight in self.model.parameters())
        with torch.no_grad():
            for tensor in self.given:
                tensor.fill_(-1 if not tensor.is_floating_point() else float("nan"))
        self.places.add(tuple(tensor.data_ptr() for tensor in state.values()))
        # else each replay copies memory to a place of its own
        assert all(get_static_address_type(tensor) == "unguarded" for tensor in state.values())
        out = self.model(tokens, state, segment, targets, **more)
        # views of what was made before it are not overwritten by a graph
        self.given = [part.detach() for part in (out.losses_BT, out.hidden_BTD, *out.metrics.values())]
        self.given += [part.detach() for key, part in out.state.items() if part.data_ptr() != state[key].data_ptr()]
        return out


def overwriting(made: list[Overwriting]) -> Any:
    """In place of `training_forward`."""

    def captured(model: TransformerXL, *_: Any, **__: Any) -> Forward:
        made.append(Overwriting(model))
        return Forward(made[-1], captured=True)

    return captured


def test_observers_see_memory_as_it_was_before_it_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["callbacks=[cost_meter,memory_monitor]", "trainer.log_every_n_steps=1", "trainer.max_steps=6"]
    rows = []
    for name in ("plain", "captured"):
        with monkeypatch.context() as patch:
            if name == "captured":
                patch.setattr(module, "training_forward", overwriting([]))
            torch.manual_seed(0)
            points, _ = watched(tiny_config(tmp_path, f"run_dir={tmp_path / name}", *keys))
        rows.append([{k: v for k, v in row.items() if k.startswith(("cost/", "memory/"))} for _, row in points.rows])
    assert rows[0] == rows[1] and rows[0][-1]["memory/cache/update/L0"] > 0


@pytest.mark.parametrize("memory", ["cache", "compressive", "tokens", "knn"])
def test_training_needs_nothing_that_captured_graphs_overwrite(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"memory={memory}", "trainer.max_steps=12", "trainer.on_divergence=skip", "trainer.val_check_interval=5"]
    runs: list[Any] = []
    made: list[Overwriting] = []
    for name in ("plain", "captured"):
        with monkeypatch.context() as patch:
            if name == "captured":
                patch.setattr(module, "training_forward", overwriting(made))
            runs.append(train(tiny_config(tmp_path, f"run_dir={tmp_path / name}", *keys), patch))
    assert runs[0][0] == runs[1][0]
    assert len(made[0].places) == 1
    files = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("plain", "captured")
    ]
    assert all(torch.equal(*pair) for pair in zip(*(file["state_dict"].values() for file in files), strict=True))
    lanes = [file["txl_lightning"]["lanes"]["lanes"] for file in files]
    assert all(torch.equal(lanes[0][key], lanes[1][key]) for key in lanes[0])


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
