"""Ranks come and go: lanes, memory and losses stay those of one process, whoever starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks as forks
from tests.ranks import on_ranks, recording, trained_on
from tests.test_resume import curve, forked, rows, saved, typed, unequal
from tests.tiny import write_corpus
from txl_lightning import TextDataModule, cli
from txl_lightning.config import Config, load
from txl_lightning.resume import what_changes

N_BYTE = 906  # an epoch of 13 segments: four lanes of about 204 targets
STILL = ["model.dropout=0.0", "model.dropatt=0.0", "logger=[csv,tensorboard]", "trainer.log_every_n_steps=1"]
VALIDATED = ["trainer.val_check_interval=4", "memory=compressive", "memory.mem_len=16"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    return tmp_path


def fit(*arguments: str, ranks: int = 1, notes: Path | None = None, environment: Any = None) -> None:
    """`txl fit` in processes of its own, which note what they train on."""

    def work() -> int:
        torch.set_num_threads(1)
        stop = recording(notes) if notes is not None else None
        code = cli.main([*arguments])
        if stop is not None:
            stop()
        return code

    on_ranks(ranks, work, environment=environment)


def of(ranks: int) -> list[str]:
    return [f"trainer.devices={ranks}", "strategy=ddp", "strategy.timeout_s=100"]


def column(run: Path, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in rows(run) if name in row]


def assert_close(whole: Path, parts: Path, *, rtol: float = 1e-5) -> None:
    """The same steps, curves up to rounding, the same cursor, memory of every lane up to rounding."""
    for name in ("train/loss", "val/loss", "optim/lr", "memory/compressive/compression/L1"):
        one, other = column(whole, name), column(parts, name)
        assert [step for step, _ in one] == [step for step, _ in other] and len(one) > 1
        values = [torch.tensor([value for _, value in found], dtype=torch.float64) for found in (other, one)]
        torch.testing.assert_close(*values, rtol=rtol, atol=1e-9)
    there, here = (saved(run)["txl_lightning"]["lanes"] for run in (whole, parts))
    assert there["position"] == here["position"] and there["lanes"].keys() == here["lanes"].keys()
    for key, tensor in there["lanes"].items():
        torch.testing.assert_close(here["lanes"][key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.distributed
def test_ranks_come_and_go(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """2 ranks, 1 in two chunks, then 4, over an epoch's unequal end; stopped where a validation is due, and between."""
    run = typed("run_dir=run", *STILL, *VALIDATED, "trainer.max_steps=17")
    fit(*typed("run_dir=whole", *STILL, *VALIDATED, "trainer.max_steps=17"), notes=here / "once")
    fit(*run, *of(2), "trainer.stop_at_step=8", ranks=2, notes=here / "seen")
    capfd.readouterr()
    one = ["fit", "resume=run", "trainer.devices=1", "trainer.lane_chunks=2", "trainer.stop_at_step=11"]
    fit(*one, notes=here / "seen")
    said = capfd.readouterr().err
    assert "the lanes of 2 ranks are shared out among 1" in said and "in 2 chunks instead of 1" in said
    assert "lanes at a time instead of" not in said  # two, as before
    fit("fit", "resume=run", "trainer.devices=4", "trainer.lane_chunks=1", ranks=4, notes=here / "seen")
    assert "the lanes of 1 ranks are shared out among 4" in capfd.readouterr().err
    seen = trained_on(here / "seen")
    assert set(seen.values()) == {1} and seen == trained_on(here / "once")
    config = Config.from_dict(torch.load(here / "run" / "checkpoints" / "last.ckpt")["txl_lightning"]["config"])
    targets = sum(len(tokens) for epoch, *_, tokens in map(json.loads, seen) if epoch == 0)
    assert targets == len(TextDataModule(config).data.require("train")) - 1
    assert_close(here / "whole", here / "run")
    assert [step for step, _ in curve(here / "run")] == list(range(1, 18))


def said_of(config: Config, *, ranks: int, strategy: str = "ddp") -> list[str]:
    there = load([f"strategy={strategy}", "data.batch_size=8", f"trainer.devices={ranks if strategy != 'auto' else 1}"])
    return what_changes(config, ranks=ranks, lane_chunks=1, strategy=there.strategy)


def test_what_a_resume_on_other_ranks_says() -> None:
    def config(devices: int, chunks: int = 1, strategy: str = "ddp", precision: str = "32-true") -> Config:
        keys = [f"trainer.devices={devices}", f"strategy={strategy}", f"trainer.lane_chunks={chunks}"]
        return load(["data.batch_size=8", f"trainer.precision={precision}", *keys])

    assert said_of(config(2), ranks=2) == []
    shared, fewer = said_of(config(1), ranks=4)
    assert "random numbers are seeded anew from seed, step and rank" in shared
    assert "a rank reads 8 lanes at a time instead of 2" in fewer and "trainer.lane_chunks=4 reads 2" in fewer
    assert len(said_of(config(1, 4), ranks=4)) == 2  # ranks and chunks, nothing to propose
    assert len(said_of(config(8), ranks=4)) == 1
    engine = config(2, strategy="deepspeed_zero3")
    assert said_of(engine, ranks=2) == [] == said_of(engine, ranks=2, strategy="deepspeed_zero1")
    assert "strategy=ddp trainer.lane_chunks=2 reads 2" in said_of(engine, ranks=4, strategy="deepspeed_zero3")[1]


