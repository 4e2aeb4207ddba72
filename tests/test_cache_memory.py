"""What the cache can do beside the paper's: XLNet's reuse_len, and a graph that crosses the border."""

from __future__ import annotations

import pytest
import torch
from plain_layers import Plain, Seen, make, read_in_segments, text
from torch import Tensor

from txl_lightning.config import ConfigError, load
from txl_lightning.memory.cache import CacheConfig
from txl_lightning.testing import check_memory
from txl_lightning.types import Segment

FORMS = ("hidden", "projected")


def by_token(plain: Plain, tokens_N: Tensor, *, size: int, reuse_len: int, mem_len: int) -> Tensor:
    """(N, D) outputs with only the first reuse_len rows of a segment kept, the newest right before the next one."""
    memory: list[list[Tensor]] = [[] for _ in range(plain.config.n_layer)]
    found = []
    for start in range(0, len(tokens_N), size):
        rows = plain.embed(tokens_N[start : start + size])
        for layer, held in enumerate(memory):
            out = []
            for t, row in enumerate(rows):
                seen = [Seen(old, len(held) - i + t) for i, old in enumerate(held)]
                seen += [Seen(rows[j], t - j) for j in range(t + 1)]
                out.append(plain.finish(layer, row, plain.attend(layer, row, seen)))
            memory[layer] = (held + rows[:reuse_len])[-mem_len:]
            rows = out
        found += rows
    return torch.stack(found)


@pytest.mark.parametrize("reuse_len", [1, 3])
def test_only_the_first_tokens_of_a_segment_are_kept(reuse_len: int) -> None:
    model = make(CacheConfig(mem_len=5, reuse_len=reuse_len), segment_len=4)
    tokens = text(20)
    expected = by_token(Plain(model), tokens[0], size=4, reuse_len=reuse_len, mem_len=5)
    for form in FORMS:
        found = read_in_segments(model, tokens, cuts=[4], form=form)
        torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=0)


def test_a_segment_shorter_than_reuse_len_is_kept_whole() -> None:
    model = make(CacheConfig(mem_len=5, reuse_len=3), segment_len=4)
    segment = Segment(torch.zeros(3, dtype=torch.bool), torch.tensor([4, 2, 0]))
    state = model(text(4, lanes=3), model.init_state(3), segment).state
    assert state["layers.0.cache.filled"].tolist() == [3, 2, 0]


def test_xlnets_overlapping_segments_miss_nothing() -> None:
    """Segments that overlap, each beginning where the kept tokens of the one before end, miss nothing."""
    model = make(CacheConfig(mem_len=20, reuse_len=3), segment_len=5, n_layer=1)
    tokens = text(17)
    state, found = model.init_state(1), []
    with torch.no_grad():
        for start in range(0, 13, 3):
            out = model(tokens[:, start : start + 5], state)
            state, found = out.state, [*found, out.hidden_BTD[:, :3]]
        whole = make(CacheConfig(mem_len=20), segment_len=5, n_layer=1)
        whole.load_state_dict(model.state_dict())
        expected = whole(tokens[:, :15], whole.init_state(1)).hidden_BTD
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("gradient", "reached"), [("stop", [3]), ("carry", [2, 3])])
def test_whether_a_loss_reaches_the_segments_before(gradient: str, reached: list[int]) -> None:
    """Memory holds one segment of 2 tokens, so in one layer only what it holds is reached."""
    model = make(CacheConfig(mem_len=2, gradient=gradient), segment_len=2, n_layer=1)
    state = model.init_state(1)
    for segment in range(4):
        out = model(torch.full((1, 2), segment), state)
        state = out.state
    assert state["layers.0.cache.hidden"].requires_grad == (gradient == "carry")
    (grad,) = torch.autograd.grad(out.hidden_BTD.pow(3).sum(), [model.embedding.tables[0].weight])
    assert grad.abs().sum(dim=1).nonzero().flatten().tolist() == reached


def test_a_carried_graph_gives_the_gradient_of_one_long_pass() -> None:
    carried = make(CacheConfig(mem_len=16, gradient="carry"), segment_len=4)
    tokens = text(13)
    grads = []
    for size in (4, 12):
        state, total = carried.init_state(1), torch.zeros(())
        for start in range(0, 12, size):
            part, then = tokens[:, start : start + size], tokens[:, start + 1 : start + size + 1]
            out = carried(part, state, None, then)
            state, total = out.state, total + out.losses_BT.sum()
        grads.append(torch.autograd.grad(total, list(carried.parameters())))
    for pieces, whole in zip(*grads, strict=True):
        torch.testing.assert_close(pieces, whole, atol=1e-9, rtol=1e-9)


def test_a_carrying_cache_loses_nothing_either() -> None:
    check_memory("cache", gradient="carry", lossless=True, mem_len=16, laws=[8, 11])


def test_a_reuse_len_that_does_nothing_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["memory.reuse_len=64", "data.segment_len=64"])
    rule = "must be < data.segment_len=64, else every token enters; lower it, or set it to null for all tokens"
    assert str(caught.value) == f"memory.reuse_len=64: {rule}"
