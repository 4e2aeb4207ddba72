"""The options of each group, and whether what is typed fits the options that are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from txl_lightning.errors import ConfigError, suggest, yaml_text
from txl_lightning.keys import GROUPS, PLUGGED, SEVERAL, names, plugged_keys, takes_list
from txl_lightning.model_config import OF_TRANSFORMER
from txl_lightning.overrides import Typed, check_value, chosen, parse

CONFIG_PACKAGE = "txl_lightning.configs"


def names_to_options(typed: Sequence[Typed]) -> list[Typed]:
    """`memory.name=X` chooses the option X, so it becomes `memory=X`; what typed options imply is added."""
    groups = {item.key: item for item in typed if item.is_group}
    found = []
    for item in typed:
        group = item.head if item.key in ("memory.name", "data.name") else None
        if group in groups and groups[group].text != item.text:
            raise item.refuse(f"contradicts {groups[group]}", "keep one of them")
        found.append(dataclasses.replace(item, key=group) if group else item)
    chosen_groups = {item.key for item in found if item.is_group}
    for (group, option), (implied, value) in IMPLIED.items():
        if Typed(key=group, text=option) in found and implied not in chosen_groups:
            found.append(Typed(key=implied, text=value))
    return found


IMPLIED = {("model", "lstm"): ("memory", "none")}
"""Options that bring one of another group with them, where none of that group is typed."""


def check_values(typed: Sequence[Typed], *, config_dir: str | None) -> None:
    """Refuse options that do not exist and values that cannot be what is meant."""
    for item in typed:
        if item.is_sweep:
            cure = f"add -m{f', or write a list: {item.key}=[{item.text}]' if takes_list(item.key) else ''}"
            raise item.refuse("several values make a sweep, one job each", cure)
        check_value(item)
        if item.is_group:
            _check_option(item, config_dir=config_dir)


def _check_option(item: Typed, *, config_dir: str | None) -> None:
    options = chosen(item)
    if len(options) != 1 and item.key not in SEVERAL:
        raise item.refuse("takes one option", f"for example {item.key}={options[0] if options else 'NAME'}")
    for option in options:
        if option in option_files(item.key, config_dir=config_dir):
            continue
        registry = PLUGGED.get(item.key)
        if registry is None:
            raise item.refuse("no such option", suggest(option, option_files(item.key, config_dir=config_dir)))
        if ":" in option:
            registry.get(option)
        elif option not in registry.names():
            known = [*registry.names(), *option_files(item.key, config_dir=config_dir)]
            raise item.refuse("no such option", suggest(option, known))


def option_files(group: str, *, config_dir: str | None = None) -> list[str]:
    """Options of a group that are YAML files, ours and the user's."""
    roots = [resources.files(CONFIG_PACKAGE), *([Path(config_dir)] if config_dir else [])]
    folders = [root / group for root in roots]
    files = [file.name for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return sorted({name.removesuffix(".yaml") for name in files if name.endswith(".yaml")})


def check_config_dir(config_dir: str) -> None:
    """Refuse a folder that is missing, or whose files Hydra would never look at because ours have the same name."""
    if not Path(config_dir).is_dir():
        cure = "give the folder that holds experiment/ and the like"
        raise ConfigError("--config-dir", config_dir, "no such folder", cure)
    for group in GROUPS:
        twice = set(option_files(group)) & {file.stem for file in Path(config_dir, group).glob("*.yaml")}
        for name in sorted(twice):
            file = str(Path(config_dir, group, f"{name}.yaml"))
            raise ConfigError("--config-dir", config_dir, f"{file} has the name of an option of txl", "rename it")


def check_plugged(typed: Sequence[Typed], outline: Mapping[str, Any]) -> None:
    """Refuse keys that the chosen memory, corpus or callbacks do not have. `outline`: values without those keys."""
    for item in typed:
        if item.head not in PLUGGED or item.is_group:
            continue
        if item.head == "callbacks":
            _check_callback(item, outline.get("callbacks") or {})
            continue
        registry, name = PLUGGED[item.head], (outline.get(item.head) or {}).get("name")
        tail = item.key.partition(".")[2]
        if name is None or tail in names(registry.get(name).config):
            continue
        owners = [f"{item.head}={part}" for part in registry.names() if tail in names(registry.get(part).config)]
        if owners:
            cure = _cure_in_parts(item, typed, outline) or f"leave it out or choose {' or '.join(owners)}"
            raise item.refuse(f"{item.head}={name} has no such key", cure)
        known = [key for key in plugged_keys() if key.startswith(f"{item.head}.")]
        raise item.refuse("no such key", suggest(item.key, known))


def _reads_no_averages(values: Mapping[str, Any]) -> bool:
    return values["optim"]["name"] in ("sgd", "adagrad", "rmsprop", "adafactor")


_Idle = tuple[Callable[[Mapping[str, Any]], Any], str, str]

IDLE: dict[str, _Idle] = {
    "model.max_distance": (
        lambda values: values["model"]["position"] not in ("shaw", "absolute_per_layer"),
        "model.position={model[position]} has no learned rows",
        "leave it out, or set model.position to shaw or absolute_per_layer",
    ),
    "model.same_length_rule": (
        lambda values: not values["model"]["same_length"],
        "model.same_length is false",
        "leave it out, or set model.same_length=true",
    ),
    "model.cluster_order": (
        lambda values: not values["model"]["cutoffs"],
        "model.cutoffs=[] makes no clusters",
        "leave it out, or set model.cutoffs",
    ),
    "model.proj_same_dim": (
        lambda values: values["model"]["div_val"] == 1,
        "model.div_val=1 makes all clusters equally wide",
        "leave it out, or set model.div_val",
    ),
    "trainer.max_skipped_steps": (
        lambda values: values["trainer"]["on_divergence"] != "skip",
        "trainer.on_divergence={trainer[on_divergence]} skips no step",
        "leave it out, or set trainer.on_divergence=skip",
    ),
    **{
        f"eval.{name}": (
            lambda values: values["eval"]["dynamic"] == "none",
            "eval.dynamic=none learns nothing",
            "leave it out, or set eval.dynamic to sgd or rms",
        )
        for name in ("dynamic_lr", "dynamic_decay")
    },
    **{
        f"eval.{name}": (
            lambda values: values["eval"]["dynamic"] != "rms",
            "eval.dynamic={eval[dynamic]} measures no gradients",
            "leave it out, or set eval.dynamic=rms",
        )
        for name in ("dynamic_eps", "dynamic_segments")
    },
    "optim.betas": (_reads_no_averages, "optim={optim[name]} has none", "leave it out, or choose optim=adamw"),
    "optim.eps": (
        lambda values: values["optim"]["name"] in ("sgd", "adafactor", "lion"),
        "optim={optim[name]} does not read it",
        "leave it out, or choose optim=adamw",
    ),
    "optim.lr_factor": (
        lambda values: values["optim"]["schedule"] != "plateau",
        "optim.schedule={optim[schedule]} does not read it",
        "leave it out, or set optim.schedule=plateau",
    ),
    "optim.patience": (
        lambda values: values["optim"]["schedule"] != "plateau",
        "optim.schedule={optim[schedule]} does not read it",
        "leave it out, or set optim.schedule=plateau",
    ),
}
"""Keys that have no effect under certain others: when that is so, the rule and the cure."""

_OF_LSTM: _Idle = (
    lambda values: values["model"]["architecture"] == "lstm",
    "model.architecture=lstm has no such part",
    "leave it out, or set model.architecture=transformer",
)
IDLE.update({f"model.{name}": _OF_LSTM for name in OF_TRANSFORMER if f"model.{name}" not in IDLE})


def check_idle(typed: Sequence[Typed], values: Mapping[str, Any]) -> None:
    """Refuse a typed key that the rest of the configuration leaves without effect. In a file it may stand."""
    for item in typed:
        is_idle, rule, cure = IDLE.get(item.key, (None, "", ""))
        if is_idle is not None and is_idle(values):
            raise item.refuse(rule.format_map(values), cure)


def _cure_in_parts(item: Typed, typed: Sequence[Typed], outline: Mapping[str, Any]) -> str | None:
    """How to set a key of a memory's parts, if it has parts with such a key."""
    parts, tail = outline[item.head].get("parts") or (), item.key.partition(".")[2]
    if item.head != "memory" or not any(_has_key(part, tail) for part in parts):
        return None
    if any(other.key == "memory.parts" for other in typed):
        return f"set {tail} in memory.parts"
    value = parse(item).value()
    changed = [{**part, tail: value} if _has_key(part, tail) else part for part in parts]
    return f"set it in the parts: 'memory.parts={yaml_text(changed)}'"


def _has_key(part: Any, name: str) -> bool:
    """Whether a part of a mix is a strategy with that key."""
    return isinstance(part, Mapping) and name in names(PLUGGED["memory"].get(str(part.get("name"))).config)


def _check_callback(item: Typed, on: Mapping[str, Any]) -> None:
    _, name, key = item.key.split(".")
    registry = PLUGGED["callbacks"]
    if name not in registry.names():
        raise item.refuse("no such callback", suggest(name, registry.names()))
    known = names(registry.get(name).config)
    if key not in known:
        raise item.refuse("no such key", suggest(item.key, [f"callbacks.{name}.{other}" for other in known]))
    if name not in on:
        raise item.refuse(f"the callback {name} is off", f"add callbacks=[{','.join([*on, name])}]")
