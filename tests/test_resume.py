"""Stopping costs nothing: a run that was stopped, or killed, and resumed equals one that never was, bit for bit."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from tests.ranks import on_ranks, start
from tests.tiny import MODEL, RUN, Losses, tiny_config, write_corpus
from txl_lightning import cli
from txl_lightning.checkpoints.manifest import Hashed
from txl_lightning.commands import fit as fit_command
from txl_lightning.config import Config
from txl_lightning.training import rng
from txl_lightning.training.checkpointing import WholeFiles
from txl_lightning.training.module import TransformerXLModule
from txl_lightning.training.stopping import GracefulStop

N_BYTE = 906  # an epoch of 13 segments: four lanes of about 204 targets
LOGGED = ["logger.csv=true", "trainer.log_every_n_steps=3", "model.dropout=0.2", "model.dropatt=0.2"]
CASES = {
    "cache": ["memory=cache", "memory.mem_len=24"],
    "compressive, accumulation, workers": [
        "memory=compressive", "trainer.accumulate_grad_batches=2", "data.num_workers=2",
    ],
    "tokens, carried gradient": [
        "memory=tokens", "memory.gradient=carry", "trainer.bptt_segments=2", "trainer.accumulate_grad_batches=2",
    ],
    "knn, workers": ["memory=knn", "data.num_workers=2", "trainer.val_check_interval=5"],
    "average of weights, plateau, accumulation": [
        "memory=cache", "optim.ema=0.8", "optim.schedule=plateau", "optim.patience=1",
        "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3",
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in a fixed order
    yield
    torch.set_num_threads(threads)


def config_of(tmp_path: Path, run: str, *overrides: str) -> Config:
    if not (tmp_path / "corpus.txt").exists():
        write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    return tiny_config(tmp_path, f"run_dir={tmp_path / run}", *LOGGED, *overrides)


def train(
    config: Config, monkeypatch: pytest.MonkeyPatch, *observers: L.Callback, resume: bool = False, stop: Any = None
) -> tuple[list[float], fit_command.Fitted]:
    """`txl fit`'s own code, its losses, and generators that are elsewhere each time."""
    seen, build = Losses(), fit_command.build_trainer
    monkeypatch.setattr(
        fit_command,
        "build_trainer",
        lambda *a, callbacks, **kw: build(*a, callbacks=[*callbacks, seen, *observers], **kw),
    )
    last = f"{config.run_dir}/checkpoints/last.ckpt" if resume else None
    try:
        fitted = fit_command.fit(config, resume=last, stop=stop)
    finally:
        monkeypatch.setattr(fit_command, "build_trainer", build)
    return seen.values, fitted


def saved(run: Path) -> dict[str, Any]:
    """All of a run's `last` but what time it took and what was typed."""
    found = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    found["txl_lightning"].pop("config")
    found["txl_lightning"]["clock"].pop("seconds")
    found["loops"].pop("validate_loop")  # validations after training, which nothing goes by
    return found


