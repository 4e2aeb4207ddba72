"""Ranks that lightning starts on this machine watch over each other: one that dies ends the others, and is named.

Lightning itself kills the first rank as soon as another one has gone, without a word and whatever it is doing.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from txl_lightning.exit_codes import DONE, FAILED, INTERRUPTED, REQUEUE
from txl_lightning.ranks import is_first_rank

GRACE = 5.0  # seconds in which the others may notice by themselves that one is gone
LAST_WORDS = "TXL_LAST_WORDS"
"""Environment variable: a folder in which a rank that fails leaves one line about why."""

FIRST_RANK = "TXL_FIRST_RANK"
"""Environment variable: the process that started this rank, which may be gone before this one looks for its parent."""

LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out", "nccl")
"""What torch's backends say, in small letters, when another rank is gone or does not come."""


class RankWatch:
    """The other ranks on this machine, as their parent, the first one, sees them.

    Args:
        folder: where they leave their last words.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._children: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()

    def begin(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        """Watch over them from now on."""
        self._children = list(children)
        threading.Thread(target=self._watch, daemon=True, name="rank-watch").start()

    def first_dead(self, *, within: float = 0.0) -> str | None:
        """Which rank died first and of what; None if all live, or ended in good order, for so many seconds."""
        until = time.monotonic() + within
        while True:
            words, codes = self._words(), self._codes()
            killed = next((rank for rank, code in codes.items() if code < 0), None)
            if killed is not None and killed not in words:
                name = signal.Signals(-codes[killed]).name
                return f"rank {killed} was killed by {name} (the system kills what takes too much memory)"
            if words:
                rank, said = next(iter(words.items()))
                return f"rank {rank} died of {said} (its own report is above)"
            if codes:
                rank, code = next(iter(codes.items()))
                return f"rank {rank} ended with exit code {code} (its own report is above)"
            if time.monotonic() >= until or not self._children:
                return None
            time.sleep(0.1)

    def end(self, *, failed: bool) -> None:
        """Watch no longer; after a failure end those that still wait for the others."""
        self._over.set()
        until = time.monotonic() + GRACE
        for child in self._children if failed else ():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
            child.kill()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            if self._codes():
                if not self._over.wait(GRACE):  # the first rank hangs where it cannot notice
                    print(f"error: {self.first_dead()}", file=sys.stderr, flush=True)
                    for child in self._children:
                        child.kill()
                    if self.folder is not None:
                        shutil.rmtree(self.folder, ignore_errors=True)
                    os._exit(FAILED)
                return

    def _codes(self) -> dict[int, int]:
        """Exit codes of ranks that did not end in good order, by rank."""
        codes = {rank: child.poll() for rank, child in enumerate(self._children, start=1)}
        return {rank: code for rank, code in codes.items() if code not in (None, DONE, REQUEUE, INTERRUPTED)}

    def _words(self) -> dict[int, str]:
        """Last words by rank, the earliest first."""
        files = list(self.folder.glob("rank_*")) if self.folder is not None else []
        found = sorted((file.stat().st_mtime_ns, file) for file in files)
        return {int(file.name.removeprefix("rank_")): file.read_text(errors="replace") for _, file in found}


@contextmanager
def watching(*, ranks: int) -> Iterator[RankWatch]:
    """Let ranks that lightning starts inside the block be watched over, and let them watch their parent."""
    if ranks == 1:
        yield RankWatch()
    elif is_first_rank():
        with _as_parent() as watch:
            yield watch
    else:
        if FIRST_RANK in os.environ:  # lightning started it
            ends = (os.getppid(), int(os.environ[FIRST_RANK]))
            threading.Thread(target=_follow_parent, args=ends, daemon=True, name="parent-watch").start()
        yield RankWatch()


@contextmanager
def _as_parent() -> Iterator[RankWatch]:
    launcher: Any = importlib.import_module("lightning.pytorch.strategies.launchers.subprocess_script")
    theirs, folder = launcher._launch_process_observer, Path(tempfile.mkdtemp(prefix="txl_ranks_"))
    watch = RankWatch(folder)
    launcher._launch_process_observer = watch.begin
    os.environ |= {LAST_WORDS: str(folder), FIRST_RANK: str(os.getpid())}
    try:
        yield watch
    finally:
        watch.end(failed=False)
        launcher._launch_process_observer = theirs
        for name in (LAST_WORDS, FIRST_RANK):
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)


def _follow_parent(parent: int, first: int) -> None:
    """End when the first rank is gone: a collective might wait for it until its timeout.

    Args:
        parent: of this process when it began to look. If the first rank was gone by then it is another one.
        first: process of the first rank.
    """
    while os.getppid() == parent and _is_there(first):
        time.sleep(0.5)
    time.sleep(GRACE)
    print(f"error: the first rank, process {first}, is gone", file=sys.stderr, flush=True)
    os._exit(FAILED)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def tell(error: BaseException, said: str | None, watch: RankWatch) -> None:
    """Say on standard error why this rank fails: `said`, or whose death it is, or with a traceback.

    Args:
        error: what it failed with.
        said: one line for errors that are not the code's fault.
        watch: over the other ranks.
    """
    from txl_lightning.training.divergence import Diverged  # and with it torch

    if isinstance(error, Diverged):  # all ranks at once
        if is_first_rank():
            print(f"error: {said}", file=sys.stderr, flush=True)
        return
    # ranks that lightning starts inside an interactive job of SLURM's all have that one's SLURM_PROCID
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if os.environ.get(name)), None)
    _leave_words(error, rank)
    dead = watch.first_dead(within=2.0) if said is None else None
    found, prefix = dead or said or _lost(error, rank), "" if rank is None or dead else f"rank {rank}: "
    if found is None or os.environ.get("TXL_DEBUG") == "1":
        print(prefix + "".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
    if found is not None:
        print(f"error: {prefix}{found}", file=sys.stderr, flush=True)


def _lost(error: BaseException, rank: str | None) -> str | None:
    """What to say of an error that another rank's end or hanging causes."""
    text = " ".join(str(error).split())
    if rank is None or not any(words in text.lower() for words in LOST):
        return None
    return f"another rank is gone, or took longer than strategy.timeout_s; its own report says why ({text[:160]})"


def _leave_words(error: BaseException, rank: str | None) -> None:
    """Let the first rank know what this one failed with."""
    folder = os.environ.get(LAST_WORDS)
    if folder is not None and not is_first_rank() and _lost(error, rank) is None:
        with suppress(OSError):
            part = Path(folder, f".{rank}")
            part.write_text(traceback.format_exception_only(error)[-1].strip())
            part.replace(Path(folder, f"rank_{rank}"))
