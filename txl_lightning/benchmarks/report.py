"""The tables of `txl bench`, and all of it as plain containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from txl_lightning.benchmarks.huggingface import LABEL
from txl_lightning.benchmarks.timing import Timing
from txl_lightning.commands.output import bytes_in_words

TITLES = {
    "training": "training step",
    "evaluation": "evaluation, memory carried along",
    "decoding": "decoding, one lane token by token",
    "attention": "attention of one layer, forward and backward",
    "overhead": "trainer beside a bare loop",
    "data": "text to tokens to batches",
    "peak": "the device at its best",
}
LENGTHS = ("data.segment_len", "eval.segment_len")
SIZES = ("mem_len", "window", "n_tokens", "n_states")
LEGEND = (
    "spread: slowest and fastest repeat beside the median; peak: memory of a call above what was there before it; "
    "FLOPs: those a token needs, of the device's best; x hf: times the speed of Hugging Face's class"
)


def show(timings: Sequence[Timing], remarks: Sequence[str], machine: Mapping[str, Any]) -> None:
    """Print a table for each part, then what else is to be known."""
    console = Console()
    for part, title in TITLES.items():
        rows = [timing for timing in timings if timing.task.part == part]
        if rows:
            console.print(_table(title, rows))
    for remark in (*remarks, LEGEND):
        console.print(remark, markup=False, highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), markup=False, highlight=False)


def _table(title: str, rows: Sequence[Timing]) -> Table:
    shapes = {_shape(row.task.facts) for row in rows} - {""}
    several = len(shapes) > 1
    table = Table(title=title if several or not shapes else f"{title}, {shapes.pop()}")
    cells = [dict(_cells(row, shape=several)) | _ratio(row, rows) for row in rows]
    names = list(dict.fromkeys(name for row in cells for name in row))
    for name in names:
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for row in cells:
        table.add_row(*(row.get(name, "") for name in names))
    return table


def _cells(timing: Timing, *, shape: bool) -> Iterator[tuple[str, str]]:
    facts, unit, part = timing.task.facts, timing.task.unit, timing.task.part
    yield "", _name(timing)
    if shape:
        yield "shape", _shape(facts)
    divisor, name = {"FLOP": (1e9, "GFLOP/s"), "bytes": (1e6, "MB/s")}.get(unit, (1.0, f"{unit}/s"))
    yield name, _number(timing.rate / divisor)
    yield "spread", f"{timing.rates[0] / timing.rate - 1:+.0%} {timing.rates[-1] / timing.rate - 1:+.0%}"
    if unit == "tokens" and part != "data":
        yield "ms", f"{1e3 * timing.task.amount / timing.rate:.4g}"
    if timing.peak_bytes is not None and part in ("training", "evaluation", "attention"):
        yield "peak", bytes_in_words(timing.peak_bytes)
    if "state_bytes_per_lane" in facts:
        yield "state/lane", bytes_in_words(round(facts["state_bytes_per_lane"]))
    if "utilisation" in facts:
        yield "FLOPs", f"{facts['utilisation']:.1%}"


def _name(timing: Timing) -> str:
    """Whose it is and with how much memory."""
    keys = timing.task.facts.get("memory")
    schedule = ", layers" if timing.task.facts.get("schedule") == "layers" else ""
    if keys is None or timing.task.part in ("attention", "overhead"):
        return timing.task.label
    size = next((f" {keys[name]:,}" for name in SIZES if name in keys), "")
    return f"{timing.task.label}{size}{schedule}"


def _shape(facts: Mapping[str, Any]) -> str:
    if "B,H,T,M,K" in facts:
        return "B,H,T,M,K = " + ",".join(map(str, facts["B,H,T,M,K"]))
    length = next((facts[name] for name in LENGTHS if name in facts), "")
    return f"{facts['lanes']} x {length} tokens" if "lanes" in facts else ""


def _ratio(row: Timing, rows: Sequence[Timing]) -> dict[str, str]:
    """How many times faster than Hugging Face's class at the same sizes."""
    other = peer(row, rows)
    return {} if other is None else {"x hf": f"{row.rate / other.rate:.2f}"}


def peer(row: Timing, rows: Sequence[Timing]) -> Timing | None:
    """Their timing of the same part and memory; None: there is none, or it is theirs."""
    if row.task.label == LABEL:
        return None
    same = (
        other
        for other in rows
        if (other.task.label, other.task.part, other.task.facts.get("memory"))
        == (LABEL, row.task.part, row.task.facts.get("memory"))
    )
    return next(same, None)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
