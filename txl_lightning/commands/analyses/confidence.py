"""`txl analyze confidence`: how sure a mean loss is, and the difference between checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.analyses.common import check_files, check_text, give, separator_of, text_of
from txl_lightning.commands.analyses.group import check_own_settings, check_vocabularies, configs_of, members_of
from txl_lightning.commands.analyses.plot import Panel
from txl_lightning.config import Config
from txl_lightning.data.vocab import Tokens
from txl_lightning.evaluation.confidence import LEAST, LEVEL, intervals, units_of
from txl_lightning.evaluation.losses import Nats, stretch_losses
from txl_lightning.options import AnalyzeOptions
from txl_lightning.training.trainer import device_kind


def check(config: Config, options: AnalyzeOptions) -> None:
    """The checkpoints score the same targets, of which there are enough. Raises ConfigError."""
    paths, configs = members_of(options), configs_of(config, options)
    check_own_settings(config, paths[0])
    check_vocabularies(paths, options)
    check_files(options)
    check_text(config, options, ckpt=paths[0], least=LEAST + 1)
    for path, own in zip(paths, configs, strict=True):
        load_checkpoint(path, own)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Score the text with each checkpoint, draw documents, print the intervals."""
    data, tokens = text_of(config, options)
    separator, paths = separator_of(data), members_of(options)
    losses = [
        _losses(path, own, tokens, separator) for path, own in zip(paths, configs_of(config, options), strict=True)
    ]
    units, cut = units_of(tokens, separator=separator)
    means, apart = intervals(losses, units, cut=cut, resamples=options.samples, seed=config.seed)
    found: list[dict[str, Any]] = []
    for path, nats, mean, difference in zip(paths, losses, means, apart, strict=True):
        row = {"ckpt": path, "loss": {"mean": float(nats.mean()), **mean.to_dict()}}
        if found:
            row["difference"] = {"mean": float((nats - losses[0]).mean()), **difference.to_dict()}
        found.append(row)
    result = {
        "members": found,
        "split": options.split,
        "n_target": len(tokens) - 1,
        "seed": config.seed,
        "data_fingerprint": data.meta.fingerprint,
    }
    give(options, _table(result), result, [_panel(found)])


def _losses(path: str, config: Config, tokens: Tokens, separator: int | None) -> Nats:
    model = load_checkpoint(path, config).to(device_kind(config)).eval()
    return stretch_losses(config, model, tokens, separator=separator).nats.astype(np.float64)


def _table(result: dict[str, Any]) -> Table:
    first = result["members"][0]["loss"]
    drawn = f"{first['units']:,} {'pieces' if first['cut'] else 'documents'}"
    table = Table(
        title=f"nats per token of the {result['split']} split, with {LEVEL:.0%} intervals over {drawn}",
        caption=f"{first['resamples']:,} draws; differences are those of the same draws",
    )
    for heading in ("checkpoint", "loss", "interval", "against the first", "interval"):
        table.add_column(heading)
    for row in result["members"]:
        cells = [f"{row['loss']['mean']:.4f}", _range(row["loss"], "")]
        if "difference" in row:
            cells += [f"{row['difference']['mean']:+.4f}", _range(row["difference"], "+")]
        table.add_row(row["ckpt"], *cells)
    return table


def _range(found: dict[str, float], sign: str) -> str:
    return f"{found['low']:{sign}.4f} to {found['high']:{sign}.4f}"


def _panel(found: list[dict[str, Any]]) -> Panel:
    """Each checkpoint's interval as a line of its own, with the mean on it."""
    curves = {
        row["ckpt"]: ([row["loss"][name] for name in ("low", "mean", "high")], [float(index)] * 3)
        for index, row in enumerate(found)
    }
    return Panel(x="nats per token", y="checkpoint", curves=curves)
