"""The values of every option of every memory strategy that the laws are tried with, and which of them go together."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from covering import Row, covering_rows

from txl_lightning import registry
from txl_lightning.config import POSITIONS, ConfigError, MemoryConfig
from txl_lightning.testing import MODEL

PLACES: dict[str, tuple[Any, ...]] = {
    "segment_len": (8, 7, 1),
    "batch_size": (5, 1),
    "numbers": ("float32", "bfloat16", "bfloat16-mixed"),
    "checkpointing": (False, True),
    "pre_norm": (False, True),
    "position": ("transformer_xl", "rotary", "shaw"),
}
"""Where every strategy is tried; those whose reads have no position with `absolute` for `shaw`."""

IN_CI: dict[str, tuple[Any, ...]] = {
    "numbers": ("float32", "bfloat16-mixed"),
    "position": ("transformer_xl", "rotary"),
}
"""The same where pairs are enough."""

WITHOUT_DISTANCES = ("none", "associative", "knn", "titans", "associative_tokens", "tokens")

VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "none": {},
    "cache": {"mem_len": (13, 5), "reuse_len": (None, 3)},
    "compressive": {"mem_len": (12, 8), "compressed_len": (3,), "rate": (1, 4), "loss_weight": (1.0,)},
    "window": {"window": (9, 4), "sinks": (0, 2)},
    "tokens": {"n_tokens": (2, 1)},
    "associative": {},
    "knn": {"mem_len": (10, 3), "top_k": (3, 2)},
    "block_recurrent": {"n_states": (3,), "block_len": (3, 8), "window": (5, 0)},
    "titans": {
        "depth": (1, 2),
        "expansion": (2,),
        "chunk_len": (3, 8),
        "lr": (0.05,),
        "conv": (4, 1),
        "persistent": (2, 0),
    },
    "associative_tokens": {"n_tokens": (2, 1), "d_mem": (4,), "nu": (3, 1)},
    "expire": {"mem_len": (12,), "max_span": (20.0,), "ramp": (5.0,), "loss_weight": (1e-2,)},
    "mix": {
        "below": (
            {"name": "cache", "mem_len": 7},
            {"name": "compressive", "mem_len": 8, "compressed_len": 3, "rate": 1},
            {"name": "window", "window": 8, "sinks": 2},
        ),
        "above": (
            {"name": "associative"},
            {"name": "knn", "mem_len": 10, "top_k": 2},
            {"name": "titans", "variant": "mac", "chunk_len": 4, "persistent": 1},
        ),
        "around": (None, {"name": "tokens", "n_tokens": 2}, {"name": "tokens", "n_tokens": 2, "read_slots": True}),
    },
}
"""Values of the options that are not words or switches (those have all their values); of `mix`, its parts: one in all
layers, one beside it in the upper, and tokens around the segment."""

SMALL = {"mem_len": 3, "compressed_len": 2, "window": 3, "max_span": 3.0, "ramp": 3.0}
"""Sizes where segments are of one token, so that few of them fill a memory."""

ARGUMENTS: dict[str, dict[str, Any]] = {"expire": {"both_losses": ("span.weight", "span.bias")}}
"""What else `check_memory` has to know."""

TOGETHER: dict[str, tuple[str, ...]] = {"titans": ("variant", "gradient")}
"""Options that are one factor, because most of their combinations are refused."""

LEFT_OUT = {"name", "reset", "offload"}  # the last two are the trainer's: where lanes start anew, where memory waits
ALONE = {"tokens": {"read_slots"}}  # has an effect in a mix only


@functools.cache
def own_options(name: str) -> dict[str, tuple[Any, ...]]:
    """The strategy's options with the values that are tried."""
    if name == "mix":
        return VALUES[name]
    found: dict[str, tuple[Any, ...]] = {}
    for item in dataclasses.fields(registry.memories.get(name).config):
        if item.name in LEFT_OUT | ALONE.get(name, set()):
            continue
        if item.name == "layers":
            found["layers"] = ("all", (1,))
        elif "choices" in item.metadata:
            found[item.name] = tuple(item.metadata["choices"])
        elif isinstance(item.default, bool):
            found[item.name] = (True, False)
        else:
            found[item.name] = VALUES.get(name, {}).get(item.name, (item.default,))
    return _joined(name, found)


