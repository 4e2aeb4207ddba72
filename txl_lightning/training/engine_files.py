"""DeepSpeed's engine writes its files so that a rank that cannot does not leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from txl_lightning.training import folders
from txl_lightning.training.trouble import system_error


def write(engine: Any, part: Path, given: Mapping[str, Any]) -> int | None:
    """Let the engine write its files into a folder. Every rank must call it, after the folder was made.

    In the midst of it the ranks wait for each other, so a file that cannot be written is noted and passed over.

    Returns:
        The system's number of what kept this rank from writing; None: all is written.
    """
    writer, copy_scripts, noted = engine.checkpoint_engine.save, engine._copy_recovery_script, []

    def save(state_dict: Any, path: str) -> None:
        # into an open file: by name torch writes it by itself, and does not say what the system said
        with open(path, "wb") as file:
            torch.save(state_dict, file)

    def noting(what: Callable[..., None]) -> Callable[..., None]:
        def passing(*args: Any, **keys: Any) -> None:
            try:
                what(*args, **keys)
            except (OSError, RuntimeError) as error:
                noted.append(number_of(error))

        return passing

    engine.checkpoint_engine.save, engine._copy_recovery_script = noting(save), noting(copy_scripts)
    try:
        engine.save_checkpoint(str(part), client_state=dict(given), tag=folders.TAG)
    except OSError as error:  # of the last file, which names the folder within; a wait follows
        noted.append(number_of(error))
        torch.distributed.barrier()
    finally:
        engine.checkpoint_engine.save, engine._copy_recovery_script = writer, copy_scripts
    return next(iter(noted), None)


def make(part: Path) -> int | None:
    """Make the folder on this rank; the system's number of what hindered it."""
    try:
        (part / folders.TAG).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return number_of(error)
    return None


def number_of(error: BaseException) -> int:
    """Raises the error if it is no trouble with the disk."""
    number = system_error(error)
    if number is None:
        raise error
    return number
