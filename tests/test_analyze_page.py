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
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
LSTM = [item for item in MODEL if item.startswith(("model.n_layer", "model.d_model"))]


def test_the_page_has_every_analysis() -> None:
    assert re.findall(r"^## (\w+):", PAGE, flags=re.MULTILINE) == list(ANALYSES)
    assert {shlex.split(line)[2] for line in LINES if line.startswith("txl analyze")} == set(ANALYSES)


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", n_byte=12_000)
    fit(tiny_config(tmp_path, "trainer.max_steps=2", "run_dir=runs/book", "logger=none"))
    for line in LINES:
        _, command, *arguments = shlex.split(line)
        if command == "fit":
            typed = {item.partition("=")[0] for item in arguments}
            model, text = LSTM if "model=lstm" in arguments else MODEL, ["data=text", "data.path=corpus.txt"]
            small = [*model, *RUN, "trainer.max_steps=2", *([] if "experiment" in typed else text)]
            left = {*typed, "data.segment_len"} - {"model"}
            arguments += [item for item in dict.fromkeys(small) if item.partition("=")[0] not in left]
            arguments = [item for item in arguments if item != "trainer.max_steps=20"]
        assert main([command, *arguments]) == 0, line
        assert capsys.readouterr().out
