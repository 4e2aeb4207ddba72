"""`txl strategies`: every memory strategy there is, ours and other packages'."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from txl_lightning.commands.output import JSON, bytes_in_words, check_out, write_out
from txl_lightning.config import Config, ModelConfig
from txl_lightning.errors import ConfigError, yaml_text
from txl_lightning.options import StrategiesOptions
from txl_lightning.registry import Entry, memories
from txl_lightning.types import n_byte


def check(config: Config, options: StrategiesOptions) -> None:
    """Refuse an `out` that cannot be written. Raises ConfigError."""
    check_out(options.out, begins=JSON)


def run(config: Config, options: StrategiesOptions) -> None:
    """Print the table, and write it to `out`."""
    rows = [describe(memories.get(name), config) for name in memories.names()]
    table = Table("name", "keys", "paper", "state per lane", title="memory strategies")
    for row in rows:
        keys = "\n".join(f"{name}={yaml_text(value)}" for name, value in row["keys"].items())
        size = row["state_bytes_per_lane"]
        fits = "does not fit this model" if size is None else bytes_in_words(size)
        table.add_row(row["name"], keys, row["paper"], fits)
    console = Console()
    console.print(table, markup=False)
    console.print(f"state: float32 while training, {config.model.n_layer} layers of width {config.model.d_model}")
    write_out(options.out, rows)


def describe(entry: Entry[Any], config: Config) -> dict[str, Any]:
    """Name, default keys, paper and state bytes per lane; of the chosen memory the keys as they are set."""
    chosen = config.memory if config.memory.name == entry.name else entry.config()
    keys = {name: value for name, value in chosen.to_dict().items() if name != "name"}
    size = state_bytes_per_lane(entry, chosen, config.model)
    return {"name": entry.name, "keys": keys, "paper": entry.paper, "state_bytes_per_lane": size}


def state_bytes_per_lane(entry: Entry[Any], memory: Any, model: ModelConfig) -> int | None:
    """Bytes one lane's state takes while training in float32; None if the defaults do not fit this model."""
    try:
        plan = entry.build(memory, model)
    except ConfigError:
        return None
    parts = [part for layer in plan.layers for part in layer.values()] + ([plan.tokens] if plan.tokens else [])
    device = torch.device("meta")
    states = [part.init_state(1, form="hidden", device=device, dtype=torch.float32) for part in parts]
    return sum(map(n_byte, states))
