"""Which segments an optimizer step sums over.

Lightning counts segments from the start of the epoch and steps when their number divides by a constant. Here a step may
begin at any segment and its size may change in the middle of an epoch (`trainer.accumulate_from_step`), also after a
resume. An epoch's last step ends with the epoch, however many segments it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from txl_lightning.types import Batch


@dataclass(frozen=True)
class Window:
    """The segments of one optimizer step.

    Attributes:
        stop: the segment behind the last one.
        n_target: targets of all of them, over all lanes and ranks.
    """

    stop: int
    n_target: int

    def batches_for_lightning(self, segment: int, batch_idx: int) -> int:
        """What `Trainer.accumulate_grad_batches` must be while a segment is read.

        Lightning steps after batch i if i + 1 divides by it, and clears gradients before batch i if i does. So this
        makes it step after the last segment only, and clear nothing but the first batch of an epoch.
        """
        return batch_idx + 1 if self.ends_with(segment) else batch_idx + 2

    def ends_with(self, segment: int) -> bool:
        """Whether a segment is the last one."""
        return segment + 1 == self.stop


def next_window(batch: Batch, layout: Any, *, segments: int) -> Window:
    """The window of so many segments that begins with a batch.

    Args:
        batch: its first one.
        layout: the LaneLayout it comes from; None: all segments count as large as this one.
        segments: how many it has, unless the epoch ends before.
    """
    epoch, first = batch.position
    if layout is None:
        return Window(stop=first + segments, n_target=batch.n_target * segments)
    stop = min(first + segments, layout.n_segment)
    rest = sum(int(layout.lengths(segment, epoch=epoch).sum()) for segment in range(first + 1, stop))
    return Window(stop=stop, n_target=batch.n_target + rest)
