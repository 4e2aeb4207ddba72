"""A corpus and a model small enough to train in a second, and a way to see every training loss."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from txl_lightning.commands import fit as fit_command
from txl_lightning.config import Config, load

MODEL = [
    "model.n_layer=2",
    "model.d_model=32",
    "model.n_head=2",
    "model.d_head=16",
    "model.d_inner=64",
    "model.init_std=0.02",
]
RUN = [
    "data.segment_len=16",
    "data.batch_size=4",
    "optim.lr=3e-3",
    "optim.warmup_steps=5",
    "trainer.max_steps=20",
    "trainer.precision=32-true",
    "trainer.accelerator=cpu",
    "callbacks=none",
    "trainer.log_every_n_steps=5",
    "trainer.num_sanity_val_steps=0",
    "trainer.val_check_interval=1.0",
]


def write_corpus(path: Path, *, n_byte: int = 4000, seed: int = 0) -> Path:
    """Words from a short list, the same on every machine."""
    rng = random.Random(seed)
    words = "the a memory segment reads writes layer of token lane and keeps what came before it".split()
    text = ""
    while len(text) < n_byte:
        text += rng.choice(words) + rng.choice(["  ", " ", " ", ".\n"])
    path.write_text(text[:n_byte])
    return path


def tiny_config(tmp_path: Path, *overrides: str) -> Config:
    """A run of 20 steps over a 4 kB file; `tmp_path/run` is its folder."""
    corpus = tmp_path / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    base = ["data=text", f"data.path={corpus}", f"run_dir={tmp_path / 'run'}", *MODEL, *RUN]
    typed = [item.partition("=")[0] for item in overrides]
    return load([item for item in base if item.partition("=")[0] not in typed] + list(overrides))


class Losses(L.Callback):
    """Every training loss, exactly as the step returned it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].item())  # a segment's share of its step: they add up to the mean


class StopAt(L.Callback):
    """Ends training after an optimizer step, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def train(config: Config, monkeypatch: Any) -> tuple[list[float], fit_command.Fitted]:
    """Run `txl fit`'s own code and watch its losses."""
    seen, build = Losses(), fit_command.build_trainer
    monkeypatch.setattr(
        fit_command, "build_trainer", lambda *args, callbacks, **kw: build(*args, callbacks=[*callbacks, seen], **kw)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in a fixed order
    try:
        fitted = fit_command.fit(config)
    finally:
        torch.set_num_threads(threads)
        monkeypatch.undo()
    return seen.values, fitted
