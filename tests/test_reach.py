"""How far back memories reach, measured by changing one token, against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from txl_lightning.config import Config, load
from txl_lightning.evaluation.reach import Reach, measure_reach, segments_for
from txl_lightning.model.transformer import TransformerXL

MODEL = ["model.d_model=16", "model.n_head=2", "model.d_head=8", "model.d_inner=16", "model.vocab_size=13"]


def config_of(memory: str, *keys: str, layers: int = 2, segment_len: int = 8) -> Config:
    return load([f"memory={memory}", f"model.n_layer={layers}", f"data.segment_len={segment_len}", *MODEL, *keys])


def reach(memory: str, *keys: str, segments: int | None = None, **sizes: int) -> Reach:
    config = config_of(memory, *keys, **sizes)
    torch.manual_seed(0)
    return measure_reach(config, TransformerXL(config), segments=segments)


@pytest.mark.parametrize(
    ("layers", "segment_len", "mem_len", "expected"),
    [(3, 8, 4, 20), (4, 8, 3, 27), (3, 8, 12, 44), (1, 8, 12, 12), (2, 4, 9, 21), (2, 1, 3, 6), (2, 8, 0, 0)],
)
def test_a_cache_reaches_as_far_as_its_formula(layers: int, segment_len: int, mem_len: int, expected: int) -> None:
    found = reach("cache", f"memory.mem_len={mem_len}", layers=layers, segment_len=segment_len)
    assert found.tokens == found.formula == expected
    assert not found.to_the_end


@pytest.mark.parametrize(("segment_len", "window"), [(8, 12), (8, 5), (4, 6)])
def test_a_window_reaches_as_far_as_its_formula(segment_len: int, window: int) -> None:
    found = reach("window", f"memory.window={window}", layers=3, segment_len=segment_len)
    assert found.tokens == found.formula == 3 * (window - 1)


@pytest.mark.parametrize("memory", ["tokens", "associative", "block_recurrent", "titans"])
def test_carried_states_reach_all_of_20_segments(memory: str) -> None:
    found = reach(memory, segment_len=4)
    assert found.tokens == found.tried == 80 and found.to_the_end
    assert found.segments == 20 and found.formula == math.inf


def test_associative_tokens_reach_back_once_they_write() -> None:
    config = config_of("associative_tokens", segment_len=4)
    model = TransformerXL(config)
    assert measure_reach(config, model).tokens == 0  # at first nothing is written
    for name, weight in model.named_parameters():
        if name.endswith("value.weight"):
            torch.nn.init.normal_(weight)
    assert measure_reach(config, model).to_the_end


def test_without_memory_and_with_each_segment_anew_nothing_reaches() -> None:
    assert (found := reach("none")).tokens == found.formula == 0
    for memory in ("cache", "associative", "window"):
        assert (found := reach(memory, "memory.reset=segment")).tokens == found.formula == 0


@pytest.mark.parametrize(
    ("keys", "layers", "expected"),
    [
        (["mem_len=8", "compressed_len=2", "rate=4", "function=conv"], 2, 16 + 16),
        (["mem_len=9", "compressed_len=3", "rate=2", "function=mean", "loss=none"], 3, 2 * 16 + 15),
        (["mem_len=8", "compressed_len=3", "rate=2", "function=dilated"], 2, 16 + 14 + 2),  # 2 rows older, not 3
        (["mem_len=8", "compressed_len=1", "rate=2", "function=dilated"], 1, 10 + 3),
        (["mem_len=8", "compressed_len=3", "rate=4", "function=dilated", "layers=[1]"], 2, 24),
    ],
)
def test_a_compressive_memory_reaches_as_far_as_its_formula(keys: list[str], layers: int, expected: int) -> None:
    found = reach("compressive", *[f"memory.{key}" for key in keys], layers=layers)
    assert found.tokens == found.formula == expected


@pytest.mark.parametrize(
    ("memory", "keys", "layers", "expected"),
    [
        ("knn", ["mem_len=16", "top_k=16"], 2, 16),
        ("knn", ["mem_len=13", "top_k=13"], 2, 16),  # in layer 1, which has read the whole segment
        ("knn", ["mem_len=13", "top_k=13", "layers=[0]"], 2, 13),
        ("knn", ["mem_len=13", "top_k=13", "layers=all"], 2, 29),
        ("expire", ["mem_len=11", "max_span=50"], 2, 16 + 11),
        ("cache", ["mem_len=8", "layers=[1]"], 2, 8),
        ("cache", ["mem_len=9", "layers=[0,2]"], 3, 16 + 9),
        ("mix", ["parts=[{name: cache, layers: [0], mem_len: 5}, {name: knn, mem_len: 9, top_k: 9}]"], 2, 21),
        ("mix", ["parts=[{name: cache, mem_len: 5}, {name: expire, mem_len: 9, max_span: 50.0}]"], 2, 25),
    ],
)  # fmt: skip
def test_other_memories_reach_as_far_as_their_formulas(
    memory: str, keys: list[str], layers: int, expected: int
) -> None:
    found = reach(memory, *[f"memory.{key}" for key in keys], layers=layers)
    assert found.tokens == found.formula == expected


def test_a_mix_with_a_carried_state_is_unbounded() -> None:
    for part in ("{name: tokens}", "{name: associative, layers: [1]}"):
        memory = config_of("mix", f"memory.parts=[{{name: cache, mem_len: 5}}, {part}]").memory
        assert memory.reach(config_of("none").model, segment_len=8) == math.inf


def test_what_has_no_formula_is_measured() -> None:
    for memory, *keys in (
        ["cache", "memory.mem_len=8", "model.same_length=true"],
        ["cache", "memory.mem_len=8", "memory.reuse_len=4"],
        ["compressive", "memory.mem_len=8", "memory.compressed_len=4", "memory.function=most_used"],
        ["expire", "memory.mem_len=8", "memory.max_span=8", "memory.ramp=2"],
        ["mix", "memory.parts=[{name: cache, mem_len: 5}, {name: window, window: 4}]"],
    ):
        found = reach(memory, *keys)
        assert found.formula is None and 0 < found.tokens <= 48


@pytest.mark.parametrize(("formula", "segments"), [(None, 20), (math.inf, 20), (0, 20), (159, 21), (800, 101)])
def test_it_reads_farther_than_the_formula(formula: float | None, segments: int) -> None:
    assert segments_for(formula, segment_len=8) == max(20, segments)


def test_fewer_segments_than_the_reach_say_so() -> None:
    found = reach("cache", "memory.mem_len=64", segments=3)
    assert found.tokens == found.tried == 24 and found.to_the_end
    assert found.to_dict()["formula"] == 128
    values: dict[str, Any] = reach("associative", segments=2).to_dict()
    assert values["formula"] == "unbounded" and values["to_the_end"] is True
