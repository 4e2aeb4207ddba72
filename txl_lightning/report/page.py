"""The page: what was run, how it ended, what the memory did, and everything needed to run it again."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from txl_lightning.comparison.plan import state_bytes
from txl_lightning.report.panels import embedded, explained, sections
from txl_lightning.report.record import Record
from txl_lightning.report.tape import tape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1020px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; }
h2 { font-size: 1.2em; margin-top: 2.2em; border-bottom: 1px solid #ddd; }
h3 { font-size: 1em; }
table { border-collapse: collapse; font-size: 13px; }
td, th { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid #eee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
.pictures { display: flex; flex-wrap: wrap; gap: 10px; }
.pictures img { width: 325px; }
img.wide { max-width: 100%; }
figure { margin: 1em 0; }
figure img { max-width: 100%; }
.note { color: #555; font-size: 13px; }
svg { width: 100%; height: auto; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 12px; white-space: pre-wrap; }
details { margin: .6em 0; }
summary { cursor: pointer; }
"""


def page(records: Sequence[Record], *, title: str, pictures: Mapping[str, bytes] | None = None) -> str:
    """One HTML document that needs no other file.

    Args:
        records: the runs, in order.
        title: heading.
        pictures: PNG files to show above the curves, by caption: the plot of a comparison, say.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", _summary(records)]
    parts += [
        f"<h2>{html.escape(caption)}</h2>{embedded(data, kind='png', alt=caption).replace('<img', '<img class=wide')}"
        for caption, data in (pictures or {}).items()
    ]
    parts.append(_tapes(records))
    for question, drawn in sections(records).items():
        words = explained(question, records)
        note = f"<p class=note>{html.escape(words)}</p>" if words else ""
        parts.append(f'<h2>{question}</h2>{note}<div class="pictures">{"".join(drawn)}</div>')
    parts += [_shown(records), _differences(records), _again(records)]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    body = "\n".join(part for part in parts if part)
    return f"<!doctype html>\n<html lang=en><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"


def _summary(records: Sequence[Record]) -> str:
    scores = sorted({name for record in records for name in record.result.val})
    headings = ["run", "memory", "state per lane", "parameters", "steps", "tokens"]
    headings += [f"validation {name.replace('_', ' ')}" for name in scores] + ["tokens/s", "ended"]
    rows = []
    for record in records:
        result = record.result
        row = [record.name, memory_in_words(record), f"{state_bytes(record.config) / 1024:,.1f} KiB"]
        row += [_number(result.figures.get(name), "{:,}") for name in ("parameters", "steps", "tokens")]
        row += [_number(result.val.get(name), "{:.4f}") for name in scores]
        row += [_number(result.figures.get("tokens_per_second"), "{:,.0f}"), _ended(record)]
        rows.append(row)
    return table(headings, rows)


def _ended(record: Record) -> str:
    if not record.result.is_there:
        return "not yet: no result.json"
    return f"stopped by {record.result.stopped_by}" if record.result.stopped_by else "at its last step"


def memory_in_words(record: Record) -> str:
    """As `cache, mem_len 64`: the strategy and the sizes it has."""
    keys = record.config.memory.to_dict()
    sizes = [
        f"{name} {value}" for name, value in keys.items() if isinstance(value, int) and not isinstance(value, bool)
    ]
    return ", ".join([record.config.memory.name, *sizes])


def _tapes(records: Sequence[Record]) -> str:
    """One picture for each memory; runs that have the same share it."""
    by_picture: dict[str, list[str]] = {}
    for record in records:
        by_picture.setdefault(tape(record.config), []).append(record.name)
    several = len(by_picture) > 1
    parts = []
    for drawn, names in by_picture.items():
        heading = f"<h3>{html.escape(', '.join(names))}</h3>" if several else ""
        parts.append(heading + drawn)
    return "<h2>What a segment can see</h2>" + "".join(parts)


def _shown(records: Sequence[Record]) -> str:
    """Pictures and texts that callbacks logged, the latest of each."""
    parts = []
    for record in records:
        who = f", {record.name}" if len(records) > 1 else ""
        for tag, (step, data) in record.images.items():
            caption = f"{tag}{who}, step {step}"
            drawn = embedded(data, kind="png", alt=caption)
            parts.append(f"<figure>{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>")
        for tag, (step, text) in record.texts.items():
            parts.append(f"<p>{html.escape(f'{tag}{who}, step {step}')}</p><pre>{html.escape(text)}</pre>")
    note = (
        "<p class=note>Attention: a map per head, a row for each query, a column for each key; left of the red line is "
        "memory, oldest first.</p>"
    )
    images = any(tag.startswith("attention/") for record in records for tag in record.images)
    return f"<h2>Pictures and samples</h2>{note if images else ''}{''.join(parts)}" if parts else ""


def _differences(records: Sequence[Record]) -> str:
    """The keys in which runs differ."""
    flat = [flattened(record.config.to_dict()) for record in records]
    names = sorted({name for own in flat for name in own})
    differing = [
        name for name in names if len({json.dumps(own.get(name, "—")) for own in flat}) > 1 and name != "run_dir"
    ]
    if not differing:
        return ""
    rows = [[name, *(_plain(own.get(name, "—")) for own in flat)] for name in differing]
    return "<h2>In which keys they differ</h2>" + table(["key", *(record.name for record in records)], rows)


def _again(records: Sequence[Record]) -> str:
    parts = ["<h2>To run it again</h2>"]
    for record in records:
        facts = record.facts
        typed, installed = facts.get("command"), facts.get("versions")
        command = shlex.join(["txl", *map(str, typed[1:] if isinstance(typed, list) else ["fit"])])
        versions = ", ".join(f"{name} {version}" for name, version in _mapping(installed).items())
        lines = [
            command,
            f"seed {record.config.seed}",
            facts.get("platform"),
            f"Python {facts.get('python', '?')}",
            versions,
        ]
        about = html.escape("\n".join(str(line) for line in lines if line))
        config = html.escape(yaml.safe_dump(record.config.to_dict(), sort_keys=False))
        parts.append(
            f"<h3>{html.escape(record.name)}</h3><pre>{about}</pre>"
            f"<details><summary>the whole configuration</summary><pre>{config}</pre></details>"
        )
    return "".join(parts)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; cells that are numbers stand to the right."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=number' if cell[:1].isdigit() else ''}>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flattened(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else form.format(value)
