"""Tiny runs reproduce their recorded losses: a refactoring that changes one digit shows.

Record anew, and say why in the commit:  TXL_RECORD=1 python -m pytest tests/test_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_config, train

GOLDEN = Path(__file__).parent / "golden"
RUNS = {
    "none": ["memory=none"],
    "cache": ["memory=cache", "memory.mem_len=24"],
    "mix": [
        "memory=mix",
        "memory.parts=[{name: cache, layers: [0], mem_len: 8}, {name: cache, layers: [1], mem_len: 32}]",
    ],
    "cache_dropout_untied_postnorm": [
        "memory=cache",
        "memory.mem_len=16",
        "model.dropout=0.1",
        "model.dropatt=0.1",
        "model.untie_r=true",
        "model.pre_norm=false",
        "trainer.accumulate_grad_batches=2",
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_the_recorded_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, *RUNS[name])
    losses, _ = train(config, monkeypatch)
    segments = config.trainer.accumulate_grad_batches
    per_step = [sum(losses[i : i + segments]) for i in range(0, len(losses), segments)]
    lines = [f"{step} {loss:.4f}" for step, loss in enumerate(per_step)]
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("TXL_RECORD"):
        file.write_text("\n".join([f"# torch {torch.__version__.split('+')[0]}", *lines]) + "\n")
    recorded = file.read_text().splitlines()
    if recorded[0] != f"# torch {torch.__version__.split('+')[0]}":
        pytest.skip(f"recorded with {recorded[0][2:]}, here is torch {torch.__version__}")
    assert len(lines) == 20
    assert lines == recorded[1:]
