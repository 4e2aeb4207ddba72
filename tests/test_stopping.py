"""Ctrl-C, SIGTERM and SIGUSR1 end training after the step under way, with a checkpoint and their exit code."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_resume import forked
from tests.tiny import MODEL, RUN, write_corpus
from txl_lightning import cli, jobs
from txl_lightning.checkpoints import read_stand
from txl_lightning.training import stopping
from txl_lightning.training.stopping import GracefulStop

# runs txl and sends itself a signal when a hook of the progress bar's kind is reached for the nth time
SENDER = """
import os, signal, sys
import lightning.pytorch as L
from txl_lightning import cli
from txl_lightning.training import stopping

hook, number, sent, times = sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3]), int(sys.argv[4])
original, count = getattr(stopping.GracefulStop, hook), 0

def sending(self, trainer, *rest):
    global count
    count += 1
    if count == number:
        for _ in range(times):
            os.kill(os.getpid(), sent)
    return original(self, trainer, *rest)

setattr(stopping.GracefulStop, hook, sending)
sys.argv[1:] = sys.argv[5:]
sys.exit(cli.main())
"""


def run(tmp_path: Path, when: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sender.py").write_text(SENDER)
    command = [sys.executable, "sender.py", *when, *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)


def fit_arguments(tmp_path: Path, *overrides: str) -> list[str]:
    write_corpus(tmp_path / "book.txt")
    typed = {override.partition("=")[0] for override in overrides}
    quick = [item for item in RUN if item.partition("=")[0] not in typed]
    return ["fit", *MODEL, *quick, "data=text", "data.path=book.txt", "run_dir=run", "logger=none", *overrides]


def saved_step(tmp_path: Path) -> int:
    return int(torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"])


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)])
def test_a_signal_in_training_saves_and_ends_with_its_code(name: str, code: int, tmp_path: Path) -> None:
    done = run(tmp_path, ["on_train_batch_end", "7", name, "1"], *fit_arguments(tmp_path))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert saved_step(tmp_path) == 7
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["stopped_by"]) == (7, name)


def test_the_closing_words_are_the_command_that_goes_on(tmp_path: Path) -> None:
    """As a shell reads it."""
    (folder := tmp_path / 'it\'s mine, $HOME="x"').mkdir()
    done = run(folder, ["on_train_batch_end", "7", "SIGINT", "1"], *fit_arguments(folder))
    assert done.returncode == 130, done.stderr
    words = shlex.split(done.stdout.splitlines()[-1].removeprefix("to go on: "))
    assert words == ["txl", "fit", f"resume={folder / 'run'}"]
    gone_on = run(folder, ["on_train_start", "99", "SIGINT", "1"], *words[1:])
    assert gone_on.returncode == 0 and "to go on" not in gone_on.stdout, gone_on.stderr
    assert json.loads((folder / "run" / "result.json").read_text())["steps"] == 20


@pytest.mark.parametrize(
    ("hook", "number", "overrides", "step"),
    [
        ("on_validation_batch_end", "1", ["trainer.num_sanity_val_steps=1"], None),  # the sanity check
        ("on_validation_batch_end", "1", ["trainer.val_check_interval=4"], 4),
        ("on_validation_batch_end", "1", ["trainer.val_check_interval=1000"], 20),  # the one after training
    ],
)
def test_a_signal_in_validation_ends_it(
    hook: str, number: str, overrides: list[str], step: int | None, tmp_path: Path
) -> None:
    done = run(tmp_path, [hook, number, "SIGTERM", "1"], *fit_arguments(tmp_path, *overrides))
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    assert ("nothing was trained: the same command may be given again" in done.stdout) == (step is None)
    assert ("to go on: txl fit resume=" in done.stdout) == (step is not None)
    if step is None:
        assert not (tmp_path / "run" / "config.yaml").exists()
        assert run(tmp_path, ["on_train_start", "99", "SIGTERM", "1"], *fit_arguments(tmp_path)).returncode == 0
    else:
        assert saved_step(tmp_path) == step
        assert json.loads((tmp_path / "run" / "result.json").read_text())["stopped_by"] == "SIGTERM"


@pytest.mark.parametrize("every", [0, 2])
def test_a_second_interrupt_stops_at_once(every: int, tmp_path: Path) -> None:
    keys = fit_arguments(tmp_path, f"trainer.save_every_steps={every}")
    done = run(tmp_path, ["on_train_batch_end", "7", "SIGINT", "2"], *keys)
    assert done.returncode == 130, done.stderr
    again = f"to go on from the last one: txl fit resume={tmp_path / 'run'}" if every else "there is none from before"
    assert done.stderr.endswith(f"ended at once, without a checkpoint of where it stood; {again}\n")
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_before_training_listens_ends_with_the_code_of_a_requeue(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the configuration is checked: nothing was made, and the same command may be given again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "build", lambda *_, **__: os.kill(os.getpid(), getattr(signal, name)))
    assert os.waitstatus_to_exitcode(forked(lambda: cli.main(fit_arguments(tmp_path)))) == 75
    assert capfd.readouterr().err == "" and not (tmp_path / "run").exists()


def test_a_signal_that_the_checks_swallowed_still_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = GracefulStop()
    monkeypatch.setattr(stopping, "EARLY", [signal.SIGTERM])
    with stop.listening():
        assert (stop.exit_code, stop.name) == (75, "SIGTERM")


def test_an_interrupt_ends_a_sweep(tmp_path: Path) -> None:
    arguments = fit_arguments(tmp_path, "seed=1,2", "run_dir=sweep")
    done = run(tmp_path, ["on_train_batch_end", "3", "SIGINT", "1"], *arguments, "-m")
    assert done.returncode == 130, done.stderr
    assert [path.name for path in sorted((tmp_path / "sweep").iterdir()) if path.is_dir()] == ["0"]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_a_signal_in_an_evaluation_ends_it_with_its_code(name: str, code: int, tmp_path: Path) -> None:
    assert run(tmp_path, ["on_train_start", "99", "SIGINT", "1"], *fit_arguments(tmp_path)).returncode == 0
    arguments = ["eval", "ckpt=run", "eval.segment_len=4", "eval.schedule=segments", "out=found.json"]
    done = run(tmp_path, ["on_test_batch_end", "2", name, "1"], *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "found.json").exists()


# runs txl; the second rank dies in its sixth step: it raises, or is killed
DYING = """
import os, signal, sys
from txl_lightning import cli
from txl_lightning.training.module import TransformerXLModule

