"""What all code of a process shares, put right around a job: ranks, sys.argv, the environment, Hydra's globals."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from txl_lightning.ranks import is_first_rank


@contextmanager
def fresh_hydra() -> Iterator[None]:
    """Hydra as in a new process, errors as exceptions; afterwards as it was."""
    held, settings, full = GlobalHydra.instance().hydra, HydraConfig.instance().cfg, os.environ.get("HYDRA_FULL_ERROR")
    GlobalHydra.instance().clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = held, settings
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


@contextmanager
def replaced_argv(arguments: Sequence[str]) -> Iterator[None]:
    """Other arguments after the program's name."""
    kept, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        yield
    finally:
        sys.argv = kept


@contextmanager
def own_environment() -> Iterator[None]:
    """Take back what launching ranks leaves behind: the next job of a sweep would think that it was launched."""
    kept = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def leave_process_group() -> None:
    """Let the next job form a group of its own; its ranks are other processes."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        engine = sys.modules.get("deepspeed.comm")  # which has groups of its own noted
        owner = engine if engine is not None and engine.is_initialized() else distributed
        owner.destroy_process_group()


@contextmanager
def own_logging() -> Iterator[None]:
    """Take back what Hydra's --info does to the root logger."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Lightning's own words only where they warn: devices not found and tips about other products help nobody here."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # lightning 2.6 uses it in every loop, torch >= 2.13 deprecates it
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            # DeepSpeed 0.19 reduces with it, torch >= 2.13 deprecates it
            warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
            # the module knows: it leaves clipping to the engine
            warnings.filterwarnings("ignore", "Since DeepSpeed handles gradient clipping internally")
            # what is logged at an epoch's end is the same on all ranks already
            warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def first_rank_prints() -> Iterator[None]:
    """Silence standard output of all other ranks: they would say the same again."""
    if is_first_rank():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def printable(text: str) -> str:
    """The text with ? for what standard output cannot take: characters it does not know, bytes that are no text."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
