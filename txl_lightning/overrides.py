"""What is typed after `txl COMMAND`: read, checked against the schema, and quoted so that Hydra reads the same.

Nothing is composed here, so a misspelt key is refused at once. Which keys a memory, corpus or callback has depends on
what is chosen: those are checked in `compose`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString
from hydra.errors import HydraException

from txl_lightning.config import SECTIONS, TOP_KEYS
from txl_lightning.errors import ConfigError
from txl_lightning.keys import GROUPS, PLUGGED, SEVERAL, hint_of, is_text, kind, names, nearest, takes_list
from txl_lightning.options import COMMANDS, FREE_TEXT

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
        ConfigError: it is no KEY=VALUE, there is no such key, the command does not read it, or Hydra cannot read the
            value.
    """
    written, equals, text = arg.partition("=")
    key = written.lstrip("+~")
    if written.startswith("~") or (written.startswith("+") and not written.startswith("++")):
        rule = "keys are neither added nor deleted, they only get values"
        none = f"{key}=none" if key in (*SEVERAL, "memory", "debug") else f"{key}=VALUE"
        raise ConfigError(written, text, rule, f"write {key}={text}" if text else f"write {none}")
    typed = Typed(key=key, text=text)
    _check_key(typed, command)
    _check_read(typed, command)
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
        options = ",".join(map(option_text, chosen(typed)))
        return f"{typed.key}=[{options}]" if typed.key in SEVERAL else f"{typed.key}={options}"
    if typed.head in PLUGGED and not typed.is_group:
        return f"++{typed}"  # an option's YAML may leave keys of its dataclass out
    if is_text(hint_of(typed.key)) and isinstance(parse(typed).value(), (int, float)):
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


def option_text(option: str) -> str:
    """The name of an option as Hydra reads it, in quotes only where it needs them."""
    return option if _is_word(option) else quote(option)


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
    return list_items(typed.text) if takes_list(typed.key) else None


def list_items(written: str) -> list[str] | None:
    """The items of [a, 'b, c']; None if it is one text, or a file of that name exists."""
    text = written.strip()
    if not (text.startswith("[") and text.endswith("]")) or os.path.exists(written):
        return None
    item = r"""\s*('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,]+?)\s*(?:,|\Z)"""
    return [_unquote(found) for found in re.findall(item, text[1:-1], flags=re.DOTALL) if found.strip()]


def _unquote(item: str) -> str:
    if item[0] not in "'\"" or item[0] != item[-1] or len(item) == 1:
        return item
    return str(OverridesParser.create().parse_override(f"x={item}").value())


def check_value(typed: Typed) -> None:
    """Refuse values Hydra would read as something else than the key takes: nothing for a number, 3 for a bool."""
    hint = hint_of(typed.key)
    if typed.key in FREE_TEXT or typed.is_group or typed.is_hydra or hint is None:
        return
    nothing = not typed.text and not is_text(hint)
    if nothing or (hint is bool and not isinstance(parse(typed).value(), (bool, str))):
        what, cure = kind(typed.key)
        raise typed.refuse(f"{'has no value and ' if nothing else ''}must be {what}", cure)


def _is_word(text: str) -> bool:
    """Hydra reads it as text without quotes."""
    return bool(re.fullmatch(r"(?!(true|false|null|inf|nan)$)[a-z_][a-z0-9_-]*", text, flags=re.IGNORECASE))


def _check_key(typed: Typed, command: str) -> None:
    key, _, tail = typed.key.partition(".")
    if "@" in typed.key:
        raise typed.refuse("groups stay where they are", f"write {typed.key.partition('@')[0]}={typed.text}")
    if typed.key in OURS:
        raise typed.refuse("is set by txl", OURS[typed.key])
    if typed.is_hydra or typed.is_group or typed.key in (*TOP_KEYS, *names(COMMANDS[command].options)):
        return
    if key in SECTIONS and tail in names(SECTIONS[key]):
        return
    if key in PLUGGED and tail and tail.count(".") == (key == "callbacks"):
        return
    raise _unknown(typed, command)


def _check_read(typed: Typed, command: str) -> None:
    """Refuse what would have no effect."""
    chosen = COMMANDS[command]
    if typed.is_hydra or typed.key in names(chosen.options) or chosen.reads(typed.key):
        return
    if typed.key == "experiment":
        raise typed.refuse("the checkpoint's own configuration is used", "leave it out and set single keys")
    *others, last = [f"txl {name}" for name, other in COMMANDS.items() if other.reads(typed.key)]
    readers = f"{', '.join(others)} and {last} read it" if others else f"{last} reads it"
    raise typed.refuse(f"txl {command} does not read it", f"leave it out; {readers}")


def _unknown(typed: Typed, command: str) -> ConfigError:
    elsewhere = [f"txl {other}" for other, its in COMMANDS.items() if typed.key in names(its.options)]
    if elsewhere:
        near = nearest(typed.key, command)
        cure = near if f".{typed.key}" in near else "leave it out"
        return typed.refuse(f"txl {command} has no such key, only {' and '.join(elsewhere)}", cure)
    if typed.key in SECTIONS or typed.head == "callbacks":
        known = names(SECTIONS[typed.key]) if typed.key in SECTIONS else ["NAME.KEY"]
        dotted = ", ".join(f"{typed.head}.{name}" for name in known)
        return typed.refuse("is a group of keys, not one", f"set {dotted}")
    return typed.refuse("no such key", nearest(typed.key, command))
