"""The guard against divergence: what it takes for ruinous, and what a skipped step leaves behind: nothing."""

from __future__ import annotations

import copy
import os
import socket
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from tests.test_resume import N_BYTE, config_of, one_thread, saved, start, train, typed, unequal  # noqa: F401
from tests.tiny import write_corpus
from txl_lightning import cli
from txl_lightning.config import TrainerConfig
from txl_lightning.training.divergence import DECAY, Diverged, Guard
from txl_lightning.training.lane_state import LaneState
from txl_lightning.training.module import TransformerXLModule
from txl_lightning.types import Batch, Position, Segment

SKIP = ["trainer.on_divergence=skip", "trainer.max_loss_rise=1.0"]
FINE = torch.tensor(1.0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    return tmp_path


def guard(**keys: Any) -> Guard:
    return Guard(TrainerConfig(**keys))


def test_a_rise_is_measured_from_the_running_mean() -> None:
    judge, losses = guard(max_loss_rise=0.5), [3.0 - 0.05 * n for n in range(12)]
    for loss in losses:
        assert judge.judge(loss=loss, grad_norm=FINE) is None
        judge.accept(loss)
    weights = [DECAY**n for n in reversed(range(12))]
    mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    assert judge.mean == pytest.approx(mean, rel=1e-12)
    assert judge.judge(loss=mean + 0.499, grad_norm=FINE) is None
    said = judge.judge(loss=mean + 0.501, grad_norm=FINE)
    assert said is not None and f"trainer.max_loss_rise=0.5 above the running mean {mean:.3f}" in said
    early = guard(max_loss_rise=0.5)
    early.accept(1.0)
    assert early.judge(loss=9.0, grad_norm=FINE) is None  # a mean of one step says little


def test_what_is_not_finite_is_ruinous_from_the_first_step() -> None:
    judge = guard(on_divergence="skip")
    for loss in (float("nan"), float("inf")):
        assert judge.judge(loss=loss, grad_norm=FINE) == "the loss is not finite"
    assert judge.judge(loss=None, grad_norm=torch.tensor(float("inf"))) == "the gradient is not finite"
    assert not guard().needs_loss and judge.needs_loss and guard(max_loss_rise=1.0).needs_loss


def test_too_many_in_a_row_stop_and_a_good_step_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    judge = guard(on_divergence="skip", max_skipped_steps=2)
    for step in (0, 1):
        judge.leave_out("so", step=step)
    again = guard(on_divergence="skip", max_skipped_steps=2)
    again.load_state_dict(judge.state_dict())
    with pytest.raises(Diverged, match=r"trainer\.max_skipped_steps=2 steps in a row were skipped before step 2"):
        again.leave_out("so", step=2)
    judge.accept(2.0)
    judge.leave_out("so", step=3)
    assert (judge.skipped, judge.in_a_row) == (3, 1)
    assert "step 0 is skipped: so; weights, optimizer state and memory stay as they were" in capsys.readouterr().err


def batch_of(segment: int, *, reset: list[bool], length: list[int], document: Any = None) -> Batch:
    tokens = torch.zeros(len(reset), 3, dtype=torch.int64)
    numbers = None if document is None else torch.tensor(document)
    facts = Segment(torch.tensor(reset), torch.tensor(length), numbers)
    return Batch(tokens, tokens, facts, sum(length), Position(0, segment))


def test_lanes_that_began_in_a_skipped_segment_begin_in_the_next() -> None:
    lanes = LaneState(model_resets=True)
    init = lambda count: {"age": torch.zeros(count, 1)}  # noqa: E731

    def step(batch: Batch, value: float) -> Batch:
        lanes.mark()
        batch = lanes.due(batch)
        state = lanes.read("train", batch, init)
        lanes.propose("train", {"age": torch.full_like(state["age"], value)}, batch)
        lanes.commit("train")
        return batch

    plain = {"reset": [False] * 4, "length": [3, 3, 3, 3]}
    step(batch_of(0, **plain), 1.0)
    # lane 1 starts a stream, lane 2 another document inside, lane 3 has ended
    documents = [[0] * 3, [0] * 3, [0, 0, 1], [0] * 3]
    step(batch_of(1, reset=[False, True, False, True], length=[3, 3, 3, 0], document=documents), 2.0)
    lanes.roll_back()
    assert lanes.current("train") is not None and lanes.position == Position(0, 2)
    assert unequal(lanes.current("train"), {"age": torch.ones(4, 1)}) == []
    other = LaneState(model_resets=True)
    other.load_state_dict(copy.deepcopy(lanes.state_dict()))
    shorter = batch_of(2, reset=[False] * 4, length=[3, 0, 3, 3])
    assert other.due(shorter).segment.reset.tolist() == [False, True, True, False]
    assert step(shorter, 3.0).segment.reset.tolist() == [False, True, True, False]  # lane 1 has no tokens: still owed
    assert step(batch_of(3, **plain), 4.0).segment.reset.tolist() == [False, True, False, False]
    assert step(batch_of(4, **plain), 5.0).segment.reset.tolist() == [False] * 4


def poisoned(monkeypatch: pytest.MonkeyPatch, where: dict[int, float], *, rank: int | None = None) -> None:
    """Losses of some segments of the first epoch multiplied, on one rank or on all, as a broken kernel would."""
    original = TransformerXLModule._read

    def read(self: Any, batch: Batch, *rest: Any, **more: Any) -> Any:
        out, (epoch, segment) = original(self, batch, *rest, **more), batch.position
        meant = self.training and epoch == 0 and segment in where and rank in (None, self.global_rank)
        return out._replace(losses_BT=out.losses_BT * where[segment]) if meant else out

    monkeypatch.setattr(TransformerXLModule, "_read", read)


class Watch(L.Callback):
    """What there is of weights, optimizer and memory after each step."""

    def __init__(self) -> None:
        self.after: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.at_border:
            optimizer = trainer.optimizers[0].state_dict()
            for group in optimizer["param_groups"]:
                group.pop("lr")
            parts = {
                "weights": pl_module.state_dict(),
                "optimizer": optimizer,
                "lanes": pl_module.lanes.current("train"),
            }
            self.after.append(copy.deepcopy(parts))


CASES = {
    "not finite": (["memory=cache"], {5: float("nan")}, 5),
    "a spike": (["memory=cache", "trainer.max_steps=14"], {12: 3.0}, 12),
    "in a step's second segment": (["memory=compressive", "trainer.accumulate_grad_batches=2"], {5: float("inf")}, 2),
    "an optimizer that counts in its groups": (["memory=none", "optim=lamb"], {0: float("nan")}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_skipped_step_leaves_nothing_behind(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, where, step = CASES[case]
    poisoned(monkeypatch, where)
    watch = Watch()
    _, fitted = train(config_of(tmp_path, "run", *SKIP, "trainer.max_steps=8", *keys), monkeypatch, watch)
    if step:
        assert unequal(watch.after[step - 1], watch.after[step]) == []
    else:
        assert not watch.after[0]["optimizer"]["state"] and "step" not in watch.after[0]["optimizer"]["param_groups"][0]
    assert unequal(watch.after[step], watch.after[step + 1]) != []
    assert fitted.result["skipped_steps"] == 1
    assert all(weight.isfinite().all() for weight in fitted.module.parameters())


class Averages(L.Callback):
    """The moving average in front of each batch."""

    def __init__(self) -> None:
        self.before: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.before.append(copy.deepcopy(dict(pl_module._average[0]._average_model.state_dict())))


def test_a_skipped_step_is_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at its end nor at the next segment, also where the run was stopped right behind it."""
    poisoned(monkeypatch, {5: float("nan")})
    keys = [*SKIP, "optim.ema=0.5", "trainer.accumulate_grad_batches=2", "trainer.max_steps=5"]
    seen = Averages()
    train(config_of(tmp_path, "run", *keys, "trainer.stop_at_step=3"), monkeypatch, seen)
    train(config_of(tmp_path, "run", *keys), monkeypatch, seen, resume=True)
    before = seen.before  # 2 segments a step; the third step is skipped
    assert unequal(before[2], before[4]) != [] and unequal(before[6], before[8]) != []
    assert unequal(before[4], before[6]) == [] and unequal(before[6], before[7]) == []


def test_a_run_with_skipped_steps_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped right behind a skipped step, and before a spike that only the running mean of all steps calls one."""
    poisoned(monkeypatch, {4: float("nan"), 11: 3.0})
    train(config_of(tmp_path, "whole", *SKIP), monkeypatch)
    for stop in ("5", "null"):
        train(config_of(tmp_path, "parts", *SKIP, f"trainer.stop_at_step={stop}"), monkeypatch, resume=stop == "null")
    assert saved(tmp_path / "whole")["txl_lightning"]["divergence"]["skipped"] == 2
    assert unequal(saved(tmp_path / "whole"), saved(tmp_path / "parts")) == []


def test_a_run_that_diverged_goes_on_when_told_to_skip(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    poisoned(monkeypatch, {11: 4.0})
    assert cli.main(typed("run_dir=run", "trainer.max_loss_rise=1.0")) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("data: ")]
    assert len(said) == 1 and said[0].startswith("error: loss of ") and "trainer.max_loss_rise=1.0" in said[0]
    assert saved(here / "run")["global_step"] == 11
    assert cli.main(["fit", "resume=run", "trainer.on_divergence=skip"]) == 0
    assert saved(here / "run")["txl_lightning"]["divergence"]["skipped"] == 1
    assert "1 of the steps, whose tokens are counted" in capsys.readouterr().out


@pytest.mark.distributed
def test_ranks_skip_together(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's loss is not finite, later one rank's is a spike; stopped and gone on with in between."""
    poisoned(monkeypatch, {2: float("nan"), 11: 6.0}, rank=1)
    keys = ["trainer.devices=2", "strategy=ddp", "trainer.max_steps=13", *SKIP, "trainer.val_check_interval=20"]
    commands = [
        typed("run_dir=whole", *keys),
        typed("run_dir=run", *keys, "trainer.stop_at_step=3"),
        ["fit", "resume=run"],
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def rank(number: int) -> int:
        os.environ["LOCAL_RANK"] = str(number)
        return max(map(cli.main, commands))

    children = [start(lambda number=number: rank(number)) for number in (0, 1)]  # type: ignore[misc]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert saved(here / "whole")["txl_lightning"]["divergence"]["skipped"] == 2
    assert unequal(saved(here / "whole"), saved(here / "run")) == []
