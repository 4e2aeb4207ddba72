"""The moving average of the weights (`optim.ema`), by Lightning's own callback."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn


class MovingAverage(EMAWeightAveraging):
    """After every update average = decay * average + (1 - decay) * weights; before the first they are equal.

    Validation reads the average. After training the module holds it. A checkpoint's `state_dict` is the average, so
    that is what evaluation and generation load; the weights that training goes on with are its `current_model_state`.

    Lightning's callback overwrites the weights with the average when training ends, so a run that was stopped could
    not go on from where it was, and a checkpoint written during a validation has the two exchanged: here is kept in
    mind which of the two the module holds.

    Args:
        decay: share of the average that an update keeps.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, decay=decay)
        self.swapped = False  # the module holds the average, and this holds the weights

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start with the module's weights; a second fit of the same module goes on with its first one's."""
        if stage == "fit" and self.swapped:
            self._swap_models(pl_module)
        if stage == "fit" and self._average_model is None:
            self._device = trainer.strategy.root_device  # the module itself is moved there only after this
            super().setup(trainer, pl_module, stage)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        """Average after every update, but for those that the module left out."""
        if getattr(pl_module, "left_out", False):
            self._latest_update_step = trainer.global_step
        super().on_train_batch_end(trainer, pl_module, *rest)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the average to a validation inside training; outside the module holds it already."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the weights back."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the average in the module and keep the weights."""
        self.show(pl_module)

    def show(self, pl_module: L.LightningModule) -> None:
        """Let the module hold the average."""
        if not self.swapped:
            self._swap_models(pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the average as `state_dict` and the weights beside it."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.swapped:
            average = checkpoint["current_model_state"]
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = average

    def _swap_models(self, pl_module: L.LightningModule) -> None:
        super()._swap_models(pl_module)
        self.swapped = not self.swapped
