"""Ranks as the environment tells of them, before any of them is set up; and lanes shared among them."""

from __future__ import annotations

import os

from txl_lightning.errors import ConfigError

RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
"""Environment variables of which a process other than the first has one above 0."""


def is_first_rank() -> bool:
    """Whether this process is the one that checks, prints, and makes folders and files."""
    return all(int(os.environ.get(name) or 0) == 0 for name in RANKS)


def ranks_started() -> int:
    """How many ranks somebody else than lightning starts, one by one."""
    return max(int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "SLURM_NTASKS"))


def check_lanes(lanes: int, *, ranks: int, key: str) -> None:
    """Each rank gets as many lanes as the others.

    Args:
        lanes: over all ranks.
        key: the setting that says how many, for the message.

    Raises:
        ConfigError: they do not divide; the cure names the nearest numbers that do.
    """
    if lanes % ranks:
        fewer = lanes // ranks * ranks
        near = " or ".join(str(number) for number in (fewer, fewer + ranks) if number)
        raise ConfigError(key, lanes, f"must divide into {ranks} ranks", f"set it to {near}")
