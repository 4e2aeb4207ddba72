"""Which checkpoints a run keeps: `best` by validation loss and `last`."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from txl_lightning.checkpoints import BEST, FOLDER, LAST
from txl_lightning.training.module import NonFiniteLoss
from txl_lightning.training.stopping import Stopped, StoppedNow


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

    With several ranks only if all of them fail together: one that fails alone would wait for the others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        together = trainer.world_size == 1 or isinstance(exception, (NonFiniteLoss, Stopped))
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and together and trainer.global_step > 0 and not isinstance(exception, StoppedNow):
            trainer.save_checkpoint(self.path)
