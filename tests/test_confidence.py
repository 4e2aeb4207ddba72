"""Confidence intervals over documents, and several memory lengths in one `txl eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import tiny_config
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.cli import main
from txl_lightning.commands.fit import fit
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.evaluation.confidence import intervals, units_of


def test_targets_belong_to_documents_or_to_pieces() -> None:
    text = np.array([5, 0, 5, 5, 0] * 20)
    units, cut = units_of(text, separator=0)
    assert not cut and len(units) == 99 and units[:6].tolist() == [0, 1, 1, 1, 2, 2]  # targets 0 5 5 0 | 5 0
    units, cut = units_of(np.ones(25_501), separator=0)
    assert cut and np.bincount(units).tolist() == [1000] * 25 + [500]
    assert len(set(units_of(np.ones(201), separator=0)[0])) == 20
    assert units_of(text[:45], separator=0)[1] and units_of(text, separator=None)[1]


def test_the_interval_is_that_of_a_mean_of_independent_documents() -> None:
    """1.96 standard errors over documents, not over targets, which are alike within a document."""
    rng = np.random.default_rng(0)
    of_document = rng.normal(3.0, 0.5, 400)
    nats = np.repeat(of_document, 25) + rng.normal(0, 0.01, 10_000)
    harder = nats + 0.1 + np.repeat(rng.normal(0, 0.02, 400), 25)
    units = np.repeat(np.arange(400), 25)
    (own, other), (none, apart) = intervals([nats, harder], units, cut=False, resamples=4000, seed=0)
    error = of_document.std(ddof=1) / 20
    assert own.low == pytest.approx(nats.mean() - 1.96 * error, abs=0.1 * error)
    assert own.high == pytest.approx(nats.mean() + 1.96 * error, abs=0.1 * error)
    assert (none.low, none.high) == (0, 0) and own.units == 400
    assert 0.095 < apart.low < 0.1 < apart.high < 0.105  # paired: narrower by far than either
    assert other.high - other.low > 5 * (apart.high - apart.low)


def test_long_documents_weigh_more() -> None:
    units = np.repeat([0, 1], [90, 10])
    nats = np.repeat([1.0, 2.0], [90, 10])
    (own,), _ = intervals([nats], units, cut=False, resamples=200, seed=0)
    assert (own.low, own.high) == (1.0, 2.0)
    (both,), _ = intervals([np.ones(100)], units, cut=False, resamples=20, seed=0)
    assert both.low == both.high == 1


def test_several_memory_lengths_in_one_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path, "trainer.max_steps=1", "logger=none", "memory.mem_len=8")
    fit(config)
    assert main(["eval", "ckpt=run", "mem_lens=[0,8,32]", "bootstrap=50", "out=e.json"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "e.json").read_text())["by_mem_len"]
    assert [one["memory"]["mem_len"] for one in found] == [0, 8, 32]
    expected = evaluate(config, load_checkpoint("run"), split="test").scores["loss"]
    assert found[1]["scores"]["loss"] == pytest.approx(expected, abs=1e-6)
    assert all(one["interval"]["low"] <= one["scores"]["loss"] <= one["interval"]["high"] for one in found)
    assert found[0]["difference"]["low"] == found[0]["difference"]["high"] == 0
    assert shown.count("test split") == 1
    table = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "│" in line]
    rows = [cells for cells in table if cells[0]]  # narrow terminals break cells
    assert [cells[0] for cells in rows] == ["0", "8", "32"]
    for cells, one in zip(rows, found, strict=True):
        assert cells[1:4] == [f"{value:.4f}" for value in one["scores"].values()]
    fingerprint = found[0]["data_fingerprint"][:16]
    assert f"fingerprint of the text: {fingerprint}" in shown and "segment_len: 16" in shown
    assert main(["eval", "ckpt=run", "memory=none", "mem_lens=[8]"]) == 2
    assert capsys.readouterr().err == "error: mem_lens=[8]: memory=none has no mem_len; leave it out\n"
    assert main(["eval", "ckpt=run", "bootstrap=9", "strategy=ddp", "trainer.devices=2"]) == 2
    assert "bootstrap=9: needs the losses of all lanes in one rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "command", "said"),
    [
        (
            "memory=cache",
            "eval ckpt=run mem_lens=[0,8] eval.warm=16",
            "mem_lens=[0,8]: with eval.warm=16: memory.mem_len=0 keeps nothing from the text before; "
            "leave that value out, or change eval.warm (set it to 0)",
        ),
        ("memory=cache", "eval ckpt=run memory.mem_len=0 eval.warm=16", "eval.warm=16: memory.mem_len=0 keeps nothing"),
        ("memory=expire", "eval ckpt=run mem_lens=[8,0]", "mem_lens=[8,0]: memory.mem_len=0 must be >= 1; choose a "),
        ("memory=expire", "analyze sweep ckpt=run mem_lens=[8,0]", "mem_lens=[8,0]: memory.mem_len=0 must be >= 1; "),
        (
            "memory=cache",
            "analyze sweep ckpt=run segment_lens=[8] mem_lens=[0] model.same_length=true memory.mem_len=4",
            "mem_lens=[0]: with model.same_length=true: needs memory.mem_len >= 1, the length it is named after, and "
            "it is 0; leave that value out, or change model.same_length (",
        ),
    ],
)
def test_a_length_that_cannot_be_is_refused_by_the_key_that_was_typed(
    memory: str, command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(tiny_config(tmp_path, "trainer.max_steps=1", "logger=none", memory))
    capsys.readouterr()
    assert main(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
