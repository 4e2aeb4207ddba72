"""Fills a model with weights, and says which one does not fit."""

from __future__ import annotations

import torch
from torch import nn

from txl_lightning.errors import ConfigError


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], *, path: str, key: str = "ckpt") -> None:
    """Fill a model; weights of a memory it does not have are left out.

    Args:
        model: what is filled.
        weights: by name, tied ones under each of their names.
        path, key: the file and the setting that names it, for messages.

    Raises:
        ConfigError: a weight is missing, too much, or of another shape; the message names it.
    """
    own = model.state_dict()
    extra = [name for name in weights if name not in own and not _of_memory(name)]
    missing = [name for name in own if name not in weights]
    for names, rule in ((extra, "the model has no weight"), (missing, "the checkpoint has no weight")):
        if names:
            cure = "keep the model and memory keys of the checkpoint"
            raise ConfigError(key, path, f"{rule} {names[0]} ({len(names)} such)", cure)
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            rule = f"{name} is {tuple(weights[name].shape)} there and {tuple(tensor.shape)} in the model"
            raise ConfigError(key, path, rule, "keep the model keys of the checkpoint")
    model.load_state_dict({name: weights[name] for name in own})


def tied_names(model: nn.Module) -> dict[str, str]:
    """Each further name of a parameter that has several, to its first name."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def _of_memory(name: str) -> bool:
    return ".memories." in name or name.startswith("tokens.")
