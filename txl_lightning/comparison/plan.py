"""Who is compared with which sizes and how long: everything that is settled before the first run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from txl_lightning import registry
from txl_lightning.commands.output import bytes_in_words
from txl_lightning.commands.strategies import state_bytes_per_lane
from txl_lightning.comparison import flops
from txl_lightning.comparison.typed import EACH, Entry, entries
from txl_lightning.compose import compose_job
from txl_lightning.config import Config, ConfigError, of_the_run
from txl_lightning.jobs import Request
from txl_lightning.options import CompareOptions

SURPLUS = 1.05  # state may be larger than the budget by so much where that is nearer to it
ENDLESS = 10**9  # optimizer steps


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One of those compared.

    Attributes:
        label: its name.
        config: of its runs; their seeds and folders come later.
        state_bytes: of one training lane in float32.
        chosen: what the budget decided, e.g. {"memory.mem_len": 128}.
        remark: what a reader of the table must know.
    """

    label: str
    config: Config
    state_bytes: int
    chosen: dict[str, int]
    remark: str = ""


def make_plan(options: CompareOptions, request: Request, *, segments: int) -> list[Entrant]:
    """Compose and fit to the budget what is compared.

    Args:
        options: of the command.
        request: what was typed.
        segments: that every run reads, unless the budget says otherwise.

    Raises:
        ConfigError: one of them is refused by its own rules or has no size within the budget.
    """
    found = []
    for entry in entries(request.typed, options.memories):
        found.append((entry, _compose(entry, config_dir=request.config_dir)))
    if options.budget == "state":
        return _equal_state(found, options.state_bytes, segments)
    plain = [_entrant(entry, config, {}) for entry, config in found]
    if options.budget == "time":
        return [replace(item, config=_with_steps(item.config, ENDLESS)) for item in plain]
    return _equal_flops(plain, segments)


@functools.lru_cache(maxsize=64)  # checked and then run: composing takes a second
def _compose(entry: Entry, *, config_dir: str | None) -> Config:
    try:
        values = compose_job(entry.typed, config_dir=config_dir, command="fit", stored=None)
        return Config.from_dict(of_the_run(values))
    except ConfigError as error:
        raise ConfigError(f"{entry.label}: {error.key}", error.value, error.rule, error.cure) from error


def _equal_state(found: Sequence[tuple[Entry, Config]], budget: int | None, segments: int) -> list[Entrant]:
    own = [state_bytes(config) for _, config in found]
    budget = budget if budget is not None else next((size for size in own if size), 0)
    entrants = []
    for (entry, config), size in zip(found, own, strict=True):
        config = _reading(config, segments)
        key = config.memory.size_key
        typed = key is not None and any(item.key == f"memory.{key}" for item in entry.typed)
        if size == 0 and key is None:
            entrants.append(_entrant(entry, config, {}))
        elif key is None or typed:
            remark = f"memory.{key} is as typed" if typed else "its state has no size to choose"
            entrants.append(_entrant(entry, config, {}, remark=remark))
        else:
            config = resize(config, budget=budget)
            entrants.append(_entrant(entry, config, {f"memory.{key}": getattr(config.memory, key)}))
    return entrants


def _equal_flops(plain: Sequence[Entrant], segments: int) -> list[Entrant]:
    cost = [flops.count(item.config).training for item in plain]
    entrants = []
    for item, own in zip(plain, cost, strict=True):
        config = _reading(item.config, max(1, round(segments * cost[0] / own)))
        entrants.append(replace(item, config=config, chosen={"trainer.max_steps": config.trainer.max_steps}))
    return entrants


def _entrant(entry: Entry, config: Config, chosen: dict[str, int], *, remark: str = "") -> Entrant:
    size = state_bytes(config)
    return Entrant(label=entry.label, config=config, state_bytes=size, chosen=chosen, remark=remark)


def state_bytes(config: Config) -> int:
    """Of one training lane in float32."""
    with torch.device("meta"):
        size = state_bytes_per_lane(registry.memories.get(config.memory.name), config.memory, config.model)
    assert size is not None, "the configuration was checked against its model"
    return size


def resize(config: Config, *, budget: int) -> Config:
    """The configuration with the memory's size key set so that its state is as near to `budget` bytes as can be, and
    never above it by more than 5 %.

    Raises:
        ConfigError: there is no such size.
    """
    name = config.memory.size_key
    assert name is not None

    def sized(number: int) -> Config | None:
        try:
            return replace(config, memory=replace(config.memory, **{name: number}))  # type: ignore[arg-type]
        except ConfigError:  # rules forbid sizes that are too small
            return None

    def too_large(number: int) -> bool:
        other = sized(number)
        return other is not None and state_bytes(other) > budget

    high = 1
    while not too_large(high):
        high *= 2
        if high > 2**40:
            raise config.memory.refuse(name, "does not change the size of the state", "correct its size_key")
    low = high // 2  # not too large
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if too_large(middle) else (middle, high)
    fitting = [other for other in map(sized, (low, high)) if other and state_bytes(other) <= SURPLUS * budget]
    if not fitting:
        return _refuse_budget(config, name, budget, smallest=sized(high))
    return min(fitting, key=lambda other: abs(state_bytes(other) - budget))


def _refuse_budget(config: Config, name: str, budget: int, *, smallest: Config | None) -> Config:
    assert smallest is not None
    least, memory = state_bytes(smallest), config.memory.name
    rule = f"memory={memory} needs {least} ({bytes_in_words(least)}) at memory.{name}={getattr(smallest.memory, name)}"
    cure = f"raise it, or set memory.{name} and the rest of its size with {EACH}={{{memory}: [...]}}"
    raise ConfigError("state_bytes", budget, rule, cure)


def _reading(config: Config, segments: int) -> Config:
    """The configuration with as many optimizer steps as read so many segments."""
    keys = config.trainer
    alone = min(keys.accumulate_from_step, segments)
    return _with_steps(config, alone + -(-(segments - alone) // keys.accumulate_grad_batches))


def _with_steps(config: Config, steps: int) -> Config:
    return replace(config, trainer=replace(config.trainer, max_steps=steps))
