"""Curves of one or several runs as pictures, one for each quantity, under the question it answers."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from txl_lightning.report.record import Curve, Record

QUESTIONS: dict[str, tuple[str, ...]] = {
    "How well does it predict?": ("val", "train", "test", "loss"),
    "Does the memory help?": ("memory_benefit", "benefit", "loss_by_position", "loss_by_age"),
    "What does the memory do?": ("memory", "attention"),
    "What does it cost?": ("perf", "cost", "throughput"),
    "How does training go?": ("optim", "gradients", "grad"),
    "Other curves": (),
}
"""Headings, and the first words of the tags below them."""

LAYER = re.compile(r"/L(\d+)(?=/|$)")
POINTS = 600  # of a curve that are drawn at most


def sections(records: Sequence[Record]) -> dict[str, list[str]]:
    """For each question its pictures as HTML; questions without an answer are left out."""
    quantities = sorted({LAYER.sub("", tag) for record in records for tag in record.curves}, key=_place)
    drawn: dict[str, list[str]] = {question: [] for question in QUESTIONS}
    for quantity in quantities:
        if not quantity.startswith("final/"):
            drawn[question_of(quantity)].append(picture(quantity, records))
    return {question: pictures for question, pictures in drawn.items() if pictures}


def _place(quantity: str) -> tuple[int, str]:
    """Figures of validation stand before those of training."""
    return (0 if quantity.startswith("val/") else 1, quantity)


def question_of(quantity: str) -> str:
    """The heading that a tag without its layer belongs under."""
    first = quantity.partition("/")[0]
    return next((question for question, words in QUESTIONS.items() if first in words), "Other curves")


def picture(quantity: str, records: Sequence[Record]) -> str:
    """One quantity over optimizer steps as an `<img>`: a line per run, or per layer where there is one run."""
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    lines = _lines(quantity, records)
    for label, curve, color in lines:
        steps = list(curve)[:: max(1, len(curve) // POINTS)]
        axes.plot(steps, [curve[step] for step in steps], color=color, label=label, lw=1.3, marker=_marker(steps))
    axes.set_title(quantity, fontsize=9)
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if 1 < len(lines) <= 12:
        axes.legend(fontsize=7)
    return as_image(figure, alt=f"{quantity} over optimizer steps")


def _lines(quantity: str, records: Sequence[Record]) -> list[tuple[str, Curve, Any]]:
    """Label, curve and colour."""
    found = []
    for index, record in enumerate(records):
        own = {tag: curve for tag, curve in record.curves.items() if LAYER.sub("", tag) == quantity}
        if len(records) == 1 and len(own) > 1:
            layers = sorted(own, key=lambda tag: int(LAYER.search(tag)[1]) if LAYER.search(tag) else -1)  # type: ignore[index]
            for place, tag in enumerate(layers):
                layer = LAYER.search(tag)
                color = colormaps["viridis"](place / max(1, len(layers) - 1) * 0.9)
                found.append((f"layer {layer[1]}" if layer else tag, own[tag], color))
        elif own:
            found.append((record.name, mean_of(list(own.values())), colormaps["tab10"](index % 10)))
    return found


def mean_of(curves: Sequence[Curve]) -> Curve:
    """The mean over curves of the steps that all of them have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in steps}


def _marker(steps: Sequence[int]) -> str | None:
    """Few points are shown as such; a single one would be invisible as a line."""
    return "o" if len(steps) < 6 else None


def as_image(figure: Figure, *, alt: str) -> str:
    """The figure inside the page."""
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": alt}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return embedded(file.getvalue(), kind="svg+xml", alt=alt)


def embedded(data: bytes, *, kind: str, alt: str) -> str:
    """An `<img>` that needs no other file."""
    return f'<img alt="{html.escape(alt)}" src="data:image/{kind};base64,{base64.b64encode(data).decode("ascii")}">'
