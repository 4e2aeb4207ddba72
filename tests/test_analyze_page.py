"""The commands of docs/protocols.md are run, and the page has all analyses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import MODEL, RUN, tiny_config, write_corpus
from txl_lightning.analyses import ANALYSES
from txl_lightning.cli import main
from txl_lightning.commands.fit import fit

PAGE = (Path(__file__).parents[1] / "docs" / "protocols.md").read_text()
MANY = "model=lstm"  # of the block that trains a group of five
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
LSTM = [item for item in MODEL if item.startswith(("model.n_layer", "model.d_model"))]


def lines_of(blocks: list[str]) -> list[str]:
    """The commands, each on one line."""
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_page_has_every_analysis() -> None:
    assert re.findall(r"^## (\w+):", PAGE, flags=re.MULTILINE) == list(ANALYSES)
    assert {shlex.split(line)[2] for line in lines_of(BLOCKS) if line.startswith("txl analyze")} == set(ANALYSES)


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run_all([block for block in BLOCKS if MANY not in block], tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_its_group_is_trained_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (block,) = [block for block in BLOCKS if MANY in block]
    run_all([block], tmp_path, monkeypatch, capsys)


def run_all(blocks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Run the commands in their order, with models and texts that take no time."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", n_byte=12_000)
    fit(tiny_config(tmp_path, "trainer.max_steps=2", "run_dir=runs/book", "logger=none"))
    for line in lines_of(blocks):
        _, command, *arguments = shlex.split(line)
        if command == "fit":
            typed = {item.partition("=")[0] for item in arguments}
            model, text = LSTM if MANY in arguments else MODEL, ["data=text", "data.path=corpus.txt"]
            small = [*model, *RUN, *([] if "experiment" in typed else text), "trainer.max_steps=2"]
            own = [item for item in small if item.partition("=")[0] not in {*typed, "data.segment_len"}]
            arguments += [item for item in own if item != "trainer.max_steps=20"]
        assert main([command, *arguments]) == 0, line
        assert capsys.readouterr().out
