"""`txl analyze recl` against losses with a known answer and a text whose dependency is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_analyze_scores import said
from tests.tiny import tiny_config
from txl_lightning.cli import main
from txl_lightning.commands.fit import fit
from txl_lightning.config import load
from txl_lightning.evaluation.recl import Group, block_starts, effective_lengths, gains, longest_context
from txl_lightning.model.transformer import ModelOutput

STEPS = {"share": 1.0, "start": 100, "step": 100, "longest": 1000}


def by_definition(short: np.ndarray, long: np.ndarray, *, r: float) -> list[float]:
    """g of each model, written as the paper has it, target by target."""
    n_model, n_target = short.shape
    b = [min(short[i][t] for i in range(n_model)) for t in range(n_target)]
    hardest = sorted(range(n_target), key=lambda t: -b[t])[: round(r * n_target)]
    found = []
    for i in range(n_model):
        before = sum(min(b[t], short[i][t]) for t in hardest) / len(hardest)
        after = sum(min(b[t], long[i][t]) for t in hardest) / len(hardest)
        found.append((math.exp(before) - math.exp(after)) / math.exp(before))
    return found


@pytest.mark.parametrize("r", [0.1, 0.5, 1.0])
def test_gains_are_the_papers(r: float) -> None:
    rng = np.random.default_rng(0)
    short, long = rng.gamma(2.0, size=(2, 3, 40))
    assert np.allclose(gains(short, long, share=r), by_definition(short, long, r=r))


def test_losses_with_a_known_answer() -> None:
    """Model i's loss falls by `fall` nats per 100 tokens until its own length, and not at all after it."""

    def losses_at(c: int) -> np.ndarray:
        ends, fall = np.array([300, 700, 100]), 0.05
        return np.tile((9 - fall * np.minimum(c, ends) / 100)[:, None], (1, 50))

    # up to 300 models 0 and 1 are equal; from there on the baseline is ahead of model 0
    found = effective_lengths(losses_at, **STEPS)
    assert [part.length for part in found] == [300, 700, 100]
    assert not any(part.open_end for part in found)
    assert found[1].gains[:6] == pytest.approx([1 - math.exp(-0.05)] * 6) and abs(found[1].gains[6]) < 1e-12
    found = effective_lengths(losses_at, **{**STEPS, "longest": 500})
    assert [(part.length, part.open_end) for part in found] == [(300, False), (500, True), (100, False)]


def test_a_gain_below_the_threshold_ends_it() -> None:
    def losses_at(c: int) -> np.ndarray:
        return np.full((2, 10), {100: 3.0, 200: 3.0 + math.log(1 - 0.011), 300: 3.0 + math.log(0.989 * 0.9905)}[c])

    assert [part.length for part in effective_lengths(losses_at, **STEPS)] == [200, 200]


def test_the_hardest_targets_are_found_anew_at_each_context() -> None:
    """From 100 to 200 only target 0 gains, from 200 to 300 only target 1: each is the hardest just then."""
    table = {100: [9, 5, 1, 1], 200: [2, 5, 1, 1], 300: [2, 1, 1, 1], 400: [2, 1, 1, 1]}

    def losses_at(c: int) -> np.ndarray:
        return np.array([table[c], [20, 20, 20, 20]], dtype=float)

    found = effective_lengths(losses_at, **{**STEPS, "share": 0.25})
    assert [part.length for part in found] == [300, 100]


class Copies:
    """Knows that a token is the one `distance` before it, once it has read that far; else each of V is as likely."""

    def __init__(self, distance: int, *, n_symbol: int, certain: float = 0.9) -> None:
        self.distance, self.n_symbol, self.certain, self.device = distance, n_symbol, certain, torch.device("cpu")

    def init_state(self, lanes: int, **_: Any) -> dict[str, torch.Tensor]:
        return {"past": torch.full((lanes, self.distance), -1)}

    def __call__(self, tokens: Any, state: Any, segment: Any, targets: Any = None, **_: Any) -> ModelOutput:
        past = torch.where(segment.reset[:, None], -1, state["past"])
        read = torch.cat([past, tokens], dim=1)
        losses = None
        if targets is not None:
            guess = read[:, 1 : 1 + tokens.shape[1]]  # `distance` before each target
            rest = (1 - self.certain) / (self.n_symbol - 1)
            known = torch.where(guess == targets, -math.log(self.certain), -math.log(rest))
            losses = torch.where(guess < 0, math.log(self.n_symbol), known)
        return ModelOutput(losses, tokens, {"past": read[:, -self.distance :]}, {}, {})


