"""docs/slurm.sh: its logic with commands that stand in for SLURM's, and a whole job of two ranks that goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_resume import N_BYTE, saved, typed, unequal
from tests.test_stopping import SENDER
from tests.tiny import write_corpus
from txl_lightning.config import load

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "slurm.sh"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on PATH for commands that stand in, and the variables that SLURM sets in a job's script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    stand_in(folder, "scontrol", 'echo "$@" >> requeued')
    stand_in(folder, "srun", 'echo "$@" > asked; shift; exec "$@"')
    return folder


def stand_in(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def submit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=280)


def requeued() -> list[str]:
    return Path("requeued").read_text().splitlines() if Path("requeued").exists() else []


def test_bash_can_read_it() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    assert any(line.startswith("#SBATCH --signal=USR1@") for line in SCRIPT.read_text().splitlines())


@pytest.mark.parametrize(("code", "back"), [(0, []), (1, []), (2, []), (130, []), (75, ["requeue 77"])])
def test_it_goes_back_into_the_queue_only_after_saving(code: int, back: list[str], cluster: Path) -> None:
    stand_in(cluster, "txl", f"exit {code}")
    done = submit("experiment=mine", "run_dir=a folder")
    assert done.returncode == code and requeued() == back
    asked = Path("asked").read_text().strip()
    assert asked.endswith("txl fit strategy=ddp experiment=mine run_dir=a folder resume=auto "
                          "trainer.num_nodes=1 trainer.devices=2")  # fmt: skip


def test_a_strategy_that_is_given_stands(cluster: Path) -> None:
    stand_in(cluster, "txl", "exit 0")
    assert submit("strategy=deepspeed_zero2", "run_dir=x").returncode == 0
    typed = Path("asked").read_text().split(" fit ")[1].split()
    assert load([item for item in typed if item.startswith("strategy=")]).strategy.title == "deepspeed_zero2"


def test_without_a_folder_it_does_not_begin(cluster: Path) -> None:
    done = submit("experiment=mine")
    assert done.returncode == 2 and "give run_dir=PATH" in done.stderr and not Path("asked").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_the_script_waits_for_the_ranks(name: str, cluster: Path) -> None:
    stand_in(cluster, "txl", "trap 'sleep 1; touch saved; exit 75' TERM; touch began; while :; do sleep 0.1; done")
    script = subprocess.Popen(["bash", SCRIPT, "run_dir=x"])
    until = time.monotonic() + 60
    while not Path("began").exists() and time.monotonic() < until:
        time.sleep(0.05)
    script.send_signal(getattr(signal, name))
    assert script.wait(60) == 75
    assert Path("saved").exists() and requeued() == ["requeue 77"]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_job_of_two_ranks_is_requeued_and_ends_as_one_that_was_not(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank gets SIGUSR1 at its fifth step; the second run of the script finishes."""
    write_corpus(Path("corpus.txt"), n_byte=N_BYTE)
    Path("sender.py").write_text(SENDER)
    stand_in(cluster, "txl", f'exec {sys.executable} sender.py on_train_batch_end ${{AT:-999}} SIGUSR1 1 "$@"')
    ranks = "\n".join(
        f'SLURM_PROCID={n} SLURM_LOCALID={n} SLURM_NODEID=0 AT={at} "$@" & p{n}=$!' for n, at in ((0, 999), (1, 5))
    )
    worst = "wait $p0; a=$?; wait $p1; b=$?; exit $((a > b ? a : b))"
    stand_in(cluster, "srun", f"shift\nexport SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_JOB_NAME=txl\n{ranks}\n{worst}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    keys = [item for item in typed("trainer.max_steps=8", "logger=csv", "trainer.val_check_interval=20")[1:]]
    first = submit(*keys, "run_dir=run")
    assert first.returncode == 75, first.stderr
    assert requeued() == ["requeue 77"] and saved(Path("run"))["global_step"] == 5
    second = submit(*keys, "run_dir=run")
    assert second.returncode == 0, second.stderr
    assert "going on from step 5" in second.stdout and requeued() == ["requeue 77"]
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    stand_in(cluster, "txl", f'exec {sys.executable} -m txl_lightning "$@"')
    whole = subprocess.run(
        ["txl", *typed(*keys, "run_dir=whole", "trainer.devices=2", "strategy=ddp")], timeout=240, capture_output=True
    )
    assert whole.returncode == 0, whole.stderr.decode()
    assert unequal(saved(Path("whole")), saved(Path("run"))) == []
