"""`txl demo` end to end; the full two minutes under `slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import MODEL, RUN, write_corpus
from txl_lightning import cli


def test_demo_trains_scores_twice_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "book.txt", n_byte=20_000)
    quick = [item for item in RUN if "max_steps" not in item]
    arguments = [*MODEL, *quick, "trainer.max_steps=300", "data=text", "data.path=book.txt", "run_dir=runs/demo"]
    assert cli.main(["demo", *arguments]) == 0
    said, run = capfd.readouterr().out, tmp_path / "runs" / "demo"
    found = json.loads((run / "demo.json").read_text())
    with_memory, without = (found[name]["scores"]["bits_per_byte"] for name in ("with memory", "without memory"))
    assert with_memory < without < 8
    for score in (with_memory, without):
        assert f"{score:.4f}" in said
    sample = said.split("300 sampled bytes:\n\n")[1].split("\ntrained at ")[0]
    assert 280 <= len(sample.encode()) <= 320 * 3  # a byte that is no text takes three to show
    assert "tensorboard --logdir" in said and str(run) in said and "tokens/s" in said
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 300


def test_demo_needs_a_memory_to_switch_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "memory=none"]) == 2
    assert capsys.readouterr().err == "error: memory=none: the demo compares with memory.mem_len=0; use memory=cache\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_whole_demo_reaches_what_readme_says(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "txl_lightning", "demo", "run_dir=demo"], cwd=tmp_path, timeout=900)
    assert done.returncode == 0
    found = json.loads((tmp_path / "demo" / "demo.json").read_text())
    with_memory, without = (found[name]["scores"]["bits_per_byte"] for name in ("with memory", "without memory"))
    assert with_memory <= 2.0
    assert without - with_memory >= 0.1
