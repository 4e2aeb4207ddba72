"""A run goes on under another engine: other ZeRO stages, other numbers of ranks, DDP and one process, in any order.

Averages of the optimizer, memory, place and schedule go along, so the curve is that of one process never disturbed.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranked import fitted, launch
from tests.ranks import trained_on
from tests.tiny import write_corpus
from txl_lightning.checkpoints import read_checkpoint
from txl_lightning.checkpoints.shares import Layout, cut_state, joined_state, one_after_the_other, side_by_side

N_BYTE = 906  # an epoch of 13 segments
STEADY = ["memory=cache", "memory.mem_len=24", "model.dropout=0", "model.dropatt=0", "logger.csv=true"]
STEADY += ["trainer.log_every_n_steps=1", "trainer.max_steps=20", "optim.weight_decay=0.1", "optim.clip=0.5"]
Part = tuple[str, int, int]  # strategy, ranks, optimizer step at which it stops


def curve(run: Path, name: str) -> torch.Tensor:
    with (run / "csv" / "metrics.csv").open() as file:
        return torch.tensor([float(row[name]) for row in csv.DictReader(file) if row.get(name)], dtype=torch.float64)


def go_on(folder: Path, chains: dict[str, list[Part]], *, more: list[str]) -> None:
    """Run chains of parts, the parts of one number of ranks in one launch."""
    for number in range(max(map(len, chains.values()))):
        here = {name: parts[number] for name, parts in chains.items() if number < len(parts)}
        for world in sorted({ranks for _, ranks, _ in here.values()}):
            jobs = [
                job_of(folder, name, part, more=more, fresh=not number)
                for name, part in here.items()
                if part[1] == world
            ]
            for job in jobs:
                Path(job["record"]).mkdir(exist_ok=True)
            if world == 1 and all(part[0] == "auto" for part in here.values() if part[1] == 1):
                for job in jobs:
                    fitted(folder, job)
            else:
                launch(folder / f"launch_{number}_{world}", jobs, world=world)


def job_of(folder: Path, name: str, part: Part, *, more: list[str], fresh: bool) -> dict[str, Any]:
    strategy, ranks, stop = part
    keys = [*STEADY, f"data.path={folder / 'corpus.txt'}", f"strategy={strategy}", f"trainer.devices={ranks}"]
    keys += [f"run_dir={folder / name}", f"trainer.stop_at_step={stop}", *more]
    return {"name": name, "do": "fit" if fresh else "resume", "overrides": keys, "record": str(folder / f"{name}_read")}


def check_chains(
    folder: Path, chains: dict[str, list[Part]], *, more: list[str] | None = None, rtol: float = 1e-5
) -> None:
    """Each chain has the curve and the state of one process never disturbed, and reads every segment once."""
    write_corpus(folder / "corpus.txt", n_byte=N_BYTE)
    go_on(folder, {"one": [("auto", 1, 20)], **chains}, more=more or [])
    one, segments = read_checkpoint(str(folder / "one"), optimizer=True), trained_on(folder / "one_read")
    assert set(segments.values()) == {1} and len(segments) == 4 * 20
    for name in chains:
        for figure in ("train/loss", "optim/lr"):
            whole = curve(folder / "one", figure)
            assert len(whole) == 20
            torch.testing.assert_close(curve(folder / name, figure), whole, rtol=rtol, atol=0)
        assert trained_on(folder / f"{name}_read") == Counter(segments), name
        last = read_checkpoint(str(folder / name), optimizer=True)
        lanes, theirs = last["txl_lightning"]["lanes"], one["txl_lightning"]["lanes"]
        assert lanes["position"] == theirs["position"]
        torch.testing.assert_close(lanes["lanes"], theirs["lanes"], rtol=1e-2, atol=100 * rtol)
        same_optimizer(last["optimizer_states"][0], one["optimizer_states"][0], tolerance=100 * rtol)


def same_optimizer(here: dict[str, Any], there: dict[str, Any], *, tolerance: float) -> None:
    assert here["param_groups"] == there["param_groups"]
    assert here["state"].keys() == there["state"].keys() and len(here["state"]) > 20
    for number, state in there["state"].items():
        torch.testing.assert_close(here["state"][number], state, rtol=0.01, atol=tolerance)


@pytest.mark.distributed
def test_two_ranks_then_one_then_two_under_other_stages(tmp_path: Path) -> None:
    check_chains(
        tmp_path,
        {
            "down": [("deepspeed_zero2", 2, 5), ("auto", 1, 11), ("deepspeed_zero3", 2, 20)],
            "up": [("deepspeed_zero3", 2, 5), ("auto", 1, 11), ("deepspeed_zero1", 2, 20)],
        },
    )
