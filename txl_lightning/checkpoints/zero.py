"""Checkpoints of DeepSpeed: folders to which every rank wrote its part.

DeepSpeed pickles more than numbers: a few plain records and enumerations of its own. Here they are read with torch's
restricted unpickler, to which exactly these are made known, so nothing in a folder can run code. Only where the user
says `trust=true` a folder that holds anything else is read as well.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from txl_lightning.checkpoints import shares
from txl_lightning.training.optim import parameter_groups
from txl_lightning.trust import is_trusted

LATEST = "latest"
"""The file by which a folder of DeepSpeed's is known; it names the subfolder."""

ENGINE = ("module", "optimizer", "ds_config", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes")
"""What DeepSpeed stores beside what was given to it, and may be large."""


@contextmanager
def restricted_loading() -> Iterator[None]:
    """While this lasts torch.load reads numbers, containers and DeepSpeed's records, whatever its caller asks for."""
    if is_trusted():
        yield
        return
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with torch.serialization.safe_globals(_records()):
            yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _records() -> list[Any]:
    """Classes of DeepSpeed that hold values and do nothing when they are made."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found nothing better
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def is_folder(path: Path) -> bool:
    """Whether it is a checkpoint of DeepSpeed's."""
    return (path / LATEST).is_file()


def read_given(folder: Path) -> dict[str, Any]:
    """What our trainer gave to DeepSpeed to keep: everything but weights and optimizer state."""
    with restricted_loading():
        return {name: held for name, held in _model_states(folder).items() if name not in ENGINE}


def read_weights(folder: Path) -> dict[str, Any]:
    """All weights under their names in the module, whole; float32 under ZeRO. Tied ones are one tensor."""
    with restricted_loading():
        if not _optimizer_files(folder):
            return _undivided_weights(_model_states(folder))
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it tells at length what it does
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag(folder)))


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's state as torch's optimizer gives it that nobody divided, from the shares of all ranks."""
    with restricted_loading():
        model, files = _model_states(folder), _optimizer_files(folder)
        if not files:
            held = model["optimizer"]
            return dict(held.get("optimizer_state_dict", held))  # inside, where the engine computes in half precision
        shards = [_load(file)["optimizer_state_dict"] for file in files]
        return shares.one_optimizer(shards, model)


def read_layouts(folder: Path) -> list[shares.Layout]:
    """How ranks share the optimizer's flat vectors; empty under ZeRO 0, where there are none."""
    with restricted_loading():
        files = _optimizer_files(folder)
        if not files:
            return []
        held, model = _load(files[0])["optimizer_state_dict"], _model_states(folder)
        return shares.layouts_of(held, model["param_shapes"], ranks=len(files))


def _undivided_weights(model: dict[str, Any]) -> dict[str, Any]:
    """Those of ZeRO 0: the optimizer's float32 copies where the engine computes in half precision."""
    weights = dict(model["module"])
    if "fp32_groups" not in model["optimizer"]:
        return weights
    named = {name: weight for name, weight in weights.items() if name not in model["buffer_names"]}
    owners = {weight.data_ptr(): name for name, weight in reversed(named.items())}  # the first name of tied ones
    groups = parameter_groups((name, weight) for name, weight in named.items() if owners[weight.data_ptr()] == name)
    copies = [copy.detach() for group in model["optimizer"]["fp32_groups"] for copy in group]
    found = dict(zip([name for group in groups for name, _ in group], copies, strict=True))
    return {**weights, **{name: found[owners[weight.data_ptr()]] for name, weight in named.items()}}


def tag(folder: Path) -> str:
    """The subfolder with the files."""
    return (folder / LATEST).read_text(encoding="utf-8").strip()


def _model_states(folder: Path) -> dict[str, Any]:
    """Of the first rank."""
    files = _in_order(folder, "*_model_states.pt")
    if not files:
        raise FileNotFoundError(f"{folder} has no *_model_states.pt")
    return _load(files[0])


def _optimizer_files(folder: Path) -> list[Path]:
    """One of each rank, in the order of ranks; none under ZeRO 0."""
    return _in_order(folder, "*_optim_states.pt")


def _in_order(folder: Path, pattern: str) -> list[Path]:
    files = (folder / tag(folder)).glob(pattern)
    return sorted(files, key=lambda file: [int(number) for number in re.findall(r"rank_(\d+)", file.name)])


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=not is_trusted(), mmap=True)
