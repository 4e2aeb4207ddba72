"""`txl analyze scores`: the loss of every token, aligned with its text."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
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
from txl_lightning.evaluation.losses import Nats, stretch_losses
from txl_lightning.evaluation.scores import WRITERS, rows, summary
from txl_lightning.options import AnalyzeOptions
from txl_lightning.ranks import is_first_rank

POINTS = 200  # of the plot


def check(config: Config, options: AnalyzeOptions) -> None:
    """There is a file to write, and text. Raises ConfigError."""
    assert options.ckpt is not None
    if options.to is None:
        raise options.refuse("to", "is required", "give the file for the losses: to=scores.jsonl")
    suffix = Path(options.to).suffix
    if suffix not in WRITERS:
        raise options.refuse("to", "is no kind of file that scores are written to", "let it end in .jsonl or .parquet")
    if suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            cure = "pip install 'txl-lightning[parquet]', or let it end in .jsonl"
            raise options.refuse("to", "writing Parquet needs pyarrow", cure) from error
    check_files(options)
    check_text(config, options, ckpt=options.ckpt)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Score, write the rows, print what they are."""
    assert options.to is not None
    data, tokens = text_of(config, options)
    losses = stretch_losses(config, model_of(config, options), tokens, separator=separator_of(data))
    file = Path(os.path.expanduser(options.to))
    if is_first_rank():
        WRITERS[file.suffix](file, rows(tokens, losses, data.vocab))
    found = summary(config, losses, split=options.split, fingerprint=data.meta.fingerprint, file=options.to)
    table = Table(title=f"losses of the {found.split} split", show_header=False)
    table.add_row("nats per token", f"{found.loss:.4f}")
    table.add_row("targets", f"{found.n_target:,}")
    table.add_row("written to", found.file)
    table.caption = settings(found.memory, segment_len=found.segment_len)
    curve = _smoothed(losses.nats)
    give(options, table, found.to_dict(), [Panel(x="token", y="nats per token", curves={"loss": curve})])


def _smoothed(nats: Nats) -> tuple[list[float], list[float]]:
    """Means over stretches of equal length (a few may be a token shorter), at most POINTS of them."""
    length = -(-len(nats) // POINTS)
    parts = np.array_split(nats, -(-len(nats) // length))
    ends = np.cumsum([len(part) for part in parts])
    return ends.tolist(), [float(part.mean()) for part in parts]
