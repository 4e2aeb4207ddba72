"""The keys of training: how long, on what, in which steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from txl_lightning.section import Section, key


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Section):
    """How long and on what to train. All steps are optimizer steps unless a key says batches."""

    section: ClassVar[str] = "trainer"

    max_steps: int = key(1000, "optimizer steps of the whole run; the schedule ends here", minimum=1)
    accelerator: str = key("auto", "device kind", choices=("auto", "cpu", "cuda", "gpu", "mps"))
    devices: int = key(1, "devices on each node; one rank each", minimum=1)
    num_nodes: int = key(1, "machines", minimum=1)
    precision: str = key(
        "auto",
        "auto: bf16-mixed where the device computes it natively, else 32-true",
        choices=("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed"),
    )
    val_check_interval: int | float = key(
        1.0, "validate every so many batches (integer) or fraction of an epoch (float)", above=0
    )
    log_every_n_steps: int = key(10, "optimizer steps between two points of the curves", minimum=1)
    num_sanity_val_steps: int = key(1, "validation batches tried before training; 0: none", minimum=0)
    accumulate_grad_batches: int = key(
        1, "segments in time before one step; its gradient is the mean over all their targets", minimum=1
    )
    accumulate_from_step: int = key(
        0, "optimizer steps made on one segment each before accumulate_grad_batches begins", minimum=0
    )
    lane_chunks: int = key(
        1,
        "parts that each rank's lanes are read in, one after the other, for one update: activations of one part at a "
        "time (batch_chunk of the authors); trainer.accumulate_grad_batches takes segments in time instead",
        minimum=1,
    )
    bptt_segments: int = key(
        1,
        "consecutive segments that one backward pass goes through where memory.gradient=carry; "
        "trainer.accumulate_grad_batches, the segments of a step, must be a multiple",
        minimum=1,
    )
    bptt_grow_steps: int = key(
        0, "optimizer steps after which bptt_segments reaches one segment further, from 1 on; 0: all at once", minimum=0
    )
    save_every_steps: int = key(
        0, "optimizer steps between two writes of the checkpoint `last`; 0: only at the end", minimum=0
    )
    save_every_minutes: float = key(0.0, "minutes between two writes of `last`; 0: as the steps say", minimum=0)
    save_top_k: int = key(1, "checkpoints of the lowest val/loss that are kept; `best` is the lowest", minimum=1)
    stop_at_step: int | None = key(
        None,
        "save and end after this optimizer step; a later resume goes on as if there had been no stop; null: run on",
        minimum=1,
    )
    max_time: str | None = key(None, "save and end after so long, as HH:MM:SS or DD:HH:MM:SS; null: run on")
    on_divergence: str = key(
        "stop",
        "when a loss or gradient is not finite, or max_loss_rise is passed: stop saves what was before and ends with "
        "exit code 1; skip leaves the step out, so that only the place in the text and the schedule move on",
        choices=("stop", "skip"),
    )
    max_loss_rise: float = key(
        0.0,
        "nats per token a step's loss may lie above the running mean of those before it, once there are 10; 0: any",
        minimum=0,
    )
    max_skipped_steps: int = key(10, "steps in a row that skip leaves out before it stops after all", minimum=1)
    compile: Any = key(
        "auto",
        "compile the model for training: auto: on CUDA, where there is a compiler (on a CPU it is slower)",
        choices=("auto", True, False),
    )
    detect_anomaly: bool = key(False, "let autograd name the operation that made a NaN (slow)")

    def check(self) -> None:
        value = self.val_check_interval
        if isinstance(value, float) and value > 1.0:
            raise self.refuse(
                "val_check_interval", "a fraction of an epoch must be <= 1.0", "write an integer for batches"
            )
        if self.accumulate_from_step and self.accumulate_grad_batches == 1:
            rule, cure = "trainer.accumulate_grad_batches=1 accumulates nothing", "set that too, to 4 say"
            raise self.refuse("accumulate_from_step", rule, cure)
        if self.max_time is not None and self.max_seconds is None:
            raise self.refuse("max_time", "is no time", "write HH:MM:SS or DD:HH:MM:SS, as 11:30:00")
        self._check_bptt()

    @property
    def max_seconds(self) -> float | None:
        """Seconds of `max_time`; None if there is no limit or it cannot be read."""
        if self.max_time is None or not re.fullmatch(r"(\d+:)?\d+:[0-5]?\d:[0-5]?\d", self.max_time):
            return None
        parts = [int(part) for part in self.max_time.split(":")]
        return float(sum(part * unit for part, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False)))

    def _check_bptt(self) -> None:
        if self.accumulate_grad_batches % self.bptt_segments:
            rule = f"must divide trainer.accumulate_grad_batches={self.accumulate_grad_batches}, the segments of a step"
            raise self.refuse("bptt_segments", rule, f"set trainer.accumulate_grad_batches={self.bptt_segments} too")
        if self.bptt_segments > 1 and self.accumulate_from_step:
            rule = "trainer.accumulate_from_step begins with steps of one segment"
            raise self.refuse("bptt_segments", rule, "set one of them only; bptt_grow_steps is a curriculum too")
        if self.bptt_grow_steps and self.bptt_segments == 1:
            raise self.refuse("bptt_grow_steps", "trainer.bptt_segments=1 has nothing to grow to", "set that to 4, say")

    def bptt_of_step(self, step: int) -> int:
        """Segments that a backward pass goes through in optimizer step number `step`, counted from 0."""
        if not self.bptt_grow_steps:
            return self.bptt_segments
        return min(self.bptt_segments, 1 + step // self.bptt_grow_steps)

    def segments_of_step(self, step: int) -> int:
        """Segments that optimizer step number `step`, counted from 0, sums over."""
        return 1 if step < self.accumulate_from_step else self.accumulate_grad_batches

    def segments_of_run(self) -> int:
        """Segments that max_steps read, if no epoch ends inside a step."""
        alone = min(self.max_steps, self.accumulate_from_step)
        return alone + (self.max_steps - alone) * self.accumulate_grad_batches
