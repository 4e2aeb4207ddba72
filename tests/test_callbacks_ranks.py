"""Observers on several ranks tell what they tell on one, and none of them changes a training loss by one bit."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranked import launch
from tests.tiny import tiny_config, train, write_corpus
from txl_lightning.choices import option_files

NAMES = [name for name in option_files("callbacks") if name != "none"]
ALL = [
    f"callbacks=[{','.join(NAMES)}]",
    "callbacks.memory_monitor.attention_every_n_steps=4",
    "callbacks.memory_monitor.lanes=4",
    "callbacks.attention_maps.every_n_steps=4",
    "callbacks.gradient_norms.every_n_steps=4",
    "callbacks.text_samples.tokens=8",
]
RUN = [
    "memory=compressive",
    "memory.mem_len=16",
    "trainer.max_steps=12",
    "trainer.val_check_interval=6",
    "trainer.log_every_n_steps=2",
    "data.ratios=[0.5,0.4,0.1]",
]
STILL = ["model.dropout=0", "model.dropatt=0"]
OF_A_RANK = ("memory/benefit/content", "memory/probe/swapped")
"""Which lane is the next one depends on the ranks."""


def job(place: Path, name: str, *overrides: str) -> dict[str, Any]:
    keys = [*RUN, *STILL, *ALL, "logger=csv", f"run_dir={place / name}", *overrides]
    return {"name": name, "do": "fit", "overrides": keys}


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    with (run / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in ("step", "epoch")]
    return {name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in names}


def assert_same(whole: Path, parts: Path) -> None:
    one, several = curves(whole), curves(parts)
    assert set(one) == set(several)
    for name in one:
        assert [step for step, _ in several[name]] == [step for step, _ in one[name]], name
        if not name.startswith(("perf/", *OF_A_RANK)):
            values = [[value for _, value in curve] for curve in (several[name], one[name])]
            assert values[0] == pytest.approx(values[1], rel=2e-3, abs=2e-4), name
    kinds = ("memory/attention/L1", "memory/attention_by_age/2-3", "memory/terms/u_content", "memory/resets",
             "memory/compressive/update/L0", "memory/benefit/nats", "memory/benefit/content", "cost/saving_percent",
             "val/loss_by_position/8-15", "val/loss_by_age/16-31", "optim/grad_norm/L0", "optim/grad_norm/memory",
             "warn/loss_rise", "perf/peak_memory_gb", "perf/data_wait")  # fmt: skip
    assert set(kinds) <= set(one)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("one")
    write_corpus(place / "corpus.txt", n_byte=1601)
    launch(place, [job(place, "one")], world=1)
    return place


@pytest.mark.distributed
def test_two_ranks_under_ddp_tell_the_same(one: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt", n_byte=1601)
    two = ["trainer.devices=2", "trainer.accelerator=cpu", "strategy=ddp"]
    launch(tmp_path, [job(tmp_path, "ddp", *two)], world=2)
    assert_same(one / "one", tmp_path / "ddp")


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_under_every_stage_of_zero_tell_the_same(one: Path, tmp_path: Path) -> None:
    """And the squares of the norms by group add up to the square of the norm that the engine finds."""
    write_corpus(tmp_path / "corpus.txt", n_byte=1601)
    two = ["trainer.devices=2", "trainer.accelerator=cpu"]
    jobs = [job(tmp_path, f"zero{stage}", *two, f"strategy=deepspeed_zero{stage}") for stage in range(4)]
    jobs.append(job(tmp_path, "window", *two, "strategy=deepspeed_zero2", "trainer.accumulate_grad_batches=2"))
    launch(tmp_path, jobs, world=2)
    for stage in range(3):
        assert_same(one / "one", tmp_path / f"zero{stage}")
    looks = re.compile("memory/(attention|terms|benefit|probe)")  # extra passes, which stage 3 does not make
    whole, divided = curves(one / "one"), curves(tmp_path / "zero3")
    assert set(whole) - set(divided) == {name for name in whole if looks.match(name)}
    for name in divided:
        if not name.startswith("perf/"):
            values = [[value for _, value in found[name]] for found in (divided, whole)]
            assert values[0] == pytest.approx(values[1], rel=2e-3, abs=2e-4), name
    for name in ("zero1", "zero2", "zero3", "window"):
        found = curves(tmp_path / name)
        groups = [dict(curve) for group, curve in found.items() if group.startswith("optim/grad_norm/")]
        for step, norm in found["optim/grad_norm"]:
            if step in groups[0]:
                assert sum(curve[step] ** 2 for curve in groups) ** 0.5 == pytest.approx(norm, rel=1e-4)
        assert list(groups[0]) == [4, 8, 12]


CASES = {
    "cache": ["memory=cache"],
    "tokens": ["memory=tokens"],
    "knn in windows": ["memory=knn", "trainer.accumulate_grad_batches=2"],
    "compressive in chunks": ["memory=compressive", "trainer.lane_chunks=2"],
}
SLOW = {
    **{name: [f"memory={name}"] for name in option_files("memory") if name not in ("mix", *CASES)},
    "mix": ["memory=mix", "memory.parts=[{name: cache, layers: [0], mem_len: 8}, {name: knn, layers: [1]}]"],
    "documents in bf16": ["memory=cache", "data.document=line", "memory.reset=document",
                          "trainer.precision=bf16-mixed"],
    "checkpointing": ["memory=expire", "model.checkpointing=true"],
    "memory on the cpu": ["memory=cache", "memory.offload=cpu"],
    "several segments of gradient": ["memory=block_recurrent", "memory.gradient=carry", "trainer.bptt_segments=2",
                                     "trainer.accumulate_grad_batches=2"],
    "steps left out": ["memory=cache", "trainer.on_divergence=skip"],
    "shaw": ["memory=cache", "model.position=shaw"],
}  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_no_observer_changes_a_loss(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, and every one of them at work."""
    found = []
    for name, callbacks in (("on", ALL), ("off", ["callbacks=none"])):
        keys = [
            *RUN[2:],
            *{**CASES, **SLOW}[case],
            "model.dropout=0.2",
            "model.dropatt=0.1",
            "logger=[csv,tensorboard]",
        ]
        config = tiny_config(tmp_path, *keys, *callbacks, "logger=[csv,tensorboard]", f"run_dir={tmp_path / name}")
        losses, fitted = train(config, monkeypatch)
        found.append((losses, fitted.module.state_dict()))
    (on, weights), (off, plain) = found
    assert on == off and len(on) >= 12
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert {"memory/benefit/nats", "cost/scores", "warn/loss_rise"} <= set(curves(tmp_path / "on"))
