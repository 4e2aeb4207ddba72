"""What ranks decide together, agreed among their processes: no device is waited for, as a reduction there would."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_groups: dict[Any, Any] = {}  # of the processes, by the group of the devices that it stands beside


def anyone(wish: bool, *, trainer: Any) -> bool:
    """Whether any rank wishes it. Every rank must ask, in the same order.

    Args:
        wish: of this rank.
        trainer: with as many ranks as wait for each other, no longer than its strategy does.
    """
    if trainer.world_size == 1:
        return wish
    told = torch.tensor(int(wish))
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=_of_processes(trainer))
    return bool(told)


def _of_processes(trainer: Any) -> Any:
    """The group that reduces on CPUs; None: the default one does."""
    if dist.get_backend() == "gloo":
        return None
    whole = dist.group.WORLD
    if whole not in _groups:
        _groups.clear()
        _groups[whole] = dist.new_group(backend="gloo", timeout=getattr(trainer.strategy, "_timeout", None))
    return _groups[whole]
