"""Steps judged late, as on a GPU: a ruinous one leaves behind what it would have if the host had looked at once."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import on_ranks
from tests.test_resume import assert_same, config_of, one_thread, saved, train, unequal  # noqa: F401
from txl_lightning.commands import fit as fit_command
from txl_lightning.memory import base
from txl_lightning.training.divergence import NonFiniteLoss
from txl_lightning.training.judging import Judging
from txl_lightning.training.module import EndOfBatch, TransformerXLModule

begin = Judging.begin_judging


def begin_late(self: Judging) -> None:
    begin(self)
    self.late = self._may_be_late()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judging, "begin_judging", begin_late)


def poisoned(monkeypatch: pytest.MonkeyPatch, step: int, *, what: str) -> None:
    """A loss or a gradient that is not a number, in one step."""
    read, after = TransformerXLModule._read, TransformerXLModule.on_after_backward

    def reads(self: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        out = read(self, batch, *rest, **more)
        if what == "loss" and self.training and self._unstepped == step:
            out = out._replace(losses_BT=out.losses_BT.index_fill(0, torch.tensor([2]), float("nan")))
        return out

    def comes_back(self: Any) -> None:
        after(self)
        if what == "gradient" and self._unstepped == step:
            self.model.softmax.biases[0].grad[0] = float("inf")

    monkeypatch.setattr(TransformerXLModule, "_read", reads)
    monkeypatch.setattr(TransformerXLModule, "on_after_backward", comes_back)


def stopped(config: Any, monkeypatch: pytest.MonkeyPatch, step: int, *, what: str, late: bool) -> str:
    """What a run says that meets such a step."""
    with monkeypatch.context() as patch:
        poisoned(patch, step, what=what)
        if late:
            patch.setattr(Judging, "begin_judging", begin_late)
        with pytest.raises(NonFiniteLoss) as error:
            fit_command.fit(config)
    return str(error.value)


@pytest.mark.parametrize(
    ("step", "what", "keys"),
    [
        (7, "loss", ["trainer.val_check_interval=1000"]),
        (7, "gradient", ["trainer.val_check_interval=1000"]),
        (8, "loss", ["trainer.val_check_interval=9"]),  # a point of the curves, then a validation
        (12, "gradient", ["trainer.val_check_interval=1.0"]),  # the last of an epoch
        (9, "loss", ["trainer.save_every_steps=5"]),  # of which a checkpoint is due
        (19, "gradient", []),  # the last of all
        (4, "loss", ["trainer.accumulate_grad_batches=2"]),
        (3, "loss", ["memory.gradient=carry", "trainer.bptt_segments=2", "trainer.accumulate_grad_batches=2"]),
    ],
)
def test_what_is_saved_does_not_depend_on_when_the_host_looks(
    step: int, what: str, keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [
        stopped(config_of(tmp_path, str(late), *keys), monkeypatch, step, what=what, late=late)
        for late in (False, True)
    ]
    lanes = ", lanes [2]" if what == "loss" else ""
    assert said[0] == said[1] and said[0].startswith(f"{what} is not finite at step {step}{lanes}: the weights before")
    assert saved(tmp_path / "True")["global_step"] == step
    assert unequal(saved(tmp_path / "False"), saved(tmp_path / "True")) == []


def test_an_error_that_comes_before_the_host_has_looked_saves_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights behind a ruinous step are sound, its memory is not."""
    stopped(config_of(tmp_path, "at_once"), monkeypatch, 9, what="loss", late=False)
    with monkeypatch.context() as patch:
        poisoned(patch, 9, what="loss")
        patch.setattr(Judging, "begin_judging", begin_late)
        step = TransformerXLModule.training_step

        def full(self: Any, *batch: Any) -> Any:
            if self.trainer.global_step == 10:
                raise RuntimeError("out of memory")
            return step(self, *batch)

        patch.setattr(TransformerXLModule, "training_step", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            fit_command.fit(config_of(tmp_path, "late"))
    assert unequal(saved(tmp_path / "at_once"), saved(tmp_path / "late")) == []


@pytest.mark.usefixtures("late")
def test_a_run_that_met_a_ruinous_step_goes_on_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config_of(tmp_path, "whole"), monkeypatch)
    stopped(config_of(tmp_path, "parts"), monkeypatch, 8, what="loss", late=True)
    train(config_of(tmp_path, "parts"), monkeypatch, resume=True)
    assert unequal(saved(tmp_path / "whole"), saved(tmp_path / "parts")) == []


