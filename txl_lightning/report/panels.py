"""Curves of one or several runs as pictures, one for each quantity, under the question it answers."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from txl_lightning.report.record import Curve, Record

QUESTIONS: dict[str, tuple[str, ...]] = {
    "How well does it predict?": ("val/", "train/", "test/"),
    "Does the memory help?": ("memory/benefit", "memory/probe", "val/loss_by_"),
    "What does the memory do?": ("memory/", "attention/"),
    "What does it cost?": ("perf/", "cost/"),
    "How does training go?": ("optim/", "warn/"),
    "Other curves": ("",),
}
"""Headings, and how the tags below them begin; a longer beginning wins."""

EXPLAINED: dict[str, dict[str, str]] = {
    "How well does it predict?": {
        r"/loss$": "Loss is in nats per token.",
        r"^val/": "Validation reads the whole split in lanes, with the memory carried along.",
    },
    "Does the memory help?": {
        r"/benefit/nats$": "benefit/nats: what the same weights lose on a few segments without their memory.",
        r"/benefit/content$": "benefit/content: what they lose with the memory of another text.",
        r"/benefit/": "Above 0 the memory helps.",
        r"/probe/": "probe: loss of the same segments with the memory, without it, and with another text's (swapped).",
        r"/loss_by_age/": "loss_by_age: by tokens since the lane last started anew.",
        r"/loss_by_position/": "loss_by_position: by place in the segment.",
    },
    "What does the memory do?": {
        r"^memory/attention/": "attention: the share that goes to memory.",
        r"/attention_by_age/": "attention_by_age: how it is spread over the tokens' age.",
        r"/fill": "fill: share of the memory in use.",
        r"/norm": "norm: size of what it holds.",
        r"/update": "update: what a segment changed, as a share of that.",
        r"/resets$": "resets: lanes and documents that started anew.",
        r"/terms/": "terms: shares of the parts of the scores.",
    },
    "What does it cost?": {
        r"^cost/scores$": "scores: attention scores of a lane so far.",
        r"/full_scores$": "full_scores: those of full attention over the same text.",
        r"/effective_context$": "effective_context: tokens that can matter.",
        r"/context_share$": "context_share: the same as a share of the text so far.",
        r"/context_per_layer$": "context_per_layer: the same in spans of one layer alone.",
    },
    "How does training go?": {
        r"/grad_norm": "grad_norm: before clipping.",
        r"/loss_rise$": "loss_rise: nats by which the loss lies above its lowest point.",
        r"/grad_ratio$": "grad_ratio: the gradient's norm in multiples of its median.",
    },
}
"""What the pictures of a heading mean, for somebody who sees them first: a sentence for each kind of tag."""

TOGETHER = ("memory/probe/", "memory/benefit/", "memory/terms/")
"""Beginnings of tags that are one picture where there is one run."""

LAYER = re.compile(r"/L(\d+)(?=/|$)")
BUCKET = re.compile(r"/(\d+)(-\d+)?$")
POINTS = 600  # of a curve that are drawn at most


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a picture."""

    label: str
    x: Sequence[Any]
    y: Sequence[float]
    color: Any


def sections(records: Sequence[Record]) -> dict[str, list[str]]:
    """For each question its pictures as HTML; questions without an answer are left out."""
    drawn: dict[str, list[str]] = {question: [] for question in QUESTIONS}
    for title in sorted({title_of(tag, records) for record in records for tag in shown(record)}, key=_place):
        drawn[question_of(title)].append(picture(title, records))
    return {question: pictures for question, pictures in drawn.items() if pictures}


def explained(question: str, records: Sequence[Record]) -> str:
    """What the pictures under a heading mean: only those that are there."""
    tags = {tag for record in records for tag in shown(record) if question_of(title_of(tag, records)) == question}
    sentences = EXPLAINED.get(question, {}).items()
    return " ".join(words for pattern, words in sentences if any(re.search(pattern, tag) for tag in tags))


def shown(record: Record) -> list[str]:
    """Tags of a run's curves, without those that say the same as another: perplexities of bytes, closing figures."""
    said = {tag for tag in record.curves if tag.endswith("/ppl") and f"{tag[:-4]}/bits_per_byte" in record.curves}
    return [tag for tag in record.curves if tag not in said and not tag.startswith("final/")]


def title_of(tag: str, records: Sequence[Record]) -> str:
    """The picture that a tag belongs to: layers are one, buckets are one, and of one run what belongs together."""
    if len(records) == 1 and tag.startswith(TOGETHER):
        return tag.rpartition("/")[0]
    return BUCKET.sub("", LAYER.sub("", tag))


