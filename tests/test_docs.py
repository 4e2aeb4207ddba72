"""What README and docs show is run."""

from __future__ import annotations

import importlib.util
import re
import shlex
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from tests.benchmark_files import enwik8
from tests.tiny import MODEL, RUN, StopAt, write_corpus
from txl_lightning import cli, registry
from txl_lightning.config import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
QUICK = [*MODEL, *(item for item in RUN if "max_steps" not in item)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",  # plain Lightning looks at its loaders
    "ignore:The `srun` command",
    "ignore:Checkpoint directory",
    "ignore:.*TensorBoard support",
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("txl_lightning.benchmarks.timing.LEAST_SECONDS", 1e-9)
    write_corpus(tmp_path / "book.txt")
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("txl ")]
    assert [shlex.split(line)[1] for line in commands] == [
        *("fit", "eval", "generate", "fit"),
        *("reproduce", "data", "fit"),
        *("bench", "bench", "bench"),
    ]
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", enwik8(40_000))
    for line in commands:
        _, command, *arguments = shlex.split(line.partition("  #")[0])
        if command == "fit" and "dry_run=true" not in arguments:
            short = [item for item in arguments if "trainer." not in item]
            arguments = [*QUICK, "trainer.max_steps=4", "data=text", "data.path=book.txt", *short]
            if "memory=mix" in arguments:
                arguments.append("model.n_layer=4")
        if command == "bench":
            tiny = [*MODEL, "data.segment_len=8", "data.batch_size=2", "data=text", "data.path=book.txt"]
            arguments = [*tiny, "rounds=1", "backends=[shift]", "eval.schedule=segments", *arguments]
        assert cli.main([command, *arguments]) == 0, line
    assert (tmp_path / "runs" / "book" / "result.json").exists()  # where tensorboard is pointed
    assert "Once upon a time" in capsys.readouterr().out


def section(title: str) -> str:
    """The text of README under a heading."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_nothing_is_left_to_fill_in() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"\b(TODO|TBD|FIXME|XXX)\b", page.read_text()), page


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "book.txt")
    (source,) = blocks("python")
    quick = [*QUICK, "data=text", "data.path=book.txt"]
    shorter = source.replace("load([", f"load([*{quick!r}, ").replace("200", "4").replace("100", "2")
    names: dict[str, Any] = {}
    exec(shorter, names)
    assert names["trainer"].global_step == 4


@pytest.mark.parametrize("name", ["plain_lightning", "lstm_lanes"])
def test_scripts_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "book.txt")
    trainer = script(name).main([*QUICK, "data=text", "data.path=book.txt", "trainer.max_steps=60"])
    assert trainer.global_step == 60
    assert torch.isfinite(trainer.callback_metrics["val/loss"])


def test_the_lstm_has_lanes_resets_and_resume(tmp_path: Path) -> None:
    """LaneState alone: state per stage, reset at epochs, dead lanes kept, 9 steps equal 5 + 4."""
    from txl_lightning import TextDataModule

    config = load([*QUICK, "data=text", f"data.path={write_corpus(tmp_path / 'book.txt')}"])
    build = script("lstm_lanes").LSTM

    def final(*, stop: int, ckpt: Path | None = None) -> Any:
        torch.manual_seed(0)
        module = build(257, width=16)
        trainer = L.Trainer(
            max_steps=100, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
            enable_checkpointing=False, callbacks=[StopAt(stop)], val_check_interval=3, check_val_every_n_epoch=None,
        )  # fmt: skip
        trainer.fit(module, TextDataModule(config), ckpt_path=ckpt, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{stop}.ckpt")
        return module

    whole = final(stop=9)
    final(stop=5)
    again = final(stop=9, ckpt=tmp_path / "5.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    state, other = whole.lanes.current("train"), again.lanes.current("train")
    assert torch.equal(state["h"], other["h"]) and state["h"].abs().sum() > 0


def test_readme_table_lists_every_strategy_with_its_file_and_paper() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", section("Memory strategies"), flags=re.MULTILINE))
    assert sorted(rows) == registry.memories.names()
    for name, row in rows.items():
        (file,) = re.findall(r"\]\((txl_lightning/memory/[^)]+)\)", row)
        assert (ROOT / file).is_file()
        paper = registry.memories.get(name).paper
        assert all(part.strip(",;") in row for part in paper.split() if "arXiv" in part)


def test_readme_table_lists_every_observer() -> None:
    cells = re.findall(r"^\| (`.*?`) \|", section("Watching"), flags=re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == registry.callbacks.names()
    assert set(named) - set(load().callbacks) == {"attention_maps"}


def test_links_of_readme_and_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
