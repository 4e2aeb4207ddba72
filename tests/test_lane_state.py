"""LaneState on its own: proposed is not committed, resets, dead lanes, stages, other shapes."""

from __future__ import annotations

import copy

import pytest
import torch

from txl_lightning import LaneState
from txl_lightning.errors import ConfigError
from txl_lightning.types import Batch, Chunk, Position, Segment


def batch(*, reset: list[bool], length: list[int], segment: int = 0) -> Batch:
    lanes = len(reset)
    tokens = torch.zeros(lanes, 4, dtype=torch.int64)
    facts = Segment(reset=torch.tensor(reset), length=torch.tensor(length))
    return Batch(tokens, tokens, facts, sum(length), Position(0, segment))


def fresh(lanes: int) -> dict[str, torch.Tensor]:
    return {"h": torch.full((lanes, 2), 7.0)}


def test_proposed_becomes_current_only_by_commit() -> None:
    lanes, first = LaneState(), batch(reset=[True, True], length=[4, 4])
    lanes.propose("train", {"h": torch.ones(2, 2)}, first)
    assert lanes.current("train") is None and lanes.position is None
    lanes.commit("train")
    assert lanes.current("train")["h"].eq(1).all() and lanes.position == Position(0, 1)


def test_a_lane_that_starts_anew_gets_the_fresh_state() -> None:
    lanes = LaneState()
    lanes.propose("train", {"h": torch.ones(2, 2)}, batch(reset=[True, True], length=[4, 4]))
    lanes.commit("train")
    state = lanes.read("train", batch(reset=[False, True], length=[4, 4], segment=1), fresh)
    assert state["h"].tolist() == [[1, 1], [7, 7]]
    assert lanes.current("train")["h"].eq(1).all()  # reading changes nothing


def test_a_lane_without_tokens_keeps_its_state() -> None:
    lanes = LaneState()
    lanes.propose("train", {"h": torch.ones(2, 2)}, batch(reset=[True, True], length=[4, 4]))
    lanes.commit("train")
    lanes.propose("train", {"h": torch.full((2, 2), 5.0)}, batch(reset=[False, False], length=[4, 0], segment=1))
    lanes.commit("train")
    assert lanes.current("train")["h"].tolist() == [[5, 5], [1, 1]]


def test_no_graph_survives_a_step() -> None:
    lanes = LaneState()
    grown = torch.ones(2, 2, requires_grad=True) * 2
    lanes.propose("train", {"h": grown}, batch(reset=[True, True], length=[4, 4]))
    lanes.commit("train")
    assert not lanes.current("train")["h"].requires_grad


@pytest.mark.parametrize("offload", [False, True])
def test_chunks_read_and_propose_their_share(offload: bool) -> None:
    """Of a model that knows no lanes: resets and lanes without tokens in each chunk, and one commit for all."""
    lanes = LaneState(offload=offload)
    reset, length = [False, True, True, False], [4, 4, 0, 0]
    first, second = batch(reset=[True] * 4, length=[4] * 4), batch(reset=reset, length=length, segment=1)
    lanes.propose("train", {"h": torch.ones(4, 2)}, first)
    lanes.commit("train")
    for index in range(2):
        chunk = Chunk(index, 2)
        part = second.share(chunk)
        assert part.tokens_BT.shape == (2, 4) and part.n_target == 8
        state = lanes.read("train", part, fresh, chunk=chunk)
        assert state["h"].tolist() == [[[1, 1], [7, 7]], [[7, 7], [1, 1]]][index]
        assert not lanes.is_whole("train")
        lanes.propose("train", {"h": torch.full((2, 2), 3.0)}, part, chunk=chunk)
        assert lanes.current("train")["h"].eq(1).all() and lanes.position == Position(0, 1)
    lanes.commit("train")
    assert lanes.current("train")["h"].tolist() == [[3, 3], [3, 3], [1, 1], [1, 1]]
    assert lanes.position == Position(0, 2)


