"""`txl bench`: what it measures, side by side, and what it refuses. No test asserts a time."""

from __future__ import annotations

import importlib.util
import json
import statistics
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from theirs import Theirs
from torch import nn

from txl_lightning import registry
from txl_lightning.benchmarks import attention, huggingface, overhead, workloads
from txl_lightning.benchmarks.timing import Task, Timing, interleave
from txl_lightning.checkpoints.reference import to_reference
from txl_lightning.cli import main
from txl_lightning.config import Config, load
from txl_lightning.model import chunked
from txl_lightning.model.lstm import LSTM
from txl_lightning.types import n_byte

SMALL = (
    "model.n_layer=1 model.d_model=16 model.n_head=2 model.d_head=8 model.d_inner=16 model.pre_norm=false "
    "data.batch_size=2 data.segment_len=8 trainer.precision=32-true trainer.accelerator=cpu"
).split()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txl_lightning.benchmarks.timing.LEAST_SECONDS", 1e-9)
    monkeypatch.setattr("txl_lightning.benchmarks.overhead.LEAST_SECONDS", 1e-9)


def small(*more: str) -> Config:
    return load([*SMALL, "memory=cache", "memory.mem_len=8", *more])


def bench(tmp_path: Path, *typed: str) -> dict[str, Any]:
    out = tmp_path / "bench.json"
    assert main(["bench", *SMALL, *typed, "rounds=2", f"out={out}"]) == 0
    return json.loads(out.read_text())


def test_tasks_take_turns() -> None:
    seen: list[str] = []
    tasks = [
        Task(part="x", label=name, run=lambda n=name: seen.append(n), amount=3.0, group=2)  # type: ignore[misc]
        for name in "ab"
    ]
    found = interleave(tasks, rounds=3, kind="cpu")
    turns = "".join(seen)
    calls = [timing.calls for timing in found]
    assert all(count % 2 == 0 for count in calls)  # whole groups
    assert turns.endswith(("a" * calls[0] + "b" * calls[1]) * 3)
    for timing in found:
        assert len(timing.seconds) == 3
        assert timing.rate == 3.0 / statistics.median(timing.seconds)


def test_every_part_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = "what=training,evaluation,decoding,attention,overhead"
    found = bench(tmp_path, "memory=cache", "memory.mem_len=8", parts, "backends=[shift,reference]")
    rows = {(row["part"], row["label"]): row for row in found["rows"]}
    ways = {("attention", way) for way in ("reference", "shift", attention.BOUND)}
    assert {("training", "cache"), ("decoding", "cache"), ("overhead", "trainer"), ("peak", "matrix product")} < set(
        rows
    )
    assert ways < set(rows)
    assert {row["schedule"] for row in found["rows"] if row["part"] == "evaluation"} == {"segments", "layers"}
    for row in found["rows"]:
        assert 0 < row["slowest"] <= row["per_second"] <= row["fastest"]
    step = rows["training", "cache"]
    assert step["utilisation"] == pytest.approx(
        step["per_second"] * step["flops_per_token"] / rows["peak", "matrix product"]["per_second"]
    )
    # one layer of 8 rows of 16 numbers, the rows in use, the lane's age
    assert step["state_bytes_per_lane"] == 8 * 16 * 4 + 8 + 8
    assert rows["decoding", "cache"]["token_by_token"] is True
    assert found["overhead"] > -1
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("training step", "cache 8", "bare loop", "matrix product", "FLOPs"))


def test_an_lstm_is_timed_as_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["model=lstm", "model.n_layer=1", "model.d_model=8", *SMALL[6:]]
    assert main(["bench", *keys, "what=attention"]) == 2
    assert "error: what=attention: model.architecture=lstm has no attention" in capsys.readouterr().err
    config = load(keys)
    made = workloads.made(config)
    assert isinstance(made, LSTM)
    for part in (workloads.training, workloads.evaluation, workloads.decoding):
        task = part(config, label="lstm")
        task.run()
        assert task.facts["state_bytes_per_lane"] == n_byte(made.init_state(1))


