"""`txl convert`: one file with the weights of a checkpoint, which many ranks may have written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl_lightning.checkpoints import checkpoint_file, read_checkpoint, weights_alone
from txl_lightning.commands.output import check_out
from txl_lightning.config import Config
from txl_lightning.options import ConvertOptions
from txl_lightning.training.checkpointing import WholeFiles


def check(config: Config, options: ConvertOptions) -> None:
    """Everything about a conversion that can be refused. Writes nothing; raises ConfigError."""
    if options.ckpt is None:
        raise options.refuse("ckpt", "is required", "give a checkpoint or run folder: txl convert ckpt=PATH to=FILE")
    if options.to is None:
        raise options.refuse("to", "is required", "name the file to write, for example to=model.ckpt")
    check_out(options.to, key="to")
    target = Path(os.path.expanduser(options.to))
    if target.exists() and target.samefile(checkpoint_file(options.ckpt)):
        raise options.refuse("to", "is the checkpoint itself, which would be lost", "name another file")
    read_checkpoint(options.ckpt)


def run(config: Config, options: ConvertOptions) -> None:
    """Write the file and say what it holds."""
    assert options.ckpt is not None and options.to is not None
    converted = convert(options.ckpt)
    try:
        WholeFiles().save_checkpoint(converted, Path(os.path.expanduser(options.to)))
    except OSError as error:
        raise options.refuse("to", f"cannot be written: {error.strerror}", "name a file elsewhere") from error
    distinct = {id(weight): weight.numel() for weight in converted["state_dict"].values()}
    print(f"{sum(distinct.values()):,} parameters in {options.to}")


def convert(ckpt: str) -> dict[str, Any]:
    """Weights in float32, tied ones once, and what evaluation and generation need beside them. Raises ConfigError."""
    saved = read_checkpoint(ckpt)
    own = saved["txl_lightning"]
    return weights_alone(
        _single(saved["state_dict"]),
        config=own["config"],
        data_fingerprint=own["data_fingerprint"],
        vocab=own.get("vocab"),
        step=saved.get("global_step", 0),
    )


def _single(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in float32; what was one tensor stays one."""
    places = {name: (weight.data_ptr(), weight.shape) for name, weight in weights.items()}
    whole: dict[Any, Tensor] = {}
    for name, weight in weights.items():
        # a copy of its own: torch.save would write all of the memory that a slice belongs to
        whole.setdefault(places[name], weight.detach().to(torch.float32, copy=True))
    return {name: whole[place] for name, place in places.items()}