def test_a_commit_needs_all_chunks() -> None:
    lanes, first = LaneState(), batch(reset=[True, True], length=[4, 4])
    lanes.propose("train", {"h": torch.ones(1, 2)}, first.share(Chunk(0, 2)), chunk=Chunk(0, 2))
    with pytest.raises(AssertionError, match="some chunks have not proposed"):
        lanes.commit("train")
    with pytest.raises(AssertionError, match="in their order"):
        lanes.propose("train", {"h": torch.ones(1, 2)}, first.share(Chunk(0, 4)), chunk=Chunk(2, 4))


def test_stages_are_apart_and_can_be_dropped() -> None:
    lanes, first = LaneState(), batch(reset=[True, True], length=[4, 4])
    for stage, value in (("train", 1.0), ("val/0", 2.0), ("val/1", 3.0)):
        lanes.propose(stage, {"h": torch.full((2, 2), value)}, first)
        lanes.commit(stage)
    later = batch(reset=[False, False], length=[4, 4], segment=1)
    assert [lanes.read(stage, later, fresh)["h"][0, 0].item() for stage in ("train", "val/0", "val/1")] == [1, 2, 3]
    assert lanes.position == Position(0, 1)  # evaluation does not move the training cursor
    lanes.drop("val/")
    assert lanes.current("val/0") is None and lanes.current("train") is not None


def test_saved_and_loaded_it_goes_on() -> None:
    lanes = LaneState()
    lanes.propose("train", {"h": torch.arange(4.0).view(2, 2)}, batch(reset=[True, True], length=[4, 4], segment=2))
    lanes.commit("train")
    other = LaneState()
    other.load_state_dict(lanes.state_dict())
    later = batch(reset=[False, False], length=[4, 4], segment=3)
    assert torch.equal(other.read("train", later, fresh)["h"], lanes.current("train")["h"])
    assert other.position == Position(0, 3)


@pytest.mark.parametrize(
    ("init", "rule"),
    [
        (lambda lanes: {"other": torch.zeros(lanes, 2)}, "the checkpoint's memory holds"),
        (lambda lanes: {"h": torch.zeros(lanes, 3)}, r"h of the checkpoint has shape \(2, 2\)"),
    ],
)
def test_another_memory_is_refused(init, rule: str) -> None:
    lanes = LaneState()
    lanes.load_state_dict({"lanes": fresh(2), "position": [0, 1]})
    with pytest.raises(ConfigError, match=rule):
        lanes.read("train", batch(reset=[False, False], length=[4, 4]), init)


def test_training_lanes_that_stay_in_place_hold_the_same_values() -> None:
    plain, fixed = LaneState(model_resets=True), LaneState(model_resets=True)
    fixed.stay_in_place()
    facts = {"reset": [False, False], "length": [4, 4]}
    places: set[int] = set()

    def step(number: int, *, fails: bool = False) -> None:
        for lanes in (plain, fixed):
            lanes.mark()
            given = lanes.due(batch(**facts, segment=number))  # type: ignore[arg-type]
            state = lanes.read("train", given, fresh)
            lanes.propose("train", {"h": state["h"] * 2 + number}, given)
            lanes.commit("train")
            if fails:
                lanes.roll_back()
        places.add(fixed.read("train", given, fresh)["h"].data_ptr())
        assert torch.equal(plain.current("train")["h"], fixed.current("train")["h"])
        before = [lanes.state_dict(marked=True)["lanes"] for lanes in (plain, fixed)]
        assert before[0].keys() == before[1].keys() and all(
            torch.equal(before[0][key], before[1][key]) for key in before[0]
        )

    step(0)
    step(1)
    step(2, fails=True)
    saved = copy.deepcopy(fixed.state_dict())
    step(3)
    for lanes in (plain, fixed):
        lanes.load_state_dict(copy.deepcopy(saved))
    step(3)
    assert len(places) == 1
    fixed.stay_in_place(False)
    before = fixed.current("train")["h"]
    step(4)
    assert fixed.current("train")["h"] is not before
