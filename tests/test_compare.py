"""`txl compare`: equal budgets, runs that are made once, and what is refused."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.tiny import MODEL, RUN, write_corpus
from txl_lightning import cli
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands import compare as command
from txl_lightning.comparison import flops, plot, table
from txl_lightning.comparison.plan import SURPLUS, Entrant, resize, state_bytes
from txl_lightning.comparison.progress import MatrixProgress
from txl_lightning.comparison.runs import MEASURED, PLAN, RECALL, RUNS, folder_name
from txl_lightning.config import Config, ConfigError, load
from txl_lightning.evaluation.retrieval import measure_retrieval
from txl_lightning.exit_codes import DONE, REFUSED, REQUEUE
from txl_lightning.jobs import Request
from txl_lightning.options import CompareOptions
from txl_lightning.overrides import read
from txl_lightning.registry import memories

COMPARED = [*MODEL, *(item for item in RUN if not item.startswith("callbacks")), "logger=none"]
SHORT = "trainer.max_steps=3"
load_once = functools.cache(lambda *typed: load(typed))  # composing takes a second


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt"))


def typed_keys(corpus: str, *typed: str) -> list[str]:
    """A tiny run, with what is typed in place of the same keys."""
    keys = [item.partition("=")[0] for item in typed]
    base = ["data=text", f"data.path={corpus}", *COMPARED]
    return [*(item for item in base if item.partition("=")[0] not in keys), *typed]


def compare(out: Path, corpus: str, names: str, *typed: str, **options: Any) -> None:
    """Check and run `txl compare` without Hydra around it."""
    words = typed_keys(corpus, *typed)
    if options.get("budget") == "time" and not any("max_steps" in item for item in typed):
        words = [item for item in words if "max_steps" not in item]
    own = [f"{name}={value}" for name, value in options.items()]
    request = Request(command="compare", typed=tuple(read(word, command="compare") for word in [*words, *own]))
    chosen = CompareOptions(memories=tuple(names.split(",")), out=str(out / "out"), **{"seeds": 1, **options})
    config = load_once(*words)
    command.check(config, chosen, request=request)
    command.run(config, chosen, request=request)


def result(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / command.JSON).read_text())


def rows(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in result(tmp_path)["rows"]}


def measured(tmp_path: Path) -> dict[str, Path]:
    """The finished runs as LABEL/SEED."""
    folder = tmp_path / "out" / RUNS
    return {str(path.parent.relative_to(folder)): path for path in sorted(folder.rglob(MEASURED))}


@pytest.fixture
def unplotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No drawing: it takes longer than these runs."""
    monkeypatch.setattr(plot, "plot", lambda *_, **__: None)


