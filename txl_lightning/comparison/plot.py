"""The plot of a comparison: quality against everything that it costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from txl_lightning.comparison.table import Row, quality

COSTS: dict[str, Callable[[Row], float]] = {
    "state per lane (KiB)": lambda row: row.entrant.state_bytes / 2**10,
    "training FLOPs per token (millions)": lambda row: row.flops.training / 1e6,
    "tokens per second": lambda row: statistics.fmean(row.values("tokens_per_second")),
    "peak memory (MiB)": lambda row: max(row.values("peak_bytes"), default=0) / 2**20,
    "parameters (millions)": lambda row: row.flops.parameters / 1e6,
}


def plot(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Write a PNG: every run's quality, and its mean against each cost with the deviation over runs."""
    rows, score = [row for row in rows if row.runs], quality(rows)
    asked = any(row.values("recall") for row in rows)
    figure = Figure(figsize=(17 if asked else 13, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(2, 4 if asked else 3).flatten()
    _draw_runs(panels[0], rows, score)
    if asked:
        _draw_recall(panels[-2], rows, score)
        panels[-1].axis("off")
    for panel, (name, cost) in zip(panels[1 : 1 + len(COSTS)], COSTS.items(), strict=True):
        for index, row in enumerate(rows):
            values = row.values(score)
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            panel.errorbar(cost(row), statistics.fmean(values), deviation, fmt="o", color=_color(index), capsize=3)
        panel.set_xlabel(name)
        panel.set_ylabel(f"test {score.replace('_', ' ')}")
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _draw_runs(panel: Any, rows: Sequence[Row], score: str) -> None:
    for index, row in enumerate(rows):
        values = row.values(score)
        panel.plot(values, [index] * len(values), "o", color=_color(index), alpha=0.6)
        panel.plot([statistics.fmean(values)], [index], "|", color="black", markersize=18)
    panel.set_yticks(range(len(rows)), [row.entrant.label for row in rows])
    panel.invert_yaxis()
    panel.set_xlabel(f"test {score.replace('_', ' ')}, each run and the mean")
    panel.grid(alpha=0.3)


def _draw_recall(panel: Any, rows: Sequence[Row], score: str) -> None:
    """Every run: do recall and quality move together?"""
    for index, row in enumerate(rows):
        found = [(run["recall"], run[score]) for run in row.runs.values() if "recall" in run]
        panel.plot([x for x, _ in found], [y for _, y in found], "o", color=_color(index), alpha=0.6)
    panel.axvline(next(value for row in rows for value in row.values("recall_by_chance")), color="grey", ls="--")
    panel.set_xlim(-0.03, 1.03)
    panel.set_xlabel("recall, each run; dashed: by chance")
    panel.set_ylabel(f"test {score.replace('_', ' ')}")
    panel.grid(alpha=0.3)


def _color(index: int) -> Any:
    return colormaps["tab20"](index % 20)