def _joined(name: str, found: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    together = TOGETHER.get(name)
    if together is None:
        return found
    values = itertools.product(*(found.pop(option) for option in together))
    config = registry.memories.get(name).config
    return {",".join(together): tuple(v for v in values if _fits(config, dict(zip(together, v, strict=True)))), **found}


def _fits(config: Any, keys: dict[str, Any]) -> bool:
    try:
        config(**{"chunk_len": 4, **keys}).check_fit(MODEL, segment_len=8)
    except ConfigError:
        return False
    return True


def keys_of(name: str, row: Row) -> dict[str, Any]:
    """The strategy's keys in a row."""
    if name == "mix":
        above = {"layers": (1,), **row["above"]}
        parts = [part for part in (row["below"], above, row["around"]) if part is not None]
        return {"parts": tuple(_sized(part, row) for part in parts)}
    keys = {option: row[option] for option in own_options(name) if "," not in option}
    if name in TOGETHER:
        keys.update(zip(TOGETHER[name], row[",".join(TOGETHER[name])], strict=True))
    return _sized(keys, row)


def _sized(keys: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """The keys with sizes that segments of 7 tokens and of one allow."""
    if keys.get("rate") == 4 and row["segment_len"] % 4:
        keys = {**keys, "rate": row["segment_len"]}
    if row["segment_len"] > 1:
        return dict(keys)
    return {option: SMALL[option] if option in SMALL and value else value for option, value in keys.items()}


def allowed(name: str, row: Row) -> bool:
    """Whether the strategy's own rules admit a row (of `mix` all parts fit)."""
    if name == "mix":
        return True
    try:
        config: MemoryConfig = registry.memories.get(name).config(**keys_of(name, row))
        model = dataclasses.replace(MODEL, position=row["position"])
        config.check_fit(model, segment_len=row["segment_len"])
    except ConfigError:
        return False
    return POSITIONS[row["position"]] or not config.reaches_back


def factors(name: str) -> dict[str, tuple[Any, ...]]:
    """Options and places."""
    position = ("transformer_xl", "rotary", "absolute" if name in WITHOUT_DISTANCES else "shaw")
    return {**own_options(name), **PLACES, "position": position}


@functools.cache
def rows(name: str) -> list[Row]:
    """Rows with every allowed pair of values."""
    return covering_rows({**factors(name), **IN_CI}, lambda row: allowed(name, row), ruled=_ruled(name))


def all_rows(name: str) -> list[Row]:
    """Rows with every allowed triple of values and every combination of the strategy's own options but `layers`."""
    own = {option: values for option, values in own_options(name).items() if option != "layers"}
    every = factors(name)
    first = []
    for values in itertools.product(*own.values()):
        row = {**{factor: some[0] for factor, some in every.items()}, **dict(zip(own, values, strict=True))}
        if any(allowed(name, {**row, "segment_len": size}) for size in PLACES["segment_len"]):
            first.append(dict(zip(own, values, strict=True)))
    return covering_rows(every, lambda row: allowed(name, row), strength=3, first=first, ruled=_ruled(name), tries=3)


def own_rows(name: str) -> list[Row]:
    """Rows with every allowed pair of the strategy's own options, in one place."""
    place = {"segment_len": 8, "batch_size": 4, **{factor: PLACES[factor][0] for factor in list(PLACES)[2:]}}
    own = own_options(name)
    found = covering_rows(own, lambda row: allowed(name, {**row, **place})) if len(own) > 1 else [{}]
    return [{**row, **place} for row in found]


def _ruled(name: str) -> list[str]:
    return [*own_options(name), "segment_len", "position"]


def arguments(name: str, row: Row) -> dict[str, Any]:
    """Arguments of `check_memory` beside the name."""
    found = {**keys_of(name, row), **ARGUMENTS.get(name, {})}
    found["model"] = {key: row[key] for key in ("checkpointing", "pre_norm", "position")}
    found["dtype"] = torch.bfloat16 if row["numbers"] == "bfloat16" else torch.float32
    found["mixed"] = row["numbers"] == "bfloat16-mixed"
    found["warm_segments"] = 4 if row["segment_len"] > 1 else 6
    return {**found, "segment_len": row["segment_len"], "batch_size": row["batch_size"]}
