"""Ranks of one machine watch over each other: which one died first, and of what."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_resume import forked
from txl_lightning import watch
from txl_lightning.training.divergence import NonFiniteLoss
from txl_lightning.watch import LAST_WORDS, RankWatch, tell, watching


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three ranks that wait for something."""
    found = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    yield found
    for child in found:
        child.kill()
        child.wait()


def watch_of(children: list[subprocess.Popen[bytes]], folder: Path) -> RankWatch:
    found = RankWatch(folder)
    found._children = children
    return found


def test_a_killed_rank_is_named(children: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    found = watch_of(children, tmp_path)
    assert found.first_dead() is None and found.first_dead(within=0.2) is None
    children[1].kill()
    assert found.first_dead(within=5.0) == (
        "rank 2 was killed by SIGKILL (the system kills what takes too much memory)"
    )
    (tmp_path / "rank_1").write_text("RuntimeError: the other one is gone")  # it noticed, and failed by that
    assert "rank 2 was killed" in str(found.first_dead())


def test_the_earliest_last_words_count(children: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    found = watch_of(children, tmp_path)
    for rank, age in ((1, 1), (3, 2)):
        file = tmp_path / f"rank_{rank}"
        file.write_text(f"ValueError: {rank}")
        os.utime(file, (1e9 - age, 1e9 - age))
    assert found.first_dead() == "rank 3 died of ValueError: 3 (its own report is above)"


@pytest.mark.parametrize(("code", "said"), [(0, None), (75, None), (130, None), (1, "rank 1 ended with exit code 1")])
def test_ends_in_good_order_are_no_deaths(code: int, said: str | None, tmp_path: Path) -> None:
    found = watch_of([subprocess.Popen(["sh", "-c", f"exit {code}"])], tmp_path)
    found._children[0].wait()
    assert (found.first_dead() or "").startswith(said or "") and (found.first_dead() is None) == (said is None)


def test_a_first_rank_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(watch, "GRACE", 0.1)

    def hangs() -> int:
        with watching(ranks=4) as found:
            own = [subprocess.Popen(["sleep", "100"]), subprocess.Popen(["sh", "-c", "exit 3"])]
            found.begin(own)
            time.sleep(100)
        return 0

    assert os.waitstatus_to_exitcode(forked(hangs)) == 1
    assert capfd.readouterr().err == "error: rank 2 ended with exit code 3 (its own report is above)\n"


def test_a_rank_that_begins_when_the_first_one_is_gone_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed while the rank still imports what it needs."""
    monkeypatch.setattr(watch, "GRACE", 0.1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setenv(watch.FIRST_RANK, str(gone.pid))
    monkeypatch.setenv("LOCAL_RANK", "1")

    def waits() -> int:
        with watching(ranks=2):
            time.sleep(20)
        return 0

    assert os.waitstatus_to_exitcode(forked(waits)) == 1
    assert capfd.readouterr().err == f"error: the first rank, process {gone.pid}, is gone\n"


def test_after_a_failure_nobody_is_left_waiting(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "GRACE", 0.1)
    found = watch_of(children, tmp_path)
    found.end(failed=False)
    assert all(child.poll() is None for child in children)
    found.end(failed=True)
    assert [child.wait(5) for child in children] == [-9, -9, -9]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_what_a_rank_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    alone = RankWatch()
    tell(raised(RuntimeError("no more ink")), None, alone)
    assert capsys.readouterr().err.startswith("Traceback")
    tell(raised(NonFiniteLoss("ruin")), "ruin", alone)
    assert capsys.readouterr().err == "error: ruin\n"
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")  # that of the interactive job around all ranks
    monkeypatch.setenv(LAST_WORDS, str(tmp_path))
    tell(raised(NonFiniteLoss("ruin")), "ruin", alone)  # the first rank says it for all
    lost = raised(RuntimeError("[..] Connection closed by peer [127.0.0.1]:1234"))
    tell(lost, None, alone)
    said = capsys.readouterr().err
    assert said.startswith(
        "error: rank 2: another rank is gone, or took longer than strategy.timeout_s; its own report"
    )
    assert "Traceback" not in said and not list(tmp_path.iterdir())  # that is nobody's cause
    tell(raised(RuntimeError("no more ink")), None, alone)
    assert capsys.readouterr().err.startswith("rank 2: Traceback")
    assert (tmp_path / "rank_2").read_text() == "RuntimeError: no more ink"