step = TransformerXLModule.training_step

def dying(self, batch, batch_idx):
    if batch_idx == 5 and self.global_rank == 1:
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("rank 1 broke")
    return step(self, batch, batch_idx)

TransformerXLModule.training_step = dying
sys.exit(cli.main())
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param(
            "raise",
            ["error: rank 1 died of RuntimeError: rank 1 broke (its own report is above)", "Traceback"],
            marks=pytest.mark.slow,
        ),
        ("kill", ["error: rank 1 was killed by SIGKILL"]),
    ],
)
def test_a_rank_that_dies_ends_the_others_and_is_named(how: str, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(f"HOW = {how!r}\n{DYING}")
    arguments = fit_arguments(tmp_path, "trainer.devices=2", "strategy=ddp", "strategy.timeout_s=120")
    process: Any = subprocess.Popen(
        [sys.executable, "dies.py", *arguments],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1, errors
    assert all(words in errors for words in said), errors
    assert not (tmp_path / "run" / ".lock").exists() and not list(tmp_path.glob("run/**/.*.part"))


@pytest.mark.slow
@pytest.mark.distributed
def test_sigterm_under_deepspeed_saves_and_asks_for_a_requeue(tmp_path: Path) -> None:
    """Sent to the first of two ranks; the run then goes on."""
    keys = ["trainer.devices=2", "strategy=deepspeed_zero2", "trainer.max_steps=100000", "trainer.save_every_steps=5"]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-m", "txl_lightning", *fit_arguments(tmp_path, *keys, "optim.schedule=constant")]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out)
        try:
            while process.poll() is None and not last.exists():
                time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=900)
        finally:
            process.kill()
    said = (tmp_path / "out").read_text()
    assert code == 75, said
    assert "Traceback" not in said and "stopped by SIGTERM" in said
    steps = read_stand(str(last)).step
    assert steps >= 5 and json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == steps
    more = ["fit", "resume=run", f"trainer.stop_at_step={steps + 2}"]
    done = subprocess.run([sys.executable, "-m", "txl_lightning", *more], cwd=tmp_path, timeout=900)
    assert done.returncode == 0 and read_stand(str(last)).step == steps + 2
    assert sorted(path.name for path in last.parent.iterdir() if path.is_dir() and not path.is_symlink()) == sorted(
        {os.readlink(link) for link in last.parent.iterdir() if link.is_symlink()}
    )