def test_attention_is_timed_as_a_layer_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    run = chunked.chunked
    monkeypatch.setattr(chunked, "chunked", lambda *args: calls.append("chunked") or run(*args))
    tasks = {task.label: task for task in attention.tasks(small(), backends=["reference", "shift"])}
    grads = {name: tasks[name].run() for name in ("reference", "shift")}
    assert calls == ["chunked"]
    for fast, plain in zip(grads["shift"], grads["reference"], strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)


def test_strategies_and_lengths_side_by_side(tmp_path: Path) -> None:
    found = bench(tmp_path, "memory=none,tokens", "what=training", "peak_flops=1e12")
    labels = [row["label"] for row in found["rows"] if row["part"] == "training"]
    assert labels == ["none", "tokens"]
    found = bench(tmp_path, "memory=cache", "lengths=[8,24]", "what=evaluation", "eval.schedule=segments")
    sizes = {row["memory"]["mem_len"]: row["state_bytes_per_lane"] for row in found["rows"]}
    assert sizes == {8: 8 * 2 * 16 * 4 + 16, 24: 24 * 2 * 16 * 4 + 16}


def test_reading_is_measured_over_the_corpus(tmp_path: Path, own_cache: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("It was a dark night.\n" * 200)
    found = bench(tmp_path, "what=data", "data=text", f"data.path={text}")
    rows = {row["label"]: row for row in found["rows"]}
    assert rows["tokenise"]["bytes"] == text.stat().st_size
    assert set(rows) == {"count and check", "tokenise", "load batches"}


@pytest.mark.parametrize("name", registry.memories.names())
def test_memory_is_full_before_it_is_timed(name: str) -> None:
    """A step more changes no tensor's shape, and what counts rows in use stays as it is."""
    config = load([*SMALL, f"memory={name}"])
    model = workloads.made(config).eval()
    state = workloads.warm(model, model.init_state(2), config, segment_len=8)
    tokens = workloads.drawn(config, lanes=2, n_token=8)
    after = model(tokens, state).state
    counters = [key for key in state if key.endswith("filled")]
    assert all(torch.equal(state[key], after[key]) for key in counters)
    assert n_byte(state) == n_byte(after)


def test_tokens_are_drawn_as_words_are() -> None:
    config = small("model.vocab_size=50")
    tokens = workloads.drawn(config, lanes=4, n_token=5000)
    count = torch.bincount(tokens.flatten(), minlength=50)
    wanted = 1 / torch.arange(1, 51) / (1 / torch.arange(1, 51)).sum()
    assert ((count / tokens.numel() - wanted).abs() < 0.02).all()


def test_the_bare_loop_makes_the_trainers_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same weights over the same segments both end with the same weights; only the schedule is left out."""
    kept: list[Any] = []
    begin = overhead._Turns.on_train_start

    def keep(self: Any, trainer: Any, pl_module: Any) -> None:
        kept.extend([self, pl_module])
        begin(self, trainer, pl_module)

    monkeypatch.setattr(overhead._Turns, "on_train_start", keep)
    found = overhead.overhead(small("optim.clip=0.5", "optim.schedule=constant", "optim.warmup_steps=0"), rounds=3)
    assert [timing.task.label for timing in found] == ["bare loop", "trainer"]
    assert all(len(timing.seconds) == 3 for timing in found)
    turns, module = kept
    fresh = workloads.made(small()).state_dict()
    for name, weight in module.model.state_dict().items():
        torch.testing.assert_close(turns.model.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
    assert any((weight != fresh[name]).any() for name, weight in module.model.state_dict().items())


def test_the_overhead_is_a_share_of_the_bare_step() -> None:
    task = Task(part="overhead", label="", run=lambda: None, amount=1.0)
    bare, whole = Timing(task=task, seconds=[1.0, 2.0, 1.0]), Timing(task=task, seconds=[1.03, 4.0, 1.2])
    assert overhead.share([bare, whole]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["what=trainning"], "error: what=trainning: there is no part trainning; did you mean training?"),
        (["what=,"], "error: what=,: names nothing to measure"),
        (["memory=none", "lengths=[8]"], "lengths=[8]: memory=none has no size that they could set"),
        (["memory=none,cache", "against=huggingface"], "error: against=huggingface: it is laid beside one memory"),
        (["what=data", "against=huggingface"], "error: against=huggingface: nothing of it is measured"),
        (["trainer.precision=16-mixed"], "trainer.precision=16-mixed:"),
        (["out=/nowhere/at/all.json"], "error: out=/nowhere/at/all.json: its folder does not exist"),
        (["-m"], "error: flag=--multirun"),
        (["trainer.max_steps=3"], "txl bench does not read it"),
        (["eval.warm=8"], "txl bench does not read it"),
        (["eval.dynamic=sgd"], "txl bench does not read it"),
    ],
)
def test_refusals(typed: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, *typed]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("there", [None, "5.0.0"])
def test_the_other_class_is_asked_for_in_its_last_version(
    there: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if there is None:
            raise metadata.PackageNotFoundError(name)
        return there

    monkeypatch.setattr(huggingface, "version", version)
    assert main(["bench", *SMALL, "against=huggingface"]) == 2
    said = capsys.readouterr().err
    assert "pip install transformers==4.57.6" in said
    assert (f"transformers {there} is installed" if there else "transformers is not installed") in said


def test_a_model_they_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(huggingface, "version", lambda _: huggingface.VERSION)
    assert main(["bench", *SMALL, "against=huggingface", "model.position=rotary"]) == 2
    assert "model.position=rotary" in capsys.readouterr().err


def test_the_slip_in_their_code_is_put_right(tmp_path: Path) -> None:
    file = tmp_path / "slip.py"
    file.write_text("def f(x, y):\n    return x.float().type_as(\n        dtype=y.dtype\n    )\n")
    spec = importlib.util.spec_from_file_location("slip", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    numbers = torch.ones(2), torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError):
        module.f(*numbers)
    assert huggingface._corrected(module).f(*numbers).dtype == torch.float64


class Restated(nn.Module):
    """Their class as `theirs` restates it, with the calls that the benchmark makes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weights, self.values = to_reference(huggingface.made_like(config), layout="huggingface")
        self.code = Theirs(self.weights, self.values, "huggingface", torch.float32)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return dict(self.weights)

    def init_mems(self, lanes: int) -> list[torch.Tensor]:
        size = (self.values["mem_len"], lanes, self.values["d_model"])
        return [torch.zeros(size) for _ in range(self.values["n_layer"])]

    def forward(self, tokens: torch.Tensor, *, mems: list[torch.Tensor], labels: torch.Tensor) -> Any:
        hidden, inputs = self.code.layers(tokens.T, mems)
        joined = [torch.cat([old, x])[-len(old) :] for old, x in zip(mems, inputs, strict=True)]
        scores = self.code.log_probs(hidden)[:-1]
        losses = -scores.gather(2, labels.T[1:, :, None])[..., 0].T
        return SimpleNamespace(losses=losses, mems=joined)


def test_losses_of_both_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("model.vocab_size=30")
    monkeypatch.setattr(huggingface, "theirs", Restated)
    assert huggingface.difference(config) < 1e-5
    build = huggingface.from_reference

    def other(weights: Any, values: Any, **more: Any) -> Any:
        model = build(weights, values, **more)
        with torch.no_grad():
            model.blocks()[0].attention.out.weight.mul_(1.5)
        return model

    monkeypatch.setattr(huggingface, "from_reference", other)
    assert huggingface.difference(config) > 1e-5


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers 4.57.6 is not installed")
def test_beside_their_own_code(tmp_path: Path) -> None:
    typed = ["memory=cache", "memory.mem_len=8", "against=huggingface"]
    found = bench(tmp_path, *typed)
    assert found["largest_loss_difference"] < 1e-5
    assert [row["label"] for row in found["rows"] if row["part"] == "decoding"] == ["cache", "huggingface"]
