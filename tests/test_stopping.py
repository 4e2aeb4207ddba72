"""Ctrl-C, SIGTERM and SIGUSR1 end training after the step under way, with a checkpoint and their exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.tiny import MODEL, RUN, write_corpus


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)])
def test_a_signal_saves_and_ends_with_its_code(name: str, code: int, tmp_path: Path) -> None:
    write_corpus(tmp_path / "book.txt")
    quick = [item for item in RUN if "max_steps" not in item and "val_check" not in item]
    arguments = ["fit", *MODEL, *quick, "trainer.max_steps=100000", "data=text", "data.path=book.txt", "run_dir=run"]
    arguments += ["trainer.val_check_interval=10", "logger=csv"]
    process = subprocess.Popen(
        [sys.executable, "-m", "txl_lightning", *arguments],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.time() + 120
    while not (tmp_path / "run" / "checkpoints" / "best.ckpt").exists() and time.time() < deadline:
        assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
        time.sleep(0.2)
    os.kill(process.pid, getattr(signal, name))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors.decode()
    assert b"Traceback" not in errors
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert saved["global_step"] == result["steps"] > 0
