"""Intervals over documents: what is drawn, that they hold what they should, and that pairs are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import MODEL, RUN, write_corpus
from txl_lightning import cli
from txl_lightning.evaluation.bootstrap import draw, interval, units_of


def test_documents_are_drawn_where_there_are_enough() -> None:
    tokens = np.array([1, 2, 0] * 25 + [1])
    units = units_of(tokens, separator=0)
    assert units.name == "document" and units.count == 26
    assert units.unit_N.tolist() == [0, 0, *(i for i in range(1, 25) for _ in range(3)), 25]  # its end counts to each
    few = units_of(np.arange(5001) % 7 + 1, separator=0)
    assert few.name == "piece" and few.count == 5 and np.bincount(few.unit_N).tolist() == [1000] * 5
    assert units_of(tokens, separator=None).name == "piece"


def test_a_draw_is_as_large_as_the_text_and_the_same_for_one_seed() -> None:
    units = units_of(np.array([1, 0] * 30), separator=0)
    one = draw(units, samples=50, seed=3)
    assert (one.sum(axis=1) == units.count).all() and (one == draw(units, samples=50, seed=3)).all()


def test_the_interval_is_that_of_drawing_documents_one_by_one() -> None:
    """Against a loop that draws documents and joins their losses, for documents of very different length."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 60, size=40)
    document = np.repeat(np.arange(40), sizes)
    nats = rng.gamma(2.0, size=len(document)) + rng.normal(size=40)[document]
    tokens = np.ones(len(document) + 1, dtype=np.int64)
    tokens[np.cumsum(sizes)] = 0
    units = units_of(tokens, separator=0)
    found = interval(nats, units, draw(units, samples=20_000, seed=1))
    scores = []
    for _ in range(20_000):
        chosen = rng.integers(40, size=40)
        scores.append(np.concatenate([nats[document == i] for i in chosen]).mean())
    spread = float(np.std(scores))
    assert found.mean == pytest.approx(nats.mean())
    assert found.low == pytest.approx(np.quantile(scores, 0.025), abs=0.15 * spread)
    assert found.high == pytest.approx(np.quantile(scores, 0.975), abs=0.15 * spread)


def test_intervals_of_differences_are_smaller_than_those_of_losses() -> None:
    rng = np.random.default_rng(0)
    units = units_of(np.array([1, 1, 1, 0] * 200), separator=0)
    hard = rng.normal(size=units.count)[units.unit_N]
    one, two = 3 + hard, 2.9 + hard + 0.05 * rng.normal(size=len(hard))
    draws = draw(units, samples=2000, seed=0)
    loss, gain = interval(one, units, draws), interval(two - one, units, draws)
    assert gain.high < 0 and gain.high - gain.low < 0.2 * (loss.high - loss.low)
    assert interval(two, units, draws).low < loss.high  # by itself it could be the same


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(70):
        write_corpus(folder / f"{number:02}.txt", n_byte=200 + 3 * number, seed=number)
    data = ["data=text", f"data.path={folder}", "data.ratios=[0.3,0.1,0.6]"]
    for name, keys in (("a", []), ("b", ["memory=none"])):
        assert cli.main(["fit", *MODEL, *RUN, *data, *keys, f"run_dir={name}"]) == 0
    assert cli.main(["analyze", "confidence", "ckpt=[a,b]", "out=c.json", "plot=c.png", "samples=500"]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["drawn"] == "document" and 20 <= found["count"] <= 70 and (tmp_path / "c.png").stat().st_size > 1000
    for row in found["members"]:
        assert cli.main(["eval", f"ckpt={row['ckpt']}", "out=e.json"]) == 0
        whole = json.loads((tmp_path / "e.json").read_text())
        assert row["loss"]["mean"] == pytest.approx(whole["scores"]["loss"], rel=1e-5)
        assert row["loss"]["low"] < row["loss"]["mean"] < row["loss"]["high"]
    means = [row["loss"]["mean"] for row in found["members"]]
    assert found["members"][1]["difference"]["mean"] == pytest.approx(means[1] - means[0], abs=1e-6)
    capsys.readouterr()
    assert cli.main(["analyze", "confidence", "ckpt=a", "split=valid"]) == 2
    assert "20001 tokens are needed" in capsys.readouterr().err