@pytest.mark.parametrize(
    ("precision", "there", "said"),
    [
        ("16-mixed", "ddp", "the loss scale of half precision is not kept"),
        ("16-mixed", "deepspeed_zero2", "the loss scale of half precision is not kept"),
        ("16-mixed", "deepspeed_zero3", None),
        ("bf16-mixed", "ddp", "in bf16-mixed deepspeed_zero3 rounds elsewhere than ddp"),
        ("bf16-mixed", "deepspeed_zero1", None),
    ],
)
def test_what_another_engine_does_not_keep_is_said(precision: str, there: str, said: str | None) -> None:
    keys = ["data.batch_size=8", "trainer.devices=2", "strategy=deepspeed_zero3", f"trainer.precision={precision}"]
    found = said_of(load(keys), ranks=2, strategy=there)
    assert found == [] if said is None else len(found) == 1 and found[0].startswith(said)


def test_ranks_that_do_not_divide_the_lanes_are_refused_at_a_resume(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed("run_dir=run", "trainer.stop_at_step=1")) == 0
    capsys.readouterr()
    assert cli.main(["fit", "resume=run", "trainer.devices=3", "strategy=ddp"]) == 2
    said = "trainer.devices=3: the 4 lanes of the run do not divide into 3 ranks; set it to 2 or 4"
    assert said in capsys.readouterr().err


@pytest.mark.distributed
def test_random_streams_are_seeded_anew_and_the_same_each_time(here: Path) -> None:
    """On other ranks; and a second resume on these goes on bit for bit."""
    keys = ["trainer.max_steps=6", "memory=cache", "model.dropout=0.2"]
    fit(*typed("run_dir=run", *keys, "trainer.stop_at_step=2"))
    for name in ("a", "b"):
        subprocess.run(["cp", "-r", "run", name], check=True)
    fit("fit", "resume=a", *of(2), ranks=2)
    fit("fit", "resume=b", *of(2), "trainer.stop_at_step=4", ranks=2)
    fit("fit", "resume=b", ranks=2)
    assert unequal(saved(here / "a"), saved(here / "b")) == []
    first, second = saved(here / "a")["txl_lightning"]["ranks"]
    assert not torch.equal(first["rng"]["torch"], second["rng"]["torch"])
    # all four lanes of one process, read anew in two ranks: other masks, the same start
    fit("fit", "resume=run", notes=here / "notes")
    assert saved(here / "run")["txl_lightning"]["scores"] != saved(here / "a")["txl_lightning"]["scores"]


def torchrun(number: int) -> dict[str, Any]:
    """Rank `number` of two nodes with one process each, as torchrun sets it."""
    return {
        "RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": number,
        "GROUP_WORLD_SIZE": 2, "ROLE_RANK": number, "ROLE_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip


def slurm(number: int) -> dict[str, Any]:
    """The same as srun sets it."""
    return {
        "SLURM_NTASKS": 2, "SLURM_PROCID": number, "SLURM_LOCALID": 0, "SLURM_NODEID": number, "SLURM_NNODES": 2,
        "SLURM_JOB_ID": 1234, "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1", "SLURM_NTASKS_PER_NODE": 1,
    }  # fmt: skip


def by_hand(number: int) -> dict[str, Any]:
    """Started once on each node, as lightning documents it; LOCAL_RANK as lightning sets it for its own children."""
    return {"NODE_RANK": number, "LOCAL_RANK": 0}


@pytest.mark.distributed
def test_two_nodes_by_any_launcher(here: Path) -> None:
    """Steps over two segments; one run reads its lanes in chunks, whose gradients must not cross ranks early."""
    keys = [*STILL, *VALIDATED, "trainer.max_steps=4", "trainer.accumulate_grad_batches=2"]
    fit(*typed("run_dir=whole", *keys), notes=here / "once")
    for launcher, chunks in ((torchrun, 2), (slurm, 1), (by_hand, 1)):
        run, notes = launcher.__name__, here / f"seen_{launcher.__name__}"
        nodes = ["trainer.num_nodes=2", "strategy=ddp", "strategy.timeout_s=100", f"trainer.lane_chunks={chunks}"]
        fit(*typed(f"run_dir={run}", *keys, *nodes), ranks=2, environment=launcher, notes=notes)
        assert trained_on(notes) == trained_on(here / "once")
        for name in ("train/loss", "val/loss", "optim/grad_norm"):
            values = [torch.tensor(column(here / found, name)) for found in (run, "whole")]
            torch.testing.assert_close(*values, rtol=1e-5, atol=0)
        one, two = (json.loads((here / found / "result.json").read_text()) for found in ("whole", run))
        assert two["tokens"] == one["tokens"]


def test_a_rank_that_hangs_says_where_and_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forks, "PATIENCE_S", 0.2)

    def hangs() -> int:
        time.sleep(30)
        return 0

    assert os.waitstatus_to_exitcode(forked(hangs)) == -signal.SIGALRM
    assert "in hangs" in capfd.readouterr().err
