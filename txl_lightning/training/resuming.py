"""What a checkpoint holds of a training run beside weights and optimizer, and how training goes on from it."""

from __future__ import annotations

from typing import Any

import torch

from txl_lightning.checkpoints import lane_files
from txl_lightning.checkpoints.own import read_config
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.store import TokenData
from txl_lightning.training import progress, rng
from txl_lightning.training.clock import Clock
from txl_lightning.training.datamodule import TextDataModule
from txl_lightning.training.judging import Judging
from txl_lightning.types import Position


class Resuming(Judging):
    """Tells checkpoints where its training stands, and takes that up again.

    Args:
        config: the whole configuration.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.clock = Clock()
        self.scores: dict[str, dict[str, float]] = {}  # latest figures per stage, in full precision
        self.validated_at = -1  # optimizer step of the latest validation
        self._resumed: dict[str, Any] | None = None  # what a checkpoint says of this rank, until training begins
        self._ended: dict[str, Any] | None = None  # what `_at_rest` gave when training ended, until it begins again
        self._read_text: str | None = None  # fingerprint of what the lanes hold

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **more: Any) -> Any:
        """As Lightning's. The configuration is the one stored there unless `config` is given.

        Raises:
            ConfigError: it is no checkpoint of ours.
        """
        if "config" not in more:
            more["config"] = Config.from_dict(read_config(str(checkpoint_path)))
        return super().load_from_checkpoint(checkpoint_path, *args, **more)

    @property
    def at_border(self) -> bool:
        """Whether no optimizer step is under way: every segment that was read has entered one."""
        return self.trainer.global_step > self._unstepped

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Everything as at the border in front of the optimizer step under way. Every rank must come here."""
        self.hear_verdict()
        marked = not self.at_border
        resting = self._border if marked else self._at_rest()
        position = self.lanes.place(marked=marked)
        checkpoint["txl_lightning"] = {
            "config": self.config.to_dict(),
            "lanes": self.lanes.state_dict(marked=marked, own_only=self._ranks_write_lanes(marked=marked)),
            "data_fingerprint": self._fingerprint(),
            "vocab": None if (data := self._data()) is None else data.vocab.to_dict(),
            "ranks": self._of_all_ranks(
                {"rng": resting["rng"], "train_loss": [part.cpu() for part in resting["train_loss"]]}
            ),
            "clock": resting["clock"],
            "divergence": resting["divergence"],
            "scores": self.scores,
            "validated_at": self.validated_at,
        }
        if self.trainer.num_training_batches != float("inf"):
            checkpoint["epoch"] = position.epoch
            to_come = not marked and self.validated_at != self.trainer.global_step and self._due_at(position)
            checkpoint["loops"]["fit_loop"] |= progress.at_border(
                epoch=position.epoch,
                batches=progress.batches_read(position, group=self.config.trainer.bptt_segments),
                per_epoch=int(self.trainer.num_training_batches),
                steps=self.trainer.global_step,
                validate=to_come,
            )
            if hasattr(self.trainer.train_dataloader, "next_position"):  # where `lanes` says
                checkpoint["loops"]["fit_loop"]["state_dict"] = {}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["txl_lightning"]
        if self._trainer is not None and self._trainer.state.fn == "fit":
            self._demand_same_text(there=saved["data_fingerprint"], what="the checkpoint was trained on")
            self._resume(saved)
        if saved["lanes"]:  # else weights alone
            self.lanes.load_state_dict(saved["lanes"], checkpoint=self._trainer.ckpt_path if self._trainer else None)

    def _ranks_write_lanes(self, *, marked: bool) -> bool:
        """Whether each rank writes its own lanes: those of all are too much for one, and the strategy can."""
        able = getattr(self.trainer.strategy, "ranks_write_lanes", False) and self.trainer.world_size > 1
        return able and self.lanes.n_byte(marked=marked) > lane_files.GATHERED_BYTES

    def _at_rest(self) -> dict[str, Any]:
        """What moves within a step and is of this rank alone, and the clock."""
        if self._ended is not None:
            return self._ended
        if self._resumed is not None:  # nothing was trained yet
            own = self._resumed
        else:
            own = {"rng": rng.capture(self.device), "train_loss": self.train_loss.sums()}
        return {**own, "clock": self.clock.state_dict(), "divergence": self.guard.state_dict()}

    def _of_all_ranks(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        world = self.trainer.world_size
        if world == 1:
            return [own]
        found: list[Any] = [None] * world
        torch.distributed.all_gather_object(found, own)
        return found

    def _resume(self, saved: dict[str, Any]) -> None:
        """Take over what is known beside weights and lanes; the generators only when training begins."""
        if "ranks" not in saved:
            return
        self.clock.load_state_dict(saved["clock"])
        if "divergence" in saved:
            self.guard.load_state_dict(saved["divergence"])
        self.scores, self.validated_at = dict(saved["scores"]), saved["validated_at"]
        ranks, rank = saved["ranks"], self.trainer.global_rank
        if len(ranks) == self.trainer.world_size:
            self._resumed = ranks[rank]
            return
        total = [sum(parts) for parts in zip(*(found["train_loss"] for found in ranks), strict=True)]
        self._resumed = {
            "rng": None,  # a lane would not meet the dropout masks it would have met anyway
            "train_loss": total if rank == 0 else [torch.zeros_like(part) for part in total],
        }

    def _take_up(self, resumed: dict[str, Any]) -> None:
        if resumed["rng"] is not None:
            rng.restore(resumed["rng"], self.device)
        else:
            rng.reseed(self.config.seed, self.trainer.global_step, self.trainer.world_size, self.trainer.global_rank)
        self.train_loss.set_sums(resumed["train_loss"])
        self._resumed = None

    def _demand_same_text(self, *, there: str | None, what: str) -> None:
        here = self._fingerprint()
        if here != there and None not in (here, there):
            rule = f"is not what {what}, {there}"
            raise ConfigError("data.fingerprint", here, rule, "go on with the same text, vocabulary and Python")

    def _fingerprint(self) -> str | None:
        """Of the data that is read, if it comes from our data module."""
        data = self._data()
        return None if data is None else data.meta.fingerprint

    def _data(self) -> TokenData | None:
        """What is read, if it comes from our data module."""
        source = getattr(self._trainer, "datamodule", None)
        return source.data if isinstance(source, TextDataModule) else None

    def _due_at(self, position: Position) -> bool:
        batches = progress.batches_read(position, group=self.config.trainer.bptt_segments)
        return progress.validation_is_due(self.trainer, epoch=position.epoch, batches=batches)
