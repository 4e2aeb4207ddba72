"""The sliding window and its sinks, against a loop over tokens that knows no segments."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from plain_layers import Plain, Seen, make, read_in_segments, text
from torch import Tensor

from txl_lightning.config import ConfigError, ModelConfig
from txl_lightning.memory.window import WindowConfig
from txl_lightning.model.block import Layout
from txl_lightning.model.transformer import token_mask
from txl_lightning.testing import check_memory
from txl_lightning.types import Segment


def by_token(plain: Plain, tokens_N: Tensor, *, window: int, sinks: int) -> Tensor:
    """(N, D) each token reads the last `window` rows, and the first `sinks` that are further back."""
    rows = plain.embed(tokens_N)
    for layer in range(plain.config.n_layer):
        out = []
        for p, row in enumerate(rows):
            seen = [Seen(rows[j], p - j) for j in range(max(0, p - window + 1), p + 1)]
            cached = min(p, sinks + window - 1)  # place of the query within what is cached
            seen += [Seen(rows[i], cached - i) for i in range(sinks) if p - i >= window]
            out.append(plain.finish(layer, row, plain.attend(layer, row, seen)))
        rows = out
    return torch.stack(rows)


FORMS = ("hidden", "projected")


@pytest.mark.parametrize("keys", [{}, {"pre_norm": True}], ids=["post-norm", "pre-norm"])
def test_every_token_sees_the_last_ones_wherever_segments_begin(keys: Any) -> None:
    model = make(WindowConfig(window=5), **keys)
    tokens = text(24)
    expected = by_token(Plain(model), tokens[0], window=5, sinks=0)
    for cuts, form in product([[1], [3], [5, 2, 4], [24]], FORMS):
        found = read_in_segments(model, tokens, cuts=cuts, form=form)
        torch.testing.assert_close(found[0], expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("sinks", [1, 3])
def test_sinks_stand_at_their_place_in_the_cache(sinks: int) -> None:
    model = make(WindowConfig(window=6, sinks=sinks), segment_len=6)
    tokens = text(21)
    expected = by_token(Plain(model), tokens[0], window=6, sinks=sinks)
    for cuts, form in product([[1], [6], [2, 5, 1, 3]], FORMS):
        found = read_in_segments(model, tokens, cuts=cuts, form=form)
        torch.testing.assert_close(found[0], expected, atol=1e-7, rtol=0)


def test_the_distances_of_a_small_example() -> None:
    """window 4, 2 sinks: the cache holds at most 6 tokens, so no distance is above 5."""
    model = make(WindowConfig(window=4, sinks=2), segment_len=4, n_layer=1)
    memory = model.get_submodule("layers.0.memories.window")
    state = model.init_state(1)
    for start in range(0, 8, 4):
        state = model(text(12)[:, start : start + 4], state).state
    own = {name.removeprefix("layers.0.window."): tensor for name, tensor in state.items()}
    slots = memory.slots(own, torch.zeros(1, 4, 8, dtype=torch.float64), None)
    step = torch.arange(4)[:, None]
    distance = (slots.age[:, None] + step).minimum(slots.farthest)[0]
    seen = slots.bias[0, 0] == 0
    lists = [[int(d) for d, s in zip(row, see, strict=True) if s] for row, see in zip(distance, seen, strict=True)]
    # sinks 0 and 1, then the rows of the window before token 8, 9, 10, 11
    assert lists == [[5, 4, 3, 2, 1], [5, 4, 3, 2], [5, 4, 3], [5, 4]]


@pytest.mark.parametrize("position", ["rotary", "shaw"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_other_positions_do_not_see_segments_either(position: str, sinks: int) -> None:
    model = make(WindowConfig(window=6, sinks=sinks), segment_len=6, position=position, d_head=4)
    tokens = text(26, lanes=2)
    ones, long = (read_in_segments(model, tokens, cuts=cuts, form="hidden") for cuts in ([1], [6, 5]))
    torch.testing.assert_close(ones, long, atol=1e-9, rtol=0)


def test_a_rotary_sink_looks_the_same_from_every_later_token() -> None:
    """One token repeated: once the cache is full, what a query reads no longer changes."""
    model = make(WindowConfig(window=4, sinks=2), segment_len=4, position="rotary", d_head=4, n_layer=1)
    found = read_in_segments(model, torch.full((1, 20), 3), cuts=[4], form="projected")[0]
    torch.testing.assert_close(found[6:], found[6:7].expand(14, -1), atol=1e-12, rtol=0)
    plain = make(WindowConfig(window=4), segment_len=4, position="rotary", d_head=4, n_layer=1)
    tokens = text(20)
    with_sinks, without = (read_in_segments(each, tokens, cuts=[4], form="projected")[0] for each in (model, plain))
    torch.testing.assert_close(with_sinks[:4], without[:4], atol=1e-12, rtol=0)
    assert not torch.isclose(with_sinks[4:], without[4:]).all(dim=1).any()


def test_gradient_flows_inside_a_segment_and_not_across() -> None:
    model = make(WindowConfig(window=3), n_layer=1)
    first = model(text(4), model.init_state(1))
    assert not any(tensor.requires_grad for tensor in first.state.values())
    table = model.embedding.tables[0].weight
    out = model(torch.tensor([[0, 1, 2, 3]]), first.state)
    (grad,) = torch.autograd.grad(out.hidden_BTD[0, 3].pow(3).sum(), [table])
    # the output projection reads no table here, so only what token 3 saw has a gradient: itself and two before it
    assert grad.abs().sum(dim=1).nonzero().flatten().tolist() == [1, 2, 3]


def test_the_limit_is_for_real_tokens_only() -> None:
    """Memory tokens around the segment see, and are seen, as before."""
    segment = Segment.full(torch.zeros(1, 3, dtype=torch.int64))
    mask = token_mask(segment, n_prefix=1, n_token=3, n_suffix=1, device=torch.device("cpu"))
    narrowed = Layout(1, 3, 1, mask, None).within(1).mask[0, 0]
    seen = ["".join("x" if bool(cell == 0) else "." for cell in row) for row in narrowed]
    assert seen == ["x....", "xx...", "xxx..", "x.xx.", "xxxxx"]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        WindowConfig(window=6, sinks=1).check_fit(ModelConfig(), segment_len=8)
    assert str(caught.value) == (
        "memory.window=6: must be >= data.segment_len=8 with sinks: a sink is kept when its segment has ended; "
        "raise it, or set memory.sinks=0"
    )
    WindowConfig(window=6).check_fit(ModelConfig(), segment_len=8)
    model = make(WindowConfig(window=6, sinks=1), segment_len=6)
    with pytest.raises(ValueError, match=r"^a segment of 7 tokens is longer than window=6 with sinks$"):
        model(text(7), model.init_state(1))


def test_sinks_beside_slots_without_a_farthest_distance() -> None:
    parts = [{"name": "window", "window": 7, "sinks": 2}, {"name": "cache", "mem_len": 9}]
    check_memory("mix", parts=parts, laws=[3, 4, 5, 6, 7, 11], compiled=False, model={"position": "rotary"})