def _place(title: str) -> tuple[int, str]:
    """Figures of validation stand before those of training."""
    return (0 if title.startswith("val/") else 1, title)


def question_of(title: str) -> str:
    """The heading that a picture belongs under."""
    starts = {start: question for question, words in QUESTIONS.items() for start in words}
    return starts[max((start for start in starts if title.startswith(start)), key=len)]


def picture(title: str, records: Sequence[Record]) -> str:
    """One picture as an `<img>`: over optimizer steps, or over buckets."""
    own = [{tag: record.curves[tag] for tag in shown(record) if title_of(tag, records) == title} for record in records]
    over_buckets = any(BUCKET.search(tag) for curves in own for tag in curves)
    lines = _over_buckets(own, records) if over_buckets else _over_steps(own, records)
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for line in lines:
        marker = "o" if len(line.x) < 20 else None
        axes.plot(line.x, line.y, color=line.color, label=_literal(line.label), lw=1.3, marker=marker, ms=3)
    axes.set_title(_literal(title), fontsize=9)
    axes.set_xlabel("tokens" if over_buckets else "optimizer step", fontsize=8)
    axes.tick_params(labelsize=8)
    if over_buckets:
        axes.tick_params(axis="x", labelrotation=60, labelsize=6)
    else:
        axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    if 1 < len(lines) <= 12:
        axes.legend(fontsize=7)
    return as_image(figure, alt=f"{title} over {'tokens' if over_buckets else 'optimizer steps'}")


def _over_steps(own: Sequence[Mapping[str, Curve]], records: Sequence[Record]) -> list[Line]:
    """A line per run, or of one run a line per layer or part."""
    if len(records) == 1:
        tags = sorted(own[0], key=_layer_of)
        labels = [f"layer {_layer_of(tag)[0]}" if LAYER.search(tag) else tag.rpartition("/")[2] for tag in tags]
        shades = [colormaps["viridis"](place / max(1, len(tags) - 1) * 0.9) for place in range(len(tags))]
        return [_line(label, own[0][tag], color) for label, tag, color in zip(labels, tags, shades, strict=True)]
    return [
        _line(record.name, mean_of(list(curves.values())), colormaps["tab10"](index % 10))
        for index, (record, curves) in enumerate(zip(records, own, strict=True))
        if curves
    ]


def _line(label: str, curve: Curve, color: Any) -> Line:
    steps = thinned(list(curve))
    return Line(label=label, x=steps, y=[curve[step] for step in steps], color=color)


def thinned(steps: Sequence[int]) -> list[int]:
    """About POINTS of them at most, evenly, with the first and the last."""
    kept = list(steps)[:: -(-len(steps) // POINTS) or 1]
    return kept if not kept or kept[-1] == steps[-1] else [*kept, steps[-1]]


def _literal(text: str) -> str:
    """For matplotlib: no formula, and no name that a legend leaves out."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def _layer_of(tag: str) -> tuple[int, str]:
    found = LAYER.search(tag)
    return (int(found[1]) if found else -1, tag)


def _over_buckets(own: Sequence[Mapping[str, Curve]], records: Sequence[Record]) -> list[Line]:
    """Of each run the latest figures; of one run the first ones too."""
    lines = []
    for index, (record, curves) in enumerate(zip(records, own, strict=True)):
        tags = sorted(curves, key=lambda tag: int(BUCKET.search(tag)[1]))  # type: ignore[index]
        steps = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
        chosen = [steps[0], steps[-1]] if len(records) == 1 and len(steps) > 1 else steps[-1:]
        for place, step in enumerate(chosen):
            label = f"step {step}" if len(records) == 1 else record.name
            color = colormaps["tab10"]((place if len(records) == 1 else index) % 10)
            names = [BUCKET.search(tag)[0][1:] for tag in tags]  # type: ignore[index]
            lines.append(Line(label=label, x=names, y=[curves[tag][step] for tag in tags], color=color))
    return lines


def mean_of(curves: Sequence[Curve]) -> Curve:
    """The mean over curves of the steps that all of them have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in steps}


def as_image(figure: Figure, *, alt: str) -> str:
    """The figure inside the page."""
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": alt}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return embedded(file.getvalue(), kind="svg+xml", alt=alt)


def embedded(data: bytes, *, kind: str, alt: str) -> str:
    """An `<img>` that needs no other file."""
    return f'<img alt="{html.escape(alt)}" src="data:image/{kind};base64,{base64.b64encode(data).decode("ascii")}">'
