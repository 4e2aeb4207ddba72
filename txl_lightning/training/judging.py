"""A module that judges its steps: one that would ruin the weights never reaches them (`training.divergence`).

On a GPU the host would have to wait for each step to look at its loss and gradient. Where a flag on the device can hold
the update back, it does, and the host reads the flag while the next step is under way: it learns of a ruinous step one
step late, and takes back what it had counted since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from txl_lightning.config import Config
from txl_lightning.training import progress
from txl_lightning.training.curves import Showing
from txl_lightning.training.divergence import Diverged, Guard, NonFiniteLoss
from txl_lightning.training.lane_state import LaneState
from txl_lightning.training.metrics import TokenLoss
from txl_lightning.training.strategies import engine_of, is_sound
from txl_lightning.types import Chunk


@dataclass(frozen=True)
class Begun:
    """An optimizer step as it began: all that moves with it but what the device holds back."""

    number: int  # optimizer steps made before it
    marked: Any  # `LaneState.marked`
    border: dict[str, Any]
    schedule: dict[str, Any]
    groups: list[dict[str, Any]]  # of the optimizer, without weights


class Verdict:
    """Whether a step is ruinous: the device knows, and the host when it asks.

    Args:
        bad_B: lanes of this rank whose loss is not finite.
        ruinous: 0-dim float32, 1 if the loss of any rank or the gradient is not finite.
        begun: the step.
    """

    def __init__(self, *, bad_B: Tensor, ruinous: Tensor, begun: Begun) -> None:
        self.bad_B, self.begun = bad_B, begun
        self._told = torch.empty((), dtype=ruinous.dtype, pin_memory=ruinous.is_cuda)
        self._told.copy_(ruinous, non_blocking=True)
        self._copied = torch.cuda.Event() if ruinous.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def is_ruinous(self) -> bool:
        """Waits until the device has come to the end of the step's backward pass."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._told)


