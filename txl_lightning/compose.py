"""From typed overrides to plain values: Hydra composes the YAML groups, the dataclasses of `config` are the schema.

The defaults are declared once, in the dataclasses; they enter as the node `txl_schema`, so the YAML options only hold
what differs. Parts of other packages that bring no YAML become options here as well.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from txl_lightning.choices import (
    CONFIG_PACKAGE,
    check_config_dir,
    check_idle,
    check_plugged,
    check_values,
    names_to_options,
)
from txl_lightning.config import SECTIONS, TOP_KEYS, Config
from txl_lightning.errors import ConfigError
from txl_lightning.keys import GROUPS, PLUGGED, names
from txl_lightning.options import COMMANDS, FREE_TEXT
from txl_lightning.overrides import Typed, chosen, escape, read, read_hydra, split_list, to_hydra

HYDRA_VERSION_BASE = "1.3"
MAIN = "config"
STORED = "stored"
"""Name of the main config, and of the option in each group, that hold a checkpoint's configuration."""

_hydra_lock = threading.RLock()  # Hydra keeps its registries and its version in globals


def compose(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    command: str = "fit",
    stored: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Values of Config's keys and of the command's own, as plain containers.

    Args:
        overrides: as typed, e.g. ["memory=none", "data.path=/a b=c.txt"]; free text needs no quotes.
        config_dir: a folder with more options, as `--config-dir`.
        command: whose keys are known beside those of Config.
        stored: a checkpoint's configuration; then only what is typed differs from it.

    Raises:
        ConfigError: whatever is wrong with the overrides or the YAML.
    """
    if config_dir is not None:
        check_config_dir(config_dir)
    typed = [read(arg, command=command) for arg in overrides]
    return compose_job(typed, config_dir=config_dir, command=command, stored=stored)


def compose_job(
    typed: Sequence[Typed], *, config_dir: str | None, command: str, stored: Mapping[str, Any] | None
) -> dict[str, Any]:
    """`compose` for overrides that were read already: one job, no sweep."""
    typed = names_to_options(typed)
    check_values(typed, config_dir=config_dir)
    with _hydra_lock, registered(typed, command=command, config_dir=config_dir, stored=stored):
        free = [item for item in typed if item.head not in PLUGGED or item.is_group]
        if len(free) < len(typed):
            outline = _load(free, config_dir=config_dir, stored=stored)
            check_plugged(typed, _drop_leftovers(free, outline, config_dir=config_dir, stored=stored))
        values = _load(typed, config_dir=config_dir, stored=stored)
        check_idle(typed, values)
        return _drop_leftovers(typed, values, config_dir=config_dir, stored=stored)


def expand(typed: Sequence[Typed], *, config_dir: str | None) -> list[list[Typed]]:
    """The jobs of a sweep, each a list of overrides without several values.

    Jobs of sweepers other than Hydra's own are not known beforehand: then one job stands for all, with first values.
    """
    with _hydra_lock, hydra_globals():
        parser = OverridesParser.create(_loader(config_dir))
        parsed = parser.parse_overrides([to_hydra(item) for item in typed])
        if any(item.key == "hydra/sweeper" and item.text != "basic" for item in typed):
            return [[read_hydra(_first(override)) for override in parsed]]
        for item, override in zip(typed, parsed, strict=True):
            if isinstance(override._value, IntervalSweep):
                cure = f"write {item.key}=VALUE,VALUE or range(...)"
                raise item.refuse("Hydra's own sweeper takes no interval", cure)
            if override.is_sweep_override() and next(override.sweep_iterator(), None) is None:
                raise item.refuse("stands for no value at all", "give at least one")
        jobs = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    return [[read_hydra(arg) for arg in job] for job in jobs]


def _first(override: Override) -> str:
    value = override._value
    if isinstance(value, ChoiceSweep):
        value = value.list[0]
    elif isinstance(value, (RangeSweep, IntervalSweep)):
        value = value.start
    elif override.is_sweep_override():
        return next(f"{override.get_key_element()}={item}" for item in override.sweep_string_iterator())
    return f"{override.get_key_element()}={Override._get_value_element_as_str(value)}"


@contextmanager
def hydra_globals() -> Iterator[None]:
    """Hydra's version rules and resolvers as we need them; afterwards as they were."""
    instance = version.VersionBase.instance()
    base = instance.version_base
    version.setbase(HYDRA_VERSION_BASE)
    setup_globals()
    try:
        yield
    finally:
        instance.version_base = base


@contextmanager
def registered(
    typed: Sequence[Typed], *, command: str, config_dir: str | None, stored: Mapping[str, Any] | None
) -> Iterator[None]:
    """While this lasts Hydra knows our schema, the parts that have no YAML and the checkpoint's configuration."""
    with hydra_globals():
        _loader(None)  # discovers Hydra's plug-ins, which register themselves: that must not be undone below
        store = ConfigStore.instance()
        kept, store.repo = store.repo, _copy(store.repo)
        try:
            store.store(name="txl_schema", node=_escaped(_ungrouped(stored or {}, schema_defaults(command))))
            for group in [] if stored is None else [name for name in GROUPS if name not in ("experiment", "debug")]:
                store.store(group=group, name=STORED, node=_escaped((stored or {}).get(group) or {}))
            for group, name, node in _without_yaml(typed, _loader(config_dir)):
                store.store(group=group, name=name, node=node)
            yield
        finally:
            store.repo = kept


def _without_yaml(typed: Sequence[Typed], loader: ConfigLoaderImpl) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Group, name and defaults of every part without a file: registered, or named as package.module:Class."""
    for group, registry in PLUGGED.items():
        imported = {option for item in typed if item.key == group for option in chosen(item) if ":" in option}
        for name in sorted({*registry.names(), *imported} - set(loader.get_group_options(group))):
            values = registry.get(name).config().to_dict()
            yield group, name, {name: values} if group == "callbacks" else {**values, "name": name}


def schema_defaults(command: str) -> dict[str, Any]:
    """Every key of the configuration and of a command that is there whatever is chosen, with its default."""
    known = set(TOP_KEYS) - set(GROUPS)
    top = {item.name: item.default for item in dataclasses.fields(Config) if item.name in known}
    sections = {name: schema().to_dict() for name, schema in SECTIONS.items()}
    return {**top, **COMMANDS[command].options().to_dict(), **sections, "callbacks": {}}


def _ungrouped(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with what a checkpoint says of keys in no group; keys younger than it keep theirs."""
    own = {name: value for name, value in stored.items() if name not in GROUPS}
    younger = {name: {**defaults[name], **value} for name, value in own.items() if isinstance(defaults.get(name), dict)}
    return {**defaults, **own, **younger}


def _escaped(value: Any) -> Any:
    """Texts in which OmegaConf finds no interpolation."""
    if isinstance(value, Mapping):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) else value


