"""Which keys and groups there are, what they hold, and which one is meant by a misspelt one."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from txl_lightning import registry
from txl_lightning.config import SECTIONS, TOP_KEYS, Config
from txl_lightning.errors import suggest
from txl_lightning.options import COMMANDS
from txl_lightning.section import Section, kind_in_words, type_cure

GROUPS = ("experiment", "model", "memory", "data", "optim", "trainer", "strategy", "logger", "callbacks", "debug")

SEVERAL = ("logger", "callbacks")
"""Groups that take a list of options."""

PLUGGED: dict[str, registry.Registry[Any]] = {
    "memory": registry.memories,
    "data": registry.corpora,
    "callbacks": registry.callbacks,
}
"""Groups whose options may come from other packages."""

_UNDOTTED: list[type[Section]] = [Config, *(command.options for command in COMMANDS.values())]


def hint_of(key: str) -> Any:
    """The type of a key of the schema or of a command; None where it depends on what is chosen."""
    head, _, tail = key.rpartition(".")
    if head in SECTIONS:
        return typing.get_type_hints(SECTIONS[head])[tail]
    found = [schema for schema in _UNDOTTED if not head and tail in names(schema)]
    return typing.get_type_hints(found[0])[tail] if found else None


def names(schema: type) -> list[str]:
    """The keys of a config dataclass."""
    return [item.name for item in dataclasses.fields(schema)]


def is_text(hint: Any) -> bool:
    """Whether a type takes texts."""
    return hint is str or str in typing.get_args(hint)


def takes_list(key: str) -> bool:
    """Whether the key may hold several values at once."""
    head, _, tail = key.partition(".")
    if head in ("memory", "data") and tail:
        found = [PLUGGED[head].get(part).config for part in PLUGGED[head].names()]
        hints = [typing.get_type_hints(schema)[tail] for schema in found if tail in names(schema)]
    else:
        hints = [hint_of(key)]
    return key in SEVERAL or any(hint is Any or "tuple" in str(hint) for hint in hints)


def kind(key: str) -> tuple[str, str]:
    """What a key of the schema or of a command holds, in words, and what it may be set to."""
    head, _, tail = key.rpartition(".")
    for schema in [SECTIONS[head]] if head else _UNDOTTED:
        for item in dataclasses.fields(schema):
            if item.name == tail:
                return kind_in_words(schema, tail), type_cure(item)
    raise AssertionError(key)


def own_keys(command: str) -> list[str]:
    """Keys without a dot that a command reads."""
    chosen = COMMANDS[command]
    return [*(name for name in TOP_KEYS if name not in GROUPS and chosen.reads(name)), *names(chosen.options)]


def section_keys() -> list[str]:
    """Dotted keys that are there whatever is chosen."""
    return [f"{section}.{name}" for section, schema in SECTIONS.items() for name in names(schema)]


def nearest(key: str, command: str) -> str:
    """The cure for a misspelt key: valid ones that look like it, with or without their section."""
    head, _, tail = key.rpartition(".")
    reads = COMMANDS[command].reads
    if head in SECTIONS:
        near = [name for name in section_keys() if name.startswith(f"{head}.")]
        return suggest(key, near) if any(map(reads, near)) else f"txl {command} reads no key of {head}"
    known = [*filter(reads, (*GROUPS, *section_keys(), *plugged_keys())), *own_keys(command)]
    same = sorted(name for name in known if name.rpartition(".")[2] == tail)
    if same:
        return f"did you mean {' or '.join(same[:3])}?"
    cure = suggest(key, known)
    return cure if cure.startswith("did you mean") else f"txl {command} --help lists them"


def plugged_keys() -> list[str]:
    """Dotted keys of every memory and corpus there is."""
    parts = [(kind, PLUGGED[kind].get(name).config) for kind in ("memory", "data") for name in PLUGGED[kind].names()]
    return sorted({f"{kind}.{name}" for kind, schema in parts for name in names(schema)})
