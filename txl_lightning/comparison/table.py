"""The results laid side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from txl_lightning.commands.output import bytes_in_words
from txl_lightning.comparison.flops import Flops
from txl_lightning.comparison.plan import Entrant

WIDTH = 200  # characters where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Row:
    """One of those compared with the figures of its runs, by seed; failed ones are missing.

    What the run of the same seed on the recall task found is among a run's figures.
    """

    entrant: Entrant
    flops: Flops
    runs: Mapping[int, Mapping[str, Any]]
    failed: Mapping[int, str] = field(default_factory=dict)
    failed_on_recall: Mapping[int, str] = field(default_factory=dict)

    def values(self, name: str) -> list[float]:
        """A figure of every run that has it."""
        return [run[name] for run in self.runs.values() if run.get(name) is not None]

    def against(self, first: Row, name: str) -> list[float]:
        """Differences to the first row's runs of the same seeds."""
        return [run[name] - first.runs[seed][name] for seed, run in self.runs.items() if seed in first.runs]

    def remark(self) -> str:
        """What the budget chose, and what a reader must know."""
        chosen = [f"{name}={value}" for name, value in self.entrant.chosen.items()]
        n_run = len(self.failed) + len(self.runs)
        failed = [f"{len(self.failed)} of {n_run} runs failed"] if self.failed else []
        if self.failed_on_recall:
            failed.append(f"{len(self.failed_on_recall)} of {n_run} runs on recall failed")
        return "; ".join([*chosen, *filter(None, [self.entrant.remark]), *failed])


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its title, and what a row shows there (the first row is given too)."""

    title: str
    cell: Callable[[Row, Row], str]


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of the table; a figure that `measure` returns needs one more line here to be shown."""
    bits = quality(rows)
    figures = [
        Column(title="test loss", cell=lambda row, _: spread(row.values("loss"), "{:.4f}")),
        Column(title=bits.replace("_", " "), cell=lambda row, _: spread(row.values(bits), "{:.4f}")),
        Column(title="against the first", cell=lambda row, first: spread(row.against(first, bits), "{:+.4f}")),
        *_recall(rows),
        Column(title="tokens", cell=lambda row, _: spread(row.values("tokens"), "{:,.0f}")),
        Column(title="tokens/s", cell=lambda row, _: spread(row.values("tokens_per_second"), "{:,.0f}")),
        Column(title="peak memory", cell=lambda row, _: _bytes(row.values("peak_bytes"))),
        Column(title="state per lane", cell=lambda row, _: bytes_in_words(row.entrant.state_bytes)),
        Column(title="parameters", cell=lambda row, _: f"{row.flops.parameters:,}"),
        Column(title="FLOPs/token", cell=lambda row, _: f"{row.flops.training:.3g}"),
        Column(title="chosen, remarks", cell=lambda row, _: row.remark()),
    ]
    return [Column(title="memory", cell=lambda row, _: row.entrant.label), *figures]


def _recall(rows: Sequence[Row]) -> list[Column]:
    """Right answers on the recall task, where runs have been asked."""
    chance = [value for row in rows for value in row.values("recall_by_chance")]
    if not chance:
        return []
    title = f"recall (chance {chance[0]:.1%})"
    return [Column(title=title, cell=lambda row, _: spread(row.values("recall"), "{:.1%}"))]


def quality(rows: Sequence[Row]) -> str:
    """The score that rows are ranked by: bits per unit of the text, else nats per token."""
    names = [name for row in rows for run in row.runs.values() for name in run if name.startswith("bits_per_")]
    return names[0] if names else "loss"


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation over runs."""
    if not values:
        return "none"
    mean = form.format(statistics.fmean(values))
    if len(values) == 1 or len(set(values)) == 1:
        return mean
    return f"{mean} ± {form.replace('+', '').format(statistics.stdev(values))}"


def _bytes(values: Sequence[float]) -> str:
    return bytes_in_words(int(max(values))) if values else "not known"


def show(rows: Sequence[Row], *, title: str) -> None:
    """Print the table; where the terminal is too narrow for a row of each, a column of each."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    shown = columns(rows)
    cells = [[column.title for column in shown], *([column.cell(row, rows[0]) for column in shown] for row in rows)]
    table = _table(cells, title=title)
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    turned = [list(row) for row in zip(*cells, strict=True)]
    console.print(table if needed <= console.width else _table(turned, title=title), markup=False)


def _table(cells: Sequence[Sequence[str]], *, title: str) -> Table:
    """Headings first; a cell is broken rather than cut."""
    table = Table(title=title)
    for heading in cells[0]:
        table.add_column(heading, overflow="fold")
    for row in cells[1:]:
        table.add_row(*row)
    return table


def to_dict(rows: Sequence[Row], *, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All of it as plain containers, with every run's figures."""
    return {**facts, "quality": quality(rows), "rows": [_row(row, rows[0]) for row in rows]}


def _row(row: Row, first: Row) -> dict[str, Any]:
    numbers = sorted({name for run in row.runs.values() for name, value in run.items() if type(value) in (int, float)})
    return {
        "label": row.entrant.label,
        "memory": row.entrant.config.memory.to_dict(),
        "chosen": row.entrant.chosen,
        "remark": row.remark(),
        "state_bytes": row.entrant.state_bytes,
        "parameters": row.flops.parameters,
        "forward_flops_per_token": row.flops.forward,
        "training_flops_per_token": row.flops.training,
        "mean": {name: statistics.fmean(row.values(name)) for name in numbers},
        "deviation": {name: statistics.stdev(row.values(name)) for name in numbers if len(row.values(name)) > 1},
        "loss_against_first": row.against(first, "loss"),
        "runs": {str(seed): dict(run) for seed, run in row.runs.items()},
        "failed": {str(seed): why for seed, why in row.failed.items()},
        "failed_on_recall": {str(seed): why for seed, why in row.failed_on_recall.items()},
    }
