"""What is typed after `txl COMMAND`: read, checked against the schema, and quoted so that Hydra reads the same.

Nothing is composed here, so a misspelt key is refused at once. Which keys a memory, corpus or callback has depends on
what is chosen: those are checked in `compose`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString
from hydra.errors import HydraException

from txl_lightning import registry
from txl_lightning.config import COMMANDS, FREE_TEXT, SECTIONS, TOP_KEYS, Config, Section
from txl_lightning.errors import ConfigError, suggest

GROUPS = ("experiment", "model", "memory", "data", "optim", "trainer", "strategy", "logger", "callbacks", "debug")

SEVERAL = ("logger", "callbacks")
"""Groups that take a list of options."""

PLUGGED: dict[str, registry.Registry[Any]] = {
    "memory": registry.memories,
    "data": registry.corpora,
    "callbacks": registry.callbacks,
}
"""Groups whose options may come from other packages."""

OURS = {
    "hydra.run.dir": "set run_dir=PATH",
    "hydra.sweep.dir": "set run_dir=PATH: each job gets a folder in it",
    "hydra.sweep.subdir": "set run_dir=PATH: each job gets a numbered folder in it",
    "hydra.searchpath": "use --config-dir PATH",
    "hydra.mode": "use -m",
    "hydra.output_subdir": "leave it out: the run folder gets the resolved configuration anyway",
    "hydra.job.chdir": "leave it out: relative paths would change their meaning",
    "hydra.job.name": "leave it out: it holds the command",
}
"""Hydra's own keys that txl sets itself, with what to do instead."""


_UNDOTTED: list[type[Section]] = [Config, *COMMANDS.values()]


@dataclass(frozen=True, kw_only=True)
class Typed:
    """One KEY=VALUE letter by letter, without a ++ in front."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}={self.text}"

    @property
    def head(self) -> str:
        """Its group or section."""
        return self.key.partition(".")[0]

    @property
    def is_group(self) -> bool:
        return self.key in GROUPS

    @property
    def is_hydra(self) -> bool:
        return self.key.startswith(("hydra.", "hydra/"))

    @property
    def is_sweep(self) -> bool:
        """Several values, one for each job of a sweep."""
        return self.key not in FREE_TEXT and parse(self).is_sweep_override()

    def refuse(self, rule: str, cure: str) -> ConfigError:
        return ConfigError(self.key, self.text, rule, cure)


def read(arg: str, *, command: str) -> Typed:
    """One argument of the command line.

    Raises:
        ConfigError: it is no KEY=VALUE, the command has no such key, or Hydra cannot read the value.
    """
    written, equals, text = arg.partition("=")
    key = written.lstrip("+~")
    if written.startswith("~") or (written.startswith("+") and not written.startswith("++")):
        rule = "keys are neither added nor deleted, they only get values"
        none = f"{key}=none" if key in (*SEVERAL, "memory", "debug") else f"{key}=VALUE"
        raise ConfigError(written, text, rule, f"write {key}={text}" if text else f"write {none}")
    typed = Typed(key=key, text=text)
    _check_key(typed, command)
    if not equals:
        raise typed.refuse("needs a value", f"write {key}=VALUE")
    if key not in FREE_TEXT:
        parse(typed)
    return typed


def read_hydra(arg: str) -> Typed:
    """One override that Hydra handed back, as it would have been typed."""
    key, _, text = arg.lstrip("+").partition("=")
    if key not in FREE_TEXT:
        return Typed(key=key, text=text)
    value = OverridesParser.create().parse_override(arg).value()
    if isinstance(value, list):
        items = (QuotedString(text=_unescape(item), quote=Quote.single).with_quotes() for item in value)
        return Typed(key=key, text=f"[{','.join(items)}]")
    return Typed(key=key, text=_unescape(str(value)))


def to_hydra(typed: Typed) -> str:
    """The override as Hydra is to read it."""
    if typed.key in FREE_TEXT:
        items = split_list(typed)
        value = quote(typed.text) if items is None else f"[{','.join(map(quote, items))}]"
        return f"{typed.key}={value}"
    if typed.is_group and not typed.is_sweep:
        options = ",".join(option if _is_word(option) else quote(option) for option in chosen(typed))
        return f"{typed.key}=[{options}]" if typed.key in SEVERAL else f"{typed.key}={options}"
    if typed.head in PLUGGED and not typed.is_group:
        return f"++{typed}"  # an option's YAML may leave keys of its dataclass out
    if _is_text(hint_of(typed.key)) and isinstance(parse(typed).value(), (int, float)):
        return f"{typed.key}={quote(typed.text)}"  # 10e2 stays a name
    return str(typed)


def parse(typed: Typed) -> Override:
    """The override in Hydra's grammar. Raises ConfigError."""
    try:
        return OverridesParser.create().parse_override(str(typed))
    except HydraException as error:
        cure = f"close its brackets and quotes, or quote all of it: \"{typed.key}='...'\""
        raise typed.refuse(f"cannot be read: {str(error).splitlines()[0]}", cure) from error


