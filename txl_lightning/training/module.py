"""The LightningModule: one segment of every lane per step, memory carried from step to step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from txl_lightning.config import Config, ConfigError
from txl_lightning.model.architectures import make_model
from txl_lightning.model.reading import Reader
from txl_lightning.model.transformer import ModelOutput, TransformerXL
from txl_lightning.ranks import check_chunks
from txl_lightning.training.accumulation import Window, next_window
from txl_lightning.training.averaging import MovingAverage
from txl_lightning.training.compiling import Forward, training_forward
from txl_lightning.training.datamodule import TextDataModule
from txl_lightning.training.lane_state import stage_of
from txl_lightning.training.metrics import TokenLoss, scores
from txl_lightning.training.optim import Plateau, build_optimizer, build_schedule
from txl_lightning.training.resuming import Resuming
from txl_lightning.training.strategies import clips_itself, engine_of
from txl_lightning.types import Batch, Chunk, State, detach


class TransformerXLModule(Resuming):
    """Trains TransformerXL on ordered lanes with automatic optimisation.

    Training keeps its memory until the data says a lane starts anew; sanity check, validation and test each have
    their own, so they cannot change one training loss.

    Args:
        config: the whole configuration.
        model: trained weights to go on with; a fresh model by default.

    Logs `train/…`, `val/…`, `test/…` (loss in nats per token over exactly the scored targets of all ranks, bits per
    unit, ppl), `optim/lr`, `optim/grad_norm` and what memory strategies report as `memory/…`.
    """

    def __init__(self, config: Config, *, model: TransformerXL | None = None) -> None:
        super().__init__(config)
        self.model = model if model is not None else make_model(config)
        self.eval_loss = TokenLoss()
        self._window: Window | None = None  # segments of the optimizer step under way
        self._schedule: LRScheduler | None = None
        self._average = [MovingAverage(config.optim.ema)] if config.optim.ema else []
        self._reported: dict[str, Tensor] = {}  # what the latest training step's memory said
        self._readers: dict[str, Reader] = {}  # by stage, of the evaluation under way
        self._forward = Forward(self.model, captured=False)  # what training calls

    def training_step(self, batch: Batch | list[Batch], batch_idx: int) -> Tensor:
        """The loss of a segment, or of a window of several that one backward pass goes through.

        With `trainer.lane_chunks` the lanes are read in chunks, and all but the last are back-propagated here: what is
        given back has the value of all and the graph of the last.
        """
        window = [self.lanes.due(part) for part in batches_of(batch)]
        count = self.config.trainer.lane_chunks
        check_chunks(len(window[0].tokens_BT), ranks=1, chunks=count)
        done = torch.zeros((), device=self.device)
        for index in range(count - 1):
            done = done + self._back_propagate(self._read_window(window, Chunk(index, count)))
        loss = self._read_window(window, Chunk(count - 1, count))
        self.clock.tokens += sum(part.n_target for part in window)
        return loss + done

    def _read_window(self, window: list[Batch], chunk: Chunk) -> Tensor:
        """The loss of one chunk of lanes over the segments of a window."""
        parts = [batch.share(chunk) for batch in window]
        reach = self.config.trainer.bptt_of_step(self.trainer.global_step)
        state = self.lanes.read("train", parts[0], lambda lanes: self.fresh_state(lanes, "train"), chunk=chunk)
        loss = torch.zeros((), device=self.device)
        for index, part in enumerate(parts):
            out = self._read(part, state if index % reach else detach(state))
            assert out.losses_BT is not None
            self.judge_losses(out.losses_BT, chunk)
            state, loss = out.state, loss + self._share_of_step(out, part)
        self.lanes.propose("train", state, parts[-1], chunk=chunk)
        self._note_memory(out, parts[-1], chunk)
        return loss

    def _back_propagate(self, loss: Tensor) -> Tensor:
        """Add a chunk's gradients while others are to come; no gradient crosses ranks yet."""
        with torch.autocast(self.device.type, enabled=False):
            self.trainer.strategy.backward(loss / self.trainer.accumulate_grad_batches, None)
        torch.clear_autocast_cache()  # its casts belong to the graph that is gone
        return loss.detach()

    def _share_of_step(self, out: ModelOutput, batch: Batch) -> Tensor:
        """What some lanes of a segment add to the loss of its optimizer step, the mean over all the targets of that."""
        assert out.losses_BT is not None
        nll, n_own = out.losses_BT.sum(), batch.segment.length.sum()
        self._sums.append((nll.detach(), n_own))
        # the mean over the targets of all ranks and segments: ddp divides by the ranks, whose lanes may hold different
        # numbers of targets, lightning by the segments. auxiliary losses are means over the targets of these lanes
        n_target = self._window.n_target if self._window is not None else batch.n_target
        share = self.trainer.accumulate_grad_batches / n_target
        if (engine := engine_of(self.trainer)) is not None:
            share *= engine.gradient_accumulation_steps()  # by which the engine divides too
        loss = nll * self.trainer.world_size * share
        return loss + sum(out.aux_losses.values()) * n_own * self.trainer.world_size * share

    def _note_memory(self, out: ModelOutput, batch: Batch, chunk: Chunk) -> None:
        """What memory says of a segment: over the chunks metrics are averaged, losses weighted by targets."""
        weight = batch.segment.length.sum() * self.trainer.world_size / batch.n_target
        found = {name: metric / chunk.count for name, metric in out.metrics.items()}
        found |= {name: loss.detach() * weight for name, loss in out.aux_losses.items()}
        before = self._reported if chunk.index else {}
        self._reported = {name: value + before[name] if before else value for name, value in found.items()}

    @property
    def unit(self) -> str:
        """What a token stands for in scores: byte, char or word where our data module says so, else token."""
        data = self._data()
        return "token" if data is None else data.meta.unit

    def on_after_backward(self) -> None:
        self.hear_verdict()  # of the step before, while the device is busy with this one
        if self.lanes.is_whole("train"):  # else chunks of lanes are to come
            self.lanes.commit("train")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.config.trainer.lane_chunks == 1:  # else the first chunks have left their gradients by now
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_train_start(self) -> None:
        self._demand_same_text(there=self._read_text, what="these lanes have read")
        self._read_text = self._fingerprint()
        if isinstance(self._schedule, Plateau) and not self.trainer.enable_validation:
            cure = "let the Trainer validate or take another schedule"
            raise ConfigError("optim.schedule", "plateau", "there is no validation whose loss it could watch", cure)
        self.lanes.seek(self.trainer.train_dataloader)
        self._forward = Forward(self.model, captured=False)
        if engine_of(self.trainer) is None:
            self._forward = training_forward(self.model, self.config.trainer, kind=self.device.type)
        self.lanes.stay_in_place(self._forward.captured)
        self._unstepped = -1
        self.begin_judging()
        if self.trainer.global_rank > 0:  # else lanes of different ranks would share their dropout masks
            torch.manual_seed(torch.initial_seed() + self.trainer.global_rank)
        if self._resumed is not None:
            self._take_up(self._resumed)
        self._ended = None
        self.clock.start()

    def on_train_end(self) -> None:
        self.hear_verdict()
        self.clock.pause()
        self._ended = self._at_rest()  # a validation on several ranks seeds the generators anew
        if self.train_loss.update_called:  # steps since the last point of the curves
            self.scores["train"] = scores(float(self.train_loss.compute()), self.unit)

    def on_train_batch_start(self, batch: Batch | list[Batch], batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        begins = self.at_border
        if begins:
            self.lanes.mark()
            self._border = self._at_rest()
            self._unstepped = self.trainer.global_step
            if engine_of(self.trainer) is None:  # which does so by itself
                self.zero_grad()  # before the forward pass, which then has their room
        if self._accumulates:
            self._accumulate(batches_of(batch), batch_idx, begins=begins)

    def end_batch(self) -> None:
        """Log the means since the last point. Runs on all ranks at the same steps: sums cross ranks here.

        Lightning calls `on_train_batch_end` of callbacks, which write checkpoints, before the module's; this comes in
        between, so that a checkpoint knows what is logged already.
        """
        if self.at_border:
            if self._verdict is not None and (self.logs_now() or self._due_at(self.lanes.place())):
                self.hear_verdict()
            self.lanes.unmark()
            self._note_norm_of_engine()
        if self.logs_now():
            if self.train_loss.update_called:  # not if all steps since the last point were left out
                self._log_scores("train", self.train_loss)
            if self.guard.skips:
                self.log_curves({"optim/skipped_steps": float(self.guard.skipped)})
            self.log_curves({f"memory/{name}": value for name, value in self.over_ranks(self._reported).items()})
            self.log_curves({"optim/lr": self.optimizers().param_groups[0]["lr"], "optim/grad_norm": self._grad_norm})  # type: ignore[union-attr]
            self.draw_point()

    def mean_loss(self) -> float | None:
        """Nats per token over the steps since the last point, of all ranks, which must all ask; None: there are none.

        For callbacks, where `logs_now` is true.
        """
        return float(self.train_loss.compute()) if self.train_loss.update_called else None

    def latest_grad_norm(self) -> Tensor:
        """0-dim norm of the latest step's gradient over all ranks' lanes, before clipping."""
        engine = engine_of(self.trainer)
        norm = None if engine is None else engine.get_global_grad_norm()
        norm = self._grad_norm if norm is None else torch.as_tensor(norm)
        assert norm is not None, "no step was made"
        return norm

    def _note_norm_of_engine(self) -> None:
        """The gradient's norm where DeepSpeed's engine clips. It is known only after the update."""
        engine = engine_of(self.trainer)
        if engine is not None and (norm := engine.get_global_grad_norm()) is not None:
            self._grad_norm = torch.as_tensor(norm)
            self.judge_gradient(self._grad_norm)

    def on_validation_start(self) -> None:
        self.hear_verdict()  # if training was stopped early
        self.clock.pause()

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking and self.trainer.state.fn == "fit":
            self.clock.start()

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """For observers: losses_BT, nats per token, 0 on padding."""
        return {"losses_BT": self._eval_step(batch, dataloader_idx)}

    def test_step(self, batch: Batch | list[Batch], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._eval_step(batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            self.eval_loss.reset()
        else:
            self.validated_at = self.trainer.global_step
            self._log_scores("val", self.eval_loss)
            self.draw_point()
            if isinstance(self._schedule, Plateau) and self._validation_was_due():
                self._schedule.tell(self.scores["val"]["loss"])
        self._readers.clear()
        self.lanes.drop("sanity/")
        self.lanes.drop("val/")

    def _validation_was_due(self) -> bool:
        """Whether the interval asked for this validation; Lightning validates too when training is stopped early."""
        return self.trainer.state.fn == "fit" and self._due_at(self.lanes.place())

    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.eval_loss)
        self._readers.clear()
        self.lanes.drop("test/")

    def configure_callbacks(self) -> list[L.Callback]:
        """What ends a batch, and the moving average of the weights if `optim.ema` asks for it."""
        return [EndOfBatch(), *self._average]

    def show_average(self) -> None:
        """Hold the moving average, if there is one, as after training."""
        for average in self._average:
            average.show(self)

    def configure_optimizers(self) -> Any:
        planned, actual = self.config.trainer.max_steps, self.trainer.max_steps
        if actual not in (-1, planned):
            rule = f"the Trainer has max_steps={actual}, so the learning-rate schedule would not fit"
            raise ConfigError("trainer.max_steps", planned, rule, "give both the same number")
        if self.trainer.accumulate_grad_batches > 1 and not self._accumulates:
            theirs = self.trainer.accumulate_grad_batches
            cure = f"set trainer.accumulate_grad_batches={theirs} in the configuration instead"
            raise ConfigError("Trainer.accumulate_grad_batches", theirs, "is not read", cure)
        chunks, strategy = self.config.trainer.lane_chunks, self.trainer.strategy
        if chunks > 1 and strategy.handles_gradient_accumulation:
            rule = f"{type(strategy).__name__} takes every backward pass for a step's last"
            raise ConfigError("trainer.lane_chunks", chunks, rule, "set it to 1, or train with strategy=ddp")
        fuse = not strategy.handles_gradient_accumulation and self.trainer.precision != "16-mixed"
        optimizer = build_optimizer(self.named_parameters(), self.config.optim, fuse=fuse)
        self._schedule = build_schedule(optimizer, self.config.optim, max_steps=planned)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip to `optim.clip` and log the norm before clipping."""
        if gradient_clip_val is not None:
            cure = f"set optim.clip={gradient_clip_val} instead"
            raise ConfigError("Trainer.gradient_clip_val", gradient_clip_val, "is not read", cure)
        engine = engine_of(self.trainer)
        if engine is not None and (clips_itself(engine) or not engine.is_gradient_accumulation_boundary()):
            return
        limit = self.config.optim.clip or float("inf")
        self._grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters(), limit)
        self.judge_gradient(self._grad_norm)

    def _read(self, batch: Batch, state: State) -> ModelOutput:
        """Read one segment in training, or as training does."""
        read = self._forward.read if self.training else self.model
        return read(batch.tokens_BT, state, batch.segment, batch.targets_BT, target_counts=batch.target_counts)

    def fresh_state(self, lanes: int, stage: str) -> State:
        """Memory of lanes that have read nothing, as a stage keeps it."""
        # weights move in training, so it keeps hidden states; evaluation projects each state once
        form = "hidden" if stage == "train" else "projected"
        home = torch.device("cpu") if self.lanes.offload else self.device
        return self.model.init_state(lanes, form=form, device=home, dtype=self._state_dtype())

    def state_before(self, batch: Batch) -> State:
        """Memory that a training batch is about to be read with. For observers; theirs to keep, not to be changed."""
        state = self.lanes.read("train", batch, lambda lanes: self.fresh_state(lanes, "train"))
        # where lanes stay in place, the step overwrites it
        return {key: tensor.clone() for key, tensor in state.items()} if self._forward.captured else state

    def _state_dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bf16" in str(self.trainer.precision) else self.dtype  # type: ignore[return-value]

    def _eval_step(self, batch: Batch | list[Batch], dataloader_idx: int) -> Tensor:
        """Losses of one segment, or of several at once layer by layer."""
        stage, group = stage_of(self.trainer, dataloader_idx), batches_of(batch)
        if stage not in self._readers:
            # ZeRO puts weights together anew for each use
            self._readers[stage] = Reader(self.model, capture=False if engine_of(self.trainer) is not None else None)
        reader = self._readers[stage]
        state = self.lanes.read(stage, group[0], lambda lanes: self.fresh_state(lanes, stage))
        if len(group) == 1:
            losses_BT, state = reader.read(group[0], state)
        else:
            out = self.model.read_by_layers(
                torch.cat([part.tokens_BT for part in group], dim=1),
                state,
                [part.segment for part in group],
                torch.cat([part.targets_BT for part in group], dim=1),
                tables=reader.tables,
            )
            losses_BT, state = out.losses_BT, out.state  # type: ignore[assignment]
        self.lanes.propose(stage, state, group[-1])
        self.lanes.commit(stage)
        if any(part.n_target for part in group):  # else lanes are being warmed
            n_target = torch.stack([part.segment.length.sum() for part in group]).sum()
            self.eval_loss.update(losses_BT.sum(), n_target)
        return losses_BT

    def _per_target(self, stage: str) -> dict[str, float]:
        """Words and bytes per target of an evaluated split, where the data counts them."""
        source = getattr(self._trainer, "datamodule", None)
        if stage == "train" or not isinstance(source, TextDataModule):
            return {}
        split = "valid" if stage == "val" else source.test_split
        n_target = source.data.meta.require(split) - 1
        return {unit: count / n_target for unit, count in source.data.meta.scored(split).items()}

    def _log_scores(self, stage: str, metric: TokenLoss) -> None:
        loss = float(metric.compute())
        metric.reset()
        self.scores[stage] = scores(loss, self.unit, per_target=self._per_target(stage))
        figures = {f"{stage}/{name}": value for name, value in self.scores[stage].items()}
        self._curves.update(figures)
        # the same on all ranks; lightning wants to be told
        self.log_dict(figures, logger=False, sync_dist=stage != "train")

    @property
    def _accumulates(self) -> bool:
        return self.config.trainer.accumulate_grad_batches > 1

    def _accumulate(self, window: list[Batch], batch_idx: int, *, begins: bool) -> None:
        """Begin or go on with an optimizer step over several segments."""
        if begins:
            layout = getattr(self.trainer.train_dataloader, "layout", None)
            segments = self.config.trainer.segments_of_step(self.trainer.global_step)
            self._window = next_window(window[0], layout, segments=segments)
        assert self._window is not None
        segment = window[-1].position.segment
        self.trainer.accumulate_grad_batches = self._window.batches_for_lightning(segment, batch_idx)
        if (engine := engine_of(self.trainer)) is not None:
            engine.set_gradient_accumulation_boundary(self._window.ends_with(segment))


def batches_of(given: Any) -> list[Batch]:
    """The segments of a batch: one, or several that belong together.

    Raises:
        TypeError: a loader gives something else.
    """
    group = given if isinstance(given, list) else [given]
    for part in group:
        if not isinstance(part, Batch):
            cure = "let TextDataModule load them, or give LaneLoader's"
            raise TypeError(f"a batch must be a txl_lightning.types.Batch, not a {type(part).__name__}: {cure}")
    return group


class EndOfBatch(L.Callback):
    """Lets the module end its batch after the observers and before checkpoints are written."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.end_batch()