def test_sound_training_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [train(config_of(tmp_path, "at_once"), monkeypatch)[0]]
    with monkeypatch.context() as patch:
        patch.setattr(Judging, "begin_judging", begin_late)
        losses.append(train(config_of(tmp_path, "late"), patch)[0])
    assert losses[0] == losses[1]
    assert_same(tmp_path / "at_once", tmp_path / "late")


@pytest.mark.parametrize(
    "keys",
    [
        ["trainer.on_divergence=skip"],
        ["trainer.max_loss_rise=1.0"],
        ["optim.ema=0.9"],
        ["optim.name=radam"],
        ["trainer.lane_chunks=2"],
    ],
)
def test_where_nothing_can_be_taken_back_the_host_looks_at_once(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool] = []

    def asked(self: Judging) -> None:
        begin(self)
        chosen.append(self._may_be_late())

    monkeypatch.setattr(Judging, "begin_judging", asked)
    train(config_of(tmp_path, "run", "trainer.max_steps=1", *keys), monkeypatch)
    assert chosen == [False]


@pytest.mark.distributed
@pytest.mark.usefixtures("late")
def test_all_ranks_hear_of_one_ranks_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "run", "trainer.devices=2", "strategy=ddp", "trainer.max_steps=6")
    read = TransformerXLModule._read

    def reads(self: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        out = read(self, batch, *rest, **more)
        if self.training and self._unstepped == 3 and self.global_rank == 1:
            out = out._replace(losses_BT=out.losses_BT.index_fill(0, torch.tensor([1]), float("nan")))
        return out

    monkeypatch.setattr(TransformerXLModule, "_read", reads)

    def work() -> int:
        with pytest.raises(NonFiniteLoss, match=r"loss is not finite at step 3, lanes \[3\]: the weights before"):
            fit_command.fit(config)
        return 0

    on_ranks(2, work)
    assert saved(tmp_path / "run")["global_step"] == 3


WAIT = ("_local_scalar_dense", "nonzero", "equal", "unique", "_unique2", "masked_select")
READ = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
OBSERVERS = "cost_meter,early_divergence,gradient_norms,loss_by_position,memory_benefit,memory_monitor,throughput"


class Waits(TorchDispatchMode):
    """Notes where the host would wait for a GPU: at operators that give it numbers, and where it reads a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._patch: Any = None

    def note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        if not any(frame.name == "is_ruinous" for frame in frames):  # of a step that the device has long made
            where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames if "test_late" not in f.filename]
            self.found.append(f"{name} in {where[-1]}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        if name in WAIT:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._patch = pytest.MonkeyPatch()
        for name in READ:
            self._patch.setattr(torch.Tensor, name, self._reading(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)

    def _reading(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
            self.note(name)
            return original(tensor, *args, **more)

        return read


class Watched(L.Callback):
    """Watches the steps between two points of the curves; must come first, and ends after all other observers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits, self.inside, self.steps = Waits(), False, 0
        original = EndOfBatch.on_train_batch_end

        def last(own: Any, trainer: Any, module: Any, *rest: Any) -> None:
            original(own, trainer, module, *rest)
            if self.inside:
                self.waits.__exit__(None, None, None)
            self.inside = False

        monkeypatch.setattr(EndOfBatch, "on_train_batch_end", last)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step and module.next_point() is None:
            self.steps, self.inside = self.steps + 1, True
            self.waits.__enter__()


def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *keys: str) -> list[str]:
    """Where the host waits in the steps between two points, with all observers that are on by default."""
    monkeypatch.setattr(base, "on_hand", lambda _: False)  # as on a GPU, where a look would wait
    config = config_of(tmp_path, "run", f"callbacks=[{OBSERVERS}]", "trainer.val_check_interval=1000", *keys)
    watched, build = Watched(monkeypatch), fit_command.build_trainer
    monkeypatch.setattr(
        fit_command, "build_trainer", lambda *a, callbacks, **kw: build(*a, callbacks=[watched, *callbacks], **kw)
    )
    fit_command.fit(config)
    assert watched.steps >= 12  # of 20; the first and those of points may
    return watched.waits.found


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("memory", ["cache", "tokens", "knn"])
def test_no_step_between_two_points_waits_for_the_device(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waits(tmp_path, monkeypatch, f"memory={memory}") == []


@pytest.mark.usefixtures("late")
def test_nor_does_one_of_several_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(tmp_path, monkeypatch, "trainer.accumulate_grad_batches=2") == []


def test_who_looks_at_once_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = waits(tmp_path, monkeypatch)
    assert len(found) >= 12 and all("judge_losses" in where or "judge" in where for where in found)
