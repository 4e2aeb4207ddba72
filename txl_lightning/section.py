"""A group of keys as a frozen dataclass: each key is declared once, with its default, its rule and its help text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from txl_lightning.errors import ConfigError, keys_renamed, suggest, yaml_text

Part = TypeVar("Part", bound="Section")


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
        for choice in value if isinstance(value, tuple) else (value,):
            if "choices" in rules and choice not in rules["choices"]:
                known = [str(valid) for valid in rules["choices"] if valid is not None]
                raise self.refuse(item.name, "no such choice", suggest(str(choice), known))


def _range_cure(rules: Mapping[str, Any]) -> str:
    """What to choose: the whole range, and what the key is for."""
    signs = {"minimum": ">=", "above": ">", "maximum": "<="}
    limits = " and ".join(f"{sign} {rules[name]}" for name, sign in signs.items() if name in rules)
    return f"choose a value {limits}: {rules['help']}"


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
    from omegaconf import OmegaConf  # only here, so that the model itself can be used without it
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(values, Mapping):
        raise ConfigError(path, values, "must be a group of keys", f"set {path}.KEY=VALUE")
    dotted = f"{path}." if path else ""
    known = [item.name for item in dataclasses.fields(schema)]
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{dotted}{name}", value, "no such key", suggest(str(name), known))
    # OmegaConf checks types, but would find meanings in texts: ${...}, ???
    as_they_are = {name: value for name, value in values.items() if _is_free(value, get_type_hints(schema)[name])}
    rest = {name: value for name, value in values.items() if name not in as_they_are}
    try:
        typed: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(schema), rest))
        with keys_renamed(schema.section, to=path):
            return schema(**{name: _untyped(value) for name, value in {**typed, **as_they_are}.items()})
    except OmegaConfBaseException as error:
        name = str(error.full_key or path)
        message = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{dotted}{name}", values.get(name), message, _type_cure(schema, name)) from error


def _is_free(value: Any, hint: Any) -> bool:
    return hint is Any or (isinstance(value, str) and (hint is str or str in get_args(hint)))


def _untyped(value: Any) -> Any:
    return tuple(_untyped(item) for item in value) if isinstance(value, list) else value


def _type_cure(schema: type[Section], name: str) -> str:
    for item in dataclasses.fields(schema):
        if item.name == name:
            return f"it takes {item.type}: {item.metadata.get('help', '')}"
    return "see --help"
