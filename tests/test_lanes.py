"""Lanes: every (lane, position) once and in order, whatever the workers, ranks, lengths and restarts."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import pickle
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch

from txl_lightning import TextDataModule
from txl_lightning.config import load
from txl_lightning.data.lanes import LaneLayout, LaneLoader, SegmentReader, used_lanes
from txl_lightning.errors import ConfigError
from txl_lightning.types import Batch, Position


def stream(n_token: int) -> np.ndarray[Any, Any]:
    """Tokens that tell their place: 1, 2, 3, ... (0 is padding)."""
    return np.arange(1, n_token + 1, dtype=np.uint16)


def loader(n_token: int, *, segment_len: int, lanes: int, used: int | None = None, **keys: Any) -> LaneLoader:
    return LaneLoader(
        stream(n_token), segment_len=segment_len, lanes=lanes, used_lanes=lanes if used is None else used, **keys
    )


def same(a: Batch, b: Batch) -> bool:
    tensors = [
        (x, y)
        for x, y in (
            (a.tokens_BT, b.tokens_BT),
            (a.targets_BT, b.targets_BT),
            (a.segment.reset, b.segment.reset),
            (a.segment.length, b.segment.length),
        )
    ]
    return all(torch.equal(x, y) for x, y in tensors) and (a.n_target, a.position) == (b.n_target, b.position)


def test_a_case_by_hand() -> None:
    # 10 targets (tokens 2..11) in 3 lanes of 4, 3, 3
    first, second = loader(11, segment_len=3, lanes=3)
    assert first.tokens_BT.tolist() == [[1, 2, 3], [5, 6, 7], [8, 9, 10]]
    assert first.targets_BT.tolist() == [[2, 3, 4], [6, 7, 8], [9, 10, 11]]
    assert first.segment.length.tolist() == [3, 3, 3] and first.segment.reset.tolist() == [True, True, True]
    assert second.tokens_BT.tolist() == [[4, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert second.targets_BT.tolist() == [[5, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert second.segment.length.tolist() == [1, 0, 0] and second.segment.reset.tolist() == [False, False, False]
    assert (first.n_target, second.n_target) == (9, 1)
    assert (first.position, second.position) == (Position(0, 0), Position(0, 1))


def test_types_and_shapes() -> None:
    batch = next(iter(loader(50, segment_len=4, lanes=6, rank=1, world_size=2)))
    for tensor in (batch.tokens_BT, batch.targets_BT):
        assert tensor.dtype == torch.int64 and tensor.shape == (3, 4) and tensor.is_contiguous()
    assert batch.segment.length.dtype == torch.int64 and batch.segment.reset.dtype == torch.bool
    assert batch.segment.length.shape == batch.segment.reset.shape == (3,) and batch.segment.document is None
    assert type(batch.n_target) is int and all(type(number) is int for number in batch.position)


def read_back(batches: list[list[Batch]]) -> list[list[tuple[int, int]]]:
    """(input, target) of every lane in the order they came; `batches[rank]` are those of one rank."""
    lanes: list[list[tuple[int, int]]] = []
    for of_rank in batches:
        own: list[list[tuple[int, int]]] = [[] for _ in of_rank[0].tokens_BT]
        for batch in of_rank:
            for lane, length in enumerate(batch.segment.length.tolist()):
                real, pad = slice(0, length), slice(length, None)
                pairs = zip(batch.tokens_BT[lane, real].tolist(), batch.targets_BT[lane, real].tolist(), strict=True)
                own[lane].extend(pairs)
                assert not batch.tokens_BT[lane, pad].any() and not batch.targets_BT[lane, pad].any()
        lanes.extend(own)
    return lanes


@pytest.mark.parametrize(
    ("n_token", "lanes", "segment_len", "world_size", "num_workers"),
    [
        (2, 1, 1, 1, 0),
        (2, 1, 8, 1, 0),
        (13, 12, 5, 3, 0),
        (100, 4, 7, 1, 0),
        (101, 4, 5, 2, 0),
        (997, 6, 16, 3, 0),
        (1000, 9, 16, 3, 0),
        (500, 4, 7, 1, 1),
        (500, 4, 7, 2, 2),
        (997, 6, 16, 3, 3),
        (9, 4, 64, 1, 2),
    ],
)
def test_every_target_once_and_in_order(
    n_token: int, lanes: int, segment_len: int, world_size: int, num_workers: int
) -> None:
    ranks = [
        loader(n_token, segment_len=segment_len, lanes=lanes, rank=r, world_size=world_size, num_workers=num_workers)
        for r in range(world_size)
    ]
    batches = [list(rank) for rank in ranks]
    assert {len(of_rank) for of_rank in batches} == {len(ranks[0])}  # ranks with unequal counts would hang
    found = read_back(batches)
    assert [pair for lane in found for pair in lane] == [(token, token + 1) for token in range(1, n_token)]
    sizes = [len(lane) for lane in found]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    for step in zip(*batches, strict=True):
        assert len({batch.position for batch in step}) == 1
        real = sum(int(batch.segment.length.sum()) for batch in step)
        assert [batch.n_target for batch in step] == [real] * world_size and real > 0


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_change_nothing(num_workers: int) -> None:
    alone = list(loader(300, segment_len=4, lanes=3))
    helped = list(loader(300, segment_len=4, lanes=3, num_workers=num_workers))
    assert len(alone) == len(helped) == 25
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))


# lanes that are not used


@pytest.mark.parametrize(
    ("n_token", "lanes", "segment_len", "used"),
    [(1025, 16, 64, 16), (1024, 16, 64, 15), (129, 16, 64, 2), (65, 16, 64, 1), (10, 16, 64, 1), (2, 4, 1, 1)],
)
def test_short_splits_use_fewer_lanes(n_token: int, lanes: int, segment_len: int, used: int) -> None:
    assert used_lanes(n_token, lanes=lanes, segment_len=segment_len) == used


def test_lanes_not_used_stay_dead() -> None:
    batches = [list(loader(8, segment_len=3, lanes=4, used=2, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [batch.segment.length.tolist() for batch in batches[0]] == [[3, 3], [1, 0]]
    assert [batch.segment.length.tolist() for batch in batches[1]] == [[0, 0], [0, 0]]
    assert [batch.n_target for batch in batches[1]] == [6, 1]
    assert read_back(batches)[:2] == [[(1, 2), (2, 3), (3, 4), (4, 5)], [(5, 6), (6, 7), (7, 8)]]


# passes and restarts


def test_each_iteration_is_a_pass() -> None:
    data = loader(20, segment_len=4, lanes=2)
    assert len(data) == 3 and data.next_position == Position(0, 0)
    for epoch in range(3):
        batches = list(data)
        assert [batch.position for batch in batches] == [Position(epoch, segment) for segment in range(3)]
        assert [batch.segment.reset.tolist() for batch in batches] == [[True] * 2, [False] * 2, [False] * 2]
        assert data.next_position == Position(epoch + 1, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_going_on_in_the_middle(num_workers: int) -> None:
    whole = loader(200, segment_len=4, lanes=2, num_workers=num_workers)
    expected = [*whole, *whole]  # 2 passes of 25
    for stop in (1, 7, 24, 25, 30):
        first = loader(200, segment_len=4, lanes=2, num_workers=num_workers)
        seen: list[Batch] = []
        while len(seen) < stop:
            seen += itertools.islice(first, stop - len(seen))
        state = pickle.loads(pickle.dumps(first.state_dict()))
        second = loader(200, segment_len=4, lanes=2, num_workers=num_workers)
        second.load_state_dict(state)
        assert second.state_dict() == state
        seen += list(second)
        assert len(seen) == (25 if stop < 25 else 50)
        seen += list(second)
        assert all(same(a, b) for a, b in zip(seen, expected, strict=False))


def test_read_ahead_does_not_count() -> None:
    data = loader(400, segment_len=4, lanes=2, num_workers=2)
    batches = iter(data)
    for count in range(1, 4):
        next(batches)
        assert data.state_dict() == {"position": [0, count]}
    assert data.next_position == Position(1, 0)  # the next iteration starts the next pass


def test_a_pass_begins_with_its_first_batch() -> None:
    data = loader(20, segment_len=4, lanes=2)
    iter(data), iter(data)
    batches = iter(data)
    data.load_state_dict({"position": [5, 1]})
    assert next(batches).position == Position(5, 1)


def test_a_place_beyond_the_pass_is_refused() -> None:
    data = loader(20, segment_len=4, lanes=2)
    data.next_position = Position(2, 3)  # all of pass 2 is done
    assert data.next_position == Position(3, 0)
    with pytest.raises(ConfigError) as caught:
        data.load_state_dict({"position": [0, 4]})
    rule = "a pass has 3 segments, the checkpoint stands before segment 4"
    assert str(caught.value) == f"data.segment_len=4: {rule}; go on with the settings of the checkpoint"


def test_lanes_that_cannot_be_filled_or_shared() -> None:
    with pytest.raises(ConfigError) as caught:
        loader(5, segment_len=2, lanes=5)
    rule = "the text has 5 tokens, and 5 lanes need at least 6"
    assert str(caught.value) == f"data.batch_size=5: {rule}; set data.batch_size to 4 or less, or give more text"
    with pytest.raises(ConfigError) as caught:
        loader(50, segment_len=2, lanes=5, world_size=2, key="eval.batch_size")
    assert str(caught.value) == "eval.batch_size=5: must divide into 2 ranks; set it to 4 or 6"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["data.batch_size=6", "eval.batch_size=3"], "eval.batch_size=3: must divide into 2 ranks; set it to 2 or 4"),
        (["data.batch_size=3"], "data.batch_size=3: must divide into 2 ranks; set it to 2 or 4"),
    ],
)
def test_the_setting_that_does_not_divide_is_named(keys: list[str], said: str, tmp_path: Path) -> None:
    """A Trainer of one's own may have more ranks than the configuration says."""
    (tmp_path / "a.txt").write_text("to read a text segment by segment " * 40)
    data = TextDataModule(load(["data=text", f"data.path={tmp_path / 'a.txt'}", "data.segment_len=4", *keys]))
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(global_rank=0, world_size=2, strategy=strategy)  # type: ignore[assignment]
    with pytest.raises(ConfigError) as caught:
        data.eval_dataloader("test")
    assert str(caught.value) == said


