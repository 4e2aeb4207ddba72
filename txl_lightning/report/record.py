"""What a run folder says, read for a report: configuration, facts, result, curves, pictures, texts.

Curves come from TensorBoard's event files or from the CSV logger's table, whichever the run has; of a step that was
logged twice, because a killed run made it again, the later entry counts.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from txl_lightning.config import Config
from txl_lightning.errors import ConfigError
from txl_lightning.training.run_folder import CONFIG, RESULT, read_facts

Curve = dict[int, float]
"""Value by optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What result.json says; figures that it holds none of are left out."""

    is_there: bool = False  # no while a run is under way
    figures: dict[str, float] = field(default_factory=dict)
    val: dict[str, float] = field(default_factory=dict)  # scores of validation
    stopped_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run."""

    path: Path
    name: str  # tells it from the other runs of the page
    config: Config
    facts: dict[str, Any]  # command, versions, platform; empty where they were not written
    result: Result
    curves: dict[str, Curve] = field(default_factory=dict)
    images: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # the latest of each tag: step and PNG
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)  # the latest of each tag


def read(path: Path, *, name: str) -> Record:
    """Everything a report shows of a run.

    Raises:
        ConfigError: the folder holds no run, or its configuration cannot be read.
    """
    config = read_config(path)
    tables, events = _tables(path), sorted(path.glob("events.out.tfevents.*"))
    logged = _read_events(path) if events else ({}, {}, {})
    curves = logged[0] or tables
    return Record(
        path=path,
        name=name,
        config=config,
        facts=read_facts(path),
        result=_result(path),
        curves={tag: dict(sorted(curve.items())) for tag, curve in sorted(curves.items())},
        images=logged[1],
        texts=logged[2],
    )


def read_config(path: Path) -> Config:
    """The run's configuration. Raises ConfigError: the folder holds no run, or it cannot be read."""
    try:
        return Config.from_dict(yaml.safe_load((path / CONFIG).read_text(encoding="utf-8")))
    except OSError as error:
        cure = "give the folder of a run, the one that holds config.yaml"
        raise ConfigError("runs", str(path), "holds no run", cure) from error
    except ConfigError as error:
        rule = f"{path / CONFIG} has {error.key}={error.value}: {error.rule}"
        raise ConfigError("runs", str(path), rule, "give another run") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError("runs", str(path), f"{path / CONFIG} cannot be read", "give another run") from error


def _result(path: Path) -> Result:
    try:
        found = json.loads((path / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Result()
    if not isinstance(found, dict):
        return Result()
    stopped = found.get("stopped_by")
    return Result(
        is_there=True,
        figures=_numbers(found),
        val=_numbers(found.get("val")),
        stopped_by=stopped if isinstance(stopped, str) else None,
    )


def _numbers(values: object) -> dict[str, float]:
    """The finite numbers among the values of a mapping."""
    found = values.items() if isinstance(values, dict) else ()
    return {name: one for name, one in found if type(one) in (int, float) and math.isfinite(one)}


def _tables(path: Path) -> dict[str, Curve]:
    """Curves of the CSV logger; what is no finite number, as in a line that was cut off, is passed over."""
    found: dict[str, Curve] = {}
    for row in _rows(path / "csv" / "metrics.csv"):
        step = _finite(row.get("step"))
        for tag, text in row.items():
            value = _finite(text) if tag not in ("step", "epoch", None) else None
            if step is not None and value is not None:
                found.setdefault(tag, {})[int(step)] = value
    return found


def _finite(text: object) -> float | None:
    try:
        value = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _rows(path: Path) -> Iterator[dict[str, str]]:
    if path.exists():
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            yield from csv.DictReader(line.replace("\0", "") for line in file)


def _read_events(path: Path) -> tuple[dict[str, Curve], dict[str, tuple[int, bytes]], dict[str, tuple[int, str]]]:
    """Curves, pictures and texts of TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second to import

    read = EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 1, "tensors": 1})
    read.Reload()
    tags = read.Tags()
    curves = {
        tag: {event.step: float(event.value) for event in read.Scalars(tag) if math.isfinite(event.value)}
        for tag in tags["scalars"]
    }
    images = {tag: (event.step, event.encoded_image_string) for tag in tags["images"] for event in read.Images(tag)}
    texts = {}
    for tag in tags["tensors"]:
        if tag.endswith("/text_summary"):
            event = read.Tensors(tag)[-1]
            texts[tag.removesuffix("/text_summary")] = (event.step, event.tensor_proto.string_val[0].decode("utf-8"))
    return curves, images, texts
