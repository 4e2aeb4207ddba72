"""Strategies need nothing of TransformerXL: three of them in a decoder that shares no code with it."""

from __future__ import annotations

import pytest
import torch
from foreign_decoder import Decoder
from torch import Tensor
from torch.nn import functional as F

from txl_lightning import registry
from txl_lightning.config import ModelConfig
from txl_lightning.types import Segment, State

VOCAB, T = 12, 6
MODEL = ModelConfig(n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, vocab_size=VOCAB)
MEMORIES = {
    "cache": {"mem_len": 24},
    "associative": {"rule": "delta"},
    "knn": {"mem_len": 32, "top_k": 8, "layers": (0, 1)},
}


def decoder(name: str) -> Decoder:
    entry = registry.memories.get(name)
    plan = entry.build(entry.config(**MEMORIES[name]), MODEL)
    torch.manual_seed(0)
    return Decoder([part for layer in plan.layers for part in layer.values()], vocab=VOCAB, d_model=16, n_head=2)


def read(model: Decoder, text_BN: Tensor, states: list[State], *, segment_len: int = T) -> tuple[Tensor, list[State]]:
    """Logits of all tokens, segment by segment."""
    logits = []
    for tokens in text_BN.split(segment_len, dim=1):
        out, states = model(tokens, states, Segment.full(tokens))
        logits.append(out)
    return torch.cat(logits, dim=1), states


@pytest.fixture
def text() -> Tensor:
    return torch.randint(VOCAB, (3, 4 * T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", ["hidden", "projected"])
def test_a_cache_that_holds_all_is_one_long_pass(form: str, text: Tensor) -> None:
    model = decoder("cache").double()
    whole, _ = read(model, text, model.init_state(3, form=form), segment_len=4 * T)
    parts, _ = read(model, text, model.init_state(3, form=form))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_matters_and_is_causal(name: str, text: Tensor) -> None:
    model = decoder(name).double()
    plain, _ = read(model, text, model.init_state(3))
    other = text.clone()
    other[0, T - 1] = (other[0, T - 1] + 1) % VOCAB  # the last token of the first segment
    changed = (read(model, other, model.init_state(3))[0] != plain).any(dim=-1)
    assert not changed[0, : T - 1].any() and changed[0, T:].all()
    assert not changed[1:].any()


@pytest.mark.parametrize("name", MEMORIES)
def test_lanes_reset_and_end(name: str, text: Tensor) -> None:
    model = decoder(name).double()
    _, state = read(model, text, model.init_state(3))
    tokens = text[:, :T]
    segment = Segment(reset=torch.tensor([True, False, False]), length=torch.tensor([T, T, 0]))
    out, after = model(tokens, state, segment)
    fresh, _ = model(tokens, model.init_state(3), Segment.full(tokens))
    torch.testing.assert_close(out[0], fresh[0])
    assert (out[1] - fresh[1]).abs().max() > 1e-4
    for old, new in zip(state, after, strict=True):
        assert all(torch.equal(new[key][2], old[key][2]) for key in old)


@pytest.mark.parametrize("name", MEMORIES)
def test_it_trains(name: str) -> None:
    """The second segment is the first one again: what comes next is known to memory only."""
    model = decoder(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        first = torch.randint(VOCAB, (32, T), generator=generator)
        logits, _ = read(model, torch.cat([first, first], dim=1), model.init_state(32))
        loss = F.cross_entropy(logits[:, T:-1].flatten(0, 1), first[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.15
