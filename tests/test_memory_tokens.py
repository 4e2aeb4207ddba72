"""The Recurrent Memory Transformer: what memory tokens see, what they become, and how far its losses reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_layers import Plain, Seen, make, text
from torch import Tensor

from txl_lightning.config import ModelConfig
from txl_lightning.memory.tokens import Tokens, TokensConfig
from txl_lightning.testing import check_memory
from txl_lightning.training.optim import decays


def by_token(plain: Plain, tokens_N: Tensor, *, size: int, n_memory: int) -> tuple[Tensor, list[Tensor]]:
    """(N, D) outputs and the memory after the last segment; segments of `size` tokens."""
    memory = list(plain.weights["tokens.rows"])
    found = []
    for start in range(0, len(tokens_N), size):
        rows = [*memory, *plain.embed(tokens_N[start : start + size]), *memory]
        first, end = n_memory, n_memory + size  # of the real tokens
        for layer in range(plain.config.n_layer):
            out = []
            for i, row in enumerate(rows):
                block = (0, first) if i < first else (end, len(rows)) if i >= end else (i, i + 1)
                places = [j for j in range(len(rows)) if j <= i or block[0] <= j < block[1]]
                seen = [Seen(rows[j], max(0, i - j)) for j in places]
                out.append(plain.finish(layer, row, plain.attend(layer, row, seen)))
            rows = out
        found += rows[first:end]
        memory = rows[end:]
        if plain.config.pre_norm:
            memory = [(row - row.mean()) / (row.var(unbiased=False) + 1e-5).sqrt() for row in memory]
    return torch.stack(found), memory


@pytest.mark.parametrize("keys", [{}, {"pre_norm": True}], ids=["post-norm", "pre-norm"])
def test_what_memory_tokens_read_and_become(keys: dict[str, Any]) -> None:
    model = make(TokensConfig(n_tokens=2), segment_len=4, **keys)
    tokens = text(12)
    expected, memory = by_token(Plain(model), tokens[0], size=4, n_memory=2)
    for form in ("hidden", "projected"):
        state, found = model.init_state(1, form=form), []
        with torch.no_grad():
            for start in range(0, 12, 4):
                out = model(tokens[:, start : start + 4], state)
                state, found = out.state, [*found, out.hidden_BTD]
        torch.testing.assert_close(torch.cat(found, dim=1)[0], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(state["tokens.memory"][0], torch.stack(memory), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("gradient", "reach"), [("carry", 4), ("stop", 1)])
def test_how_far_the_last_segments_loss_reaches(gradient: str, reach: int) -> None:
    """One text per segment with a token of its own; the gradient of its row says whether the loss came there."""
    model = make(TokensConfig(n_tokens=2, gradient=gradient), segment_len=2, dropout=0.0)
    state = model.init_state(1)
    for segment in range(4):
        out = model(torch.full((1, 2), segment), state)
        state = out.state
    table = model.embedding.tables[0].weight
    (grad,) = torch.autograd.grad(out.hidden_BTD.pow(3).sum(), [table])
    assert grad.abs().sum(dim=1).nonzero().flatten().tolist() == list(range(4 - reach, 4))


def test_one_token_changes_what_is_read_twenty_segments_later() -> None:
    model = make(TokensConfig(n_tokens=2), segment_len=3)
    ours = text(66)
    theirs = ours.clone()
    theirs[0, 0] = (theirs[0, 0] + 1) % 11
    last = []
    for tokens in (ours, theirs):
        state = model.init_state(1)
        with torch.no_grad():
            for start in range(0, 66, 3):
                out = model(tokens[:, start : start + 3], state)
                state = out.state
        last.append(out.hidden_BTD)
    assert not torch.equal(*last)


def test_the_first_memory_is_as_large_as_embeddings_and_does_not_decay() -> None:
    torch.manual_seed(0)
    rows = Tokens(TokensConfig(n_tokens=200), ModelConfig(d_model=64, init_std=0.05)).rows
    assert not decays("tokens.rows", rows)
    assert rows.std().item() == pytest.approx(0.05 * 8, rel=0.05)


def test_pre_norm_memory_does_not_grow() -> None:
    model = make(TokensConfig(n_tokens=2), segment_len=4, pre_norm=True)
    state, sizes = model.init_state(1), []
    with torch.no_grad():
        for segment in range(12):
            state = model(text(4, seed=segment), state).state
            sizes.append(state["tokens.memory"].square().mean().item())
    assert sizes == pytest.approx([1.0] * 12, abs=1e-3)


@pytest.mark.parametrize("read_slots", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokens_beside_a_cache_keep_the_laws(read_slots: bool) -> None:
    parts = [{"name": "cache", "mem_len": 7}, {"name": "tokens", "n_tokens": 2, "read_slots": read_slots}]
    check_memory("mix", parts=parts, laws=[1, 3, 4, 5, 6, 7, 9, 11], compiled=False)
