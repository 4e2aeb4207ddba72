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
from tests.test_resume_matrix import unequal
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


def go_on(folder: Path, chains: dict[str, list[Part]], *, more: list[str], fresh: bool = True) -> None:
    """Run chains of parts, the parts of one number of ranks in one launch; the runs' folders are beside `folder`."""
    for number in range(max(map(len, chains.values()))):
        here = {name: parts[number] for name, parts in chains.items() if number < len(parts)}
        for world in sorted({ranks for _, ranks, _ in here.values()}):
            jobs = [
                job_of(folder, name, part, more=more, fresh=fresh and not number)
                for name, part in here.items()
                if part[1] == world
            ]
            for job in jobs:
                Path(job["record"]).mkdir(exist_ok=True)
            if world == 1 and all(part[0] == "auto" for part in here.values() if part[1] == 1):
                for job in jobs:
                    fitted(folder.parent, job)
            else:
                launch(folder / f"launch_{number}_{world}", jobs, world=world)


def job_of(folder: Path, name: str, part: Part, *, more: list[str], fresh: bool) -> dict[str, Any]:
    strategy, ranks, stop = part
    place = folder.parent
    keys = [*STEADY, f"data.path={place / 'corpus.txt'}", f"strategy={strategy}", f"trainer.devices={ranks}"]
    keys = [key for key in keys if key.partition("=")[0] not in {typed.partition("=")[0] for typed in more}]
    keys += [f"run_dir={place / name}", f"trainer.stop_at_step={stop}", *more]
    return {"name": name, "do": "fit" if fresh else "resume", "overrides": keys, "record": str(place / f"{name}_read")}


def check_chains(
    folder: Path, chains: dict[str, list[Part]], *, more: list[str] | None = None, rtol: float = 1e-5
) -> None:
    """Each chain has the curve and the state of one process never disturbed, and reads every segment once."""
    write_corpus(folder / "corpus.txt", n_byte=N_BYTE)
    go_on(folder / "parts", {"one": [("auto", 1, 20)], **chains}, more=more or [])
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
    groups = [
        [{name: group[name] for name in group if name != "fused"} for group in one["param_groups"]]
        for one in (here, there)
    ]
    assert groups[0] == groups[1]
    assert here["state"].keys() == there["state"].keys() and len(here["state"]) > 20
    for number, state in there["state"].items():
        torch.testing.assert_close(here["state"][number], state, rtol=0.01, atol=tolerance)


@pytest.mark.distributed
def test_two_ranks_then_one_then_two_under_another_stage(tmp_path: Path) -> None:
    chain: list[Part] = [("deepspeed_zero2", 2, 5), ("auto", 1, 11), ("deepspeed_zero3", 2, 20)]
    check_chains(tmp_path, {"chain": chain})


CHAINS: dict[str, list[Part]] = {
    "third_first": [("deepspeed_zero3", 2, 5), ("auto", 1, 11), ("deepspeed_zero1", 2, 20)],
    "none_divided": [("deepspeed_zero0", 2, 5), ("deepspeed_zero2", 4, 11), ("ddp", 2, 20)],
    "ddp_first": [("ddp", 2, 5), ("deepspeed_zero1", 4, 11), ("deepspeed_zero0", 2, 20)],
    "same_stage": [("deepspeed_zero3", 2, 5), ("deepspeed_zero3", 4, 11), ("deepspeed_zero3", 2, 20)],
    "same_ranks": [("deepspeed_zero1", 2, 5), ("deepspeed_zero2", 2, 11), ("deepspeed_zero3", 2, 20)],
    "offloaded": [("deepspeed_zero2_offload", 2, 5), ("deepspeed_zero3_offload", 4, 11), ("auto", 1, 20)],
    "alone": [("deepspeed_zero3", 1, 5), ("deepspeed_zero2", 2, 11), ("deepspeed_zero1", 1, 20)],
    "one_first": [("auto", 1, 5), ("deepspeed_zero2", 4, 11), ("deepspeed_zero1", 2, 20)],
}


@pytest.mark.slow
@pytest.mark.distributed
def test_any_engine_goes_on_from_any_other(tmp_path: Path) -> None:
    check_chains(tmp_path, CHAINS)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", ["nadam", "radam", "rmsprop", "sgd", "lion", "adabelief"])
def test_what_other_optimizers_keep_goes_along(optimizer: str, tmp_path: Path) -> None:
    momentum = ["optim.momentum=0.9"] if optimizer in ("sgd", "rmsprop") else []
    last = 1 if optimizer in ("lion", "adabelief") else 3  # where ZeRO 3 counts more steps than are made
    chain: list[Part] = [("deepspeed_zero2", 2, 5), ("auto", 1, 11), (f"deepspeed_zero{last}", 2, 20)]
    check_chains(tmp_path, {"chain": chain}, more=[f"optim={optimizer}", "optim.lr=1e-3", *momentum])


