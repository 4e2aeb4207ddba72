"""What goes wrong around a run is told in one line with its cure, and nothing that was saved is lost."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_resume import N_BYTE, forked, saved, typed, unequal
from tests.tiny import write_corpus
from txl_lightning import cli, resume
from txl_lightning.checkpoints import manifest
from txl_lightning.config import load
from txl_lightning.training import lock
from txl_lightning.training.module import TransformerXLModule
from txl_lightning.training.trouble import explain, what_saves_memory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", n_byte=N_BYTE)
    return tmp_path


def told(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    text = capfd.readouterr().err
    lines = text.splitlines()
    assert "Traceback" not in text and [line.startswith("error: ") for line in lines].count(True) == 1, text
    return lines[-1]


def limited(kind: int, size: int, *arguments: str) -> Callable[[], int]:
    """The command in a process that the system gives no more of something; for `forked`."""

    def work() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, as on a full disk
        if kind == resource.RLIMIT_AS:
            size_now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(kind, (size_now + size, resource.RLIM_INFINITY))
        else:
            resource.setrlimit(kind, (size, resource.RLIM_INFINITY))
        return cli.main(list(arguments))

    return work


def test_a_disk_that_fills_up_costs_nothing_that_was_saved(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No file may grow beyond what the weights take: the checkpoint's second half is never written."""
    assert cli.main(typed("run_dir=whole", "logger=none")) == 0
    assert cli.main(typed("run_dir=run", "logger=none", "trainer.stop_at_step=4", "trainer.save_every_steps=2")) == 0
    folder = here / "run" / "checkpoints"
    before = (folder / "last.ckpt").read_bytes()
    capfd.readouterr()
    half = len(before) // 2
    assert os.waitstatus_to_exitcode(forked(limited(resource.RLIMIT_FSIZE, half, "fit", "resume=run"))) == 1
    said = told(capfd)
    assert f"{folder / 'last.ckpt'} cannot be written: File too large; what was there before is whole" in said
    assert "bytes are free), then go on with txl fit resume=" in said and said.endswith(str(here / "run"))
    assert (folder / "last.ckpt").read_bytes() == before and not list(folder.glob(".*"))
    assert not manifest.is_damaged(folder / "last.ckpt")
    assert cli.main(["fit", "resume=run"]) == 0
    assert unequal(saved(here / "whole"), saved(here / "run")) == []