def chosen(typed: Typed) -> list[str]:
    """The options a group override names; those of all jobs if it is a sweep."""
    value = parse(typed)._value
    if isinstance(value, Glob):
        return []
    found = value.list if isinstance(value, ChoiceSweep) else [value]
    if not isinstance(value, (ChoiceSweep, list, QuotedString)):
        return [typed.text]
    flat = [item for entry in found for item in (entry if isinstance(entry, list) else [entry])]
    return [item.text if isinstance(item, QuotedString) else str(item) for item in flat]


def quote(text: str) -> str:
    """`text` as a quoted string of Hydra's grammar in which OmegaConf finds no interpolation."""
    return QuotedString(text=escape(text), quote=Quote.single).with_quotes()


def escape(text: str) -> str:
    """`text` as OmegaConf wants it so that ${...} in it is no interpolation."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def _unescape(text: str) -> str:
    return re.sub(r"((?:\\\\)*)\\\$\{", lambda match: f"{match[1][: len(match[1]) // 2]}${{", text)


def split_list(typed: Typed) -> list[str] | None:
    """The items of a free text that is a list, [a, 'b, c']; None if it is one text (or a file of that name exists)."""
    text = typed.text.strip()
    if not (text.startswith("[") and text.endswith("]")) or os.path.exists(typed.text) or not takes_list(typed.key):
        return None
    item = r"""\s*('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,]+?)\s*(?:,|\Z)"""
    return [_unquote(found) for found in re.findall(item, text[1:-1], flags=re.DOTALL) if found.strip()]


def _unquote(item: str) -> str:
    if item[0] not in "'\"" or item[0] != item[-1] or len(item) == 1:
        return item
    return str(OverridesParser.create().parse_override(f"x={item}").value())


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


def check_value(typed: Typed) -> None:
    """Refuse values Hydra would read as something else than the key takes: nothing for a number, 3 for a bool."""
    hint = hint_of(typed.key)
    if typed.key in FREE_TEXT or typed.is_group or typed.is_hydra or hint is None:
        return
    if not typed.text and not _is_text(hint):
        raise typed.refuse("has no value", _takes(typed.key))
    if hint is bool and not isinstance(parse(typed).value(), (bool, str)):
        raise typed.refuse("must be true or false", _takes(typed.key))


def _is_word(text: str) -> bool:
    """Hydra reads it as text without quotes."""
    return bool(re.fullmatch(r"(?!(true|false|null|inf|nan)$)[a-z_][a-z0-9_-]*", text, flags=re.IGNORECASE))


def _is_text(hint: Any) -> bool:
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


def _takes(key: str) -> str:
    head, _, tail = key.rpartition(".")
    for schema in [SECTIONS[head]] if head else _UNDOTTED:
        for item in dataclasses.fields(schema):
            if item.name == tail:
                return f"it takes {item.type}: {item.metadata['help']}"
    raise AssertionError(key)


def _check_key(typed: Typed, command: str) -> None:
    key, _, tail = typed.key.partition(".")
    if "@" in typed.key:
        raise typed.refuse("groups stay where they are", f"write {typed.key.partition('@')[0]}={typed.text}")
    if typed.key in OURS:
        raise typed.refuse("is set by txl", OURS[typed.key])
    if typed.is_hydra or typed.is_group or typed.key in own_keys(command):
        return
    if key in SECTIONS and tail in names(SECTIONS[key]):
        return
    if key in PLUGGED and tail and tail.count(".") == (key == "callbacks"):
        return
    raise _unknown(typed, command)


def own_keys(command: str) -> list[str]:
    """Keys without a dot that a command takes."""
    return [*(name for name in TOP_KEYS if name not in GROUPS), *names(COMMANDS[command])]


def section_keys() -> list[str]:
    """Dotted keys that are there whatever is chosen."""
    return [f"{section}.{name}" for section, schema in SECTIONS.items() for name in names(schema)]


def _unknown(typed: Typed, command: str) -> ConfigError:
    elsewhere = [f"txl {other}" for other, options in COMMANDS.items() if typed.key in names(options)]
    if elsewhere:
        return typed.refuse(f"txl {command} has no such key, only {' and '.join(elsewhere)}", "leave it out")
    if typed.key in SECTIONS or typed.head == "callbacks":
        known = names(SECTIONS[typed.key]) if typed.key in SECTIONS else ["NAME.KEY"]
        dotted = ", ".join(f"{typed.head}.{name}" for name in known)
        return typed.refuse("is a group of keys, not one", f"set {dotted}")
    return typed.refuse("no such key", nearest(typed.key, command))


def nearest(key: str, command: str) -> str:
    """The cure for a misspelt key: valid ones that look like it, with or without their section."""
    head, _, tail = key.rpartition(".")
    if head in SECTIONS:
        return suggest(key, [name for name in section_keys() if name.startswith(f"{head}.")])
    known = [*GROUPS, *own_keys(command), *section_keys(), *plugged_keys()]
    same = sorted(name for name in known if name.rpartition(".")[2] == tail)
    if same:
        return f"did you mean {' or '.join(same[:3])}?"
    cure = suggest(key, known)
    return cure if cure.startswith("did you mean") else f"txl {command} --help lists them"


def plugged_keys() -> list[str]:
    """Dotted keys of every memory and corpus there is."""
    parts = [(kind, PLUGGED[kind].get(name).config) for kind in ("memory", "data") for name in PLUGGED[kind].names()]
    return sorted({f"{kind}.{name}" for kind, schema in parts for name in names(schema)})
