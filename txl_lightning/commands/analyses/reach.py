"""`txl analyze reach`: how far back a memory reaches."""

from __future__ import annotations

import math

import torch
from rich.console import Console
from rich.table import Table

from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.output import JSON, check_out, write_out
from txl_lightning.config import Config
from txl_lightning.errors import yaml_text
from txl_lightning.evaluation.reach import Reach, measure_reach
from txl_lightning.model.architectures import make_model
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import AnalyzeOptions


def check(config: Config, options: AnalyzeOptions) -> None:
    """The result can be written. Raises ConfigError."""
    check_out(options.out, begins=JSON)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Measure, print, and write the JSON if asked."""
    reach = measure_reach(config, _model(config, options), segments=options.segments)
    show_reach(reach, trained=options.ckpt is not None)
    write_out(options.out, reach.to_dict())


def _model(config: Config, options: AnalyzeOptions) -> TransformerXL:
    """The checkpoint's, or one with random weights."""
    if options.ckpt is not None:
        return load_checkpoint(options.ckpt, config)
    torch.manual_seed(config.seed)
    return make_model(config)


def show_reach(found: Reach, *, trained: bool) -> None:
    """Print how far back a token matters, and what the memory's design says."""
    table = Table(title="reach from a segment's first token", show_header=False)
    more = " (the farthest that was tried)" if found.to_the_end else ""
    table.add_row("measured", f"{found.tokens:,} tokens{more}")
    table.add_row("formula", formula_in_words(found.formula))
    table.add_row("tried", f"{found.tried:,} tokens: {found.segments} segments of {found.segment_len}")
    table.add_row("memory", ", ".join(f"{key}={yaml_text(value)}" for key, value in found.memory.items()))
    table.add_row("layers", str(found.n_layer))
    table.add_row("weights", "of the checkpoint" if trained else "random")
    Console().print(table)


def formula_in_words(formula: float | None) -> str:
    """As the table shows it."""
    if formula is None:
        return "none known"
    return "unbounded: a state is carried on" if formula == math.inf else f"{int(formula):,} tokens"
