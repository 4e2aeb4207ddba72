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


def check_chunks(lanes: int, *, ranks: int, chunks: int) -> None:
    """Each rank's lanes divide into chunks of equal size.

    Args:
        lanes: over all ranks, which they divide into.
        chunks: of each rank.

    Raises:
        ConfigError: they do not; the cure names the nearest numbers of either that do.
    """
    own, step = lanes // ranks, ranks * chunks
    if own % chunks == 0:
        return
    divisors = [number for number in range(1, own + 1) if own % number == 0]
    near = [max(number for number in divisors if number < chunks), *[n for n in divisors if n > chunks][:1]]
    sizes = [number for number in (lanes // step * step, lanes // step * step + step) if number]
    rule = f"must divide the {own} lanes of each rank (data.batch_size={lanes} over {ranks})"
    cure = f"set it to {' or '.join(map(str, near))}, or data.batch_size to {' or '.join(map(str, sizes))}"
    raise ConfigError("trainer.lane_chunks", chunks, rule, cure)


def chunks_for_fewer(*, lanes: int, at_most: int) -> int:
    """The fewest chunks that lanes divide into with no more than so many lanes in each."""
    return next(number for number in range(1, lanes + 1) if lanes % number == 0 and lanes // number <= at_most)
