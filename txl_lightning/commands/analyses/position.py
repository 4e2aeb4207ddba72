"""`txl analyze position`: loss by position in the segment."""

from __future__ import annotations

from rich.table import Table

from txl_lightning.commands.analyses.common import (
    check_files,
    check_text,
    give,
    model_of,
    separator_of,
    settings,
    text_of,
)
from txl_lightning.commands.analyses.plot import Panel
from txl_lightning.config import Config
from txl_lightning.evaluation.place import ByPlace, measure_by_place
from txl_lightning.options import AnalyzeOptions


def check(config: Config, options: AnalyzeOptions) -> None:
    """There is text. Raises ConfigError."""
    assert options.ckpt is not None
    check_files(options)
    check_text(config, options, ckpt=options.ckpt)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Read with the memory and without it."""
    data, tokens = text_of(config, options)
    found = measure_by_place(
        config,
        model_of(config, options),
        tokens,
        separator=separator_of(data),
        split=options.split,
        data_fingerprint=data.meta.fingerprint,
    )
    table = Table(title=f"nats per token by position in the segment, {found.split} split")
    for name in ("position", "targets", "with memory", "without", "gain"):
        table.add_column(name, justify="right")
    for index in _shown(found):
        row = (found.n_target[index], found.loss[index], found.loss_without[index])
        table.add_row(str(found.place[index]), f"{row[0]:,}", *_cells(row[1], row[2]))
    table.add_section()
    table.add_row("all", f"{sum(found.n_target):,}", *_cells(found.mean, found.mean_without))
    table.caption = settings(found.memory, segment_len=found.segment_len)
    x = [float(place) for place in found.place]
    curves = {"with memory": (x, found.loss), "without: anew each segment": (x, found.loss_without)}
    give(options, table, found.to_dict(), [Panel(x="position in the segment", y="nats per token", curves=curves)])


def _shown(found: ByPlace) -> list[int]:
    """Places 1, 2, 4, 8, ... and the last."""
    last = len(found.place) - 1
    return sorted({2**k - 1 for k in range(20) if 2**k - 1 <= last} | {last})


def _cells(loss: float, without: float) -> list[str]:
    return [f"{loss:.4f}", f"{without:.4f}", f"{without - loss:+.4f}"]
