"""What ends a run for reasons outside the code, told in one line with its cure: memory and disk run out."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from txl_lightning.checkpoints import FOLDER, LAST
from txl_lightning.config import Config
from txl_lightning.training.divergence import Diverged
from txl_lightning.training.run_folder import go_on

OUT_OF_MEMORY = ("t allocate memory", "not enough memory", "out of memory", "alloc_failed", "cannot allocate memory")
"""What torch's allocators say, on CPU and GPU, in small letters."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)


class NotWritten(RuntimeError):
    """A file of the run cannot be written: disk full, read-only or no permission. What was there is untouched."""


def explain(error: BaseException, config: Config, *, training: bool) -> str | None:
    """One line for an error that is not a fault of the code; None for any other.

    Args:
        error: what was raised.
        config: that of the run.
        training: and not an evaluation, whose keys are others.
    """
    if isinstance(error, (NotWritten, Diverged)):
        return str(error)
    if isinstance(error, OSError) and error.errno in (*DISK_FULL, *NO_ACCESS):
        path = Path(os.fsdecode(error.filename or config.run_dir or "a file"))
        run = Path(config.run_dir) if training and config.run_dir else None
        return f"{path} cannot be written: {os.strerror(error.errno)}; {_cure(error.errno, path, run)}"
    if is_out_of_memory(error):
        found = str(error).strip().splitlines()
        said = next((line for line in found if "allocate" in line), found[0] if found else "no memory left")
        cure = what_saves_memory(config) if training else _smaller_evaluation(config)
        return f"out of memory ({said.strip()}); {cure}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    wanted = isinstance(error, (RuntimeError, OSError))
    return wanted and any(words in str(error).lower() for words in OUT_OF_MEMORY)


def what_saves_memory(config: Config) -> str:
    """What to turn first, with the values that are: what leaves the result as it is comes before what changes it."""
    first = [] if config.model.checkpointing else ["model.checkpointing=true (now false)"]
    chunks = getattr(config.trainer, "lane_chunks", None)
    if chunks is not None and chunks < config.data.batch_size:
        first.append(f"a higher trainer.lane_chunks={chunks}")
    smaller = [f"data.batch_size={config.data.batch_size}", f"data.segment_len={config.data.segment_len}"]
    mem_len = getattr(config.memory, "mem_len", 0)
    smaller += [f"memory.mem_len={mem_len}"] if mem_len else []
    before = f"set {' or '.join(first)}, which train the same; else " if first else ""
    return f"{before}lower {' or '.join(smaller)}; dry_run=true tells what a setting needs"


def _smaller_evaluation(config: Config) -> str:
    sizes = [f"eval.batch_size={config.eval_batch_size}", f"eval.segment_len={config.eval_segment_len}"]
    mem_len = getattr(config.memory, "mem_len", 0)
    return f"lower {' or '.join([*sizes, *([f'memory.mem_len={mem_len}'] if mem_len else [])])}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that cannot be written, why, and what to do.

    Raises:
        NotWritten: the disk is full, or the folder may not be written to.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = system_error(error)
        if cause is None:
            raise
        raise NotWritten(cannot_be_written(path, cause)) from error


def cannot_be_written(path: Path, cause: int) -> str:
    """That a file of a run cannot be, and what to do. `cause`: the system's number of it."""
    return f"{path} cannot be written: {os.strerror(cause)}; {_cure(cause, path, _run_of(path))}"


def names_its_file(method: Callable[..., None]) -> Callable[..., None]:
    """For a method (self, content, path, ...): the file is named if it cannot be written. Raises NotWritten."""

    @functools.wraps(method)
    def named(self: Any, content: Any, path: Any, *rest: Any, **keys: Any) -> None:
        with writing(Path(path)):
            method(self, content, path, *rest, **keys)

    return named


def system_error(error: BaseException | None) -> int | None:
    """The system's number for a full disk or a lack of permission; torch's writer wraps its own error around it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (*DISK_FULL, *NO_ACCESS):
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _cure(cause: int, path: Path, run: Path | None) -> str:
    """What to do, and how a run goes on then, if it is one."""
    cure = f"make room{_room(path)}" if cause in DISK_FULL else "give this user the right to write there"
    if run is None:
        return cure
    saved = (run / FOLDER / LAST).exists()
    again = f"go on with {go_on(run)}" if saved else "give the same command again with resume=auto"
    return f"what was there before is whole; {cure}, then {again}"


def _room(path: Path) -> str:
    try:
        return f" ({shutil.disk_usage(path.parent).free:,} bytes are free)"
    except OSError:
        return ""


def _run_of(path: Path) -> Path:
    """The run's folder that a file belongs to: the file stands in it or one folder deeper."""
    return path.parent.parent if path.parent.name == FOLDER else path.parent