def test_equal_state_and_an_empty_cache_equals_none(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    room = 2 * (24 * 32 * 4 + 8)  # 24 rows of 32 float32 and a counter, in 2 layers
    options = ["memory=none,cache,empty", "each={empty: [memory=cache, memory.mem_len=0]}", "seeds=2"]
    where = [f"state_bytes={room}", f"out={tmp_path / 'out'}"]
    assert cli.main(["compare", *options, *where, *typed_keys(corpus, SHORT)]) == DONE
    found = rows(tmp_path)
    assert found["cache"]["chosen"] == {"memory.mem_len": 24}
    assert (found["none"]["state_bytes"], found["cache"]["state_bytes"]) == (0, room)
    assert found["empty"]["remark"] == "memory.mem_len is as typed"
    assert found["empty"]["loss_against_first"] == [0.0, 0.0] == found["none"]["loss_against_first"]
    assert found["cache"]["loss_against_first"] != [0.0, 0.0]
    assert list(found["cache"]["runs"]) == ["1111", "1112"]
    tokens = {run["tokens"] for row in found.values() for run in row["runs"].values()}
    assert tokens == {3 * 4 * 16}
    assert all(row["deviation"]["loss"] > 0 and row["mean"]["tokens_per_second"] > 0 for row in found.values())
    assert (tmp_path / "out" / command.PLOT).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "24" in printed.out and " ± " in printed.out
    assert "run 6 of 6, empty, seed 1112: test loss" in printed.err


@pytest.mark.usefixtures("unplotted")
def test_finished_runs_are_kept_and_other_ones_refused(tmp_path: Path, corpus: str) -> None:
    compare(tmp_path, corpus, "none,cache", SHORT)
    before, files = rows(tmp_path), measured(tmp_path)
    kept = files["none/seed_1111"].stat().st_mtime_ns
    files["cache/seed_1111"].unlink()
    compare(tmp_path, corpus, "none,cache", SHORT)
    after = rows(tmp_path)
    assert measured(tmp_path)["none/seed_1111"].stat().st_mtime_ns == kept
    assert after["none"] == before["none"]
    assert after["cache"]["mean"]["loss"] == before["cache"]["mean"]["loss"]
    with pytest.raises(ConfigError, match=r"configs\.none\.trainer\.max_steps=3, and now it is 4"):
        compare(tmp_path, corpus, "none,cache", "trainer.max_steps=4")


@pytest.mark.usefixtures("unplotted")
def test_a_signal_ends_the_matrix_and_the_same_command_goes_on(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(self: MatrixProgress, *_: Any) -> None:
        if self._name.startswith("cache"):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(MatrixProgress, "step", ask)
        compare(tmp_path, corpus, "none,cache", SHORT)
    assert ended.value.code == REQUEUE
    assert "1 of 2 runs are finished" in capsys.readouterr().err
    assert list(measured(tmp_path)) == ["none/seed_1111"]
    compare(tmp_path, corpus, "none,cache", SHORT)
    assert rows(tmp_path)["cache"]["mean"]["steps"] == 3


@pytest.mark.usefixtures("unplotted")
def test_a_run_that_fails_leaves_the_others(tmp_path: Path, corpus: str) -> None:
    ruinous = "{cache: [optim.lr=1e20, optim.warmup_steps=0, optim.clip=0]}"
    compare(tmp_path, corpus, "none,cache", each=ruinous)
    found = rows(tmp_path)
    assert found["cache"]["runs"] == {} and "not finite" in found["cache"]["failed"]["1111"]
    assert found["cache"]["remark"].endswith("1 of 1 runs failed")
    assert list(found["none"]["runs"]) == ["1111"]


@pytest.mark.usefixtures("unplotted")
def test_equal_flops_and_windows_of_segments(tmp_path: Path, corpus: str) -> None:
    window = "[memory.n_tokens=4, trainer.bptt_segments=2, trainer.accumulate_grad_batches=2]"
    compare(tmp_path, corpus, "none,tokens", each=f"{{tokens: {window}}}", budget="flops")
    none, tokens = rows(tmp_path).values()
    assert none["mean"]["steps"] == 20
    spent = [row["mean"]["tokens"] * row["training_flops_per_token"] for row in (none, tokens)]
    segment = tokens["training_flops_per_token"] * 4 * 16
    assert abs(spent[1] - spent[0]) <= 2 * segment  # steps are whole


@pytest.mark.usefixtures("unplotted")
def test_equal_tokens_when_steps_read_several_segments(tmp_path: Path, corpus: str) -> None:
    each = "{cache: [trainer.accumulate_grad_batches=2]}"
    compare(tmp_path, corpus, "none,cache", "trainer.max_steps=4", each=each)
    none, cache = (row["mean"] for row in rows(tmp_path).values())
    assert (none["steps"], cache["steps"]) == (4, 2)
    assert none["tokens"] == cache["tokens"]


@pytest.mark.usefixtures("unplotted")
def test_equal_time(tmp_path: Path, corpus: str) -> None:
    compare(tmp_path, corpus, "none", "optim.schedule=constant", budget="time", seconds=0.3)
    (row,) = rows(tmp_path).values()
    assert 0.3 <= row["mean"]["train_seconds"] < 10
    assert row["mean"]["steps"] > 1


def test_recall_beside_the_score(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for after the runs on the text: those stay, and each memory is trained on the task once."""
    compare(tmp_path, corpus, "none,associative", SHORT)
    before = {name: path.stat().st_mtime_ns for name, path in measured(tmp_path).items()}
    assert "chance" not in capsys.readouterr().out
    compare(tmp_path, corpus, "none,associative", SHORT, recall=2)
    assert {name: path.stat().st_mtime_ns for name, path in measured(tmp_path).items()} == before
    assert "recall (chance 12.5%)" in " ".join(capsys.readouterr().out.replace("┃", " ").split())
    place = tmp_path / "out" / RECALL
    configs = json.loads((place / PLAN).read_text())["configs"]
    for label, reach in (("none", 1), ("associative", 5)):
        found, run = configs[label], rows(tmp_path)[label]["runs"]["1111"]
        assert found["trainer"]["bptt_segments"] == reach and found["memory"]["reset"] == "document"
        assert found["model"] == {**rows_config(tmp_path, label)["model"], "vocab_size": 18}
        config = replace(Config.from_dict(found), run_dir=None)
        again = measure_retrieval(config, load_checkpoint(str(place / label / "seed_1111"), config))
        assert (run["recall"], run["nats_per_answer"]) == (again.accuracy, again.answer_loss)
        assert run["recall_by_chance"] == 1 / 8 and run["steps"] == 3
    with pytest.raises(
        ConfigError, match=r"recall: its runs have configs\.none\.trainer\.max_steps=2, and now it is 3"
    ):
        compare(tmp_path, corpus, "none,associative", SHORT, recall=3)


def rows_config(tmp_path: Path, label: str) -> dict[str, Any]:
    """The configuration of the runs on the text."""
    return json.loads((tmp_path / "out" / PLAN).read_text())["configs"][label]


@pytest.mark.usefixtures("unplotted")
def test_on_the_recall_task_itself_its_answers_are_counted(tmp_path: Path, corpus: str) -> None:
    own = ["data=recall", "model.vocab_size=21", "data.episodes=64", "data.test_episodes=64", SHORT]
    words = [item for item in typed_keys(corpus, *own) if not item.startswith("data.path")]
    request = Request(command="compare", typed=tuple(read(word, command="compare") for word in words))
    options = CompareOptions(memories=("none",), out=str(tmp_path / "out"), seeds=1)
    with pytest.raises(ConfigError, match="recall=5: data=recall is that task already"):
        command.check(load_once(*words), replace(options, recall=5), request=request)
    command.run(load_once(*words), options, request=request)
    (row,) = rows(tmp_path).values()
    assert 0 <= row["mean"]["recall"] < 0.5 and row["mean"]["recall_by_chance"] == 1 / 8


def with_memory(name: str, **keys: Any) -> Config:
    return replace(load_once(*MODEL, "data.segment_len=16"), memory=memories.get(name).config(**keys))


@pytest.mark.parametrize("name", [name for name in memories.names() if memories.get(name).config.size_key])
def test_every_memory_with_a_size_fits_the_budget(name: str) -> None:
    config = with_memory(name)
    budget = 2 * state_bytes(config) + 100
    fitted = resize(config, budget=budget)
    key = config.memory.size_key
    assert key is not None
    size = getattr(fitted.memory, key)
    assert size > getattr(config.memory, key)
    found = state_bytes(fitted)
    assert found <= SURPLUS * budget
    for other in (size - 1, size + 1):
        there = state_bytes(with_memory(name, **{key: other}))
        assert there > SURPLUS * budget or abs(there - budget) >= abs(found - budget)


def test_memories_without_a_size() -> None:
    without = [name for name in memories.names() if not memories.get(name).config.size_key]
    assert without == ["associative", "mix", "none", "titans"]


def test_flops_are_those_counted_by_hand() -> None:
    config = load([*MODEL, "memory=none", "model.position=none", "data.segment_len=16", "data.batch_size=2"])
    width, inner, length, vocab = 32, 64, 16, 257
    layer = 2 * 4 * width * width + 2 * 2 * width * inner + 2 * 2 * length * width
    counted = flops.count(config)
    assert counted.forward == 2 * layer + 2 * width * vocab
    assert counted.training == 3 * counted.forward
    assert counted.parameters == config.model.num_params()


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_is_whole_on_any_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure is cut: where a row of each is too wide, each has a column."""
    shown, found = io.StringIO(), []
    for name in ("none", "cache", "knn"):
        config = load([*MODEL, f"memory={name}"])
        chosen = {} if name == "none" else {f"memory.{config.memory.size_key}": 64}
        entrant = Entrant(label=name, config=config, state_bytes=state_bytes(config), chosen=chosen)
        run = {"loss": 3.125, "bits_per_byte": 4.5084, "tokens": 20480, "tokens_per_second": 1e5, "peak_bytes": 2**29}
        found.append(table.Row(entrant=entrant, flops=flops.count(config), runs={1: run}))
    terminal = Console(file=shown, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(table, "Console", lambda: terminal)
    table.show(found, title="stdlib")
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= width
    lines = [re.split("[│┃]", line)[1:-1] for line in text.splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines if line]
    by_column = [[column.title, *(column.cell(row, found[0]) for row in found)] for column in table.columns(found)]
    assert cells == (by_column if width == 80 else [list(row) for row in zip(*by_column, strict=True)])


def test_labels_become_names_of_folders() -> None:
    labels = ("cache", "my.memory:Gate", "../up", ".")
    assert [folder_name(label) for label in labels] == ["cache", "my.memory_Gate", "_up", "_"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["-m", "memory=none,cache"], "flag=--multirun: memory=A,B,C is a list here"),
        (["out=here"], "memory=: names nothing to compare"),
        (["memory=none,cache", "out=here"], "out="),
        (["memory=none,cache", "run_dir=x"], "run_dir=x: txl compare does not read it"),
        (["memory=none,cahce", "out=new"], "cahce: memory=cahce: no such option; did you mean cache?"),
        (["memory=cache,cache", "out=new"], "error: memory=cache,cache: two have the name cache; "),
        (["memory=cache", "each={cache: [memory.layers=[0]]}"], "put quotes around what holds brackets"),
    ],
)
def test_typed_and_refused(
    typed: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("a file")
    assert cli.main(["compare", *typed]) == REFUSED
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize(
    ("names", "typed", "options", "said"),
    [
        ("cache,cache", [], {}, "memory=cache,cache: two have the name cache"),
        ("cache,none", ["memory.mem_len=3"], {}, "none: memory.mem_len=3: memory=none has no such key"),
        ("cache", [], {"each": "{knn: memory.top_k=3}"}, "knn is not among those compared; write memory=cache,knn"),
        ("cache", [], {"each": "{cache: data.batch_size=3}"}, "data.batch_size must be the same for all"),
        ("cache", [], {"each": "{cache: memory.men_len=3}"}, "memory.men_len=3: no such key"),
        ("cache", [], {"each": "[cache]"}, "must name overrides for each of several"),
        ("none,compressive", [], {"state_bytes": 99}, "state_bytes=99: memory=compressive needs "),
        ("cache", [], {"budget": "time"}, "seconds=null: budget=time needs it"),
        (
            "cache",
            [SHORT],
            {"budget": "time", "seconds": 1.0},
            "trainer.max_steps=3: budget=time ends runs",
        ),
        ("cache", [], {"budget": "flops", "state_bytes": 99}, "state_bytes=99: budget=flops does not read it"),
    ],
)
def test_refused(names: str, typed: list[str], options: dict[str, Any], said: str, tmp_path: Path, corpus: str) -> None:
    with pytest.raises(ConfigError) as error:
        compare(tmp_path, corpus, names, *typed, **options)
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_time_budget_has_no_last_step(tmp_path: Path, corpus: str) -> None:
    with pytest.raises(ConfigError, match="has to know its last step"):
        compare(tmp_path, corpus, "none", budget="time", seconds=1.0)
