"""`txl compare`: several memories under one budget, several seeds each, one table."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from txl_lightning.commands import fit as fit_command
from txl_lightning.commands.output import bytes_in_words
from txl_lightning.comparison import flops, table
from txl_lightning.comparison.plan import Entrant, make_plan
from txl_lightning.comparison.recall import ANSWERS, on_recall
from txl_lightning.comparison.runs import (
    PLAN,
    RECALL,
    TEXT,
    Run,
    check_folder,
    folder_name,
    matrix,
    plan_facts,
    recall_facts,
    run_all,
)
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.recall import RecallConfig
from txl_lightning.data.store import survey
from txl_lightning.jobs import Request
from txl_lightning.options import CompareOptions
from txl_lightning.training.run_folder import write_json

JSON, PLOT = "comparison.json", "comparison.png"


def check(config: Config, options: CompareOptions, *, request: Request) -> None:
    """Everything about the whole matrix that can be refused. Writes nothing; raises ConfigError."""
    if request.multirun:
        raise ConfigError("flag", "--multirun", "memory=A,B,C is a list here", "leave -m out")
    if options.out is None:
        raise options.refuse("out", "is required", "give a folder: txl compare memory=none,cache out=FOLDER")
    _check_names(options)
    _check_budget(options, request)
    survey(config.data).require("test")
    entrants = make_plan(options, request, segments=config.trainer.segments_of_run())
    for item in entrants:
        fit_command.check(item.config, options)
        if options.budget == "time" and item.config.optim.schedule == "cosine":
            cure = "set optim.schedule=constant or inverse_sqrt"
            raise item.config.optim.refuse("schedule", "has to know its last step, and a time budget does not", cure)
    check_folder(_folder(options), _facts(entrants, options, config))
    _check_recall(entrants, options, config)


def _check_recall(entrants: list[Entrant], options: CompareOptions, config: Config) -> None:
    if not options.recall:
        return
    if isinstance(config.data, RecallConfig):
        raise options.refuse("recall", "data=recall is that task already, and its table says so", "leave it out")
    tried = _on_recall(entrants, options)
    for item in tried:
        fit_command.check(item.config, options)
    check_folder(_folder(options) / RECALL, _recall_facts(tried))


def _check_names(options: CompareOptions) -> None:
    if not options.memories:
        raise ConfigError("memory", "", "names nothing to compare", "give memory=A,B,C; txl strategies lists them")
    for name, count in Counter(map(folder_name, options.memories)).items():
        if count > 1:
            cure = "give each a name of its own: each={long: [memory=cache, memory.mem_len=256]}"
            raise ConfigError("memory", ",".join(options.memories), f"two have the name {name}", cure)


def _check_budget(options: CompareOptions, request: Request) -> None:
    if options.budget == "time" and options.seconds is None:
        raise options.refuse("seconds", "budget=time needs it", "give the seconds that each run trains")
    steps = next((item for item in request.typed if item.key == "trainer.max_steps"), None)
    if options.budget == "time" and steps is not None:
        raise steps.refuse("budget=time ends runs after seconds, not steps", "leave it out")
    for name, budget in (("state_bytes", "state"), ("seconds", "time")):
        if getattr(options, name) is not None and options.budget != budget:
            cure = f"leave it out or set budget={budget}"
            raise options.refuse(name, f"budget={options.budget} does not read it", cure)


def run(config: Config, options: CompareOptions, *, request: Request) -> None:
    """Make the runs that are missing, then print the table and write JSON and plot.

    Raises:
        SystemExit: 130 or 75 when a signal ended a run; the same command goes on with it.
    """
    entrants, folder = make_plan(options, request, segments=config.trainer.segments_of_run()), _folder(options)
    facts = _facts(entrants, options, config)
    check_folder(folder, facts)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PLAN, facts)
    runs = matrix(entrants, seeds=options.seeds, folder=folder, seconds=options.seconds)
    if options.recall:
        tried = _on_recall(entrants, options)
        (folder / RECALL).mkdir(exist_ok=True)
        write_json(folder / RECALL / PLAN, _recall_facts(tried))
        runs += matrix(tried, seeds=options.seeds, folder=folder, task=RECALL)
    for item in entrants:
        chosen = "".join(f", {name}={value}" for name, value in item.chosen.items())
        print(f"{item.label}: {bytes_in_words(item.state_bytes)} of state per lane{chosen}", flush=True)
    code = run_all(runs)
    if code:
        done = sum(item.measured() is not None for item in runs)
        print(f"{done} of {len(runs)} runs are finished; the same command goes on from there", file=sys.stderr)
        sys.exit(code)
    _report(_rows(entrants, runs), options, config, facts)


def _report(rows: list[table.Row], options: CompareOptions, config: Config, facts: dict[str, Any]) -> None:
    from txl_lightning.comparison.plot import plot  # matplotlib takes a second to import

    folder = _folder(options)
    equal = {
        "state": "equal state" if options.state_bytes is None else f"{bytes_in_words(options.state_bytes)} of state",
        "flops": "equal training FLOPs",
        "time": f"{options.seconds:g} s of training" if options.seconds else "",
    }[options.budget]
    title = f"{config.data.name}, {equal}, {options.seeds} seed{'s' if options.seeds > 1 else ''}"
    table.show(rows, title=title)
    write_json(folder / JSON, table.to_dict(rows, facts=facts))
    if any(row.runs for row in rows):
        plot(rows, folder / PLOT, title=title)
    print(f"{folder / JSON} and {PLOT}")


def _rows(entrants: list[Entrant], runs: list[Run]) -> list[table.Row]:
    rows = []
    for item in entrants:
        good, failed = _outcome(runs, item.label, TEXT)
        recalled, forgot = _outcome(runs, item.label, RECALL)
        seen = {seed: {**figures, **_answers(recalled.get(seed, {}))} for seed, figures in good.items()}
        cost = flops.count(item.config)
        rows.append(table.Row(entrant=item, flops=cost, runs=seen, failed=failed, failed_on_recall=forgot))
    return rows


def _outcome(runs: list[Run], label: str, task: str) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Figures of the runs that went well, and what the others failed of, by seed."""
    mine = (run for run in runs if (run.label, run.task) == (label, task))
    found = {run.config.seed: run.measured() or {} for run in mine}
    good = {seed: figures for seed, figures in found.items() if "failed" not in figures}
    return good, {seed: figures["failed"] for seed, figures in found.items() if "failed" in figures}


def _answers(figures: dict[str, Any]) -> dict[str, Any]:
    """What a run on the recall task adds to the run on the text."""
    return {name: figures[name] for name in ANSWERS if name in figures}


def _on_recall(entrants: list[Entrant], options: CompareOptions) -> list[Entrant]:
    return [
        replace(item, config=on_recall(item.config, label=item.label, steps=options.recall), chosen={}, remark="")
        for item in entrants
    ]


def _recall_facts(tried: list[Entrant]) -> dict[str, Any]:
    return recall_facts(tried, fingerprint=survey(tried[0].config.data).fingerprint)


def _facts(entrants: list[Entrant], options: CompareOptions, config: Config) -> dict[str, Any]:
    return plan_facts(entrants, options, fingerprint=survey(config.data).fingerprint)


def _folder(options: CompareOptions) -> Path:
    assert options.out is not None
    return Path(os.path.abspath(os.path.expanduser(options.out)))
