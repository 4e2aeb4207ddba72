"""What ranks decide together, beside a group of devices and without one."""

from __future__ import annotations

import datetime
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks
from txl_lightning.training import agreement


@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_wish_of_any_rank_is_heard_by_all(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SimpleNamespace(_timeout=datetime.timedelta(seconds=60))
    trainer: Any = SimpleNamespace(world_size=2, strategy=strategy)

    def work() -> int:
        rank = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=2)
        monkeypatch.setattr(dist, "get_backend", lambda: backend)
        made, new_group = [], dist.new_group
        monkeypatch.setattr(dist, "new_group", lambda **keys: made.append(keys) or new_group(**keys))
        wishes = [rank == 0, False, rank == 1, True]
        heard = [agreement.anyone(wish, trainer=trainer) for wish in wishes]
        kept = [] if backend == "gloo" else [{"backend": "gloo", "timeout": strategy._timeout}]
        return int(heard != [True, False, True, True] or made != kept)

    on_ranks(2, work)


def test_one_rank_asks_nobody() -> None:
    trainer: Any = SimpleNamespace(world_size=1)
    assert [agreement.anyone(wish, trainer=trainer) for wish in (True, False)] == [True, False]
