"""`txl compare`: equal budgets, runs that are made once, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import MODEL, RUN, tiny_config, write_corpus
from txl_lightning import cli
from txl_lightning.commands.compare import JSON, PLOT
from txl_lightning.comparison import flops
from txl_lightning.comparison.plan import SURPLUS, resize, state_bytes
from txl_lightning.comparison.progress import MatrixProgress
from txl_lightning.comparison.runs import MEASURED, RUNS, folder_name
from txl_lightning.config import load
from txl_lightning.exit_codes import DONE, REFUSED, REQUEUE
from txl_lightning.registry import memories

COMPARED = [item for item in RUN if not item.startswith(("callbacks", "trainer.max_steps"))]
SHORT = "trainer.max_steps=3"


def compare(tmp_path: Path, *typed: str) -> int:
    """The exit code of `txl compare` into tmp_path/out, with a tiny model and corpus."""
    corpus = tmp_path / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    return cli.main(
        ["compare", "data=text", f"data.path={corpus}", f"out={tmp_path / 'out'}", "logger=none", *MODEL, *COMPARED]
        + list(typed)
    )


def result(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / JSON).read_text())


def rows(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in result(tmp_path)["rows"]}


def measured(tmp_path: Path) -> dict[str, Path]:
    """The finished runs as LABEL/SEED."""
    folder = tmp_path / "out" / RUNS
    return {str(path.parent.relative_to(folder)): path for path in sorted(folder.rglob(MEASURED))}


def test_equal_state_and_an_empty_cache_equals_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["memory=none,cache,empty", "each={empty: [memory=cache, memory.mem_len=0]}", "seeds=2", SHORT]
    room = 2 * (24 * 32 * 4 + 8)  # 24 rows of 32 float32 and a counter, in 2 layers
    assert compare(tmp_path, *command, f"state_bytes={room}") == DONE
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
    assert (tmp_path / "out" / PLOT).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "24" in printed.out and " ± " in printed.out
    assert "run 6 of 6, empty, seed 1112: test loss" in printed.err


def test_finished_runs_are_kept_and_other_ones_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path, "memory=none,cache", "seeds=1", SHORT) == DONE
    before, files = rows(tmp_path), measured(tmp_path)
    kept = files["none/seed_1111"].stat().st_mtime_ns
    files["cache/seed_1111"].unlink()
    assert compare(tmp_path, "memory=none,cache", "seeds=1", SHORT) == DONE
    after = rows(tmp_path)
    assert measured(tmp_path)["none/seed_1111"].stat().st_mtime_ns == kept
    assert after["none"] == before["none"]
    assert after["cache"]["mean"]["loss"] == before["cache"]["mean"]["loss"]
    capsys.readouterr()
    assert compare(tmp_path, "memory=none,cache", "seeds=1", SHORT, "optim.lr=0.01") == REFUSED
    assert "configs.none.optim.lr=0.003, and now it is 0.01" in capsys.readouterr().err
    assert compare(tmp_path, "memory=none,cache", "seeds=1", "trainer.max_steps=4") == REFUSED


def test_a_signal_ends_the_matrix_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(self: MatrixProgress, *_: Any) -> None:
        if self._name.startswith("cache"):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(MatrixProgress, "step", ask)
        assert compare(tmp_path, "memory=none,cache", "seeds=1", SHORT) == REQUEUE
    assert "1 of 2 runs are finished" in capsys.readouterr().err
    assert list(measured(tmp_path)) == ["none/seed_1111"]
    assert compare(tmp_path, "memory=none,cache", "seeds=1", SHORT) == DONE
    assert rows(tmp_path)["cache"]["mean"]["steps"] == 3


def test_a_run_that_fails_leaves_the_others(tmp_path: Path) -> None:
    ruinous = "each={cache: [optim.lr=1e20, optim.warmup_steps=0, optim.clip=0]}"
    assert compare(tmp_path, "memory=none,cache", ruinous, "seeds=1", "trainer.max_steps=20") == DONE
    found = rows(tmp_path)
    assert found["cache"]["runs"] == {} and "not finite" in found["cache"]["failed"]["1111"]
    assert found["cache"]["remark"].endswith("1 of 1 runs failed")
    assert list(found["none"]["runs"]) == ["1111"]


def test_equal_flops_and_windows_of_segments(tmp_path: Path) -> None:
    window = "[memory.n_tokens=4, trainer.bptt_segments=2, trainer.accumulate_grad_batches=2]"
    each = f"each={{tokens: {window}}}"
    assert compare(tmp_path, "memory=none,tokens", each, "budget=flops", "trainer.max_steps=12", "seeds=1") == DONE
    none, tokens = rows(tmp_path).values()
    assert none["mean"]["steps"] == 12
    spent = [row["mean"]["tokens"] * row["training_flops_per_token"] for row in (none, tokens)]
    segment = tokens["training_flops_per_token"] * 4 * 16
    assert abs(spent[1] - spent[0]) <= 2 * segment  # steps are whole


def test_equal_tokens_when_steps_read_several_segments(tmp_path: Path) -> None:
    each = "each={cache: [trainer.accumulate_grad_batches=2]}"
    assert compare(tmp_path, "memory=none,cache", each, "trainer.max_steps=4", "seeds=1") == DONE
    none, cache = (row["mean"] for row in rows(tmp_path).values())
    assert (none["steps"], cache["steps"]) == (4, 2)
    assert none["tokens"] == cache["tokens"]


def test_equal_time(tmp_path: Path) -> None:
    assert compare(tmp_path, "memory=none", "budget=time", "seconds=0.3", "seeds=1", "optim.schedule=constant") == DONE
    (row,) = rows(tmp_path).values()
    assert 0.3 <= row["mean"]["train_seconds"] < 10
    assert row["mean"]["steps"] > 1


@pytest.mark.parametrize("name", [name for name in memories.names() if memories.get(name).config.size_key])
def test_every_memory_with_a_size_fits_the_budget(name: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, f"memory={name}")
    budget = 2 * state_bytes(config) + 100
    fitted = resize(config, budget=budget)
    key = config.memory.size_key
    assert key is not None
    size = getattr(fitted.memory, key)
    assert size > getattr(config.memory, key)
    found = state_bytes(fitted)
    assert found <= SURPLUS * budget
    for other in (size - 1, size + 1):
        there = state_bytes(tiny_config(tmp_path, f"memory={name}", f"memory.{key}={other}"))
        assert there > SURPLUS * budget or abs(there - budget) >= abs(found - budget)


def test_memories_without_a_size() -> None:
    assert {name for name in memories.names() if not memories.get(name).config.size_key} == {
        "none",
        "mix",
        "associative",
        "titans",
    }


def test_flops_are_those_counted_by_hand() -> None:
    config = load([*MODEL, "memory=none", "model.position=none", "data.segment_len=16", "data.batch_size=2"])
    width, inner, length, vocab = 32, 64, 16, 257
    layer = 2 * 4 * width * width + 2 * 2 * width * inner + 2 * 2 * length * width
    counted = flops.count(config)
    assert counted.forward == 2 * layer + 2 * width * vocab
    assert counted.training == 3 * counted.forward
    assert counted.parameters == config.model.num_params()


def test_labels_become_names_of_folders() -> None:
    assert [folder_name(label) for label in ("cache", "my.memory:Gate", "../up", ".")] == [
        "cache",
        "my.memory_Gate",
        "_up",
        "_",
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["-m", "memory=none,cache"], "flag=--multirun: memory=A,B,C is a list here"),
        ([], "memory=: names nothing to compare"),
        (["memory=none,cahce"], "cahce: memory=cahce: no such option; did you mean cache?"),
        (["memory=cache,cache"], "memories=[cache,cache]: two have the name cache"),
        (["memory=cache,none", "memory.mem_len=3"], "none: memory.mem_len=3: memory=none has no such key"),
        (["memory=none,cache", "run_dir=x"], "run_dir=x: txl compare does not read it"),
        (["memory=cache", "each={knn: memory.top_k=3}"], "knn is not among those compared; write memory=cache,knn"),
        (["memory=cache", "each={cache: data.batch_size=3}"], "data.batch_size must be the same for all"),
        (["memory=cache", "each={cache: memory.men_len=3}"], "memory.men_len=3: no such key"),
        (["memory=cache", "each={cache: [memory.layers=[0]]}"], "put quotes around what holds brackets"),
        (["memory=cache", "each=[cache]"], "must name overrides for each of several"),
        (["memory=none,compressive", "state_bytes=99"], "state_bytes=99: memory=compressive needs "),
        (["memory=cache", "budget=time"], "seconds=null: budget=time needs it"),
        (["memory=cache", "budget=time", "seconds=1"], "optim.schedule=cosine: has to know its last step"),
        (
            ["memory=cache", "budget=time", "seconds=1", SHORT],
            "trainer.max_steps=3: budget=time ends runs after seconds",
        ),
        (["memory=cache", "budget=flops", "state_bytes=99"], "state_bytes=99: budget=flops does not read it"),
        (["memory=cache", "out=here"], "out="),
    ],
)
def test_refusals(
    typed: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("a file")
    assert compare(tmp_path, *typed) == REFUSED
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
