"""20 steps equal 7 + 6 + 7 bit for bit on every backend with every memory; DeepSpeed equals one process.

All runs of one test share a launch of their ranks (`tests.ranked`).
"""

from __future__ import annotations

import csv
import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranked import fitted, launch
from tests.tiny import write_corpus
from txl_lightning.checkpoints import read_checkpoint, zero

N_BYTE = 906  # an epoch of 13 segments: step 13 ends it, with accumulation step 7
MEMORIES = {
    "cache": ["memory=cache", "memory.mem_len=24"],
    "compressive": ["memory=compressive"],
    "tokens": ["memory=tokens"],
    "knn": ["memory=knn"],
}
BACKENDS = {
    "one": [],
    "ddp": ["strategy=ddp"],
    "zero1": ["strategy=deepspeed_zero1"],
    "zero2": ["strategy=deepspeed_zero2"],
    "zero3": ["strategy=deepspeed_zero3"],
}
Case = tuple[str, str, int, int]  # backend, memory, segments of a step, workers


def matrix() -> list[Case]:
    """Each backend with each memory; accumulation and workers spread so that any two values meet."""
    return [
        (backend, memory, 1 + (b + m) % 2, 2 * ((b + m // 2) % 2))
        for (b, backend), (m, memory) in product(enumerate(BACKENDS), enumerate(MEMORIES))
    ]


def test_any_two_values_meet() -> None:
    values = (list(BACKENDS), list(MEMORIES), [1, 2], [0, 2])
    for i, j in combinations(range(4), 2):
        assert {(case[i], case[j]) for case in matrix()} == set(product(values[i], values[j]))


def jobs_of(case: Case, folder: Path) -> list[dict[str, Any]]:
    backend, memory, segments, workers = case
    keys = [
        *BACKENDS[backend], *MEMORIES[memory], f"trainer.devices={1 if backend == 'one' else 2}",
        f"trainer.accumulate_grad_batches={segments}", f"data.num_workers={workers}",
        "model.dropout=0.2", "model.dropatt=0.2", "logger.csv=true", "trainer.log_every_n_steps=3",
    ]  # fmt: skip
    name, jobs = f"{backend}_{memory}", []
    for run, stop in (("whole", None), ("parts", 7), ("parts", 13), ("parts", None)):
        limit = [] if stop is None else [f"trainer.stop_at_step={stop}"]
        do = "resume" if run == "parts" and stop != 7 else "fit"
        place = f"run_dir={folder / name / run}"
        jobs.append({"name": f"{name}_{run}_{stop or 20}", "do": do, "overrides": [*keys, *limit, place]})
    return jobs


def check_exact(cases: list[Case], folder: Path, *, world: int) -> None:
    folder.mkdir(exist_ok=True)
    write_corpus(folder / "corpus.txt", n_byte=N_BYTE)
    found = launch(folder, [job for case in cases for job in jobs_of(case, folder)], world=world)
    for backend, memory, segments, _ in cases:
        name = f"{backend}_{memory}"
        whole, parts = found[f"{name}_whole_20"], [found[f"{name}_parts_{stop}"] for stop in (7, 13, 20)]
        for rank in range(world):
            assert [loss for part in parts for loss in part[rank]] == whole[rank]
            assert len(set(whole[rank])) > 15
        assert len(parts[0][0]) == (7 if segments == 1 else 13)
        one, two = (everything(folder / name / run) for run in ("whole", "parts"))
        assert unequal(one, two) == []
        assert rows(folder / name / "whole") == rows(folder / name / "parts")


def everything(run: Path) -> dict[str, Any]:
    """All that the files of a run's `last` hold, but what time it took and what was typed."""
    last = run / "checkpoints" / "last.ckpt"
    files = [last] if last.is_file() else sorted(last.rglob("*.pt"))
    with zero.restricted_loading():
        held = {file.name: torch.load(file, weights_only=True) for file in files}
    for file in held.values():
        file.get("txl_lightning", {}).pop("config", None)
        file.get("txl_lightning", {}).get("clock", {}).pop("seconds", None)
        file.get("loops", {}).pop("validate_loop", None)  # validations after training, which nothing goes by
    assert sum("txl_lightning" in file for file in held.values()) > 0
    clear_padding(held)
    return held


def clear_padding(held: dict[str, Any]) -> None:
    """ZeRO 3 fills shares of uneven parameters up with whatever was in memory; it belongs to no weight."""
    shares = {name: file["optimizer_state_dict"] for name, file in held.items() if name.endswith("_optim_states.pt")}
    world = len(shares)
    for rank, share in enumerate(share for _, share in sorted(shares.items())):
        if "fp32_flat_groups" not in share:
            continue
        shapes = next(file["param_shapes"] for file in held.values() if "param_shapes" in file)
        for flat, group in zip(share["fp32_flat_groups"], shapes, strict=True):
            start = 0
            for shape in group.values():
                size = -(-shape.numel() // world)
                real = max(0, min(size, shape.numel() - rank * size))
                flat.detach().view(-1)[start + real : start + size] = 0
                start += size
            assert start == flat.numel()


def unequal(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two checkpoints differ in any bit."""
    if type(one) is not type(other):
        return [f"{path}: {type(one)} and {type(other)}"]
    if isinstance(one, dict):
        keys = [] if one.keys() == other.keys() else [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return keys + [place for key in one if key in other for place in unequal(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        return [place for i, pair in enumerate(zip(one, other, strict=True)) for place in unequal(*pair, f"{path}/{i}")]
    if isinstance(one, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if hasattr(one, "__dict__") and not isinstance(one, type):
        return unequal(vars(one), vars(other), path)
    return [] if one == other else [f"{path}: {one} and {other}"]


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "csv" / "metrics.csv").open() as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


def curve(run: Path) -> torch.Tensor:
    return torch.tensor([float(row["train/loss"]) for row in rows(run) if "train/loss" in row], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_stopped_twice_equals_never_stopped(backend: str, tmp_path: Path) -> None:
    cases = [case for case in matrix() if case[0] == backend]
    check_exact(cases, tmp_path, world=1 if backend == "one" else 2)


@pytest.mark.distributed
def test_ranks_resume_exactly(tmp_path: Path) -> None:
    """One case of DDP, of ZeRO 2 and of ZeRO 3; the whole matrix is slow."""
    cases = [case for case in matrix() if case[:2] in (("ddp", "compressive"), ("zero2", "cache"), ("zero3", "tokens"))]
    check_exact(cases, tmp_path, world=2)


def test_ruin_comes_in_the_second_segment_of_its_step(tmp_path: Path) -> None:
    """What the slow test below goes by."""
    write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    keys = ["trainer.accumulate_grad_batches=2", f"run_dir={tmp_path / 'run'}"]
    assert len(fitted(tmp_path, {"name": "run", "do": "fit", "overrides": keys, "ruin": 2})) == 2 * 2 + 1


@pytest.mark.slow
@pytest.mark.distributed
def test_a_loss_that_is_not_finite_leaves_the_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    """In the second of a step's two segments: what was added up so far is forgotten, and the run can go on."""
    write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    jobs = []
    for backend in ("zero1", "zero2", "zero3"):
        keys = [*BACKENDS[backend], "trainer.devices=2", "trainer.accumulate_grad_batches=2", "model.dropout=0.2"]
        keys += ["logger.csv=true", "trainer.log_every_n_steps=3"]
        for run, do, ruin in (("whole", "fit", -1), ("parts", "fit", 9), ("parts", "resume", -1)):
            place = [f"run_dir={tmp_path / backend / run}"]
            jobs.append({"name": f"{backend}_{run}_{do}", "do": do, "overrides": [*keys, *place], "ruin": ruin})
    found = launch(tmp_path, jobs, world=2)
    for backend in ("zero1", "zero2", "zero3"):
        whole, first, rest = (found[f"{backend}_{run}"] for run in ("whole_fit", "parts_fit", "parts_resume"))
        for rank in range(2):
            before = len(whole[rank]) - len(rest[rank])  # the segment that was read twice is read once more
            assert len(first[rank]) == before + 1
            assert first[rank][:before] + rest[rank] == whole[rank]
        assert unequal(*(everything(tmp_path / backend / run) for run in ("whole", "parts"))) == []


STAGES = [f"strategy=deepspeed_zero{stage}" for stage in range(4)]
STEADY = ["trainer.max_steps=50", "model.dropout=0", "model.dropatt=0", "optim.lr=1e-3", "logger.csv=true"]
STEADY += ["trainer.log_every_n_steps=1"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("accumulation", [1, 3])
def test_deepspeed_follows_one_process_and_its_files_hold_the_live_model(accumulation: int, tmp_path: Path) -> None:
    """50 steps, losses to 1e-5, the memory of every lane; and what is scored from folder and file, bit for bit."""
    write_corpus(tmp_path / "corpus.txt", n_byte=3001)
    keys = [*STEADY, f"trainer.accumulate_grad_batches={accumulation}", "eval.schedule=segments"]  # as in training
    launch(tmp_path, [{"name": "one", "do": "fit", "overrides": [*keys, f"run_dir={tmp_path / 'one'}"]}], world=1)
    jobs: list[dict[str, Any]] = []
    for stage, strategy in enumerate(STAGES):
        run, file = tmp_path / f"zero{stage}", tmp_path / f"zero{stage}.ckpt"
        mine = [*keys, strategy, "trainer.devices=2", f"run_dir={run}"]
        jobs.append({"name": run.name, "do": "fit", "overrides": mine})
        jobs.append({"name": f"{run.name}_folder", "do": "eval", "overrides": mine, "ckpt": str(run)})
        convert = {"convert": str(run), "ckpt": str(file)}
        jobs.append({"name": f"{run.name}_file", "do": "eval", "overrides": mine, **convert})
    found = launch(tmp_path, jobs, world=2)
    one = read_checkpoint(str(tmp_path / "one"))
    for stage in range(4):
        run = tmp_path / f"zero{stage}"
        assert len(curve(run)) == 50
        torch.testing.assert_close(curve(run), curve(tmp_path / "one"), rtol=1e-5, atol=0)
        here = read_checkpoint(str(run))
        lanes, theirs = here["txl_lightning"]["lanes"], one["txl_lightning"]["lanes"]
        assert lanes["position"] == theirs["position"]
        torch.testing.assert_close(lanes["lanes"], theirs["lanes"], rtol=1e-3, atol=1e-4)
        live = json.loads((run / "result.json").read_text())["val"]
        for rank in range(2):
            assert found[f"{run.name}_folder"][rank] == found[f"{run.name}_file"][rank] == live
        file = torch.load(tmp_path / f"zero{stage}.ckpt", weights_only=True)
        weights = file["state_dict"]
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        tied = weights["model.embedding.tables.0.weight"], weights["model.softmax.weights.0"]
        assert tied[0].data_ptr() == tied[1].data_ptr() and weights.keys() == one["state_dict"].keys()
