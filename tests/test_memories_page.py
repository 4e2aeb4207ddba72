"""docs/memories.md: its table says what is so, and its example works."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from txl_lightning import registry
from txl_lightning.commands.strategies import state_bytes_per_lane
from txl_lightning.config import ModelConfig
from txl_lightning.testing import check_memory

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "memories.md").read_text()
ROWS = {
    cells[0].split()[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
MODEL = ModelConfig(n_layer=3, d_model=20, n_head=2, d_head=6, d_inner=24, vocab_size=11)
T = 8

# keys of each strategy, and the letters of the page that they are
KEYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "none": ({}, {}),
    "cache": ({"mem_len": 12}, {"M": 12}),
    "compressive": ({"mem_len": 12, "compressed_len": 5, "rate": 2}, {"M": 12, "C": 5, "c": 2}),
    "window": ({"window": 9, "sinks": 0}, {"W": 9, "S": 0}),
    "expire": ({"mem_len": 7}, {"M": 7}),
    "tokens": ({"n_tokens": 3}, {"m": 3}),
    "associative": ({}, {}),
    "associative_tokens": ({"nu": 2, "d_mem": 5}, {"F": 20}),
    "block_recurrent": ({"n_states": 4, "window": 9}, {"S": 4, "W": 9}),
    "knn": ({"mem_len": 40, "top_k": 4}, {"M": 40}),
    "titans": ({"conv": 3}, {"conv": 3}),
}


def value(cell: str, letters: dict[str, int]) -> float | None:
    """What a formula of the table comes to; None if the cell is no formula."""
    if not cell.startswith("`"):
        return None
    names = {"L": MODEL.n_layer, "D": MODEL.d_model, "H": MODEL.n_head, "K": MODEL.d_head, "T": T, "ceil": math.ceil}
    return float(eval(cell.strip("`"), {"__builtins__": {}}, {**names, **letters}))


def test_every_strategy_has_a_row_with_its_paper() -> None:
    assert sorted(ROWS) == registry.memories.names()
    for name, (paper, file, *_) in ROWS.items():
        assert file == f"[{name}](../txl_lightning/memory/{name}.py)"
        assert set(re.findall(r"arXiv:[\d.]+\d", registry.memories.get(name).paper)) == set(
            re.findall(r"arXiv:\S+\d", paper)
        )


@pytest.mark.parametrize("name", KEYS)
def test_formulas_of_state_and_reach(name: str) -> None:
    keys, letters = KEYS[name]
    entry = registry.memories.get(name)
    config = entry.config(**keys)
    *_, state, reach = ROWS[name]
    assert value(state, letters) == state_bytes_per_lane(entry, config, MODEL)
    said = config.reach(MODEL, segment_len=T)
    assert (math.inf if reach == "unbounded" else value(reach, letters)) == said


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's example, loaded; afterwards nobody knows it."""
    monkeypatch.setattr(registry.memories, "_entries", {**registry.memories._entries})
    registry.memories.names()
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    module = ModuleType("summary_memory")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(code, "docs/memories.md", "exec"), module.__dict__)
    yield code


def test_the_example_keeps_every_law(example: str) -> None:
    assert len([line for line in example.splitlines() if line.strip()]) <= 40
    verdicts = check_memory("summary", longer={"keep": 0.9})
    assert {law: verdict.outcome for law, verdict in verdicts.items()} == dict.fromkeys(range(1, 13), "ok")
