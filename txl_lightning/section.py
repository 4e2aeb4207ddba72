"""A group of keys as a frozen dataclass: each key is declared once, with its default, its rule and its help text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from txl_lightning.errors import ConfigError, keys_renamed, suggest, yaml_text

Part = TypeVar("Part", bound="Section")

LARGEST = 2**48
"""Whole numbers beyond it are slips, and too large to count with where they are multiplied."""


def key(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] | None = None,
) -> Any:
    """A dataclass field with its help text and its rule; `above` is an exclusive minimum."""
    rules = {"minimum": minimum, "above": above, "maximum": maximum, "choices": choices}
    metadata = {"help": help, **{name: rule for name, rule in rules.items() if rule is not None}}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of keys. Checks each key's rule; subclasses check what spans several keys in `check`."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))
            self._check_rule(item, getattr(self, item.name))
        self.check()

    def check(self) -> None:
        """Rules over several keys. Raises ConfigError."""

    def refuse(self, name: str, rule: str, cure: str) -> ConfigError:
        """The error for one of this section's keys."""
        return ConfigError(f"{self.section}.{name}", getattr(self, name), rule, cure)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, as YAML and checkpoints hold them."""
        return {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}

    def _check_rule(self, item: dataclasses.Field[Any], value: Any) -> None:
        rules = item.metadata
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise self.refuse(item.name, "must be a finite number", f"the default is {yaml_text(item.default)}")
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            if "minimum" in rules and number < rules["minimum"]:
                raise self.refuse(item.name, f"must be >= {rules['minimum']}", _range_cure(rules))
            if "above" in rules and number <= rules["above"]:
                raise self.refuse(item.name, f"must be > {rules['above']}", _range_cure(rules))
            if "maximum" in rules and number > rules["maximum"]:
                raise self.refuse(item.name, f"must be <= {rules['maximum']}", _range_cure(rules))
            if isinstance(number, int) and abs(number) > LARGEST:
                rule = f"must be {f'<= {LARGEST}' if number > 0 else f'>= -{LARGEST}'}"
                raise self.refuse(item.name, rule, f"choose a number nearer to 0: {rules.get('help', item.name)}")
        for choice in value if isinstance(value, tuple) else (value,):
            if "choices" in rules and choice not in rules["choices"]:
                known = [str(valid) for valid in rules["choices"] if valid is not None]
                raise self.refuse(item.name, "no such choice", suggest(str(choice), known))


def _range_cure(rules: Mapping[str, Any], *, many: bool = False) -> str:
    """What to choose: the whole range, and what the key is for."""
    signs = {"minimum": ">=", "above": ">", "maximum": "<="}
    limits = " and ".join(f"{sign} {rules[name]}" for name, sign in signs.items() if name in rules)
    return f"choose {'values' if many else 'a value'} {limits}: {rules['help']}"


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def build_section(schema: type[Part], values: Mapping[str, Any], *, path: str) -> Part:
    """Typed and checked dataclass from plain values; `path` is the dotted key in messages."""
    if not isinstance(values, Mapping):
        raise ConfigError(path, values, "must be a group of keys", f"set {path}.KEY=VALUE")
    dotted = f"{path}." if path else ""
    known = [item.name for item in dataclasses.fields(schema)]
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{dotted}{name}", value, "no such key", suggest(str(name), known))
    hints = get_type_hints(schema)
    typed = {}
    for name, value in values.items():
        try:
            typed[name] = of_kind(value, hints[name])
        except (ValueError, TypeError) as error:
            item = next(item for item in dataclasses.fields(schema) if item.name == name)
            rule = f"must be {kind_in_words(schema, name)}"
            raise ConfigError(f"{dotted}{name}", value, rule, type_cure(item)) from error
    with keys_renamed(schema.section, to=path):
        return schema(**typed)


TRUTHS = {
    **dict.fromkeys(("true", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "no", "n", "off", "0"), False),
}


def of_kind(value: Any, hint: Any) -> Any:
    """The value as a field of that type holds it: numbers may be written as text, lists become tuples.

    Raises:
        ValueError: it is of another kind.
    """
    if get_origin(hint) in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ValueError("no list")
        return tuple(of_kind(part, get_args(hint)[0]) for part in value)
    if get_origin(hint) in (Union, UnionType):
        return _of_one_of(value, get_args(hint))
    if hint is Any:
        return _as_tuples(value)
    if hint is bool:
        return value if isinstance(value, bool) else _truth(value)
    if value is None or isinstance(value, (Mapping, list, tuple)) or (isinstance(value, bool) and hint is not str):
        raise ValueError("neither a number nor text")
    if hint is str:
        return yaml_text(value)
    if hint is int and isinstance(value, float):
        raise ValueError("no whole number")
    return hint(value)


def _of_one_of(value: Any, kinds: Sequence[Any]) -> Any:
    """As the first of several types that it fits."""
    if value is None and type(None) in kinds:
        return None
    for kind in (kind for kind in kinds if kind is not type(None)):
        with suppress(ValueError):
            return of_kind(value, kind)
    raise ValueError("none of them")


def _truth(value: Any) -> bool:
    if not isinstance(value, str) or value.lower() not in TRUTHS:
        raise ValueError("neither true nor false")
    return TRUTHS[value.lower()]


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


def type_cure(item: dataclasses.Field[Any]) -> str:
    """What to set a key to, for somebody who set it to something of another kind."""
    rules = item.metadata
    if {"minimum", "above", "maximum"} & set(rules):
        return _range_cure(rules, many=str(item.type).startswith("tuple"))
    if "choices" in rules:
        return f"choose one of {', '.join(map(yaml_text, rules['choices']))}: {rules['help']}"
    default = item.default_factory() if callable(item.default_factory) else item.default
    return f"the default is {yaml_text(default)}: {rules['help']}"


KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, ...]: "a list of numbers",
    tuple[float, float]: "a list of 2 numbers",
    tuple[bool, ...]: "a list of true and false",
    tuple[str, ...]: "a list of texts",
    int | float: "a number",
}
"""Types in words."""


def kind_in_words(schema: type, name: str) -> str:
    """What a key holds, as `a whole number or null`."""
    hint = get_type_hints(schema)[name]
    kinds = get_args(hint) if hint not in KINDS and get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(KINDS.get(kind, str(getattr(kind, "__name__", kind))) for kind in kinds)
