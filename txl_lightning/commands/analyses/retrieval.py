"""`txl analyze retrieval`: what a memory brings back."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from txl_lightning.build import check_vocabulary
from txl_lightning.checkpoints import read_checkpoint
from txl_lightning.commands.analyses.common import check_files, give, model_of, settings
from txl_lightning.commands.analyses.plot import Panel
from txl_lightning.commands.evaluate import check_same_ids
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.episodes import EpisodesConfig
from txl_lightning.data.passkey import PasskeyConfig
from txl_lightning.data.store import survey
from txl_lightning.data.vocab import Vocab, from_dict
from txl_lightning.errors import yaml_text
from txl_lightning.evaluation.passkey import check_spelling, measure_passkey
from txl_lightning.evaluation.retrieval import Retrieval, measure_grid, measure_retrieval
from txl_lightning.options import AnalyzeOptions


def check(config: Config, options: AnalyzeOptions) -> None:
    """There is text with answers in it. Raises ConfigError."""
    assert options.ckpt is not None
    check_files(options)
    if options.plot is not None and options.task == "corpus":
        raise options.refuse("plot", "task=corpus finds one figure", "leave it out, or set task=grid")
    if options.task == "passkey_text":
        check_spelling(_vocab_of(options))
        return
    if options.task == "grid":
        _check_grid(config, options)
    _check_corpus(config, options)
    if options.task == "corpus" and config.data.test_episodes % config.eval_batch_size:  # type: ignore[attr-defined]
        rule = f"must divide data.test_episodes={config.data.test_episodes}, so that lanes begin with an episode"  # type: ignore[attr-defined]
        raise ConfigError(config.eval_batch_key, config.eval_batch_size, rule, "change one of them")


def _vocab_of(options: AnalyzeOptions) -> Vocab:
    assert options.ckpt is not None
    saved = read_checkpoint(options.ckpt, weights=False)["txl_lightning"].get("vocab")
    if saved is None:
        raise options.refuse("ckpt", "has no vocabulary that says what text is", "give one that txl fit wrote")
    return from_dict(saved)


def _check_corpus(config: Config, options: AnalyzeOptions) -> None:
    assert options.ckpt is not None
    if not isinstance(config.data, EpisodesConfig):
        rule = "this text asks for nothing that was shown before"
        raise ConfigError("data", config.data.name, rule, "set data=recall, and train with it")
    found = survey(config.data, training=False)
    check_vocabulary(config, found)
    check_same_ids(config, found, ckpt=options.ckpt)


def _check_grid(config: Config, options: AnalyzeOptions) -> None:
    if not isinstance(config.data, PasskeyConfig):
        cure = "give a checkpoint of txl fit experiment=passkey"
        raise ConfigError("data", config.data.name, "task=grid hides the needles of data=passkey", cure)
    least = -(-(2 * config.data.needle_len + 1) // config.data.segment_len)
    if min(options.grid_segments, default=0) < least:
        rule = f"a needle and its question need {least} segments"
        raise options.refuse("grid_segments", rule, "for example grid_segments=[1,2,4,8]")


def run(config: Config, options: AnalyzeOptions) -> None:
    """Measure, print, and write what was asked for."""
    model = model_of(config, options)
    if options.task == "corpus":
        found = measure_retrieval(config, model)
        give(options, table_of(found), found.to_dict(), [])
        return
    how = {"depths": options.depths, "needles": options.needles}
    if options.task == "grid":
        grid = measure_grid(config, model, segments=options.grid_segments, **how)
        shares = {(cell.length, cell.depth): cell.whole for cell in grid.cells}
        _give_grid(options, grid, shares, chance=grid.whole_chance)
    else:
        lengths = [count * config.eval_segment_len for count in options.grid_segments]
        text = measure_passkey(config, model, _vocab_of(options), lengths=lengths, **how)
        shares = {(cell.length, cell.depth): cell.right for cell in text.cells}
        _give_grid(options, text, shares, chance=text.chance)


def table_of(found: Retrieval) -> Table:
    """Recall and loss side by side."""
    table = Table(title=f"retrieval, {found.split} split of {found.task}", show_header=False)
    table.add_row("answers right", f"{found.accuracy:.1%} of {found.n_answer:,}")
    table.add_row("by chance", f"{found.chance:.1%}")
    if found.whole_chance != found.chance:
        table.add_row("all of an episode", f"{found.whole:.1%}")
        table.add_row("by chance", f"{found.whole_chance:.2g}")
    table.add_row("nats per answer", f"{found.answer_loss:.4f}")
    table.add_row("nats per token, all targets", f"{found.loss:.4f}")
    details = found.details
    if found.task == "recall":
        table.add_row("distance", f"{details['distance']} segments of {found.segment_len}, {details['pairs']} pairs")
    else:
        shown = ", ".join(f"{key}={value}" for key, value in details.items())
        table.add_row("episode", f"{shown}, segments of {found.segment_len}")
    table.add_row("memory", ", ".join(f"{key}={yaml_text(value)}" for key, value in found.memory.items()))
    return table


def _give_grid(options: AnalyzeOptions, found: Any, shares: dict[tuple[int, float], float], *, chance: float) -> None:
    """Lengths by depths, the worst depth of each, and the plot."""
    table = Table(
        title=f"needles found, of {found.needles} each; by chance {chance:.2g}",
        caption=settings(found.memory, segment_len=found.segment_len),
    )
    depths = sorted({depth for _, depth in shares})
    for name in ("tokens", *(f"{depth:.0%}" for depth in depths), "worst"):
        table.add_column(name, justify="right")
    for length, worst in found.worst.items():
        row = [f"{shares[length, depth]:.0%}" for depth in depths]
        table.add_row(f"{length:,}", *row, f"{worst:.0%}")
    curves = {f"{length:,} tokens": (depths, [shares[length, depth] for depth in depths]) for length in found.worst}
    panel = Panel(x="depth of the needle: 0 first, 1 last", y="found", curves=curves, levels={"chance": chance})
    give(options, table, found.to_dict(), [panel])