@pytest.mark.slow
@pytest.mark.distributed
def test_float32_copies_go_along_in_bf16(tmp_path: Path) -> None:
    """Put together and cut again without a step: weights and averages are the same, bit for bit."""
    write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    more = ["trainer.precision=bf16-mixed", "optim.schedule=constant", "trainer.max_steps=5"]
    stages = range(4)
    go_on(tmp_path / "a", {f"zero{stage}": [(f"deepspeed_zero{stage}", 2, 5)] for stage in stages}, more=more)
    before = {stage: read_checkpoint(str(tmp_path / f"zero{stage}"), optimizer=True) for stage in stages}
    rest = {f"zero{s}": [(f"deepspeed_zero{(s + 2) % 4}", 4, 5), (f"deepspeed_zero{s}", 2, 5)] for s in stages}
    go_on(tmp_path / "b", rest, more=more, fresh=False)
    for stage in stages:
        was, after = before[stage], read_checkpoint(str(tmp_path / f"zero{stage}"), optimizer=True)
        assert after["global_step"] == 5 and len(after["txl_lightning"]["ranks"]) == 2
        assert not all(torch.equal(weight, weight.bfloat16().float()) for weight in was["state_dict"].values())
        for part in ("state_dict", "optimizer_states"):
            assert unequal(was[part], after[part]) == []


SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (1,), "c": (4, 1, 2), "d": (7,), "e": (2,)}


def layout_of(kind: str, ranks: int) -> Layout:
    if kind == "each":
        return side_by_side(SHAPES, ranks=ranks)
    paddings = (1, 3, 0, 2, 0) if kind == "aligned" else ()
    size = -(-(sum(torch.Size(shape).numel() for shape in SHAPES.values()) + sum(paddings)) // ranks)
    return one_after_the_other(SHAPES, ranks=ranks, share=size + 1, paddings=paddings)


def expected_share(kind: str, values: dict[str, torch.Tensor], *, rank: int, layout: Layout) -> list[float]:
    """A rank's share, number by number, with 0 wherever something is filled up."""
    if kind == "each":
        found: list[float] = []
        for value in values.values():
            size = -(-value.numel() // layout.ranks)
            filled = value.flatten().tolist() + [0.0] * (size * layout.ranks - value.numel())
            found += filled[rank * size : (rank + 1) * size]
        return found
    line: list[float] = []
    for value, free in zip(values.values(), (1, 3, 0, 2, 0) if kind == "aligned" else (0,) * 5, strict=True):
        line += value.flatten().tolist() + [0.0] * free
    line += [0.0] * (layout.share * layout.ranks - len(line))
    return line[rank * layout.share : (rank + 1) * layout.share]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("kind", ["each", "whole", "aligned"])
def test_what_is_cut_into_shares_is_joined_again(kind: str, ranks: int) -> None:
    layout = layout_of(kind, ranks)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    cut = [layout.cut(values, rank=rank) for rank in range(ranks)]
    for rank, share in enumerate(cut):
        assert share.tolist() == expected_share(kind, values, rank=rank, layout=layout)
    joined = dict(layout.join(cut))
    assert joined.keys() == values.keys() and all(torch.equal(joined[name], values[name]) for name in values)


def test_the_state_of_an_optimizer_is_cut_and_joined() -> None:
    """What every parameter has for each of its elements, what it has once, and what it does not have yet."""
    layout = layout_of("each", 3)
    states = {
        name: {"step": torch.tensor(4.0), "average": torch.randn(shape), "kind": None} for name, shape in SHAPES.items()
    }
    shares = [cut_state(layout, states, rank=rank) for rank in range(3)]
    assert all(share["step"] == 4.0 and share["kind"] is None and share["average"].dim() == 1 for share in shares)
    joined = joined_state(layout, shares)
    for name, state in states.items():
        assert torch.equal(joined[name]["average"], state["average"]) and joined[name]["step"] == 4.0
    early = {name: state for name, state in states.items() if name != "d"}
    later = joined_state(layout, [cut_state(layout, early, rank=rank) for rank in range(3)])
    assert torch.equal(later["d"]["average"], torch.zeros(7)) and torch.equal(
        later["a"]["average"], joined["a"]["average"]
    )
    assert cut_state(layout, {}, rank=0) == {}


def test_a_parameter_without_dimensions_is_cut_like_others() -> None:
    layout = side_by_side({"gate": (), "matrix": (2, 3)}, ranks=2)
    states = {
        "gate": {"step": torch.tensor(4.0), "average": torch.tensor(7.0)},
        "matrix": {"step": torch.tensor(4.0), "average": torch.arange(6.0).view(2, 3)},
    }
    joined = joined_state(layout, [cut_state(layout, states, rank=rank) for rank in range(2)])
    assert joined["gate"] == states["gate"] and torch.equal(joined["matrix"]["average"], states["matrix"]["average"])