def unequal(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two checkpoints differ in any bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [place for key in one for place in unequal(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [place for i, pair in enumerate(zip(one, other, strict=True)) for place in unequal(*pair, f"{path}/{i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    return [] if type(one) is type(other) and one == other else [f"{path}: {one} and {other}"]


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "csv" / "metrics.csv").open() as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


def assert_same(whole: Path, parts: Path) -> None:
    assert unequal(saved(whole), saved(parts)) == []
    assert rows(whole) == rows(parts)
    results = [json.loads((run / "result.json").read_text()) for run in (whole, parts)]
    for timed in ("train_seconds", "tokens_per_second"):
        assert all(result.pop(timed) > 0 for result in results)
    assert results[0] == results[1]


@pytest.mark.parametrize("case", CASES)
def test_stopped_twice_equals_never_stopped(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 steps = 7 + 6 + 7 across an epoch; 13 (with accumulation 7) is exactly its end."""
    losses, _ = train(config_of(tmp_path, "whole", *CASES[case]), monkeypatch)
    assert saved(tmp_path / "whole")["txl_lightning"]["lanes"]["position"][0] > 0
    found: list[float] = []
    for stop in (7, 13, None):
        limit = [] if stop is None else [f"trainer.stop_at_step={stop}"]
        more, again = train(config_of(tmp_path, "parts", *CASES[case], *limit), monkeypatch, resume=bool(found))
        found += more
        assert again.module.trainer.global_step == (stop or 20)
    assert found == losses
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_validation_that_was_stopped_runs_whole_after_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["trainer.val_check_interval=5", "eval.segment_len=4"]
    losses, _ = train(config_of(tmp_path, "whole", *keys), monkeypatch)
    stop, batches = GracefulStop(), []

    class Asks(L.Callback):
        def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            batches.append(trainer.global_step)
            if len(batches) == 1:
                stop.received = signal.SIGTERM

    first, _ = train(config_of(tmp_path, "parts", *keys), monkeypatch, Asks(), stop=stop)
    assert stop.exit_code == 75 and 0 < len(batches) < 3 and len(first) == 5
    rest, _ = train(config_of(tmp_path, "parts", *keys), monkeypatch, resume=True)
    assert first + rest == losses
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_checkpoint_written_inside_a_step_is_that_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error in the second of two segments, and right before an update."""
    keys = ["trainer.accumulate_grad_batches=2"]
    train(config_of(tmp_path, "whole", *keys), monkeypatch)

    class Breaks(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 9:
                raise RuntimeError("no more ink")

    with pytest.raises(RuntimeError, match="no more ink"):
        train(config_of(tmp_path, "parts", *keys), monkeypatch, Breaks())
    assert saved(tmp_path / "parts")["global_step"] == 9
    train(config_of(tmp_path, "parts", *keys), monkeypatch, resume=True)
    assert unequal(saved(tmp_path / "whole"), saved(tmp_path / "parts")) == []


def test_a_finished_run_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fitted = train(config_of(tmp_path, "run", "optim.ema=0.8"), monkeypatch)
    before = saved(tmp_path / "run")
    losses, again = train(config_of(tmp_path, "run", "optim.ema=0.8"), monkeypatch, resume=True)
    assert losses == [] and again.result["val"] == fitted.result["val"]
    assert unequal(before, saved(tmp_path / "run")) == []


def test_generators_come_back_through_a_file(tmp_path: Path) -> None:
    import numpy as np

    device = torch.device("cpu")
    torch.save(rng.capture(device), tmp_path / "state")
    drawn = random.random(), np.random.rand(), torch.rand(3), random.gauss(0, 1), np.random.randn()
    rng.restore(torch.load(tmp_path / "state", weights_only=True), device)
    again = random.random(), np.random.rand(), torch.rand(3), random.gauss(0, 1), np.random.randn()
    assert unequal(drawn, again) == []


# through the command line


def typed(*overrides: str) -> list[str]:
    names = {item.partition("=")[0] for item in overrides}
    base = [*MODEL, *RUN, *LOGGED, "data=text", "data.path=corpus.txt", "logger=none"]
    return ["fit", *(item for item in base if item.partition("=")[0] not in names), *overrides]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    return tmp_path


def forked(work: Callable[[], int]) -> int:
    """Status of a child that does the work; a real process, without the seconds that imports take."""
    return os.waitpid(start(work), 0)[1]


def test_resume_goes_on_in_the_folder_of_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run_dir=run", "logger=[csv,tensorboard]"]
    assert cli.main(typed("run_dir=whole", "logger=[csv,tensorboard]")) == 0
    assert cli.main(typed(*run, "trainer.stop_at_step=7")) == 0
    assert "stopped by trainer.stop_at_step" in capsys.readouterr().out
    assert cli.main(["fit", "resume=run/checkpoints/last.ckpt", "trainer.stop_at_step=9"]) == 0
    assert cli.main(["fit", "resume=run", "trainer.save_every_steps=4", "data.num_workers=1"]) == 0
    assert "going on from step 9" in capsys.readouterr().out
    assert_same(here / "whole", here / "run")
    facts = json.loads((here / "run" / "run.json").read_text())
    assert [entry["step"] for entry in facts["resumed"]] == [7, 9]
    assert not (here / "run" / ".lock").exists() and not (here / "runs").exists()
    assert curve(here / "run") == curve(here / "whole")
    assert cli.main(typed(*run)) == 2
    assert "the folder holds a run already" in capsys.readouterr().err


def curve(run: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def raw_events(run: Path) -> tuple[dict[str, list[int]], Counter[str]]:
    """Steps of every curve over all event files in their order, repeats and all; entries of the HParams tab by kind."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    steps: dict[str, list[int]] = {}
    entries: Counter[str] = Counter()
    for file in sorted(run.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "hparams":
                    data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                    entries[str(data.WhichOneof("data"))] += 1
                else:
                    steps.setdefault(value.tag, []).append(event.step)
    return steps, entries


def test_event_files_of_a_run_in_parts_have_every_point_once(here: Path) -> None:
    """Nothing is drawn twice, and the HParams tab gets its line when the run is finished."""
    keys = ["logger=[tensorboard]", "trainer.log_every_n_steps=2", "trainer.val_check_interval=3"]
    assert cli.main(typed("run_dir=whole", *keys)) == 0
    for stop, command in ((7, typed("run_dir=run", *keys)), (9, ["fit", "resume=run"])):
        assert cli.main([*command, f"trainer.stop_at_step={stop}"]) == 0
        assert raw_events(here / "run")[1] == Counter()
    assert cli.main(["fit", "resume=run"]) == 0
    (whole, entries), parts = raw_events(here / "whole"), raw_events(here / "run")
    assert parts == (whole, entries)
    assert entries == {"experiment": 1, "session_start_info": 1, "session_end_info": 1}
    assert {"train/loss", "val/loss", "final/loss"} <= set(whole)
    assert all(len(set(steps)) == len(steps) for steps in whole.values())
    assert len(whole["train/loss"]) >= 6 and len(whole["val/loss"]) >= 4 and len(whole["final/loss"]) == 1


def test_auto_finds_the_newest_run_that_agrees(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = typed("resume=auto", "trainer.stop_at_step=2")
    assert cli.main(auto) == 0
    said = capsys.readouterr().out
    assert "resume=auto: no run to go on with, so this one starts afresh" in said
    assert cli.main(typed("resume=auto", "trainer.stop_at_step=2", "seed=3")) == 0
    assert "starts afresh" in capsys.readouterr().out
    assert cli.main(typed("resume=auto", "trainer.stop_at_step=4", "trainer.log_every_n_steps=1")) == 0
    assert "going on from step 2" in capsys.readouterr().out
    assert sorted(saved(run)["global_step"] for run in (here / "runs" / "default").iterdir()) == [2, 4]
    assert cli.main(typed("resume=auto", "run_dir=mine", "trainer.stop_at_step=1")) == 0
    assert cli.main(typed("resume=auto", "run_dir=mine", "trainer.stop_at_step=3")) == 0
    assert saved(here / "mine")["global_step"] == 3
    capsys.readouterr()
    assert cli.main(typed("resume=auto", "run_dir=mine", "memory.mem_len=9")) == 2
    assert "memory.mem_len=9: the run in" in capsys.readouterr().err


def test_what_would_change_training_is_refused_with_both_values(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(typed("run_dir=run", "trainer.stop_at_step=2", "data.cache_dir=tokens")) == 0
    before = sorted(path.name for path in here.iterdir())

    def refused(*overrides: str) -> str:
        capsys.readouterr()
        assert cli.main(["fit", "resume=run", *overrides]) == 2
        return capsys.readouterr().err

    assert "error: memory=none: the run to go on with has cache; leave it out" in refused("memory=none")
    assert "memory.mem_len=7: the run to go on with has 64" in refused("memory.mem_len=7")
    assert "optim.lr=0.1: the run to go on with has 0.003" in refused("optim.lr=0.1")
    assert "trainer.max_steps=30: the run to go on with has 20" in refused("trainer.max_steps=30")
    assert "data.batch_size=2: the run to go on with has 4" in refused("data.batch_size=2")
    assert "trainer.stop_at_step=1: the checkpoint has made 2 steps" in refused("trainer.stop_at_step=1")
    assert "trainer.max_time=soon: is no time" in refused("trainer.max_time=soon")
    assert "run_dir=" in refused("run_dir=other") and "resume=" in refused("seed=1,2", "-m")
    assert "resume=nowhere: no such file or folder" in refused("resume=nowhere")
    with (here / "corpus.txt").open("a") as file:
        file.write("more")
    assert "data.fingerprint=" in refused() and "the text was altered: the run was trained on" in refused()
    assert before == sorted(path.name for path in here.iterdir())


def test_another_python_and_another_vocabulary_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from txl_lightning.config import ConfigError, load
    from txl_lightning.data.store import survey

    config = config_of(tmp_path, "run", "trainer.max_steps=1", "trainer.val_check_interval=99")
    train(config, monkeypatch)
    found, last = survey(config.data), str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    fit_command.check_resumable(config, found, last)
    with pytest.raises(ConfigError, match=r"data\.vocab=abc: the run has the vocabulary \w{64} of 257 symbols"):
        fit_command.check_resumable(config, replace(found, fingerprint="other", vocab_digest="abc"), last)
    (tmp_path / "run" / "run.json").write_text('{"python": "3.9.1"}')
    stdlib = replace(config, data=load(["data=stdlib"]).data)
    with pytest.raises(ConfigError, match=r"data=stdlib: .* the run was trained on that of 3\.9\.1; go on with Python"):
        fit_command.check_resumable(stdlib, replace(found, fingerprint="other"), last)


def test_two_runs_in_one_folder_are_refused(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(typed("run_dir=run", "trainer.stop_at_step=1")) == 0
    (here / "run" / ".lock").write_text("4194304\n")  # of a process that is dead: nobody holds it
    assert cli.main(["fit", "resume=run", "trainer.stop_at_step=2"]) == 0

    from txl_lightning.training.lock import locked

    with locked(here / "run"):
        assert os.waitstatus_to_exitcode(forked(lambda: cli.main(["fit", "resume=run"]))) == 2
    assert f"process {os.getpid()} is training in this folder; wait for it" in capfd.readouterr().err
    assert saved(here / "run")["global_step"] == 2


def test_a_damaged_last_is_refused_and_the_one_before_offered(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(typed("run_dir=run", "trainer.stop_at_step=4", "trainer.save_every_steps=2")) == 0
    folder = here / "run" / "checkpoints"
    good = (folder / "last.ckpt").read_bytes()
    (folder / ".last.ckpt.part").write_bytes(good[:99])
    middle = len(good) // 2
    (folder / "last.ckpt").write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    capsys.readouterr()
    for command in (["fit", "resume=run"], ["eval", "ckpt=run"]):
        assert cli.main(command) == 2
        key, said = command[1].partition("=")[0], capsys.readouterr().err
        assert "last.ckpt is damaged: its size or content is not what the manifest says" in said
        assert f"give the one before it: {key}=" in said and "previous.ckpt" in said
    assert cli.main(["fit", f"resume={folder / 'previous.ckpt'}", "trainer.stop_at_step=5"]) == 0
    assert not list(folder.glob(".*")) and saved(here / "run")["global_step"] == 5


def test_top_k_keeps_the_best_by_their_steps(here: Path) -> None:
    keys = ["trainer.save_top_k=2", "trainer.val_check_interval=3", "trainer.max_steps=12"]
    assert cli.main(typed("run_dir=run", *keys)) == 0
    folder = here / "run" / "checkpoints"
    ranking = saved(here / "run")["callbacks"]["KeepBest"]["ranking"]
    assert sorted(path.name for path in folder.glob("step_*")) == sorted(f"step_{int(s):08d}.ckpt" for _, s in ranking)
    best = torch.load(folder / "best.ckpt", weights_only=True)
    assert len(ranking) == 2 and best["global_step"] == ranking[0][1]


def test_time_limits_end_and_save(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[Any] = []
    original = WholeFiles.save_checkpoint

    def noted(self: Any, checkpoint: Any, *rest: Any, **keys: Any) -> None:
        writes.append(checkpoint["global_step"])
        original(self, checkpoint, *rest, **keys)

    monkeypatch.setattr(WholeFiles, "save_checkpoint", noted)
    assert cli.main(typed("run_dir=run", "trainer.max_time=00:00:00")) == 0
    assert saved(here / "run")["global_step"] == 1
    assert json.loads((here / "run" / "result.json").read_text())["stopped_by"] == "trainer.max_time"
    writes.clear()
    assert cli.main(["fit", "resume=run", "trainer.stop_at_step=4", "trainer.save_every_minutes=1e-9"]) == 0
    assert writes == [2, 3, 4, 4]


KILLED = ["trainer.save_every_steps=2", "run_dir=run", "resume=auto", "trainer.accumulate_grad_batches=2"]


def kill_at(moment: str, count: int) -> Callable[[], int]:
    """Runs the command and dies by SIGKILL, without a word, at the nth moment of a kind."""

    def work() -> int:
        from txl_lightning.checkpoints import manifest

        owner: Any = {"note": manifest, "training_step": TransformerXLModule, "save_checkpoint": WholeFiles}[moment]
        original, seen = getattr(owner, moment), []

        def dying(*args: Any, **keys: Any) -> Any:
            found = original(*args, **keys)
            seen.append(1)
            if len(seen) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        setattr(owner, moment, dying)
        return cli.main(typed(*KILLED))

    return work


def test_a_killed_run_ends_as_an_undisturbed_one(here: Path) -> None:
    """In a step, between the manifest and the new name of a checkpoint, right behind it, and before the first."""
    assert cli.main(typed("run_dir=whole", "trainer.accumulate_grad_batches=2")) == 0
    for moment in (("training_step", 2), ("training_step", 12), ("note", 2), ("save_checkpoint", 1)):
        assert forked(kill_at(*moment)) == signal.SIGKILL
    assert forked(lambda: cli.main(typed(*KILLED))) == 0
    assert unequal(saved(here / "whole"), saved(here / "run")) == []
    assert not list((here / "run" / "checkpoints").glob(".*"))


ASKED = {
    "training": (TransformerXLModule, "training_step", 9),
    "validation": (TransformerXLModule, "validation_step", 4),
    "checkpointing": (Hashed, "write", 40),
}


def test_sigterm_at_any_moment_saves_and_resumes_exactly(here: Path) -> None:
    """In the middle of a step, of a validation and of the bytes of a checkpoint."""
    keys = ["trainer.save_every_steps=3", "trainer.val_check_interval=5", "eval.segment_len=4"]
    assert cli.main(typed("run_dir=whole", *keys)) == 0
    for moment, (owner, name, count) in ASKED.items():

        def work() -> int:
            original, seen = getattr(owner, name), []  # noqa: B023

            def asking(*args: Any, **more: Any) -> Any:
                seen.append(1)
                if len(seen) == count:  # noqa: B023
                    os.kill(os.getpid(), signal.SIGTERM)
                    Path("asked").write_text(str(time.monotonic()))
                return original(*args, **more)

            setattr(owner, name, asking)  # noqa: B023
            return cli.main(typed(f"run_dir={moment}", *keys))  # noqa: B023

        assert os.waitstatus_to_exitcode(forked(work)) == 75
        print(f"SIGTERM in {moment}: ended {time.monotonic() - float(Path('asked').read_text()):.2f} s later")
        stopped = saved(here / moment)["global_step"]
        assert 0 < stopped < 20 and json.loads((here / moment / "result.json").read_text())["stopped_by"] == "SIGTERM"
        assert cli.main(["fit", f"resume={moment}"]) == 0
        assert unequal(saved(here / "whole"), saved(here / moment)) == []


@pytest.mark.distributed
def test_two_ranks_resume_exactly(here: Path) -> None:
    """Twice; the first stop is where a validation is due. Each rank has its own generators: dropout goes on on both."""
    keys = ["trainer.devices=2", "strategy=ddp", "trainer.max_steps=8", "trainer.val_check_interval=3"]
    keys += ["logger=[csv,tensorboard]", "trainer.accumulate_grad_batches=2"]
    commands = [
        typed("run_dir=whole", *keys),
        typed("run_dir=run", *keys, "trainer.stop_at_step=3"),
        ["fit", "resume=run", "trainer.stop_at_step=5"],
        ["fit", "resume=run"],
    ]
    on_ranks(2, lambda: max(map(cli.main, commands)))
    assert_same(here / "whole", here / "run")
    for name in ("train/loss", "val/loss", "optim/lr"):
        assert curve(here / "run", name) == curve(here / "whole", name) != []
    result = json.loads((here / "run" / "result.json").read_text())
    assert curve(here / "run", "final/loss")[-1][1] == pytest.approx(result["val"]["loss"])
    first, second = saved(here / "run")["txl_lightning"]["ranks"]
    assert not torch.equal(first["rng"]["torch"], second["rng"]["torch"])
