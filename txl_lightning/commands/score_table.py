"""Scores of a split as a table: of one setting in rows, of several memory lengths a row for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from txl_lightning.errors import yaml_text
from txl_lightning.evaluation.cached import Evaluation
from txl_lightning.evaluation.confidence import Interval

Bound = tuple[Interval, Interval] | None
"""The interval of a loss, and that of its difference to the first setting's."""

LENGTH = "mem_len"


def show(found: Sequence[Evaluation], bounds: Sequence[Bound]) -> None:
    """Print scores with everything they depend on."""
    title = f"{found[0].split} split"
    pairs = enumerate(zip(found, bounds, strict=True))
    scores = [_scores(score, bound, first=index == 0) for index, (score, bound) in pairs]
    if len(found) == 1:
        time = f"{found[0].seconds:.1f} s, {found[0].tokens_per_second:,.0f} tokens/s"
        Console().print(_one(title, {**scores[0], **_settings(found[0], found[0].memory), "time": time}))
    else:
        Console().print(_several(title, scores, found))


def _scores(found: Evaluation, bound: Bound, *, first: bool) -> dict[str, str]:
    """Scores and their intervals by name; the first setting has none to differ from."""
    named = {name: f"{value:.4f}" for name, value in found.scores.items()}
    if bound is not None:
        own, difference = bound
        unit = "pieces of the text" if own.cut else "documents"
        named[f"loss, {own.level:.0%} over {own.units:,} {unit}"] = f"{own.low:.4f} to {own.high:.4f}"
        if not first:
            named["above the first length"] = f"{difference.low:+.4f} to {difference.high:+.4f}"
    return named


def _settings(found: Evaluation, memory: Mapping[str, Any]) -> dict[str, str]:
    """What a score depends on, by name."""
    named: dict[str, str | None] = {
        "scored targets": f"{found.n_target:,}",
        **{f"scored {unit}s": f"{count:,}" for unit, count in found.scored.items()},
        "segment_len": str(found.segment_len),
        "memory": _keys(memory),
        "memory starts anew": f"each {found.memory_reset}",
        "lanes begin": f"{found.warm} tokens early, unscored" if found.warm else None,
        "clamp_len": str(found.clamp_len),
        "same_length": None if found.same_length is None else f"every token sees {found.same_length} keys",
        "lanes": f"{found.n_lane} of {found.batch_size}",
        "precision": found.precision,
        "dynamic evaluation": None if found.dynamic is None else _keys(found.dynamic),
        "fingerprint of the text": found.data_fingerprint[:16],
    }
    return {name: value for name, value in named.items() if value is not None}


def _keys(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={yaml_text(value)}" for key, value in values.items())


def _one(title: str, named: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False)
    for name, value in named.items():
        table.add_row(name, value)
    return table


def _several(title: str, scores: Sequence[Mapping[str, str]], found: Sequence[Evaluation]) -> Table:
    """A row for each memory length; settings in which no two rows differ stand below."""
    settings = [_settings(one, {key: value for key, value in one.memory.items() if key != LENGTH}) for one in found]
    common = [name for name in settings[0] if len({row[name] for row in settings}) == 1]
    rows = [
        {LENGTH: yaml_text(one.memory[LENGTH]), **own, **rest, "seconds": f"{one.seconds:.1f}"}
        for one, own, rest in zip(found, scores, settings, strict=True)
    ]
    columns = [name for name in rows[-1] if name not in common]  # the first differs from no other
    table = Table(title=title, padding=(0, 0, 0, 1))  # seven columns in 80 characters
    table.caption = "\n".join(f"{name}: {settings[0][name]}" for name in common)
    table.caption_justify = "left"
    for name in columns:
        table.add_column(name.replace("_per_", " per "), justify="right")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in columns))
    return table