def _copy(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: _copy(node) if isinstance(node, dict) else node for name, node in tree.items()}


def _loader(config_dir: str | None) -> ConfigLoaderImpl:
    path = create_config_search_path(f"pkg://{CONFIG_PACKAGE}")
    if config_dir:
        folder = f"file://{Path(config_dir).absolute()}"
        path.prepend(provider="command-line", path=folder, anchor=SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(config_search_path=path)


def _load(
    typed: Sequence[Typed],
    *,
    config_dir: str | None,
    stored: Mapping[str, Any] | None,
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Compose with Hydra and resolve interpolations. `without`: groups to leave out."""
    overrides = [*map(to_hydra, typed), *(f"~{group}" for group in without)]
    try:
        config = _loader(config_dir).load_configuration(
            config_name=MAIN if stored is None else STORED, overrides=overrides, run_mode=RunMode.RUN, from_shell=False
        )
        choices = config.hydra.runtime.choices
        with open_dict(config):
            del config["hydra"]
        values: Any = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:
        raise translate(error, typed) from error
    _put_free_text(typed, values)
    for group in ("experiment", "debug"):  # their files set keys of the whole configuration
        if values.pop(group, None):
            rule = f"its file sets keys of {group}, not of the whole configuration"
            raise ConfigError(group, choices[group], rule, "make `# @package _global_` its first line")
    if "experiment" not in without:
        values["experiment"] = choices["experiment"] if stored is None else stored["experiment"]
    _check_missing(values)
    return dict(values)


def _put_free_text(typed: Sequence[Typed], values: dict[str, Any]) -> None:
    """Letter by letter even where OmegaConf has a meaning for a text (??? says that a value is missing)."""
    for item in typed:
        if item.key in FREE_TEXT:
            section, _, name = item.key.rpartition(".")
            items = split_list(item)
            (values[section] if section else values)[name] = item.text if items is None else items


def _check_missing(values: Mapping[str, Any], path: str = "") -> None:
    for name, value in values.items():
        if value == "???" and f"{path}{name}" not in FREE_TEXT:
            raise ConfigError(f"{path}{name}", value, "has no value", f"set {path}{name}=VALUE")
        if isinstance(value, Mapping):
            _check_missing(value, f"{path}{name}.")


def _drop_leftovers(
    typed: Sequence[Typed],
    values: dict[str, Any],
    *,
    config_dir: str | None,
    stored: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Leave out what an experiment set for a memory, corpus or callback that was then replaced by a typed one."""
    groups = [item.key for item in typed if item.key in PLUGGED]
    if stored is not None or not any(group == "callbacks" or _surplus(group, values) for group in groups):
        return values
    bare = [
        item
        for item in typed
        if item.key not in ("experiment", "debug") and (item.head not in PLUGGED or item.is_group)
    ]
    option = _load(bare, config_dir=config_dir, stored=None, without=("experiment", "debug"))
    for group in groups:
        left = set(values[group]) if group == "callbacks" else _surplus(group, values)
        drop = left - set(option[group] or {})
        values[group] = {name: value for name, value in values[group].items() if name not in drop}
    return values


def _surplus(group: str, values: Mapping[str, Any]) -> set[str]:
    part = values.get(group) or {}
    return set(part) - set(names(PLUGGED[group].get(part["name"]).config)) if "name" in part else set()


def translate(error: Exception, typed: Sequence[Typed]) -> ConfigError:
    """What Hydra, OmegaConf or the YAML reader says, as one line about the override it is about."""
    if not str(error).strip() and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    message = re.split(r" (?=full_key: |Config search path: |To append to your )", text)[0].rstrip(". ")
    cure = "correct it or the file that sets it"
    key = str(getattr(error, "full_key", None) or "")
    about = [item for item in typed if item.key == key]
    about += [item for item in typed if item.key in message or (item.is_group and f"{item.key}/" in message)]
    if about:
        return about[0].refuse(message, cure)
    if key:
        return ConfigError(key, "?", message, cure)
    experiment = next((item for item in typed if item.key == "experiment"), Typed(key="experiment", text="default"))
    return experiment.refuse(message, "correct the file that says so")