# being a good neighbour


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_generators_are_left_alone(num_workers: int) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    list(loader(100, segment_len=4, lanes=2, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]  # type: ignore[index]


def wait_for_children() -> list[Any]:
    """Child processes still there after a moment of grace."""
    gc.collect()
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    return multiprocessing.active_children()


def test_workers_end_with_the_last_batch() -> None:
    data = loader(100, segment_len=4, lanes=2, num_workers=2)
    batches = iter(data)
    for _ in range(len(data) - 1):
        next(batches)
    assert len(multiprocessing.active_children()) == 2
    next(batches)  # Lightning asks no further
    assert multiprocessing.active_children() == []


def test_workers_end_when_a_pass_is_left() -> None:
    batches = iter(loader(1000, segment_len=4, lanes=2, num_workers=2))
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    del batches
    assert wait_for_children() == []


def test_a_mapped_file_travels_by_name(tmp_path: Path) -> None:
    stream(60_000).tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype="<u2", mode="r")
    layout = LaneLayout(n_token=60_000, lanes=2, used=2, segment_len=4)
    for tokens, limit in ((mapped, 1000), (mapped[:60_000], 10**6), (np.array(mapped), 10**6)):
        reader = SegmentReader(tokens, layout, own=slice(0, 2))
        packed = pickle.dumps(reader)
        assert len(packed) < limit
        assert (
            pickle.loads(packed)[3].tolist() == reader[3].tolist() == [list(range(12, 18)), list(range(30012, 30018))]
        )
    assert reader[3].dtype == np.uint16


