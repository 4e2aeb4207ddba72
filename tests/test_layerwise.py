"""Evaluation layer by layer over many segments gives what segment after segment gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_config
from txl_lightning import TransformerXL
from txl_lightning.build import segments_at_once
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.lanes import LaneLoader
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.model import layerwise
from txl_lightning.types import Batch, State

T = 6
CACHE = {"name": "cache", "mem_len": 10}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of memory and of model
    "none": ({"name": "none"}, {}),
    "cache": (CACHE, {}),
    "shorter": ({"name": "cache", "mem_len": 2}, {"clamp_len": 5}),
    "multiple": ({"name": "cache", "mem_len": 12}, {}),
    "long": ({"name": "cache", "mem_len": 200}, {"clamp_len": 9}),
    "zeros": ({"name": "cache", "mem_len": 9, "cold": "zeros"}, {}),
    "zeros_normed": ({"name": "cache", "mem_len": 9, "cold": "zeros"}, {"pre_norm": True}),
    "same_length": (CACHE, {"same_length": True}),
    "same_length_mem_len": (CACHE, {"same_length": True, "same_length_rule": "mem_len"}),
    "window": ({"name": "window", "window": 4}, {}),
    "wide_window": ({"name": "window", "window": 15}, {}),
    "some_layers": ({**CACHE, "layers": [1]}, {}),
    "mix": (
        {
            "name": "mix",
            "parts": [{**CACHE, "layers": [0], "mem_len": 3}, {"name": "window", "layers": [1], "window": 9}],
        },
        {},
    ),
    "shaw": (CACHE, {"position": "shaw", "max_distance": 7}),
    "rotary": (CACHE, {"position": "rotary"}),
    "content": (CACHE, {"position": "none"}),
    "modern": (CACHE, {"pre_norm": True, "norm": "rmsnorm", "n_kv_head": 1, "untie_r": True, "final_norm": True}),
    "reference": (CACHE, {"attention": "reference"}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_config(tmp_path_factory.mktemp("base"), f"data.segment_len={T}").to_dict()


def built(base: dict[str, Any], memory: dict[str, Any], model: dict[str, Any]) -> TransformerXL:
    torch.manual_seed(0)
    made = TransformerXL(Config.from_dict({**base, "memory": memory, "model": {**base["model"], **model}}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    return made.double().eval()


def batches(*, reset: str = "epoch", lanes: int = 3) -> list[Batch]:
    """Three lanes of 27, 26 and 26 tokens, the fourth of none: short ends, and what stands by."""
    tokens = np.random.default_rng(0).integers(1, 257, 80)
    tokens[[3, 11, 17, 18, 30, 42, 59]] = 0
    loader = LaneLoader(tokens, segment_len=T, lanes=lanes + 1, used_lanes=lanes, reset=reset, separator=0)
    return list(loader)


@torch.no_grad()
def one_by_one(model: TransformerXL, parts: list[Batch]) -> tuple[torch.Tensor, State]:
    state, losses = model.init_state(4, form="projected"), []
    for part in parts:
        out = model(part.tokens_BT, state, part.segment, part.targets_BT)
        state = out.state
        losses.append(out.losses_BT)
    return torch.cat(losses, dim=1), state


@torch.no_grad()
def at_once(model: TransformerXL, parts: list[Batch], *, size: int) -> tuple[torch.Tensor, State]:
    state, losses = model.init_state(4, form="projected"), []
    for first in range(0, len(parts), size):
        group = parts[first : first + size]
        tokens, targets = (torch.cat([getattr(p, name) for p in group], dim=1) for name in ("tokens_BT", "targets_BT"))
        out = model.read_by_layers(tokens, state, [part.segment for part in group], targets)
        state = out.state
        losses.append(out.losses_BT)
    return torch.cat(losses, dim=1), state


def used(state: State) -> State:
    """The state with rows that nothing reads put to 0: what is left of streams that ended is of no meaning."""
    found = {}
    for key, tensor in state.items():
        path, _, _ = key.rpartition(".")
        count = state.get(f"{path}.filled", state.get(f"{path}.read"))
        if count is not None and tensor.dim() > 1:
            there = torch.arange(tensor.shape[1], 0, -1) <= count[:, None]
            tensor = tensor * there.view(*there.shape, *[1] * (tensor.dim() - 2))
        found[key] = tensor
    return found


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop_over_segments(name: str, queries: int, base: dict[str, Any], monkeypatch: Any) -> None:
    """In one chunk, and in chunks of two segments; with blocks of one segment, and of three."""
    monkeypatch.setitem(layerwise.QUERIES, "cpu", queries)
    model, parts = built(base, *CASES[name]), batches()
    losses, state = one_by_one(model, parts)
    for size in (len(parts), 2):
        found, after = at_once(model, parts, size=size)
        torch.testing.assert_close(found, losses, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(used(after), used(state), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("reset", ["segment", "document"])
@pytest.mark.parametrize("name", ["none", "shorter", "long", "same_length", "mix"])
def test_memory_starts_anew_where_it_should(
    name: str, reset: str, queries: int, base: dict[str, Any], monkeypatch: Any
) -> None:
    monkeypatch.setitem(layerwise.QUERIES, "cpu", queries)
    memory, keys = CASES[name]
    model, parts = built(base, {**memory, "reset": reset}, keys), batches(reset=reset)
    losses, state = one_by_one(model, parts)
    for size in (len(parts), 2):
        found, after = at_once(model, parts, size=size)
        torch.testing.assert_close(found, losses, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(used(after), used(state), atol=1e-9, rtol=1e-9)


def test_a_later_token_changes_no_loss_before_it(base: dict[str, Any]) -> None:
    model, parts = built(base, *CASES["cache"]), batches()
    losses, _ = at_once(model, parts, size=len(parts))
    changed = [part._replace(tokens_BT=part.tokens_BT.clone()) for part in parts]
    changed[2].tokens_BT[:3, 4] += 1
    others, _ = at_once(model, changed, size=len(parts))
    assert torch.equal(losses[:, : 2 * T + 4], others[:, : 2 * T + 4])
    assert (losses[:3, 2 * T + 4 :] != others[:3, 2 * T + 4 :]).any()


REFUSED = {
    "tokens": ({"name": "tokens"}, {}, "tokens reads more than"),
    "compressive": ({"name": "compressive", "mem_len": T, "rate": 2}, {}, "compressive reads more than"),
    "sinks": ({"name": "window", "window": 8, "sinks": 2}, {}, "window reads more than"),
    "reuse": ({**CACHE, "reuse_len": 3}, {}, "cache reads more than"),
    "titans": ({"name": "titans"}, {}, "titans reads more than"),
    "knn": ({"name": "knn"}, {}, "knn reads more than"),
    "absolute": ({"name": "none"}, {"position": "absolute"}, "numbers the tokens of each segment"),
    "two": (
        {"name": "mix", "parts": [{**CACHE, "layers": [0]}, {"name": "window", "layers": [0], "window": 9}]},
        {},
        "a layer has several memories",
    ),
    "zeros": ({**CACHE, "cold": "zeros", "reset": "segment"}, {}, "cannot start anew among tokens read at once"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_does_not_apply_it_is_refused_and_auto_takes_segments(name: str, base: dict[str, Any]) -> None:
    memory, keys, rule = REFUSED[name]
    values = {**base, "memory": memory, "model": {**base["model"], **keys}}
    auto = Config.from_dict(values)
    assert segments_at_once(auto, lanes=2, segment_len=T) == 1
    asked = Config.from_dict({**values, "eval": {"schedule": "layers"}})
    with pytest.raises(ConfigError, match=rule) as caught:
        evaluate(asked, TransformerXL(asked), split="test")
    assert (caught.value.key, caught.value.value) == ("eval.schedule", "layers")


def test_txl_eval_reads_so_where_it_applies(base: dict[str, Any], monkeypatch: Any) -> None:
    found, read = {}, []
    original = TransformerXL.read_by_layers
    monkeypatch.setattr(
        TransformerXL, "read_by_layers", lambda self, *a, **k: read.append(a[0].shape) or original(self, *a, **k)
    )
    for schedule in ("segments", "layers", "auto"):
        config = Config.from_dict({**base, "memory": CACHE, "eval": {"schedule": schedule, "batch_size": 3}})
        torch.manual_seed(0)
        found[schedule] = evaluate(config, TransformerXL(config).eval(), split="test")
        read.append(schedule)
    assert read[0] == "segments" and read[1] == read[3] and len(read) == 5
    assert found["layers"].scores["loss"] == pytest.approx(found["segments"].scores["loss"], abs=1e-6)
    assert found["auto"].scores == found["layers"].scores
    assert (found["segments"].schedule, found["auto"].schedule) == ("segments", "layers")


def test_a_chunk_has_a_bounded_number_of_tokens(tmp_path: Path, base: dict[str, Any]) -> None:
    config = Config.from_dict({**base, "memory": CACHE})
    for lanes, segment_len in ((1, 8), (4, 128), (16, 512), (64, 512)):
        n_segment = segments_at_once(config, lanes=lanes, segment_len=segment_len)
        assert n_segment == 1 or lanes * segment_len * n_segment <= 8192
