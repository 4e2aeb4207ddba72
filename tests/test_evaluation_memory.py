"""Evaluation on a CPU: heads and queries a few at a time, and a state that may be given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from txl_lightning.config import load
from txl_lightning.model import inference
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training.footprint import LiveBytes
from txl_lightning.types import Segment, State, n_byte

SMALL = "model.n_layer=2 model.d_model=32 model.n_head=4 model.d_head=8 model.d_inner=64".split()


def made(*more: str, dtype: torch.dtype = torch.float64) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(load([*SMALL, "memory=cache", "memory.mem_len=17", *more])).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.to(dtype)


def segments(n_token: int, *, documents: bool = False) -> list[Segment]:
    """Whole ones, one with short and dead lanes, one in which a lane starts anew, and whole ones again."""
    full = Segment(reset=torch.zeros(3, dtype=torch.bool), length=torch.full((3,), n_token))
    short = full._replace(length=torch.tensor([n_token, n_token // 2, 0]))
    anew = full._replace(reset=torch.tensor([False, True, False]))
    found = [full, full, short, anew, full]
    if documents:
        numbers = torch.arange(n_token).expand(3, -1).div(n_token // 2 + 1, rounding_mode="floor")
        found = [part._replace(document=numbers) for part in found]
    return found


@torch.no_grad()
def read(model: TransformerXL, n_token: int, *, donate: bool = False, **more: Any) -> tuple[list[Tensor], State]:
    """Hidden states of each segment, and the state behind them."""
    torch.manual_seed(1)
    state, tables, found = model.init_state(3, form="projected"), Tables(), []
    for segment in segments(n_token, **more):
        out = model(torch.randint(0, 257, (3, n_token)), state, segment, tables=tables, donate=donate)
        found.append(out.hidden_BTD * segment.mask(n_token)[..., None])
        state = out.state
    return found, state


@pytest.mark.parametrize("n_byte", [1, 4000, 30_000, 2**21])
@pytest.mark.parametrize(
    ("more", "documents"),
    [
        ([], False),
        ([], True),
        (["model.same_length=true", "model.clamp_len=9"], False),
        (["model.terms=[a,b]", "model.n_kv_head=2", "model.untie_r=true"], False),
        (["memory=window", "memory.window=12"], False),
    ],
)
def test_a_few_heads_and_queries_at_a_time_are_all_of_them(
    more: list[str], documents: bool, n_byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(*more) if "memory=window" not in more else made_with_window()
    calls: list[int] = []
    run = inference.by_heads
    monkeypatch.setattr(inference, "BLOCK_BYTES", n_byte)
    monkeypatch.setattr(inference, "MIN_QUERIES", 3)
    monkeypatch.setattr(inference, "by_heads", lambda *args: calls.append(1) or run(*args))
    fast, state = read(model, 13, documents=documents)
    assert len(calls) == 2 * 5  # layers times segments
    with monkeypatch.context() as patch:
        patch.setattr(inference, "reads_apart", lambda *_, **__: False)
        patch.setattr(inference, "can_fuse", lambda *_: False)
        plain, other = read(model, 13, documents=documents)
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    for key in state:
        torch.testing.assert_close(state[key], other[key], rtol=1e-9, atol=1e-9)


def made_with_window() -> TransformerXL:
    torch.manual_seed(0)
    return TransformerXL(load([*SMALL, "memory=window", "memory.window=12"])).eval().double()


@pytest.mark.parametrize("memory", ["cache", "window", "compressive", "knn", "expire", "mix"])
@pytest.mark.parametrize("n_token", [8, 32])  # shorter and longer than the memory
def test_a_state_given_up_gives_the_same(memory: str, n_token: int) -> None:
    torch.manual_seed(0)
    sizes = {"cache": ["memory.mem_len=17"], "window": ["memory.window=20"]}.get(memory, [])
    model = TransformerXL(load([*SMALL, f"memory={memory}", *sizes, f"data.segment_len={n_token}"])).eval()
    (kept, state), (given, other) = read(model, n_token), read(model, n_token, donate=True)
    for a, b in zip(kept, given, strict=True):
        assert torch.equal(a, b)
    for key in state:
        assert torch.equal(state[key], other[key])


@pytest.mark.parametrize("donate", [False, True])
def test_only_a_state_given_up_changes(donate: bool) -> None:
    model = made()
    with torch.no_grad():
        state = model(torch.randint(0, 257, (3, 20)), model.init_state(3, form="projected")).state
    before = {key: tensor.clone() for key, tensor in state.items()}
    tokens = torch.randint(0, 257, (3, 5))
    model(tokens, state, donate=True)  # with a graph nothing is given up
    assert all(torch.equal(before[key], state[key]) for key in state)
    with torch.no_grad():
        out = model(tokens, state, donate=donate)
    same = {key for key in state if out.state[key].data_ptr() == state[key].data_ptr()}
    rows = {key for key in state if key.endswith((".keys", ".values"))}
    assert rows <= same if donate else not rows & same
    assert all(torch.equal(before[key], state[key]) for key in state) != donate


def test_memory_of_an_evaluation_grows_as_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes at the highest point of a call against those of the state and of the kept distances."""
    monkeypatch.setattr(inference, "BLOCK_BYTES", 2**16)
    sizes = ["model.n_layer=6", "model.n_head=8", "model.d_head=16"]

    def held(mem_len: int) -> tuple[int, int]:
        model, tables = made(f"memory.mem_len={mem_len}", *sizes, dtype=torch.float32), Tables()
        with torch.no_grad():
            state = model.init_state(4, form="projected")
            model(torch.randint(0, 257, (4, 32)), state, tables=tables)
            kept = [*(table.rows_WD for table in tables._embedded.values())]
            kept += [table.projected_WHK for _, table in tables._projected.values() if table.projected_WHK is not None]
            live = LiveBytes()
            live.start([*state.values(), *kept, *model.parameters()])
            with live:
                model(torch.randint(0, 257, (4, 32)), state, tables=tables, donate=True)
        stored = n_byte(state) + n_byte({str(number): tensor for number, tensor in enumerate(kept)})
        return stored + live.peak, stored

    (total, stored), (more, larger) = held(512), held(2048)
    assert 0.95 < (more - total) / (larger - stored) < 1.05


def test_without_giving_up_it_grows_by_more() -> None:
    """What the test above would see otherwise."""
    model = made("memory.mem_len=512", "model.n_layer=3", dtype=torch.float32)
    with torch.no_grad():
        state = model.init_state(16, form="projected")
        live = LiveBytes()
        live.start(state.values())
        with live:
            out = model(torch.randint(0, 257, (16, 32)), state)
    assert live.peak > n_byte(out.state)
