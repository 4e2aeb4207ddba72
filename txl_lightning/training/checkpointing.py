"""Which checkpoints a run keeps, `best` by validation loss and `last`, and how they get to disk whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from txl_lightning.checkpoints import BEST, FOLDER, LAST
from txl_lightning.training.module import NonFiniteLoss
from txl_lightning.training.stopping import Stopped, StoppedNow


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its place, syncs it and renames it: the file is the old or the new one, never a part.

    Lightning's own way goes through a temporary file that may be on another file system, where renaming is copying.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checkpoint_callbacks(run_dir: Path, *, save_every_steps: int, has_valid: bool) -> list[L.Callback]:
    """Lightning's own callbacks, told where and when to write.

    Args:
        run_dir: the run's folder; files go to its subfolder `checkpoints`.
        save_every_steps: optimizer steps between two writes of `last`; 0: only at the end.
        has_valid: there is a validation split to choose `best` by.
    """
    folder = run_dir / FOLDER
    found: list[L.Callback] = [SaveOnError(folder / LAST)]
    if has_valid:
        # at the end of validation, not of the epoch: without a validation there is nothing to choose by
        found.append(_one_file(folder, BEST, monitor="val/loss", save_on_train_epoch_end=False))
    if save_every_steps:
        found.append(_one_file(folder, LAST, every_n_train_steps=save_every_steps, save_on_train_epoch_end=False))
    return found


def keep_if_best(trainer: L.Trainer, *, loss: float) -> None:
    """Write `best` for weights that were validated after training ended, if they are the best."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None and callback.dirpath is not None:
            if callback.best_model_score is None or loss < float(callback.best_model_score):
                trainer.save_checkpoint(Path(callback.dirpath) / BEST)


def _one_file(folder: Path, name: str, **when: object) -> ModelCheckpoint:
    return ModelCheckpoint(
        dirpath=folder,
        filename=Path(name).stem,
        save_top_k=1,
        auto_insert_metric_name=False,
        enable_version_counter=False,
        **when,  # type: ignore[arg-type]
    )


class SaveOnError(L.Callback):
    """Writes `last` when training ends by an error or by a stop during validation, if it can be done safely.

    With several ranks only if all of them fail together: one that fails alone would wait for the others. Never over a
    good checkpoint with weights that are ruined.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        together = trainer.world_size == 1 or isinstance(exception, (NonFiniteLoss, Stopped))
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        wanted = fitting and together and trainer.global_step > 0 and not isinstance(exception, StoppedNow)
        if wanted and all(bool(weight.isfinite().all()) for weight in pl_module.parameters()):
            trainer.save_checkpoint(self.path)