@pytest.mark.parametrize("place", ["manifest.json", "result.json", "config.yaml"])
def test_every_file_of_a_run_may_be_the_one_that_finds_no_room(
    place: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = Path.open

    def full(self: Path, mode: str = "r", *rest: Any, **keys: Any) -> Any:
        if "w" in mode and place in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return original(self, mode, *rest, **keys)

    monkeypatch.setattr(Path, "open", full)
    assert cli.main(typed("run_dir=run", "logger=none", "trainer.stop_at_step=1")) == 1
    said = told(capfd)
    assert "cannot be written: No space left on device; what was there before is whole; make room (" in said
    saved_one = place == "result.json"  # the last of them to be written
    assert said.endswith(
        f"go on with txl fit resume={here / 'run'}" if saved_one else "give the same command again with resume=auto"
    )
    assert not list((here / "run").glob("**/.*.part"))


def unprivileged(*arguments: str) -> Callable[[], int]:
    """The command as a user who owns nothing here; for `forked`. Root may write anywhere."""

    def work() -> int:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return cli.main(list(arguments))

    return work


def test_a_folder_that_may_not_be_written_to_is_refused_before_anything(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for folder in (here, *list(here.parents)[:3]):
        folder.chmod(0o755)
    monkeypatch.setenv("TXL_CACHE_DIR", str(here / "tokens"))
    assert cli.main(typed("run_dir=run", "logger=none", "trainer.stop_at_step=1")) == 0
    before = sorted(path for path in here.rglob("*") if not path.name.startswith("."))
    capfd.readouterr()
    for arguments in (typed("run_dir=closed/run"), typed(), ["fit", "resume=run"]):
        assert os.waitstatus_to_exitcode(forked(unprivileged(*arguments))) == 2
        said = told(capfd)
        assert "is read-only or belongs to somebody else; get the right to write there, or name another folder" in said
        assert said.startswith("error: run_dir=")
    (here / "run" / "checkpoints" / "last.ckpt").chmod(0)
    for arguments in (["eval", "ckpt=run"], ["fit", "resume=run"]):
        assert os.waitstatus_to_exitcode(forked(unprivileged(*arguments))) == 2
        assert "last.ckpt may not be read; get the right to read it" in told(capfd)
    assert before == sorted(path for path in here.rglob("*") if not path.name.startswith("."))


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", none)
    with lock.locked(tmp_path):
        assert "cannot be locked (No locks available): start no second run in it" in capsys.readouterr().err
    assert not (tmp_path / lock.LOCK).exists()


INJECTED = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried "
                        "to allocate 99 bytes. Error code 12 (Cannot allocate memory)"),
    "python": MemoryError(),
    "library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}  # fmt: skip


@pytest.mark.parametrize("kind", INJECTED)
def test_out_of_memory_says_what_to_turn(
    kind: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = TransformerXLModule.training_step

    def full(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 3:
            raise INJECTED[kind]
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TransformerXLModule, "training_step", full)
    assert cli.main(typed("run_dir=run", "logger=none")) == 1
    said = told(capfd)
    assert said.startswith("error: out of memory (")
    assert "set model.checkpointing=true (now false)" in said and "which train the same; else lower " in said
    assert "data.batch_size=4 or data.segment_len=16 or memory.mem_len=64; dry_run=true tells" in said
    assert saved(here / "run")["global_step"] == 3  # nothing is lost


def test_real_memory_that_runs_out_is_told(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = ["data.segment_len=200", "model.d_inner=262144", "memory.mem_len=4", "model.checkpointing=true"]
    keys.append("trainer.log_every_n_steps=1")
    work = limited(resource.RLIMIT_AS, 1 << 30, *typed("run_dir=run", "logger=none", *keys))
    assert os.waitstatus_to_exitcode(forked(work)) == 1
    said = told(capfd)
    assert "out of memory (" in said and "tried to allocate" in said and "model.checkpointing" not in said


def test_what_is_no_trouble_of_this_kind_keeps_its_traceback(tmp_path: Path) -> None:
    config = load()
    assert explain(RuntimeError("size mismatch"), config, training=True) is None
    assert explain(FileNotFoundError(errno.ENOENT, "No such file"), config, training=True) is None
    said = explain(MemoryError(), config, training=False)
    assert (
        said == "out of memory (no memory left); lower eval.batch_size=16 or eval.segment_len=64 or memory.mem_len=64"
    )
    assert what_saves_memory(load(["memory=none"])).endswith(
        "data.segment_len=64; dry_run=true tells what a setting needs"
    )


def test_a_clock_that_goes_back_changes_neither_limits_nor_durations(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time of day jumps back an hour at each look; the run measures with clocks that cannot."""
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600.0 * next(jumps))
    keys = ["trainer.max_time=00:10:00", "trainer.save_every_minutes=5", "trainer.save_every_steps=7"]
    assert cli.main(typed("run_dir=run", "logger=none", *keys)) == 0
    found = saved(here / "run")
    assert found["global_step"] == 20
    clock = torch.load(here / "run" / "checkpoints" / "last.ckpt", weights_only=True)["txl_lightning"]["clock"]
    assert 0 < clock["seconds"] < 300


def test_auto_takes_the_latest_run_also_after_the_clock_went_back(here: Path) -> None:
    """The later of two runs that agree has the earlier time of day."""
    assert cli.main(typed("logger=none", "trainer.stop_at_step=2")) == 0
    (first,) = (here / "runs" / "default").iterdir()
    os.utime(first / "checkpoints" / "last.ckpt", (2e9, 2e9))  # written when the clock was ahead
    assert cli.main(typed("logger=none", "trainer.stop_at_step=1")) == 0
    (second,) = set((here / "runs" / "default").iterdir()) - {first}
    config = load([*typed("logger=none", "trainer.stop_at_step=3")[1:]])
    assert resume._newest(config) == second / "checkpoints" / "last.ckpt"
