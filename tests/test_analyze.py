"""`txl analyze reach|retrieval`: what it prints and writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import MODEL, RUN
from txl_lightning.analyses import ANALYSES
from txl_lightning.cli import main

RECALL = ["experiment=recall", "data.episodes=32", "data.test_episodes=8", "data.batch_size=4", "run_dir=run"]
SHORT = [item for item in RUN if item.startswith(("trainer.p", "trainer.ac", "trainer.n", "callbacks"))]


def rows(shown: str) -> dict[str, str]:
    """What a table of two columns says."""
    cells = [line.strip("│").split("│") for line in shown.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in cells}


def test_reach_is_shown_beside_its_formula(capsys: Any, tmp_path: Path) -> None:
    keys = ["memory=cache", "memory.mem_len=4", "model.n_layer=3", "data.segment_len=8", f"out={tmp_path / 'x.json'}"]
    assert main(["analyze", "reach", *[item for item in MODEL if "n_layer" not in item], *keys]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["measured"] == shown["formula"] == "20 tokens" and shown["weights"] == "random"
    assert shown["tried"] == "160 tokens: 20 segments of 8"
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["tokens"], found["formula"], found["memory"]["mem_len"]) == (20, 20, 4)
    assert main(["analyze", "reach", *MODEL, "memory=associative", "data.segment_len=4", "segments=3"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["measured"] == "12 tokens (the farthest that was tried)"
    assert shown["formula"] == "unbounded: a state is carried on"


def test_a_run_is_analysed_with_its_own_settings(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit = [*RECALL, *SHORT, "memory=associative", "trainer.bptt_segments=5", "trainer.max_steps=2", "logger=none"]
    assert main(["fit", *fit]) == 0
    capsys.readouterr()
    assert main(["analyze", "retrieval", "ckpt=run", "trainer.accelerator=cpu", "out=found.json"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["by chance"] == "12.5%" and shown["answers right"].endswith("% of 8")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["memory"]["name"] == "associative" and (found["distance"], found["n_target"]) == (4, 320)
    assert main(["analyze", "retrieval", "ckpt=run", "data.distance=1", "trainer.accelerator=cpu"]) == 0
    assert rows(capsys.readouterr().out)["distance"] == "1 segments of 8, 1 pairs"
    assert main(["analyze", "reach", "ckpt=run", "segments=2"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["weights"] == "of the checkpoint" and shown["tried"] == "16 tokens: 2 segments of 8"

    said = refusals(capsys)
    assert said("ckpt=run", "segments=3").startswith("segments=3: is of txl analyze reach only; leave it out")
    assert said("ckpt=run", "data.keys=9").startswith("model.vocab_size=18: the data has 19 symbols (recall)")
    rule = "the ids of this text (recall) do not mean what the checkpoint's do"
    assert said("ckpt=run", "data.keys=9", "data.values=7").startswith(f"data=recall: {rule}; ")
    cure = "so that lanes begin with an episode; change one of them"
    assert said("ckpt=run", "eval.batch_size=3") == f"eval.batch_size=3: must divide data.test_episodes=8, {cure}"
    assert said("ckpt=run", "data=stdlib") == (
        "data=stdlib: this text asks for nothing that was shown before; set data=recall, and train with it"
    )


def refusals(capsys: Any) -> Any:
    def said(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["analyze", "retrieval", *arguments]) == 2
        return str(capsys.readouterr().err).removeprefix("error: ").strip()

    return said


def test_refusals_without_a_run(capsys: Any) -> None:
    said = refusals(capsys)
    cure = "train one with txl fit experiment=recall and give ckpt=PATH"
    assert said() == f"ckpt=null: retrieval needs trained weights; {cure}"
    assert said("ckpt=nowhere").startswith("ckpt=nowhere: ")
    assert main(["analyze", "recal"]) == 2
    assert capsys.readouterr().err.startswith("error: action=recal: no such choice; ")


@pytest.mark.parametrize("typed", [[], ["action=null"], ["memory=knn", "seed=3"]])
def test_without_its_name_no_analysis_is_chosen(typed: list[str], capsys: Any) -> None:
    assert main(["analyze", *typed]) == 2
    said = capsys.readouterr()
    *listed, error = said.err.splitlines()
    assert said.out == "" and [line.split()[0] for line in listed] == list(ANALYSES)
    assert all(line.endswith(f"  {ANALYSES[line.split()[0]].summary}") for line in listed)
    assert error.startswith("error: action=") and "txl analyze ANALYSIS" in error
