"""Lightning's counters as they are at a border between two optimizer steps.

What Lightning stores depends on the hook a checkpoint is written in, and so does what it does after a resume: it may
skip a validation, or half of it, or an epoch. Here the counters follow from where the lanes stand, so a resume is the
same whatever the checkpoint was written for.
"""

from __future__ import annotations

from typing import Any

from txl_lightning.types import Position


def batches_read(position: Position, *, group: int) -> int:
    """Batches of the epoch in front of a position, of `group` segments each."""
    return -(-position.segment // group)


def validation_is_due(trainer: Any, *, epoch: int, batches: int) -> bool:
    """Whether the interval asks for a validation after so many batches of an epoch."""
    interval, every = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or not batches or interval is None:
        return False
    if every is None:
        return (epoch * trainer.num_training_batches + batches) % interval == 0
    if (epoch + 1) % every:
        return False
    return batches == trainer.num_training_batches if interval == float("inf") else batches % interval == 0


def at_border(*, epoch: int, batches: int, per_epoch: int, steps: int, validate: bool) -> dict[str, Any]:
    """State of the fit loop as it resumes.

    Args:
        epoch: passes made.
        batches: those read of this one; all of them mean the start of the next, unless a validation is to come.
        per_epoch: batches of a whole pass.
        steps: optimizer steps made.
        validate: begin with a whole validation.
    """
    total = epoch * per_epoch + batches
    if batches == per_epoch and not validate:
        epoch, batches = epoch + 1, 0
    begun = epoch + (batches > 0)
    made = _counts(ready=steps, completed=steps)
    loop = "epoch_loop"
    started = int(validate)  # a validation that has begun is done again by Lightning, from its first batch
    return {
        "epoch_progress": _both(_counts(ready=begun, started=begun, processed=epoch, completed=epoch)),
        f"{loop}.state_dict": {"_batches_that_stepped": steps},
        f"{loop}.batch_progress": {
            "total": _all(total),
            "current": _all(batches),
            "is_last_batch": batches == per_epoch,
        },
        f"{loop}.scheduler_progress": {"total": made, "current": _counts(ready=0, completed=0)},
        f"{loop}.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": {"total": made, "current": _counts(ready=0, completed=0)},
                "zero_grad": {
                    "total": _counts(ready=steps, started=steps, completed=steps),
                    "current": _counts(ready=0, started=0, completed=0),
                },
            }
        },
        f"{loop}.val_loop.batch_progress": {
            "total": _counts(ready=started, started=started, processed=0, completed=0),
            "current": _all(0),
            "is_last_batch": False,
        },
    }


def take_back_to(trainer: Any, *, steps: int) -> None:
    """Let Lightning have made so many optimizer steps."""
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
    loop._batches_that_stepped = steps


def _counts(**counts: int) -> dict[str, int]:
    return counts


def _all(count: int) -> dict[str, int]:
    return {"ready": count, "completed": count, "started": count, "processed": count}


def _both(counts: dict[str, int]) -> dict[str, dict[str, int]]:
    return {"total": counts, "current": dict(counts)}