@pytest.mark.parametrize(("distance", "expected"), [(150, 200), (100, 100), (101, 200), (99, 100)])
def test_a_text_whose_dependency_is_known(distance: int, expected: int) -> None:
    rng = np.random.default_rng(0)
    text = np.tile(rng.integers(0, 16, distance), 3000 // distance + 2)[:3000].astype(np.uint8)
    noisy = rng.random(3000) < 0.05
    text[noisy] = rng.integers(0, 16, int(noisy.sum()))
    config = load(["memory=cache", "memory.mem_len=1", "data.segment_len=64"])
    models = [Copies(distance, n_symbol=16), Copies(700, n_symbol=16)]
    firsts = block_starts(n_token=3000, n_target=200, block=1, longest=600)
    group = Group([config] * 2, models, text, firsts, 1)
    for share in (0.5, 1.0):
        found = effective_lengths(group.losses_at, **{**STEPS, "share": share, "longest": 600})
        assert [part.length for part in found] == [expected, 100]


def test_blocks_have_whole_contexts_and_lie_evenly() -> None:
    firsts = block_starts(n_token=1000, n_target=98, block=4, longest=300)
    assert len(firsts) == 25 and firsts[0] == 300 and firsts[-1] == 996
    assert np.diff(firsts).min() >= 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("group")
    short = ["trainer.max_steps=2", "logger=none"]
    fit(tiny_config(folder, *short, f"run_dir={folder / 'cache'}"))
    fit(tiny_config(folder, *short, "memory=none", f"run_dir={folder / 'none'}"))
    fit(tiny_config(folder, *short, "memory=none", "model.position=absolute", f"run_dir={folder / 'absolute'}"))
    recall = [
        "experiment=recall",
        "data.episodes=8",
        "data.test_episodes=8",
        "data.batch_size=4",
        "trainer.max_steps=1",
    ]
    fit(load([*recall, "callbacks=none", "logger=none", "trainer.accelerator=cpu", f"run_dir={folder / 'other'}"]))
    return folder


def test_a_group_of_checkpoints(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(runs)
    keys = ["split=train", "start=8", "step=8", "longest=40", "block=2", "targets=150", "trainer.accelerator=cpu"]
    command = ["analyze", "recl", "ckpt=[cache,none,absolute]", *keys]
    assert main([*command, "mem_len=64", "out=r.json", "to=r.npz", "plot=r.png"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "c from 8 by 8 to 40, 150 targets" in shown and "r = 0.1" in shown
    found, kept = json.loads((runs / "r.json").read_text()), np.load(runs / "r.npz")
    assert [member["longest"] for member in found["members"]] == [None, None, 16]
    assert [member["memory"].get("mem_len") for member in found["members"]] == [64, None, None]
    assert kept["losses"].shape == (len(found["contexts"]), 3, 150) and len(set(kept["targets"].tolist())) == 150
    assert np.allclose(kept["losses"].mean(axis=2).T, found["losses"])
    again = effective_lengths(
        lambda c: kept["losses"][found["contexts"].index(c)], share=0.5, start=8, step=8, longest=40
    )
    assert [part.length for part in again] == [part["length"] for part in found["effective"][1]]
    assert (kept["losses"][1:, 2] == kept["losses"][1, 2]).all()  # absolute: no more than a segment
    assert (runs / "r.png").read_bytes()[1:4] == b"PNG"


def test_groups_that_cannot_be_compared_are_refused(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(runs)
    assert said(capsys, "recl", "ckpt=cache") == (
        "ckpt=cache: the baseline is the best of a group, and one checkpoint makes none; "
        "give several: ckpt=[runs/a,runs/b]"
    )
    assert said(capsys, "recl", "ckpt=[cache,nowhere]").startswith("ckpt=")
    assert said(capsys, "recl", "ckpt=[]").startswith("ckpt=[]: names no checkpoint")
    assert "other has another vocabulary than cache" in said(capsys, "recl", "ckpt=[cache,other]")
    assert said(capsys, "recl", "ckpt=[none,absolute]", "longest=1000") == (
        "start=100: model.position=absolute of absolute was trained on 16 tokens and knows no more; set block=1"
    )
    assert said(capsys, "recl", "ckpt=[none,absolute]", "block=1").endswith("knows no more; set it to 16 or less")
    assert said(capsys, "recl", "ckpt=[none,cache]", "step=10").startswith("block=25: contexts would differ")
    assert said(capsys, "recl", "ckpt=[none,cache]", "longest=150").endswith("set it to 200")
    assert said(capsys, "recl", "ckpt=[none,cache]", "shares=[0]").startswith("shares=[0]: each is a part")
    assert said(capsys, "recl", "ckpt=[none,cache]", "split=train").startswith("tokens=null: 33776 tokens are needed")
    assert said(capsys, "recl", "ckpt=[cache,none]", "memory.mem_len=9") == (
        "memory.mem_len=9: each checkpoint keeps its own; leave it out; mem_len=N sets the length of every cache"
    )
    assert said(capsys, "scores", "ckpt=[cache,none]", "to=a.jsonl") == (
        "ckpt=[cache,none]: scores takes one checkpoint; give it without brackets"
    )


def test_what_positions_can_tell_apart() -> None:
    for position, expected in (("shaw", None), ("rotary", None), ("none", None), ("absolute_per_layer", 16)):
        config = load(["memory=none", f"model.position={position}", "data.segment_len=16", "eval.segment_len=99"])
        assert longest_context(config) == expected
