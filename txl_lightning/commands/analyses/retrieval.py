"""`txl analyze retrieval`: what a memory brings back."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from txl_lightning.build import check_vocabulary
from txl_lightning.commands.analyses.common import model_of
from txl_lightning.commands.evaluate import check_same_ids
from txl_lightning.commands.output import check_out, write_out
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.recall import RecallConfig
from txl_lightning.data.store import survey
from txl_lightning.evaluation.retrieval import Retrieval, measure_retrieval
from txl_lightning.options import AnalyzeOptions


def check(config: Config, options: AnalyzeOptions) -> None:
    """There is text with answers in it. Raises ConfigError."""
    assert options.ckpt is not None
    check_out(options.out)
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
    retrieval = measure_retrieval(config, model_of(config, options))
    show_retrieval(retrieval)
    write_out(options.out, retrieval.to_dict())


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
