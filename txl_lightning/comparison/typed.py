"""What is compared, as it was typed: `memory=a,b,c` is a list, and `each` holds the keys of some only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from txl_lightning.errors import ConfigError
from txl_lightning.keys import names
from txl_lightning.options import COMMANDS
from txl_lightning.overrides import Typed, chosen, option_text, read

LIST, EACH, COMMAND = "memories", "each", "compare"
OWN = ("trainer.accumulate_grad_batches", "trainer.bptt_segments", "trainer.bptt_grow_steps")
"""Keys that may differ between what is compared, beside those of model, memory and optim."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One that is compared: its name, and the overrides that `txl fit` would get."""

    label: str
    typed: tuple[Typed, ...]


def gather(typed: Sequence[Typed]) -> tuple[Typed, ...]:
    """`memory=a,b,c` as memories=[a,b,c] and the memory of the first, with which one configuration is composed.

    Raises:
        ConfigError: `each` cannot be read.
    """
    lists = [item for item in typed if item.key in ("memory", LIST)]
    if not lists:
        return tuple(typed)
    labels, own = chosen(lists[-1]), _read_each(typed)
    rest = [item for item in typed if item not in lists]
    text = ",".join(map(option_text, labels))
    first = [Typed(key="memory", text=option_text(_memory(labels[0], own)))] if labels else []
    return (*rest, Typed(key=LIST, text=f"[{text}]"), *first)


def entries(typed: Sequence[Typed], labels: Sequence[str], *, command: str = COMMAND) -> list[Entry]:
    """What `txl fit` would be given for each label; `command`: whose own keys are left out.

    Raises:
        ConfigError: `each` cannot be read, or names what is not compared or must not differ.
    """
    own = _read_each(typed)
    for label in own:
        if label not in labels:
            raise _refuse(typed, f"{label} is not among those compared", f"write memory={','.join([*labels, label])}")
    mine = {"memory", *names(COMMANDS[command].options)}
    shared = [item for item in typed if item.key not in mine]
    found = []
    for label in labels:
        memory = Typed(key="memory", text=option_text(_memory(label, own)))
        special = [item for item in own.get(label, ()) if item.key != "memory"]
        keys = {item.key for item in special}
        kept = [item for item in shared if item.key not in keys]
        found.append(Entry(label=label, typed=(*kept, memory, *special, Typed(key="callbacks", text="none"))))
    return found


def _memory(label: str, own: Mapping[str, Sequence[Typed]]) -> str:
    """The strategy behind a label: the one of that name, unless `each` names another."""
    named = [chosen(item)[0] for item in own.get(label, ()) if item.key == "memory"]
    return named[-1] if named else label


def _read_each(typed: Sequence[Typed]) -> dict[str, list[Typed]]:
    text = next((item.text for item in reversed(typed) if item.key == EACH), None)
    try:
        value = yaml.safe_load(text) if text is not None else {}
    except yaml.YAMLError as error:
        rule = f"is no YAML: {getattr(error, 'problem', None) or error}"
        raise _refuse(typed, rule, "put quotes around what holds brackets, commas or colons") from error
    wanted = "for example {compressive: [memory.rate=2]}"
    if not isinstance(value, dict):
        raise _refuse(typed, "must name overrides for each of several", wanted)
    found = {}
    for label, items in value.items():
        items = items if isinstance(items, list) else [items]
        if not all(isinstance(item, str) for item in items):
            raise _refuse(typed, f"{label} must have a list of KEY=VALUE", wanted)
        found[str(label)] = [read(item, command="fit") for item in items]
        for item in found[str(label)]:
            if item.head not in ("model", "memory", "optim") and item.key not in OWN:
                raise _refuse(typed, f"{item.key} must be the same for all", f"set it outside of {EACH}")
    return found


def _refuse(typed: Sequence[Typed], rule: str, cure: str) -> ConfigError:
    text = next(item.text for item in reversed(typed) if item.key == EACH)
    return ConfigError(EACH, text, rule, cure)
