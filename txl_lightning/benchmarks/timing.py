"""Tasks timed side by side: they take turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from txl_lightning.comparison import peak

LEAST_SECONDS = 0.2
"""A repeat is made of as many calls as take about so long."""

WARM = {"cuda": 4}
"""Calls before anything is timed, one where nothing is said: a captured graph is compiled, tried and recorded first."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something that can be done again and again.

    Attributes:
        part: of the benchmark, as in `what`.
        label: whose it is.
        run: does it once.
        amount: units that one call does.
        unit: what is counted.
        group: calls that belong together, one of which may cost more than the others.
        facts: what else is known about it.
    """

    part: str
    label: str
    run: Callable[[], object]
    amount: float
    unit: str = "tokens"
    group: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Timing:
    """What was found for a task."""

    task: Task
    calls: int = 0  # of one repeat
    seconds: list[float] = field(default_factory=list)  # of one call, the mean of each repeat
    peak_bytes: int | None = None  # highest point of a call above what was there before it; None: the system is silent

    @property
    def rate(self) -> float:
        """Units per second, of the median repeat."""
        return self.task.amount / statistics.median(self.seconds)

    @property
    def rates(self) -> list[float]:
        """Units per second of each repeat, lowest first."""
        return sorted(self.task.amount / seconds for seconds in self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "part": self.task.part,
            "label": self.task.label,
            "unit": self.task.unit,
            "per_second": self.rate,
            "slowest": self.rates[0],
            "fastest": self.rates[-1],
            "seconds": statistics.median(self.seconds),
            "repeats": self.seconds,
            "calls_per_repeat": self.calls,
            "peak_bytes": self.peak_bytes,
            **self.task.facts,
        }


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""What seconds are: those of the wall, or those that this process's threads computed (for busy machines)."""


def interleave(tasks: Sequence[Task], *, rounds: int, kind: str, clock: str = "wall") -> list[Timing]:
    """Time every task `rounds` times, one repeat of each before the next of any.

    Args:
        tasks: warmed up here.
        rounds: repeats.
        kind: of the device: "cpu", "cuda" or "mps".
        clock: one of `CLOCKS`.
    """
    found = [Timing(task=task) for task in tasks]
    for timing in found:
        if kind in WARM:  # what a graph holds from then on is no longer told
            timing.peak_bytes = _peak_of(timing.task, kind, calls=timing.task.group * WARM[kind])
        else:
            _timed(timing.task, timing.task.group, kind, clock)
            timing.peak_bytes = _peak_of(timing.task, kind, calls=1)
        once = _timed(timing.task, timing.task.group, kind, clock)
        timing.calls = timing.task.group * max(1, round(LEAST_SECONDS / once))
    for _ in range(rounds):
        for timing in found:
            timing.seconds.append(_timed(timing.task, timing.calls, kind, clock) / timing.calls)
    return found


def _timed(task: Task, calls: int, kind: str, clock: str) -> float:
    """Seconds of so many calls."""
    now = CLOCKS[clock]
    synchronise(kind)
    start = now()
    for _ in range(calls):
        task.run()
    synchronise(kind)
    return now() - start


def _peak_of(task: Task, kind: str, *, calls: int) -> int | None:
    peak.start(kind)
    before = peak.read(kind)
    for _ in range(calls):
        task.run()
    synchronise(kind)
    after = peak.read(kind)
    return None if before is None or after is None else max(0, after - before)


def synchronise(kind: str) -> None:
    """Wait until the device has done what it was told."""
    if kind == "cuda":
        torch.cuda.synchronize()
    elif kind == "mps":
        torch.mps.synchronize()
