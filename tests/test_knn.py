"""Memorizing Transformers against loops over lanes, heads, queries and entries."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from by_hand import MODEL, STORY, Facts, fresh, moved, random_tap, started, written
from torch import Tensor

from txl_lightning.config import ConfigError, ModelConfig, load
from txl_lightning.memory import knn
from txl_lightning.memory.knn import Knn, KnnConfig
from txl_lightning.types import Segment

GROUPED = dataclasses.replace(MODEL, n_kv_head=1)
FOUR = dataclasses.replace(MODEL, n_head=4, n_kv_head=2)


def make(model: ModelConfig = MODEL, **keys: Any) -> Knn:
    (layer,) = knn.build(KnnConfig(**keys), model).layers
    part = layer["knn"]
    assert isinstance(part, Knn)
    return part


def unit(x: list[float]) -> list[float]:
    size = math.sqrt(sum(value * value for value in x))
    return [value / size for value in x]


def read_by_hand(part: Knn, kept: list[Any], q: Tensor, local: Tensor, head: int, *, top_k: int) -> list[float]:
    """One query of one head against the entries (key, value) of its lane, oldest first."""
    if not kept:
        return local.tolist()
    query, scored = q.tolist(), []
    for key, value in kept:
        if part.scale is None:
            score = sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query))
        else:
            score = sum(a * b for a, b in zip(unit(query), unit(key), strict=True)) * part.scale[head].item()
        scored.append((score, value))
    best = sorted(scored, key=lambda pair: -pair[0])[:top_k]
    weights = [math.exp(score) for score, _ in best]
    found = [
        sum(w * value[i] for w, (_, value) in zip(weights, best, strict=True)) / sum(weights) for i in range(len(query))
    ]
    gate = 1 / (1 + math.exp(-part.gate[head].item()))
    return [gate * a + (1 - gate) * b for a, b in zip(found, local.tolist(), strict=True)]


@pytest.mark.parametrize("at_once", [8192, 3])
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (MODEL, {"mem_len": 10, "top_k": 3}),
        (MODEL, {"mem_len": 6, "top_k": 6, "normalise": False}),
        (MODEL, {"mem_len": 3, "top_k": 2}),  # shorter than a segment
        (MODEL, {"mem_len": 1, "top_k": 1}),
        (GROUPED, {"mem_len": 7, "top_k": 4}),
        (FOUR, {"mem_len": 7, "top_k": 4, "normalise": False}),
    ],
)
def test_every_query_reads_its_nearest_entries(
    model: ModelConfig, keys: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn, "SEARCHED_AT_ONCE", at_once)
    part = moved(make(model, **keys))
    assert isinstance(part, Knn)
    kept: list[list[list[Any]]] = [[[] for _ in range(model.n_head)] for _ in range(3)]
    state = fresh(part)
    for number, facts in enumerate(STORY + STORY[1:]):
        tap, local = random_tap(number, model=model), torch.randn(3, model.n_head, 4, 4, dtype=torch.float64)
        heads, extra = part.side(started(part, state, facts), tap, local, facts.segment())
        assert extra is None
        state = written(part, state, tap, facts)
        for lane, (reset, length) in enumerate(zip(*facts, strict=True)):
            for head in range(model.n_head):
                entries = kept[lane][head]
                if reset and length:
                    entries.clear()
                for t in range(length):
                    wanted = read_by_hand(
                        part, entries, tap.q_BHTK[lane, head, t], local[lane, head, t], head, top_k=keys["top_k"]
                    )
                    torch.testing.assert_close(heads[lane, head, t].tolist(), wanted, rtol=1e-9, atol=1e-9)
                for t in range(length):
                    entries.append((tap.k_BHTK[lane, head, t].tolist(), tap.v_BHTK[lane, head, t].tolist()))
                del entries[: -keys["mem_len"]]
        fill = [len(lane[0]) / keys["mem_len"] for lane in kept]
        torch.testing.assert_close(part.fill(state).tolist(), fill)


def test_one_entry_by_hand() -> None:
    """Keys (1, 0) and (0, 1) with values (4, 0) and (0, 8); the query (3, 0) finds the first, and half of it counts."""
    part = Knn(mem_len=2, top_k=1, normalise=True, n_head=1, d_head=2).double()
    state = {
        "keys": torch.eye(2, dtype=torch.float64)[None, :, None],
        "values": torch.tensor([[[[4.0, 0.0]], [[0.0, 8.0]]]], dtype=torch.float64),
        "written": torch.tensor([2]),
    }
    query = torch.tensor([[[[3.0, 0.0]]]], dtype=torch.float64)
    tap = random_tap(0, n_token=1, n_lane=1)._replace(q_BHTK=query)
    local = torch.tensor([[[[10.0, 10.0]]]], dtype=torch.float64)
    heads, _ = part.side(state, tap, local, Segment.full(torch.zeros(1, 1)))
    assert heads.tolist() == [[[[7.0, 5.0]]]]  # (4, 0) and (10, 10) at 0.5 each
    part.top_k = 2
    assert part.scale is not None
    torch.nn.init.constant_(part.scale, math.log(3.0))  # weights 3/4 and 1/4
    heads, _ = part.side(state, tap, local, Segment.full(torch.zeros(1, 1)))
    torch.testing.assert_close(heads, torch.tensor([[[[6.5, 6.0]]]], dtype=torch.float64))


def test_gradient_reaches_query_gate_and_scale_but_nothing_that_is_kept() -> None:
    part = moved(make(mem_len=8, top_k=2))
    state, now = written(part, fresh(part), random_tap(0), STORY[0]), random_tap(1)
    assert not any(tensor.requires_grad for tensor in state.values())
    local = torch.zeros(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    heads, _ = part.side(state, now, local, STORY[1].segment())
    heads.square().sum().backward()
    for tensor in (now.q_BHTK, local, *part.parameters()):
        assert tensor.grad is not None and tensor.grad.any()


def test_the_ring_overwrites_the_oldest_first() -> None:
    part = make(mem_len=5, top_k=1)
    state = fresh(part, n_lane=1)
    for number in range(3):
        tap = random_tap(number, n_lane=1)
        tap = tap._replace(v_BHTK=torch.full_like(tap.v_BHTK, number) + torch.arange(4)[:, None] / 10)
        state = written(part, state, tap, Facts([False], [4]))
    assert [round(row, 1) for row in state["values"][0, :, 0, 0].tolist()] == [2.2, 2.3, 1.3, 2.0, 2.1]
    assert state["written"].tolist() == [12]


def test_documents_inside_a_segment_are_kept_apart() -> None:
    """Lane 0 goes on with its document for two tokens, then reads two others; lane 1 goes on with its own."""
    part = moved(make(mem_len=3, top_k=2))
    state, tap = written(part, fresh(part), random_tap(0), STORY[0]), random_tap(1)
    document = torch.tensor([[4, 4, 5, 6], [7, 7, 7, 7], [7, 7, 8, 8]])
    segment = Segment(torch.zeros(3).bool(), torch.tensor([4, 4, 3]), document)
    local = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    mixed, _ = part.side(state, tap, local, segment)
    plain, _ = part.side(state, tap, local, STORY[0].segment())
    wanted = plain.clone()
    wanted[0, :, 2:], wanted[2, :, 2:] = local[0, :, 2:], local[2, :, 2:]
    torch.testing.assert_close(mixed, wanted)
    new, _ = part.write(state, tap, None, segment)
    assert new["written"].tolist() == [1, 8, 1]
    torch.testing.assert_close(new["values"][0, 0], tap.v_BHTK[0, :, 3])
    torch.testing.assert_close(new["values"][2, 0], tap.v_BHTK[2, :, 2])
    torch.testing.assert_close(new["values"][1], tap.v_BHTK[1, :, [2, 3, 1]].transpose(0, 1))


def test_the_default_layer_is_three_quarters_up() -> None:
    for n_layer, layer in ((1, 0), (2, 1), (3, 2), (4, 3), (12, 9), (24, 18)):
        assert KnnConfig().layer_indices(n_layer) == [layer]
    assert KnnConfig(layers="all").layer_indices(2) == [0, 1]
    assert KnnConfig(layers=[1]).layer_indices(2) == [1]


def test_a_memory_of_length_zero_is_no_memory() -> None:
    assert knn.build(KnnConfig(mem_len=0), MODEL).layers == [{}]
    assert not KnnConfig().reaches_back


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["memory.top_k=600"], "memory.top_k=600: must be <= memory.mem_len=512; lower it, or raise memory.mem_len"),
        (
            ["memory.layers=some"],
            "memory.layers=some: must be auto or all or a list of indices >= 0; for example [0,2]",
        ),
        (["memory.layers=[9]"], "memory.layers=[9]: the model has layers 0 to 3; leave the others out"),
    ],
)
def test_what_cannot_work_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["memory=knn", "model.n_layer=4", *keys])
    assert str(caught.value) == said
