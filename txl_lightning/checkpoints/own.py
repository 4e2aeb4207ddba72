"""Checkpoints of a run: where they are, what they say, and the model in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from txl_lightning.checkpoints import lane_files, manifest, zero
from txl_lightning.config import Config, ConfigError, StrategyConfig
from txl_lightning.model.architectures import make_model
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.model.weights import load_weights

FOLDER, LAST, BEST = "checkpoints", "last.ckpt", "best.ckpt"
MISMATCH = "its size or content is not what the manifest says"


def checkpoint_file(path: str, *, key: str = "ckpt") -> Path:
    """The checkpoint a user means: a file, a folder of DeepSpeed's, or the `last` of a run folder.

    `key` is the setting that says so.

    Raises:
        ConfigError: there is none.
    """
    given = Path(os.path.expanduser(path))
    if is_checkpoint(given):
        return given
    for candidate in (given / FOLDER / LAST, given / LAST):
        if is_checkpoint(candidate):
            return candidate
    if given.is_dir():
        raise ConfigError(key, path, f"the folder has no {FOLDER}/{LAST}", "give a run folder or a .ckpt file")
    raise ConfigError(key, path, "no such file or folder", "give the run folder that `txl fit` printed")


def is_checkpoint(path: Path) -> bool:
    """Whether it is a file, or a folder of DeepSpeed's."""
    return path.is_file() or zero.is_folder(path)


def read_checkpoint(path: str, *, key: str = "ckpt", weights: bool = True, optimizer: bool = False) -> dict[str, Any]:
    """Everything in a checkpoint, on the CPU, as plain containers and tensors.

    Args:
        path: file, folder of DeepSpeed's, or run folder.
        key: the setting that names it.
        weights: read the bytes of a file's tensors too, not only when they are looked at; put a folder's together,
            which takes time.
        optimizer: put a folder's optimizer state together too; a file's is always there, if it has any.

    Raises:
        ConfigError: it is missing, damaged, not one of ours, or may not be read.
    """
    file = checkpoint_file(path, key=key)
    try:
        if manifest.is_damaged(file):
            raise ConfigError(key, path, f"{file.name} is damaged: {MISMATCH}", _cure(file, key=key))
        if file.is_dir():
            saved: Any = _read_folder(file, weights=weights, optimizer=optimizer)
        else:
            saved = _read_file(file, weights=weights)
    except ConfigError:
        raise
    except PermissionError as error:
        cure = "get the right to read it"
        raise ConfigError(key, path, f"{error.filename or file} may not be read", cure) from error
    except Exception as error:  # on garbage the restricted unpickler fails in any way
        rule = f"{file.name} is damaged, or holds more than numbers and would run code on loading"
        trusted = "; if you know who made it, trust=true" if file.is_dir() else ""
        raise ConfigError(key, path, rule, f"give a checkpoint that txl fit wrote{trusted}") from error
    if not _is_ours(saved):
        raise ConfigError(key, path, f"{file.name} is not a txl_lightning checkpoint", "give one that txl fit wrote")
    return saved


def _read_file(file: Path, *, weights: bool) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=not weights)


def _read_folder(folder: Path, *, weights: bool, optimizer: bool) -> dict[str, Any]:
    saved = {**zero.read_given(folder), "state_dict": zero.read_weights(folder) if weights else {}}
    return {**saved, "optimizer_states": [zero.read_optimizer(folder)]} if optimizer else saved


def check_lane_files(path: str, saved: Mapping[str, Any], *, key: str) -> None:
    """The files that hold the lanes of a checkpoint, if it has such, are there and whole. Raises ConfigError."""
    file = checkpoint_file(path, key=key)
    for shard in saved["txl_lightning"]["lanes"].get("shards", ()):
        fault = lane_files.fault_of(lane_files.root_of(file), shard)
        if fault is not None:
            raise ConfigError(key, path, fault, _cure(file, key=key))


def _cure(file: Path, *, key: str) -> str:
    """The checkpoint before a damaged one, if that is whole."""
    before = file.with_name(manifest.PREVIOUS)
    usable = file.name == LAST and is_checkpoint(before) and not manifest.is_damaged(before)
    return f"give the one before it: {key}={before}" if usable else "give another checkpoint"


def _is_ours(saved: Any) -> bool:
    """Whether a loaded file has the parts that every checkpoint of ours has."""
    own = saved.get("txl_lightning") if isinstance(saved, dict) else None
    weights = saved.get("state_dict") if isinstance(saved, dict) else None
    return (
        isinstance(own, dict)
        and isinstance(own.get("config"), dict)
        and "data_fingerprint" in own
        and isinstance(weights, dict)
        and all(isinstance(weight, torch.Tensor) for weight in weights.values())
    )


def read_config(path: str, *, key: str = "ckpt") -> dict[str, Any]:
    """The configuration stored in a checkpoint, as plain containers. Raises ConfigError as `read_checkpoint`."""
    return dict(read_checkpoint(path, key=key, weights=False)["txl_lightning"]["config"])


@dataclass(frozen=True)
class Stand:
    """Where a run stood when a checkpoint was written."""

    step: int  # optimizer steps made
    ranks: int  # 0: not known
    lane_chunks: int
    strategy: StrategyConfig


def read_stand(path: str) -> Stand:
    """Where a checkpoint stands; hardly more of it is read into memory."""
    if zero.is_folder(Path(path)):
        saved: Any = zero.read_given(Path(path))
    else:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    own = saved["txl_lightning"]
    config = Config.from_dict(own["config"])
    return Stand(
        step=int(saved["global_step"]),
        ranks=len(own.get("ranks", ())),
        lane_chunks=config.trainer.lane_chunks,
        strategy=config.strategy,
    )


def weights_alone(
    weights: Mapping[str, torch.Tensor],
    *,
    config: Mapping[str, Any],
    data_fingerprint: str | None,
    vocab: Mapping[str, Any] | None,
    step: int = 0,
) -> dict[str, Any]:
    """A checkpoint to evaluate and sample with, for `txl` and for plain Lightning.

    Args:
        weights: by their names in the LightningModule.
        config: `Config.to_dict`.
        data_fingerprint: of the text that was trained on; None: not known.
        vocab: `Vocab.to_dict`; None: not known.
        step: optimizer steps that were made.
    """
    own = {"config": dict(config), "data_fingerprint": data_fingerprint, "vocab": vocab, "lanes": {}}
    return {
        "state_dict": dict(weights),
        "global_step": step,
        "pytorch-lightning_version": version("lightning"),  # by it lightning knows its own
        "txl_lightning": own,
    }


def load_checkpoint(path: str, config: Config | None = None) -> TransformerXL:
    """The model of a checkpoint, in evaluation mode on the CPU.

    Args:
        path: checkpoint file or run folder.
        config: the stored one by default; another may change what does not change weights, such as `memory.mem_len`.

    Raises:
        ConfigError: no such checkpoint, or its weights do not fit the configuration; the message names the weight.
    """
    saved = read_checkpoint(path)
    config = config if config is not None else Config.from_dict(saved["txl_lightning"]["config"])
    model = make_model(config)
    weights = {k.removeprefix("model."): v for k, v in saved["state_dict"].items() if k.startswith("model.")}
    load_weights(model, weights, path=path)
    model.vocab = saved["txl_lightning"].get("vocab")
    return model.eval()
