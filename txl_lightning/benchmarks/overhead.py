"""What Lightning and the handling of state, checks and logging cost: steps of `txl fit` beside those of a bare loop.

Both train the same model with the same optimizer on the same segments. The bare loop runs inside a callback of the
trainer, so the two take turns.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import numpy as np

from txl_lightning.benchmarks.timing import CLOCKS, LEAST_SECONDS, Task, Timing, synchronise
from txl_lightning.benchmarks.workloads import common, drawn, one_pass, optimizer_step
from txl_lightning.config import Config
from txl_lightning.data.lanes import LaneLoader
from txl_lightning.training.compiling import training_forward
from txl_lightning.training.datamodule import counted
from txl_lightning.training.module import TransformerXLModule
from txl_lightning.training.optim import build_optimizer
from txl_lightning.training.trainer import build_trainer, device_kind
from txl_lightning.types import Batch

SEGMENTS = 64  # of a pass


def overhead(config: Config, *, rounds: int, clock: str = "wall") -> list[Timing]:
    """Timings of the bare loop and of the trainer, a step each."""
    lanes, n_token = config.data.batch_size, config.data.segment_len
    facts, kind = common(config, "data.segment_len", n_token, lanes), device_kind(config)

    def task(label: str) -> Task:
        return Task(part="overhead", label=label, run=lambda: None, amount=lanes * n_token, facts=facts)

    long = replace(config.trainer, max_steps=10**9, num_sanity_val_steps=0, val_check_interval=10**9)
    settled = replace(config, trainer=one_pass(long))
    turns = _Turns(
        settled, [Timing(task=task("bare loop")), Timing(task=task("trainer"))], rounds=rounds, kind=kind, clock=clock
    )
    trainer = build_trainer(settled, callbacks=[turns])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no")
        trainer.fit(TransformerXLModule(settled), train_dataloaders=_loader(config))
    return turns.found


def share(found: list[Timing]) -> float:
    """What the trainer takes of a step beyond the bare loop, as a share of the bare step: median over the repeats."""
    bare, whole = (timing.seconds for timing in found)
    shares = sorted(b / a - 1 for a, b in zip(bare, whole, strict=True))
    return shares[len(shares) // 2]


def _loader(config: Config) -> LaneLoader:
    """The loader of `txl fit` over random tokens."""
    lanes, n_token = config.data.batch_size, config.data.segment_len
    tokens = drawn(config, lanes=1, n_token=lanes * n_token * SEGMENTS + 1)[0].cpu().numpy()
    return LaneLoader(
        tokens.astype(np.uint16 if config.model.vocab_size < 2**16 else np.uint32),
        segment_len=n_token,
        lanes=lanes,
        used_lanes=lanes,
        rank=0,
        world_size=1,
        reset=config.memory.reset,
        separator=0,
        num_workers=config.data.num_workers,
        key="data.batch_size",
    )


class _Turns(L.Callback):
    """Times the trainer's steps, and between two repeats as many of a bare loop."""

    def __init__(self, config: Config, found: list[Timing], *, rounds: int, kind: str, clock: str) -> None:
        self.config, self.found, self.rounds, self.kind = config, found, rounds, kind
        self.now = CLOCKS[clock]
        self.steps, self.left, self.start = 1, 2, 0.0  # of a repeat; until its end; when it began

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        other = TransformerXLModule(self.config).to(pl_module.device)
        other.load_state_dict(pl_module.state_dict())
        self.model = other.model.train()
        self.optimizer = build_optimizer(self.model.named_parameters(), self.config.optim, fuse=True)
        self.forward = training_forward(self.model, self.config.trainer, kind=self.kind)
        state = self.model.init_state(self.config.data.batch_size, dtype=pl_module._state_dtype())  # type: ignore[operator]
        self.state = self.forward.kept(state, place={})
        self.text = self._segments(pl_module)
        self._bare(2)
        self.start = self.now()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.left -= 1
        if self.left:
            return
        synchronise(self.kind)
        seconds = (self.now() - self.start) / self.steps
        if self.found[1].calls:  # else these were to warm up
            self.found[1].seconds.append(seconds)
            self.found[0].seconds.append(self._bare(self.steps) / self.steps)
        else:
            self.steps = max(1, round(LEAST_SECONDS / seconds))
            for timing in self.found:
                timing.calls = self.steps
        trainer.should_stop = len(self.found[1].seconds) >= self.rounds
        self.left, self.start = self.steps, self.now()

    def _segments(self, pl_module: L.LightningModule) -> Iterator[Batch]:
        cutoffs = self.config.model.cutoffs
        loaded = [counted(batch, cutoffs=cutoffs) if cutoffs else batch for batch in _loader(self.config)]
        batches = [pl_module.transfer_batch_to_device(batch, pl_module.device, 0) for batch in loaded]
        return itertools.cycle(batches)

    def _bare(self, steps: int) -> float:
        """Seconds of so many steps."""
        start = self.now()
        for _ in range(steps):
            new = optimizer_step(self.forward.read, self.optimizer, next(self.text), self.state, self.config)
            self.state = self.forward.kept(new, place=self.state)
        synchronise(self.kind)
        return self.now() - start
