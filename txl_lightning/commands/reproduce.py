"""`txl reproduce`: the commands of a published result, its score, and what it takes at a measured speed."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from txl_lightning.commands.output import JSON, check_out, write_out
from txl_lightning.config import Config, load
from txl_lightning.errors import suggest
from txl_lightning.options import ReproduceOptions
from txl_lightning.published import PUBLISHED
from txl_lightning.training.run_folder import CONFIG, RESULT


@functools.cache
def experiment(name: str) -> Config:
    """The configuration of an experiment as it is."""
    return load([f"experiment={name}"])


def check(config: Config, options: ReproduceOptions) -> None:
    """Refuse a result that is not known and a speed that was not measured. Raises ConfigError."""
    check_out(options.out, begins=JSON)
    if options.name is not None and options.name not in PUBLISHED:
        raise options.refuse("name", "nothing was published under this name", suggest(options.name, PUBLISHED))
    if options.name is None and (options.speed or options.speed_from):
        given = "speed" if options.speed else "speed_from"
        raise options.refuse(given, "says how fast one experiment trains", "name it: txl reproduce NAME")
    if options.speed and options.speed_from:
        raise options.refuse("speed", "contradicts speed_from", "give one of them")
    if options.name is not None:
        measured_speed(options, experiment(options.name))


def run(config: Config, options: ReproduceOptions) -> None:
    """Print one result, or the list of all."""
    if options.name is None:
        rows = [summary(name) for name in PUBLISHED]
        show_list(rows)
        write_out(options.out, rows)
        return
    found = describe(options)
    show(found)
    write_out(options.out, found)


def summary(name: str) -> dict[str, Any]:
    """Name, published score, metric, source and parameters of one experiment."""
    known, model = PUBLISHED[name], experiment(name).model
    return {
        "name": name,
        "score": known.score,
        "metric": known.metric,
        "source": known.source,
        "parameters": model.num_params(),
    }


def describe(options: ReproduceOptions) -> dict[str, Any]:
    """All that `txl reproduce NAME` says, as plain containers."""
    assert options.name is not None
    config = experiment(options.name)
    speed = measured_speed(options, config)
    tokens = config.trainer.segments_of_run() * config.data.segment_len * config.data.batch_size
    return {
        **summary(options.name),
        "commands": commands(options.name),
        "steps": config.trainer.max_steps,
        "training_tokens": tokens,
        "tokens_per_second": speed,
        "device_hours": tokens / speed / 3600 if speed else None,
        "notes": list(PUBLISHED[options.name].notes),
    }


def commands(name: str) -> list[str]:
    """From the benchmark's files to the score."""
    test = " ".join(PUBLISHED[name].test)
    return [
        f"txl data prepare experiment={name} data.path=PATH",
        f"txl fit experiment={name} data.path=PATH run_dir=runs/{name}",
        f"txl eval ckpt=runs/{name} split=test {test}".rstrip(),
    ]


def measured_speed(options: ReproduceOptions, config: Config) -> float | None:
    """Training tokens per second of one device, typed or measured by a run; None if it is not known.

    Raises:
        ConfigError: `speed_from` is no finished run of this model with these lengths.
    """
    if options.speed_from is None:
        return options.speed
    folder = Path(os.path.expanduser(options.speed_from))
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        measured = Config.from_dict(yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")))
        speed = float(result["tokens_per_second"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        rule = f"is no folder of a finished run with {RESULT} and {CONFIG}"
        raise options.refuse("speed_from", rule, "give the run_dir of txl fit") from error
    same = (measured.model, measured.memory, measured.data.segment_len) == (
        config.model,
        config.memory,
        config.data.segment_len,
    )
    if not same or speed <= 0:
        rule = f"did not train the model, memory and segments of {options.name}"
        raise options.refuse("speed_from", rule, f"measure with: {measuring(str(options.name))}")
    return speed / (measured.trainer.devices * measured.trainer.num_nodes)


def measuring(name: str) -> str:
    """A short run that measures the speed."""
    return f"txl fit experiment={name} data.path=PATH trainer.max_steps=50 run_dir=speed"


def show_list(rows: list[dict[str, Any]]) -> None:
    """Print every result in one line each."""
    table = Table("experiment", "published", "source", "parameters", title="published results")
    for row in rows:
        table.add_row(row["name"], _score(row), row["source"], f"{row['parameters']:,}")
    Console().print(table, markup=False)
    print("txl reproduce NAME prints the commands of one of them")


def show(found: dict[str, Any]) -> None:
    """Print one result: commands that can be copied, score, cost, traps."""
    print(f"{found['name']}: {_score(found)} ({found['source']})")
    print(
        f"{found['parameters']:,} parameters, {found['steps']:,} steps, {found['training_tokens']:,} training tokens\n"
    )
    for command in found["commands"]:
        print(f"  {command}")
    print(f"\n{_cost(found)}")
    for note in found["notes"]:
        print(f"- {note}")


def _score(row: dict[str, Any]) -> str:
    return f"no {row['metric']} published" if row["score"] is None else f"{row['metric']} {row['score']}"


def _cost(found: dict[str, Any]) -> str:
    if found["tokens_per_second"]:
        speed, hours = found["tokens_per_second"], found["device_hours"]
        return f"At {speed:,.0f} tokens per second and device training takes {hours:,.1f} device-hours."
    return (
        "How long it takes depends on your devices and was not measured here. Measure it, then ask again:\n\n"
        f"  {measuring(found['name'])}\n"
        f"  txl reproduce {found['name']} speed_from=speed\n"
    )
