"""`txl analyze sliding`: cached evaluation against the sliding window without cache."""

from __future__ import annotations

from rich.table import Table

from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.analyses.common import check_files, check_text, give, text_of
from txl_lightning.commands.analyses.plot import Panel
from txl_lightning.config import Config, ConfigError
from txl_lightning.evaluation.sliding import Pace, measure_sliding, tokens_needed, with_cache
from txl_lightning.memory.cache import CacheConfig
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import AnalyzeOptions
from txl_lightning.training.trainer import device_kind


def check(config: Config, options: AnalyzeOptions) -> None:
    """The memory is a cache that can be compared, and there is text enough. Raises ConfigError."""
    assert options.ckpt is not None
    memory = config.memory
    if not isinstance(memory, CacheConfig):
        rule = "a sliding window has no counterpart of what this memory keeps"
        raise ConfigError("memory", memory.name, rule, "give a checkpoint that was trained with memory=cache")
    if memory.cold != "absent":
        raise memory.refuse("cold", "a sliding window has no empty slots to read", "set memory.cold=absent")
    if memory.reuse_len is not None:
        raise memory.refuse("reuse_len", "memory then has gaps that no window has", "set memory.reuse_len=null")
    if memory.reset != "epoch":
        raise memory.refuse("reset", "windows do not look where text starts anew", "set memory.reset=epoch")
    if min(options.lengths, default=0) < 2:
        raise options.refuse("lengths", "must hold numbers of tokens, 2 or more each", "for example lengths=[800,1800]")
    with options.said_of({"memory.mem_len": "lengths"}):
        for length in options.lengths:
            with_cache(config, length)
    check_files(options)
    least = tokens_needed(max(options.lengths), segment_len=config.eval_segment_len)
    check_text(config, options, ckpt=options.ckpt, least=least)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Measure both ways at each length."""

    def load(wanted: Config) -> TransformerXL:
        assert options.ckpt is not None
        return load_checkpoint(options.ckpt, wanted).to(device_kind(wanted)).eval()

    _, tokens = text_of(config, options)
    found = measure_sliding(config, load, tokens, lengths=options.lengths, windows=options.windows, split=options.split)
    table = Table(
        title=f"cache against sliding window, segments of {found.segment_len}, {found.device}",
        caption="ms per token in one lane; nats of the same targets; differ: most where both see the same context",
        padding=(0, 0, 0, 1),  # nine columns in 80 characters
    )
    for name in ("length", "cache", "window", "faster", "paper", "loss", "window's", "differ", "targets"):
        table.add_column(name, justify="right")
    for pace in found.paces:
        table.add_row(*_cells(pace))
    x = [float(pace.length) for pace in found.paces]
    published = [(float(pace.length), pace.published) for pace in found.paces if pace.published]
    curves = {"here": (x, [pace.speedup for pace in found.paces])}
    if published:
        curves["paper"] = ([length for length, _ in published], [value for _, value in published])
    times = {
        "cache": (x, [1e3 * pace.cached_seconds for pace in found.paces]),
        "window": (x, [1e3 * pace.sliding_seconds for pace in found.paces]),
    }
    panels = [
        Panel(x="attention length (tokens)", y="speed-up", curves=curves),
        Panel(x="attention length (tokens)", y="ms per token", curves=times, log_y=True),
    ]
    give(options, table, found.to_dict(), panels)


def _cells(pace: Pace) -> list[str]:
    return [
        f"{pace.length:,}",
        f"{1e3 * pace.cached_seconds:.3g}",
        f"{1e3 * pace.sliding_seconds:.3g}",
        f"{pace.speedup:,.0f}x",
        f"{pace.published:,.0f}x" if pace.published else "",
        f"{pace.cached_loss:.4f}",
        f"{pace.sliding_loss:.4f}",
        f"{pace.difference:.0e}",
        str(pace.n_same),
    ]
