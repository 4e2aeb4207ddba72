"""Curves of an analysis as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes with its curves."""

    x: str  # label of the axis
    y: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]  # label -> x and y of its points
    levels: Mapping[str, float] = field(default_factory=dict)  # label -> height of a dashed line
    log: bool = False  # the x axis
    log_y: bool = False
    whole_x: bool = False  # the x axis counts something


def draw(panels: Sequence[Panel], path: Path, *, title: str) -> None:
    """Write the panels side by side."""
    figure = Figure(figsize=(1 + 6 * len(panels), 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, panel: Panel) -> None:
    for label, (x, y) in panel.curves.items():
        axes.plot(x, y, marker="o" if len(x) < 100 else None, markersize=4, label=label)
    for label, height in panel.levels.items():
        axes.axhline(height, color="grey", linestyle="--", label=label)
    if panel.log:
        axes.set_xscale("log", base=2)
    if panel.log_y:
        axes.set_yscale("log")
    if panel.whole_x and not panel.log:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(alpha=0.3)
    if len(panel.curves) + len(panel.levels) > 1:
        axes.legend()