class Judging(Showing):
    """Judges losses and gradients of its steps.

    Args:
        config: the whole configuration.
    """

    _schedule: LRScheduler | None

    def __init__(self, config: Config) -> None:
        super().__init__(every_n_steps=config.trainer.log_every_n_steps)
        self.config = config
        self.guard = Guard(config.trainer)
        self.train_loss = TokenLoss()
        self.lanes = LaneState(model_resets=True, offload=config.memory.offload == "cpu")
        self.left_out = False  # the latest optimizer step
        self.late = False  # whether the host learns of a ruinous step while the next one is under way
        self._unstepped = -1  # optimizer steps made when the step under way began
        self._border: dict[str, Any] = {}  # what does not follow from those when the step under way began
        self._sums: list[tuple[Tensor, Tensor]] = []  # loss and targets of what was read in it
        self._loss: float | None = None  # mean of that, if the guard looks at it
        self._grad_norm: Tensor | None = None
        self._doubts: list[Tensor] = []  # (B,) lanes whose loss is not finite, of what was read in it
        self._verdict: Verdict | None = None  # of the step before, until the host has heard it

    def begin_judging(self) -> None:
        """Choose when to look, as training begins."""
        self._sums.clear()
        self._doubts.clear()
        self._verdict = None
        self.late = self.device.type == "cuda" and self._may_be_late()

    def _may_be_late(self) -> bool:
        """Whether all that a ruinous step changes can be held back on the device, or taken back by the host."""
        fused = all(group.get("fused") for group in self._raw_optimizer().param_groups)
        decides = self.guard.needs_loss or engine_of(self.trainer) is not None
        keys = self.config
        return fused and not decides and not keys.optim.ema and keys.trainer.lane_chunks == 1

    def judge_losses(self, losses_BT: Tensor, chunk: Chunk) -> None:
        """Refuse losses that are not finite; where steps are left out or judged late, their whole is judged later.

        Raises:
            NonFiniteLoss: on every rank.
        """
        if self.guard.skips:
            return
        bad_B = ~losses_BT.detach().isfinite().all(dim=1)
        if self.late:
            self._doubts.append(bad_B)
        elif self.trainer.strategy.reduce(bad_B.any().float(), reduce_op="sum"):
            self._refuse_lanes(bad_B, chunk)

    def judge_gradient(self, norm: Tensor) -> None:
        """Judge the step whose gradient is complete.

        Args:
            norm: of the gradient over all ranks' lanes.

        Raises:
            Diverged: training ends here, on every rank.
        """
        if self.late:
            self._judge_late(norm)
            return
        # in fp16 the scaler skips such steps by itself
        norm = torch.zeros(()) if self.trainer.precision == "16-mixed" else norm
        self._loss = self._loss_of_step()
        why = self.guard.judge(loss=self._loss, grad_norm=norm)
        if why is None:
            return
        if not self.guard.skips:
            kind = Diverged if norm.isfinite() else NonFiniteLoss
            raise kind(f"{why.removeprefix('the ')} at step {self.trainer.global_step}: {self._cure()}")
        self.guard.leave_out(why, step=self.trainer.global_step)
        self.left_out = True
        for weight in self.parameters():
            weight.grad = None  # optimizers pass over such weights

    def hear_verdict(self, *, refuse: bool = True) -> None:
        """Look at the flag of the step before, if the host has not yet.

        Args:
            refuse: whether training ends by it; where it ends by something else already, it is only taken back.

        Raises:
            NonFiniteLoss: it was ruinous; everything is as where it began.
        """
        verdict, self._verdict = self._verdict, None
        if verdict is None or not verdict.is_ruinous():
            return
        self._take_back(verdict.begun)
        if not refuse:
            return
        anyone = verdict.bad_B.any().float()
        if self.trainer.strategy.reduce(anyone, reduce_op="sum"):
            self._refuse_lanes(verdict.bad_B, Chunk(0, 1))
        raise NonFiniteLoss(f"gradient is not finite at step {self.trainer.global_step}: {self._cure()}")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """The optimizer step, unless the guard leaves it out: then nothing but the place in the text moves."""
        before = _without_weights(optimizer)
        self.left_out = False
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.left_out:
            self.lanes.roll_back()
            for group, values in zip(optimizer.param_groups, before, strict=True):
                for name in set(group) - {"params", *values}:
                    del group[name]
                group.update(values)  # some optimizers count steps here
        else:
            self.guard.accept(self._loss)
            for nll, count in self._sums:
                self.train_loss.update(nll, count)
        self._sums.clear()

    def _judge_late(self, norm: Tensor) -> None:
        """Let the device hold the update back if it must, and the host hear of it later."""
        assert self._schedule is not None and self._verdict is None
        bad_B = torch.stack(self._doubts).any(dim=0)
        ruinous = (bad_B.any() | ~norm.isfinite()).float()
        if self.trainer.world_size > 1:  # lightning's own reduction would wait
            dist.all_reduce(ruinous, op=dist.ReduceOp.MAX)
        optimizer = self._raw_optimizer()
        optimizer.found_inf = ruinous  # type: ignore[attr-defined]  # fused updates look at it on the device
        begun = Begun(
            number=self.trainer.global_step,
            marked=self.lanes.marked,
            border=self._border,
            schedule=self._schedule.state_dict(),
            groups=_without_weights(optimizer),
        )
        self._verdict = Verdict(bad_B=bad_B, ruinous=ruinous, begun=begun)
        self._doubts.clear()

    def _take_back(self, begun: Begun) -> None:
        """Stand again where a step began that the device has held back."""
        assert self._schedule is not None
        self.lanes.mark_again(begun.marked)
        self._border, self._unstepped = begun.border, begun.number
        self._schedule.load_state_dict(begun.schedule)
        for group, values in zip(self._raw_optimizer().param_groups, begun.groups, strict=True):
            group.update(values)
        progress.take_back_to(self.trainer, steps=begun.number)

    def _raw_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers(use_pl_optimizer=False)  # type: ignore[return-value]

    def _loss_of_step(self) -> float | None:
        """Mean loss over all targets of the optimizer step, of all ranks; None if the guard has no use for it."""
        if not self.guard.needs_loss:
            return None
        sums = torch.stack([torch.stack([nll.to(self.train_loss.wide), count]) for nll, count in self._sums]).sum(dim=0)
        nll, count = self.trainer.strategy.reduce(sums, reduce_op="sum").tolist()
        return nll / count

    def _refuse_lanes(self, bad_B: Tensor, chunk: Chunk) -> None:
        """Name the lanes of all ranks whose loss is not finite. Every rank must come here."""
        everywhere = [bad_B.byte() for _ in range(self.trainer.world_size)]
        if len(everywhere) > 1:
            dist.all_gather(everywhere, bad_B.byte())
        of_all = bad_B.new_zeros(len(everywhere), chunk.count, len(bad_B))
        of_all[:, chunk.index] = torch.stack(everywhere).bool()
        lanes = of_all.flatten().nonzero().flatten().tolist()
        raise NonFiniteLoss(f"loss is not finite at step {self.trainer.global_step}, lanes {lanes}: {self._cure()}")

    def _cure(self) -> str:
        """What became of the weights, and what to change."""
        sound = is_sound(self)
        kept = "the weights before this step are saved" if sound else "the weights are ruined and not saved"
        kept = kept if self.trainer.global_step else "no step was made, so nothing is saved"
        optim, precision = self.config.optim, str(self.trainer.precision)
        clip = f"lower optim.clip={optim.clip}" if optim.clip else "set optim.clip=0.25"
        full = "" if precision.startswith("32") else f", use trainer.precision=32-true instead of {precision}"
        cures = f"lower optim.lr={optim.lr}, raise optim.warmup_steps={optim.warmup_steps}, {clip}{full}"
        on = ", or go on with trainer.on_divergence=skip" if sound and self.trainer.global_step else ""
        return f"{kept}; {cures} in a new run{on}"


def _without_weights(optimizer: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
