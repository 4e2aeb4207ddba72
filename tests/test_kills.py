"""Thirty runs die by SIGKILL at random moments; `resume=auto` makes of each the undisturbed run, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_resume import forked, one_thread, saved, typed, unequal  # noqa: F401
from tests.tiny import write_corpus
from txl_lightning import cli
from txl_lightning.training.checkpointing import WholeFiles
from txl_lightning.training.module import TransformerXLModule

KILLS, STEPS = 30, 60
KEYS = [f"trainer.max_steps={STEPS}", "trainer.save_every_steps=1", "trainer.val_check_interval=20", "logger=csv"]
OTHER_DISK = Path("/dev/shm")
"""A folder on another file system, for TMPDIR."""


class Diary:
    """What the processes of a run did, in a file that outlives them: a letter each.

    b: a step begun; e: a step ended; w: a checkpoint begun to be written; W: written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, letter: str) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, letter.encode())
        os.close(file)

    def read(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def around(self, owner: Any, name: str, *, before: str, after: str, hook: Callable[[], None] | None = None) -> None:
        """Note letters before and after a method; `hook` is called in between, before the method."""
        original = getattr(owner, name)

        def noted(*args: Any, **keys: Any) -> Any:
            self.note(before)
            if hook is not None:
                hook()
            found = original(*args, **keys)
            self.note(after)
            return found

        setattr(owner, name, noted)


def kill_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def life(
    run: str, diary: Diary, *, tmp: str | None, after: float | None = None, write: tuple[int, float] | None = None
) -> Callable[[], int]:
    """The command in a process of its own, to be killed.

    Args:
        run: its folder.
        diary: what it does is noted here.
        tmp: folder for temporary files.
        after: seconds after which it dies.
        write: which checkpoint (from 1 on), and how many seconds after its writing began, it dies.
    """

    def work() -> int:
        if tmp is not None:
            os.environ["TMPDIR"], tempfile.tempdir = tmp, None
        writes = []

        def writing() -> None:
            writes.append(1)
            if write is not None and len(writes) == write[0]:
                kill_after(write[1])

        diary.around(TransformerXLModule, "training_step", before="b", after="")
        diary.around(TransformerXLModule, "end_batch", before="e", after="")
        diary.around(WholeFiles, "save_checkpoint", before="w", after="W", hook=writing)
        if after is not None:
            kill_after(after)
        return cli.main(typed(f"run_dir={run}", "resume=auto", *KEYS))

    return work


@pytest.mark.slow
def test_thirty_random_kills_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them anywhere, half while a checkpoint is being written; every other one with TMPDIR elsewhere."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", n_byte=906)
    elsewhere = OTHER_DISK if OTHER_DISK.is_dir() and OTHER_DISK.stat().st_dev != tmp_path.stat().st_dev else None
    began = time.monotonic()
    assert forked(life("whole", Diary(tmp_path / "whole.txt"), tmp=None)) == 0
    whole, span = saved(tmp_path / "whole"), time.monotonic() - began
    one_write = span / 200
    draw, killed, torn, again, lost = random.Random(5), 0, 0, 0, 0
    for number in range(2 * KILLS):  # some end before their moment, if the machine was slower at first
        if killed == KILLS:
            break
        run, diary = f"run{number}", Diary(tmp_path / f"{number}.txt")
        tmp = str(elsewhere) if elsewhere is not None and number % 2 else None
        moment, write = draw.uniform(0.0, span), (draw.randint(1, STEPS), draw.uniform(0.0, one_write))
        how: dict[str, Any] = {"after": moment} if number % 4 < 2 else {"write": write}
        killed += forked(life(run, diary, tmp=tmp, **how)) == signal.SIGKILL
        torn += diary.read().endswith("w")
        assert forked(life(run, diary, tmp=tmp)) == 0
        assert unequal(whole, saved(tmp_path / run)) == [], f"run {number} {how}"
        assert not list((tmp_path / run / "checkpoints").glob(".*"))
        began_steps, ended = (diary.read().count(letter) for letter in "be")
        again, lost = again + began_steps - STEPS, lost + ended - STEPS
    print(f"\n{killed} of {KILLS} killed, {torn} while a checkpoint was written; TMPDIR of every other: {elsewhere}")
    print(f"steps begun again {again}, of them finished before {lost}; undisturbed run {span:.1f} s")
    assert killed == KILLS and torn >= 5
