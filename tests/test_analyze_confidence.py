"""`txl analyze confidence`: intervals of several checkpoints on the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import MODEL, RUN, write_corpus
from txl_lightning import cli


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
    first = found["members"][0]["loss"]
    assert not first["cut"] and 20 <= first["units"] <= 70 and (tmp_path / "c.png").stat().st_size > 1000
    for row in found["members"]:
        assert cli.main(["eval", f"ckpt={row['ckpt']}", "out=e.json"]) == 0
        whole = json.loads((tmp_path / "e.json").read_text())
        assert row["loss"]["mean"] == pytest.approx(whole["scores"]["loss"], rel=1e-5)
        assert row["loss"]["low"] < row["loss"]["mean"] < row["loss"]["high"]
    means = [row["loss"]["mean"] for row in found["members"]]
    assert found["members"][1]["difference"]["mean"] == pytest.approx(means[1] - means[0], abs=1e-6)
    capsys.readouterr()
    assert cli.main(["analyze", "confidence", "ckpt=a", "tokens=20"]) == 2
    assert "tokens=20: 21 tokens are needed" in capsys.readouterr().err
