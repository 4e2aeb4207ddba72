"""Weight files of other codes: read without running anything in them, and written.

Read: safetensors, state dicts of torch (.pt, .bin), the authors' whole pickled module, NVIDIA's checkpoint, and folders
with one of them. The configuration is in the file (module, NVIDIA), in a JSON beside it, or named by the user.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from txl_lightning.checkpoints import unpickler
from txl_lightning.checkpoints.unpickler import ForbiddenName, Inert
from txl_lightning.config import ConfigError

IN_FOLDERS = ("model.safetensors", "pytorch_model.bin", "model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
"""What a folder is looked through for: names that Hugging Face, the authors and NVIDIA give their files."""

CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What a file of another code holds: weights by its names, and its configuration if that is known."""

    state: Mapping[str, Tensor]
    config: Mapping[str, Any] | None


def read(src: str, *, config: str | None = None) -> Foreign:
    """Weights and configuration of a file or folder.

    Args:
        src: file or folder.
        config: JSON with the configuration; None: what the file holds, else STEM.json or config.json beside it.

    Raises:
        ConfigError: there is no such file, it is damaged, it holds no weights, or it wants to run code.
    """
    file = weight_file(src)
    found = _of_safetensors(file, src) if file.suffix == ".safetensors" else _of_torch(file, src)
    if config is not None:
        return Foreign(state=found.state, config=_read_json(Path(os.path.expanduser(config)), key="config"))
    if found.config is None:
        beside = [path for path in (file.with_suffix(".json"), file.with_name(CONFIG)) if path.is_file()]
        return Foreign(state=found.state, config=_read_json(beside[0], key="src") if beside else None)
    return found


