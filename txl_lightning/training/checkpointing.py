"""Which checkpoints a run keeps, `best` by validation loss and `last`, and how they get to disk whole."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from txl_lightning.checkpoints import BEST, FOLDER, LAST, lane_files, manifest, read_checkpoint, zero
from txl_lightning.training import folders
from txl_lightning.training.agreement import anyone
from txl_lightning.training.divergence import Diverged
from txl_lightning.training.judging import Judging
from txl_lightning.training.stopping import GracefulStop, Stopped, StoppedNow
from txl_lightning.training.strategies import FolderDeepSpeed, is_sound
from txl_lightning.training.trouble import NotWritten, names_its_file


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its place, syncs it and renames it: the file is the old or the new one, never a part.

    Lightning's own way goes through a temporary file that may be on another file system, where renaming is copying.
    In a run's folder size and hash go to the manifest first, and the `last` before the latest stays as `previous`.
    """

    @names_its_file
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        try:
            with part.open("wb") as file:
                hashed = manifest.Hashed(file)
                torch.save(checkpoint, hashed)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            if target.parent.name == FOLDER:
                manifest.note(target, size=part.stat().st_size, sha256=hashed.digest.hexdigest())
                if target.name == LAST:
                    manifest.keep_previous(target)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        manifest.sync_folder(target.parent)
        if target.parent.name == FOLDER:
            lane_files.remove_unused(target.parent)

    def load_checkpoint(self, path: Any, *rest: Any, **keys: Any) -> dict[str, Any]:
        """A file, or a folder of DeepSpeed's whose shares are put together."""
        if zero.is_folder(Path(path)):
            return read_checkpoint(str(path), key="resume", optimizer=True)
        return super().load_checkpoint(path, *rest, **keys)


def checkpoint_callbacks(
    run_dir: Path, *, save_every_steps: int, has_valid: bool, save_every_minutes: float = 0.0, save_top_k: int = 1
) -> list[L.Callback]:
    """The callbacks that write checkpoints into the subfolder `checkpoints` of a run's folder.

    Args:
        run_dir: the run's folder.
        save_every_steps: optimizer steps between two writes of `last`; 0: only at the end.
        has_valid: there is a validation split to choose `best` by.
        save_every_minutes: minutes between two writes of `last`; 0: only as the steps say.
        save_top_k: checkpoints of the lowest validation losses that are kept.
    """
    folder = run_dir / FOLDER
    kept = KeepLast(folder / LAST, every_steps=save_every_steps, every_minutes=save_every_minutes)
    return [SaveOnError(folder / LAST, kept), kept, *([KeepBest(folder, top_k=save_top_k)] if has_valid else [])]


class KeepLast(Checkpoint):
    """Writes `last` at borders of optimizer steps, every so many steps or minutes."""

    def __init__(self, path: Path, *, every_steps: int, every_minutes: float) -> None:
        self.path, self.every_steps, self.every_minutes = path, every_steps, every_minutes
        self._since = time.monotonic()
        self.saved_at = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since, self.saved_at = time.monotonic(), trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        if not pl_module.at_border or step == self.saved_at:
            return
        if (self.every_steps and step % self.every_steps == 0) or self._time_is_over(trainer):
            self._since, self.saved_at = time.monotonic(), step
            for logger in trainer.loggers:
                logger.save()  # curves up to here are on disk when the checkpoint is
            trainer.save_checkpoint(self.path)

    def _time_is_over(self, trainer: L.Trainer) -> bool:
        over = time.monotonic() - self._since >= 60 * self.every_minutes
        return self.every_minutes > 0 and anyone(over, trainer=trainer)


class KeepBest(Checkpoint):
    """Writes `best` whenever a validation loss is the lowest, and with top_k > 1 keeps the best ones by their steps."""

    def __init__(self, folder: Path, *, top_k: int = 1) -> None:
        self.folder, self.top_k = folder, top_k
        self.ranking: list[list[float]] = []  # [loss, optimizer step], the lowest loss first

    def state_dict(self) -> dict[str, Any]:
        return {"ranking": self.ranking}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ranking = [list(entry) for entry in state_dict["ranking"]]

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.consider(trainer, loss=pl_module.scores["val"]["loss"])

    def consider(self, trainer: L.Trainer, *, loss: float) -> None:
        """Keep the weights as they are if their validation loss is low enough. Every rank must call it."""
        step = trainer.global_step
        others = [entry for entry in self.ranking if entry[1] != step]  # a resumed run may validate one again
        ranking = sorted([*others, [loss, step]], key=lambda entry: entry[0])
        dropped, self.ranking = ranking[self.top_k :], ranking[: self.top_k]
        if self.top_k > 1 and [loss, step] in self.ranking:
            trainer.save_checkpoint(self._of_step(step))
        if self.ranking[0] == [loss, step]:
            self._keep_as_best(trainer, step)
        if trainer.is_global_zero:
            for _, old in dropped:
                self._of_step(int(old)).unlink(missing_ok=True)
            folders.remove_unused(self.folder)

    def _keep_as_best(self, trainer: L.Trainer, step: int) -> None:
        best, folder = self.folder / BEST, self._of_step(step)
        if self.top_k == 1 or not isinstance(trainer.strategy, FolderDeepSpeed):
            trainer.save_checkpoint(best)
        elif trainer.is_global_zero:  # it has just been written
            folders.point(best, folder.resolve())
            manifest.sync_folder(self.folder)

    def _of_step(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.ckpt"


def keep_if_best(trainer: L.Trainer, *, loss: float) -> None:
    """Write `best` for weights that were validated after training ended, if they are the best."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, KeepBest):
            callback.consider(trainer, loss=loss)


class EndInside(Checkpoint):
    """Under DeepSpeed: the closing validation and the last write of `last` come before training ends.

    Afterwards the engine, and with it the optimizer's state, is gone.
    """

    def __init__(self, path: Path, stop: GracefulStop, *, has_valid: bool) -> None:
        self.path, self.stop, self.has_valid = path, stop, has_valid

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.at_border and trainer.global_step >= trainer.max_steps and self.has_valid:
            stopped = anyone(self.stop.name is not None, trainer=trainer)
            trainer.should_stop = not stopped  # lightning then validates once more

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class SaveOnError(L.Callback):
    """Writes `last` when training ends by an error or by a stop during validation, if it can be done safely.

    With several ranks only if all of them fail together: one that fails alone would wait for the others. Never over a
    good checkpoint with weights that are ruined, and where training diverges not twice at one step: the second would
    take the place of the one before, whose weights may be better.
    """

    def __init__(self, path: Path, kept: KeepLast) -> None:
        self.path, self.kept = path, kept

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(pl_module, Judging):
            pl_module.hear_verdict(refuse=False)
        together = trainer.world_size == 1 or isinstance(exception, (Diverged, Stopped))
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        useless = isinstance(exception, (StoppedNow, NotWritten))
        there = isinstance(exception, Diverged) and self.kept.saved_at == trainer.global_step
        wanted = fitting and together and trainer.global_step > 0 and not useless and not there
        if wanted and is_sound(pl_module):
            trainer.save_checkpoint(self.path)
