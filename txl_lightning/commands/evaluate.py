"""`txl eval`: score a split with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
from rich.console import Console
from rich.table import Table

from txl_lightning import registry
from txl_lightning.build import check_vocabulary
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.config import Config, EvalOptions
from txl_lightning.data.store import survey
from txl_lightning.evaluation.cached import Evaluation, evaluate
from txl_lightning.training.run_folder import write_json
from txl_lightning.training.trainer import check_devices


def check(config: Config, options: EvalOptions) -> None:
    """Everything about an evaluation that can be refused. Writes nothing; raises ConfigError."""
    if options.ckpt is None:
        raise options.refuse("ckpt", "is required", "give a checkpoint file or run folder: txl eval ckpt=PATH")
    if options.out is not None and not Path(options.out).expanduser().resolve().parent.is_dir():
        raise options.refuse("out", "its folder does not exist", "make the folder first")
    check_devices(config)
    load_checkpoint(options.ckpt, config)
    found = survey(config.data, training=False)
    found.require(options.split)
    check_vocabulary(config, found)


def run(config: Config, options: EvalOptions) -> None:
    """Evaluate, print the table, write the JSON if asked."""
    assert options.ckpt is not None
    model = load_checkpoint(options.ckpt, config)
    found = evaluate(config, model, split=options.split, callbacks=progress_bar(config))
    show(found)
    if options.out is not None:
        write_json(Path(options.out).expanduser(), found.to_dict())


def progress_bar(config: Config) -> list[L.Callback]:
    """The bar, if the configuration has it among its callbacks."""
    name = "progress_bar"
    return [registry.callbacks.get(name).build(config.callbacks[name])] if name in config.callbacks else []


def show(found: Evaluation) -> None:
    """Print a score with everything it depends on."""
    table = Table(title=f"{found.split} split", show_header=False)
    for name, value in found.scores.items():
        table.add_row(name, f"{value:.4f}")
    table.add_row("scored targets", f"{found.n_target:,}")
    table.add_row("segment_len", str(found.segment_len))
    table.add_row("memory", ", ".join(f"{key}={value}" for key, value in found.memory.items()))
    table.add_row("memory starts anew", f"each {found.memory_reset}")
    table.add_row("clamp_len", str(found.clamp_len))
    table.add_row("lanes", f"{found.n_lane} of {found.batch_size}")
    table.add_row("precision", found.precision)
    table.add_row("time", f"{found.seconds:.1f} s, {found.tokens_per_second:,.0f} tokens/s")
    Console().print(table)