def write(to: str, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[Path]:
    """Write weights, as safetensors or as torch's state dict by the file's suffix, and the configuration beside them.

    Returns:
        The files.

    Raises:
        ConfigError: the suffix says neither.
    """
    file = weight_target(to)
    beside = config_target(file)
    parts = {target: target.with_name(f".{target.name}.part") for target in (file, beside)}
    try:
        _write_weights(parts[file], state, suffix=file.suffix)
        parts[beside].write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for target, part in parts.items():
            part.replace(target)
    except (OSError, RuntimeError) as error:  # torch's writer raises the second
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise ConfigError(
            "to", to, f"cannot be written: {str(error).splitlines()[0]}", "name a file elsewhere"
        ) from error
    return [file, beside]


def _write_weights(part: Path, state: Mapping[str, Tensor], *, suffix: str) -> None:
    if suffix != ".safetensors":
        torch.save(dict(state), part)
        return
    # the format holds no tensor twice: a tied one is kept under its first name, as Hugging Face does
    names = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    save_file({name: state[name].contiguous() for name in names.values()}, part, metadata={"format": "pt"})


def weight_target(to: str) -> Path:
    """The file that `to` means; a folder that exists gets model.safetensors. Raises ConfigError."""
    path = Path(os.path.expanduser(to))
    if path.is_dir():
        return path / IN_FOLDERS[0]
    if path.suffix not in (".safetensors", ".pt", ".bin"):
        cure = "let it end in .safetensors, .pt or .bin, or name a folder that exists"
        raise ConfigError("to", to, "its suffix says no format", cure)
    if not path.parent.is_dir():
        raise ConfigError("to", to, "its folder does not exist", "make the folder first")
    return path


def config_target(file: Path) -> Path:
    """Where the configuration of a weight file goes: config.json beside the names Hugging Face uses, else STEM.json."""
    return file.with_name(CONFIG) if file.name in IN_FOLDERS[:2] else file.with_suffix(".json")


def weight_file(src: str) -> Path:
    """The file that `src` means; in a folder the first of IN_FOLDERS. Raises ConfigError."""
    path = Path(os.path.expanduser(src))
    if path.is_file():
        return path
    for name in IN_FOLDERS if path.is_dir() else ():
        if (path / name).is_file():
            return path / name
    if path.is_dir():
        raise ConfigError("src", src, f"the folder has none of {', '.join(IN_FOLDERS)}", "give the file itself")
    raise ConfigError("src", src, "no such file or folder", "give a weight file")


def _of_safetensors(file: Path, src: str) -> Foreign:
    try:
        return Foreign(state=load_file(file), config=None)
    except Exception as error:  # of the format's own kind, which is not public
        raise ConfigError("src", src, f"{file.name} is no whole safetensors file", "fetch it again") from error


def _of_torch(file: Path, src: str) -> Foreign:
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # it holds more than tensors and containers, or is damaged
        held = _of_pickle(file, src)
    if isinstance(held, Inert):
        try:
            return _of_module(held)
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            rule = f"{file.name} holds a module whose parts are not what modules have"
            raise ConfigError("src", src, rule, "give the authors' model.pt") from error
    if isinstance(held, dict) and isinstance(held.get("txl_lightning"), dict):
        rule = f"{file.name} is a checkpoint of txl_lightning already"
        raise ConfigError("src", src, rule, "give it to txl eval, generate or export as ckpt=")
    config = None
    if isinstance(held, dict) and isinstance(held.get("model_state"), dict):  # NVIDIA
        config, held = held.get("model_config"), held["model_state"]
    if not isinstance(held, dict) or not held or not all(isinstance(item, Tensor) for item in held.values()):
        rule = f"{file.name} holds neither weights by name nor a model"
        raise ConfigError("src", src, rule, "give a state dict, the authors' model.pt or NVIDIA's checkpoint")
    return Foreign(state=held, config=config if isinstance(config, dict) else None)


def _of_pickle(file: Path, src: str) -> Any:
    try:
        return unpickler.load(file)
    except ForbiddenName as error:
        rule = f"{file.name} wants to call {error}, which no checkpoint needs; nothing of it was run"
        raise ConfigError("src", src, rule, "do not use this file unless you know who made it and why") from error
    except Exception as error:  # on garbage it fails in any way
        rule = f"{file.name} is damaged or no file of torch's: {str(error).splitlines()[0] if str(error) else error!r}"
        raise ConfigError("src", src, rule, "fetch it again") from error


def _of_module(module: Inert) -> Foreign:
    """Weights of the authors' pickled model, and its configuration as far as its attributes have it."""
    inner = module.get("module")
    whole = inner if isinstance(inner, Inert) and module.get("n_token") is None else module  # DataParallel
    return Foreign(state=dict(whole.tensors()), config=_module_config(whole))


def _module_config(model: Inert) -> dict[str, Any] | None:
    """The arguments of the authors' model, from the attributes it keeps; None if it lacks some."""
    word_emb, crit = _part(model, "word_emb"), _part(model, "crit")
    layer = _part(_part(model, "layers"), "0")
    attention, feed_forward = _part(layer, "dec_attn"), _part(layer, "pos_ff")
    own = "n_token n_layer n_head d_model d_head d_embed tgt_len mem_len ext_len attn_type same_length clamp_len"
    config = {name: model.get(name) for name in own.split()}
    config |= {"div_val": word_emb.get("div_val"), "cutoffs": list(word_emb.get("cutoffs") or [0])[:-1]}
    config |= {"d_inner": feed_forward.get("d_inner"), "pre_lnorm": bool(attention.get("pre_lnorm", False))}
    if any(value is None for value in config.values()):
        return None
    return {**config, "sample_softmax": model.get("sample_softmax", -1), **_ties(word_emb, crit)}


def _part(module: Inert, name: str) -> Inert:
    """A submodule; an empty one if it is not there."""
    found = module.get(name)
    return found if isinstance(found, Inert) else Inert()


def _ties(word_emb: Inert, crit: Inert) -> dict[str, Any]:
    """Which parameters of embedding and softmax are one and the same."""
    own, shared = dict(crit.tensors()), dict(word_emb.tensors())
    n_cluster = len(word_emb.get("cutoffs") or [0])
    projections = {id(tensor) for name, tensor in shared.items() if name.startswith("emb_projs.")}
    return {
        "tie_weight": own.get("out_layers.0.weight") is shared.get("emb_layers.0.weight"),
        "tie_projs": [id(own.get(f"out_projs.{i}")) in projections for i in range(n_cluster)],
    }


def _read_json(path: Path, *, key: str) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read: {error.strerror}", "give a JSON file") from error
    except ValueError as error:
        raise ConfigError(key, path, f"{path.name} is no JSON: {error}", "give a JSON file") from error
    if not isinstance(held, dict):
        raise ConfigError(key, path, f"{path.name} holds no JSON object", "give the model's arguments by name")
    return held