def test_a_part_of_a_mapped_file_travels_as_itself(tmp_path: Path) -> None:
    stream(100).tofile(tmp_path / "tokens.bin")
    part = np.memmap(tmp_path / "tokens.bin", dtype="<u2", mode="r")[40:80]
    layout = LaneLayout(n_token=40, lanes=1, used=1, segment_len=4)
    reader = pickle.loads(pickle.dumps(SegmentReader(part, layout, own=slice(0, 1))))
    assert reader[0].tolist() == [[41, 41, 42, 43, 44, 45]]  # the first is the token before: there is none


class Recorder(L.LightningModule):
    """Trains one number and remembers where its batches stood."""

    def __init__(self, data: LaneLoader) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.data = data
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch.position.epoch, batch.position.segment))
        return self.weight**2

    def train_dataloader(self) -> LaneLoader:
        return self.data

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_takes_it_as_it_is_and_resumes_in_the_middle(num_workers: int, tmp_path: Path) -> None:
    def fit(max_steps: int, ckpt: Path | None) -> list[tuple[int, int]]:
        module = Recorder(loader(34, segment_len=4, lanes=2, num_workers=num_workers))  # 5 segments
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            max_steps=max_steps, accelerator="cpu", enable_checkpointing=False, use_distributed_sampler=True, **quiet
        )
        trainer.fit(module, ckpt_path=ckpt)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module.seen

    expected = [(step // 5, step % 5) for step in range(17)]
    assert fit(17, None) == expected
    seen = fit(3, None)
    for stop in (8, 12, 17):  # twice in the middle of a pass
        seen += fit(stop, tmp_path / "last.ckpt")
    assert seen == expected


# ---- where memory starts anew, groups of segments


def test_documents_are_numbered_and_reset_where_one_begins() -> None:
    tokens = np.array([5, 9, 5, 5, 9, 9, 5, 5, 5, 9, 5, 5, 5], dtype="<u2")  # 9 ends a document
    batches = list(LaneLoader(tokens, segment_len=3, lanes=2, used_lanes=2, reset="document", separator=9))
    assert [batch.tokens_BT.tolist() for batch in batches] == [[[5, 9, 5], [5, 5, 5]], [[5, 9, 9], [9, 5, 5]]]
    numbers = [batch.segment.document for batch in batches]
    assert [number.tolist() for number in numbers if number is not None] == [
        [[0, 0, 1], [0, 0, 0]],
        [[0, 0, 1], [0, 1, 1]],
    ]
    # lane 0's second segment goes on in the document that began with its third token; lane 1 begins in the middle
    assert [batch.segment.reset.tolist() for batch in batches] == [[True, True], [False, False]]
    late = list(LaneLoader(tokens, segment_len=2, lanes=1, used_lanes=1, reset="document", separator=9))
    begins = [bool(batch.segment.reset) for batch in late]
    assert begins == [True, True, False, True, False, True]  # segments start at 0, 2, 4, 6, 8, 10


def test_memory_may_start_anew_with_each_segment() -> None:
    batches = list(LaneLoader(stream(41), segment_len=5, lanes=2, used_lanes=2, reset="segment"))
    assert len(batches) == 4 and all(batch.segment.reset.all() for batch in batches)
    assert all(batch.segment.document is None for batch in batches)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("group", [1, 3, 100])
def test_groups_hold_the_same_segments_in_order(group: int, workers: int) -> None:
    size = {"segment_len": 4, "lanes": 2, "used_lanes": 2, "num_workers": workers}
    single = list(LaneLoader(stream(83), **size))
    grouped = LaneLoader(stream(83), group=group, **size)
    assert len(grouped) == -(-len(single) // group)
    found = list(grouped)
    assert [len(part) for part in found[:-1]] == [group] * (len(found) - 1)
    flat = [batch for part in found for batch in part]
    assert [batch.position for batch in flat] == [batch.position for batch in single]
    assert all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(flat, single, strict=True))
    again = LaneLoader(stream(83), group=group, **size)
    next(iter(again))
    expected = min(group, len(single))
    assert again.state_dict() == {"position": [0, expected] if expected < len(single) else [1, 0]}
    again.load_state_dict({"position": [0, 2]})
    assert [batch.position.segment for part in again for batch in part] == list(range(2, len(single)))
