"""`txl generate`: prompts of any bytes, from wherever they come, on whatever takes the output."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import MODEL
from txl_lightning.cli import main
from txl_lightning.config import load
from txl_lightning.model.transformer import TransformerXL

BYTES = b"caf\xe9 = '\xc3\xa9' \xff"
SHOWN = "caf\ufffd = 'é' \ufffd"


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained model of a run that used more devices than there are, and another kind."""
    torch.manual_seed(0)
    config = load([*MODEL, "trainer.devices=8", "strategy=ddp", "trainer.precision=16-mixed"])
    weights = {f"model.{name}": tensor for name, tensor in TransformerXL(config).state_dict().items()}
    path = tmp_path_factory.mktemp("run") / "last.ckpt"
    torch.save({"txl_lightning": {"config": config.to_dict(), "data_fingerprint": None}, "state_dict": weights}, path)
    return str(path)


def sample(ckpt: str, *arguments: str) -> int:
    return main(["generate", f"ckpt={ckpt}", "tokens=40", "trainer.accelerator=cpu", *arguments])


def test_bytes_that_are_no_text_are_continued_alike_from_everywhere(
    ckpt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_bytes(BYTES)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BYTES)))
    said = []
    for prompt in (f"prompt={os.fsdecode(BYTES)}", f"prompt_file={tmp_path / 'prompt'}", "prompt=-"):
        assert sample(ckpt, prompt) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith(SHOWN) and len(said[0]) > len(SHOWN) + 20
    assert said[0] == said[1] == said[2]


def test_output_that_is_not_unicode_gets_what_it_can_take(ckpt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert sample(ckpt, f"prompt={os.fsdecode(BYTES)}", "-m", "seed=1,2") == 0
    out = raw.getvalue()
    assert b"\ncaf? = '?' ?" in out and out.isascii()
    assert out.startswith(b"[0] ckpt=")


def test_a_prompt_called_null_is_a_prompt(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sample(ckpt, "prompt=null") == 0
    assert capsys.readouterr().out.startswith("null")


def test_a_file_that_cannot_be_read_is_refused(
    ckpt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt"
    path.touch()
    assert sample(ckpt, f"prompt_file={path}") == 2
    rule = "the file is empty; give at least one character to continue"
    assert capsys.readouterr().err == f"error: prompt_file={path}: {rule}\n"

    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert sample(ckpt, f"prompt_file={path}") == 2
    rule = "cannot be read: Permission denied; give a text file"
    assert capsys.readouterr().err == f"error: prompt_file={path}: {rule}\n"


def test_nothing_on_standard_input_is_refused(
    ckpt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert sample(ckpt, "prompt=-") == 2
    rule = "standard input is empty; give at least one character to continue"
    assert capsys.readouterr().err == f"error: prompt=-: {rule}\n"
