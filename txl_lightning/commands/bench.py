"""`txl bench`: how fast and how large everything is, here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from txl_lightning.benchmarks import attention, huggingface, machine, overhead, reading, report, workloads
from txl_lightning.benchmarks.timing import Task, Timing, interleave
from txl_lightning.build import not_layer_parallel
from txl_lightning.commands.output import JSON, check_out, write_out
from txl_lightning.comparison import flops
from txl_lightning.comparison.typed import entries
from txl_lightning.compose import compose_job
from txl_lightning.config import Config, ConfigError, of_the_run
from txl_lightning.data.store import survey
from txl_lightning.jobs import Request
from txl_lightning.options import BENCH_PARTS, BenchOptions
from txl_lightning.training.trainer import check_devices, device_kind, resolve_precision

Entrant = tuple[str, Config]
OF_A_MODEL = ("training", "evaluation", "decoding")


def check(config: Config, options: BenchOptions, *, request: Request) -> None:
    """Everything about a measurement that can be refused. Writes nothing; raises ConfigError."""
    if request.multirun:
        raise ConfigError("flag", "--multirun", "memory=A,B,C is a list here", "leave -m out")
    check_out(options.out, begins=JSON)
    check_devices(config)
    if options.clock == "cpu" and device_kind(config) != "cpu":
        raise options.refuse("clock", "what another device computes takes no time of the cpu", "set clock=wall")
    if not options.parts:
        raise options.refuse("what", "names nothing to measure", f"choose among {', '.join(BENCH_PARTS)}")
    for _, one in entrants(config, options, request):
        if resolve_precision(one) == "16-mixed":
            raise ConfigError("trainer.precision", "16-mixed", "is not measured", "use bf16-mixed or 32-true")
    if "attention" in options.parts and config.model.architecture != "transformer":
        rule = f"model.architecture={config.model.architecture} has no attention"
        raise options.refuse("what", rule, "leave attention out")
    if options.against is not None:
        _check_against(config, options)
    if "data" in options.parts:
        survey(config.data)


def _check_against(config: Config, options: BenchOptions) -> None:
    if len(options.memories) > 1:
        cure = "leave memory out or name one"
        raise options.refuse("against", "it is laid beside one memory, which must be cache", cure)
    if not set(options.parts) & set(OF_A_MODEL):
        raise options.refuse("against", "nothing of it is measured", f"add one of {', '.join(OF_A_MODEL)} to what")
    huggingface.check(config)


def entrants(config: Config, options: BenchOptions, request: Request) -> list[Entrant]:
    """What is measured side by side: one for each strategy, and for each of `lengths`. Raises ConfigError."""
    found = [("", config)]
    if len(options.memories) > 1:
        found = []
        for entry in entries(request.typed, options.memories, command="bench"):
            values = compose_job(entry.typed, config_dir=request.config_dir, command="fit", stored=None)
            found.append((entry.label, Config.from_dict(of_the_run(values))))
    else:
        found = [(options.memories[0] if options.memories else config.memory.name, config)]
    if not options.lengths:
        return found
    return [(label, _of_length(one, size, options)) for label, one in found for size in options.lengths]


def _of_length(config: Config, size: int, options: BenchOptions) -> Config:
    if config.memory.size_key is None:
        raise options.refuse("lengths", f"memory={config.memory.name} has no size that they could set", "leave it out")
    with options.said_of({f"memory.{config.memory.size_key}": "lengths"}):
        return workloads.with_memory_length(config, size)


def run(config: Config, options: BenchOptions, *, request: Request) -> None:
    """Measure, print the tables, write the JSON if asked."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    kind, facts = device_kind(config), machine.facts(config)
    found: list[Timing] = []
    everyone = entrants(config, options, request)
    for part in options.parts:
        tasks = list(_tasks(part, everyone, config, options))
        if part == "training" and options.peak_flops is None:
            tasks.append(machine.products(config))
        if tasks:
            found += interleave(tasks, rounds=options.rounds, kind=kind, clock=options.clock)
        if part == "overhead":
            found += overhead.overhead(config, rounds=max(3, options.rounds), clock=options.clock)
    found = [_with_utilisation(timing, everyone, found, options) for timing in found]
    remarks, summary = _remarks(found, config, options)
    report.show(found, remarks, facts)
    rows = [timing.to_dict() for timing in found]
    write_out(
        options.out, {"machine": facts, "rounds": options.rounds, "clock": options.clock, **summary, "rows": rows}
    )


def _tasks(part: str, everyone: list[Entrant], config: Config, options: BenchOptions) -> Iterator[Task]:
    for label, one in everyone:
        if part == "training":
            yield workloads.training(one, label=label)
        elif part == "evaluation":
            yield workloads.evaluation(one, label=label)
            if one.eval.schedule != "segments" and not_layer_parallel(one) is None:
                yield workloads.evaluation(one, label=label, by_layers=True)
        elif part == "decoding":
            yield workloads.decoding(one, label=label)
        elif part == "attention":
            yield from attention.tasks(one, backends=options.backends)
        if options.against and part in OF_A_MODEL:
            yield getattr(huggingface, part)(one)
    if part == "data":
        yield from reading.tasks(config)


def _with_utilisation(timing: Timing, everyone: list[Entrant], found: list[Timing], options: BenchOptions) -> Timing:
    """With the FLOPs of a token and the share of the device's best that the step reaches."""
    task = timing.task
    mine = next(
        (c for name, c in everyone if (name, c.memory.to_dict()) == (task.label, task.facts.get("memory"))), None
    )
    if task.part != "training" or mine is None:
        return timing
    best = options.peak_flops or next(other.rate for other in found if other.task.part == "peak")
    targets = workloads.drawn(mine, lanes=mine.data.batch_size, n_token=mine.data.segment_len).cpu()
    per_token = flops.count_reading(mine, targets).training
    facts = {**task.facts, "flops_per_token": per_token, "utilisation": timing.rate * per_token / best}
    return replace(timing, task=replace(task, facts=facts))


def _remarks(found: list[Timing], config: Config, options: BenchOptions) -> tuple[list[str], dict[str, Any]]:
    """What the tables do not say, for the reader and for the JSON."""
    remarks, summary = [], {}
    beside = [timing for timing in found if timing.task.part == "overhead"]
    if beside:
        share = summary["overhead"] = overhead.share(beside)
        remarks.append(f"the trainer takes {share:+.1%} of a step beyond the bare loop")
    if options.against:
        worst = summary["largest_loss_difference"] = huggingface.difference(config)
        remarks.append(f"losses of Hugging Face's class with the same weights: within {worst:.1e} of ours")
    return remarks, summary
