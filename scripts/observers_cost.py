"""What the default observers cost on a CPU: time spent in each one's hooks during the default experiment.

    python scripts/observers_cost.py [--steps N] [KEY=VALUE ...]

Times are those of the main thread's processor, so that a busy machine slows both sides alike; shares are of the rest of
the run: training, two validations, closing. On a GPU work goes on behind the hooks, so compare `perf/tokens_per_second`
with and without them there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from txl_lightning import registry
from txl_lightning.commands.fit import fit
from txl_lightning.config import load
from txl_lightning.process import quiet_lightning

SPENT: Counter[str] = Counter()
"""Seconds in hooks by observer."""


def timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, its time noted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        found = hook(*args, **kwargs)
        SPENT[name] += time.thread_time() - start
        return found

    return call


def time_observers(names: list[str]) -> None:
    """Let every hook of these observers be timed."""
    for name in names:
        kind: Any = registry.callbacks.get(name).build
        for hook in [found for found in vars(kind) if found.startswith("on_")]:
            setattr(kind, hook, timed(name, getattr(kind, hook)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = [f"trainer.max_steps={args.steps}", f"trainer.val_check_interval={args.steps // 2}"]
    with tempfile.TemporaryDirectory() as folder, quiet_lightning():
        config = load([*steps, "trainer.accelerator=cpu", f"run_dir={Path(folder) / 'run'}", *args.overrides])
        time_observers(list(config.callbacks))
        start = time.thread_time()
        fit(config)
        rest = time.thread_time() - start - SPENT.total()
    for name, seconds in SPENT.most_common():
        print(f"{name:18} {seconds:7.2f} s  {100 * seconds / rest:6.2f} %")
    print(f"{'all':18} {SPENT.total():7.2f} s  {100 * SPENT.total() / rest:6.2f} %  of {rest:.1f} s", flush=True)


if __name__ == "__main__":
    main()
