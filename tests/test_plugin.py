"""A memory of another package, docs/my_memory.py: it keeps every law, is found by its entry point, and trains."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MODEL, RUN, write_corpus

from txl_lightning import registry
from txl_lightning.testing import check_memory
from txl_lightning.types import Segment, Tap

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "my_memory.py"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, loaded; afterwards nobody knows it."""
    monkeypatch.setattr(registry.memories, "_entries", {**registry.memories._entries})
    registry.memories.names()
    spec = importlib.util.spec_from_file_location("my_memory", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_memory", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module


@pytest.mark.parametrize("mixed", [False, True])
def test_it_keeps_every_law(mixed: bool, plugin: Any) -> None:
    verdicts = check_memory("running_mean", half_life=5.0, longer={"half_life": 50.0}, mixed=mixed, compiled=not mixed)
    assert {law: verdict.outcome for law, verdict in verdicts.items()} == dict.fromkeys(range(1, 13), "ok")


def test_it_is_the_mean_it_says(plugin: Any) -> None:
    """However the text is cut: a lane of 5 and 2 tokens, and one of 3 and none, against the plain sum."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 4)
    memory = plugin.RunningMean(half_life=3.0, d_model=4)
    state = memory.init_state(2, form="hidden", device=torch.device("cpu"), dtype=torch.float32)
    for part, length in ((x[:, :5], [5, 3]), (x[:, 5:], [2, 0])):
        segment = Segment(reset=torch.zeros(2, dtype=torch.bool), length=torch.tensor(length))
        tap = Tap(x_BTD=part, h_BTD=part, q_BHTK=part, k_BHTK=part, v_BHTK=part)
        state, _ = memory.write(state, tap, None, segment)
    slot = memory.slots(state, x, segment).hidden
    for lane, n_token in ((0, 7), (1, 3)):
        share = 0.5 ** (torch.arange(n_token - 1, -1, -1) / 3)
        torch.testing.assert_close(slot[lane, 0], (share[:, None] * x[lane, :n_token]).sum(0) / share.sum())


def test_an_installed_package_is_found_and_trains(tmp_path: Path) -> None:
    """Installed as pip would: a module, and beside it the entry point that CONTRIBUTING shows."""
    site = tmp_path / "site"
    about = site / "my_memory-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "my_memory.py").write_text(FILE.read_text())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-memory\nVersion: 1.0\n")
    (lines,) = re.findall(r"```toml\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    toml = re.fullmatch(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(\w+)".*\n', lines)
    assert toml is not None
    (about / "entry_points.txt").write_text("[{}]\n{} = {}\n".format(*toml.groups()))
    corpus = write_corpus(tmp_path / "corpus.txt")
    keys = ["memory=running_mean", "memory.half_life=20", "data=text", f"data.path={corpus}", "run_dir=run", *MODEL]
    keys += [item.replace("max_steps=20", "max_steps=5") for item in RUN]
    code = (
        "import sys; from txl_lightning.cli import main; "
        f"sys.exit(main(['strategies', 'out=table.json']) or main({['fit', *keys]!r}))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"running_mean .*reset=epoch", done.stdout) and "half_life=64.0" in done.stdout
    rows = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())}
    assert rows["running_mean"]["state_bytes_per_lane"] == 4 * (128 + 1) * 4
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 5
