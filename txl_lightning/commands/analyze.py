"""`txl analyze reach|retrieval`: how far back a memory reaches, and what it brings back."""

from __future__ import annotations

import math

import torch
from rich.console import Console
from rich.table import Table

from txl_lightning.build import check_vocabulary
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.evaluate import check_same_ids
from txl_lightning.commands.output import check_out, write_out
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.recall import RecallConfig
from txl_lightning.data.store import survey
from txl_lightning.evaluation.reach import Reach, measure_reach
from txl_lightning.evaluation.retrieval import Retrieval, measure_retrieval
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import AnalyzeOptions
from txl_lightning.training.trainer import device_kind


def check(config: Config, options: AnalyzeOptions) -> None:
    """Everything about an analysis that can be refused. Writes nothing; raises ConfigError."""
    check_out(options.out)
    if options.ckpt is not None:
        load_checkpoint(options.ckpt, config)
    if options.action == "retrieval":
        check_retrieval(config, options)


def check_retrieval(config: Config, options: AnalyzeOptions) -> None:
    """There are weights, and text with answers in it. Raises ConfigError."""
    if options.ckpt is None:
        cure = "train one with txl fit experiment=recall and give ckpt=PATH"
        raise options.refuse("ckpt", "retrieval needs trained weights", cure)
    if options.segments is not None:
        raise options.refuse("segments", "is of txl analyze reach only", "leave it out; data.distance says how far")
    if not isinstance(config.data, RecallConfig):
        rule = "this text asks for nothing that was shown before"
        raise ConfigError("data", config.data.name, rule, "set data=recall, and train with it")
    if config.data.test_episodes % config.eval_batch_size:
        rule = f"must divide data.test_episodes={config.data.test_episodes}, so that lanes begin with an episode"
        raise ConfigError(config.eval_batch_key, config.eval_batch_size, rule, "change one of them")
    found = survey(config.data, training=False)
    check_vocabulary(config, found)
    check_same_ids(config, found, ckpt=options.ckpt)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Measure, print, and write the JSON if asked."""
    if options.action == "reach":
        reach = measure_reach(config, _model(config, options), segments=options.segments)
        show_reach(reach, trained=options.ckpt is not None)
        write_out(options.out, reach.to_dict())
    else:
        model = _model(config, options).to(device_kind(config))
        retrieval = measure_retrieval(config, model)
        show_retrieval(retrieval)
        write_out(options.out, retrieval.to_dict())


def _model(config: Config, options: AnalyzeOptions) -> TransformerXL:
    """The checkpoint's, or one with random weights."""
    if options.ckpt is not None:
        return load_checkpoint(options.ckpt, config)
    torch.manual_seed(config.seed)
    return TransformerXL(config)


def show_reach(found: Reach, *, trained: bool) -> None:
    """Print how far back a token matters, and what the memory's design says."""
    table = Table(title="reach from a segment's first token", show_header=False)
    more = " (the farthest that was tried)" if found.to_the_end else ""
    table.add_row("measured", f"{found.tokens:,} tokens{more}")
    table.add_row("formula", formula_in_words(found.formula))
    table.add_row("tried", f"{found.tried:,} tokens: {found.segments} segments of {found.segment_len}")
    table.add_row("memory", ", ".join(f"{key}={value}" for key, value in found.memory.items()))
    table.add_row("layers", str(found.n_layer))
    table.add_row("weights", "of the checkpoint" if trained else "random")
    Console().print(table)


def formula_in_words(formula: float | None) -> str:
    """As the table shows it."""
    if formula is None:
        return "none known"
    return "unbounded: a state is carried on" if formula == math.inf else f"{int(formula):,} tokens"


def show_retrieval(found: Retrieval) -> None:
    """Print recall and loss side by side."""
    table = Table(title=f"retrieval, {found.split} split", show_header=False)
    table.add_row("answers right", f"{found.accuracy:.1%} of {found.n_answer:,}")
    table.add_row("by chance", f"{found.chance:.1%}")
    table.add_row("nats per answer", f"{found.answer_loss:.4f}")
    table.add_row("nats per token, all targets", f"{found.loss:.4f}")
    table.add_row("distance", f"{found.distance} segments of {found.segment_len}, {found.pairs} pairs")
    table.add_row("memory", ", ".join(f"{key}={value}" for key, value in found.memory.items()))
    Console().print(table)
