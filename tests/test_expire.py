"""Expire-Span's mask and loss, against weights that are multiplied and renormalised one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from plain_layers import Plain, Seen, make, read_in_segments, text
from torch import Tensor

from txl_lightning.memory.expire import ExpireConfig
from txl_lightning.types import Segment

KEYS = {"mem_len": 9, "max_span": 12.0, "ramp": 4.0, "loss_weight": 0.5}


def span_of(plain: Plain, layer: int, row: Tensor, *, longest: float) -> float:
    weight, bias = (plain.weights[f"layers.{layer}.memories.expire.span.{part}"] for part in ("weight", "bias"))
    return longest / (1 + math.exp(-float(weight[0] @ row + bias[0])))


def masked_read(plain: Plain, layer: int, row: Tensor, seen: list[Seen], mask: list[float]) -> Tensor:
    """(H, K): softmax, times the mask, renormalised: the paper's way."""
    weights = plain.weigh(layer, row, seen) * torch.tensor(mask, dtype=torch.float64)
    weights = weights / weights.sum(-1, keepdim=True)
    values = torch.stack([plain.heads_of(layer, other.row)[2] for other in seen], dim=1)
    return (weights[..., None] * values).sum(1)


def by_token(plain: Plain, tokens_N: Tensor, *, size: int) -> tuple[Tensor, list[float]]:
    """(N, D) outputs, and the losses of all layers and segments, in that order within a segment."""
    memory: list[list[Tensor]] = [[] for _ in range(plain.config.n_layer)]
    found, losses = [], []
    for start in range(0, len(tokens_N), size):
        rows = plain.embed(tokens_N[start : start + size])
        for layer in range(plain.config.n_layer):
            held, out, price = memory[layer], [], 0.0
            for t, row in enumerate(rows):
                seen, mask = [], []
                for back, old in enumerate(reversed(held), start=1):
                    span = span_of(plain, layer, old, longest=12.0)
                    share = min(1.0, max(0.0, 1 + (span - (back + t)) / 4.0))
                    price += span if 0 < share < 1 else 0.0
                    seen.append(Seen(old, back + t))
                    mask.append(share)
                seen += [Seen(rows[j], t - j) for j in range(t + 1)]
                out.append(plain.finish(layer, row, masked_read(plain, layer, row, seen, mask + [1.0] * (t + 1))))
            losses.append(0.5 * price / len(rows))
            memory[layer] = (held + rows)[-9:]
            rows = out
        found += rows
    return torch.stack(found), losses


@pytest.mark.parametrize("keys", [{}, {"pre_norm": True}], ids=["post-norm", "pre-norm"])
def test_the_mask_is_the_papers(keys: dict[str, Any]) -> None:
    model = make(ExpireConfig(**KEYS), segment_len=6, **keys)
    tokens = text(18)
    expected, _ = by_token(Plain(model), tokens[0], size=6)
    for form in ("hidden", "projected"):
        found = read_in_segments(model, tokens, cuts=[6], form=form)
        torch.testing.assert_close(found[0], expected, atol=1e-7, rtol=0)


def test_the_loss_counts_memories_on_the_ramp() -> None:
    model = make(ExpireConfig(**KEYS), segment_len=6, dropout=0.0).train()
    tokens = text(18)
    _, expected = by_token(Plain(model), tokens[0], size=6)
    state, found = model.init_state(1), []
    for start in range(0, 18, 6):
        out = model(tokens[:, start : start + 6], state)
        state = out.state
        found += [out.aux_losses[f"expire/span/L{layer}"].item() for layer in range(2)]
    assert found == pytest.approx(expected, abs=1e-6)
    assert expected[0] == 0 < expected[2]
    out.aux_losses["expire/span/L1"].backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"layers.1.memories.expire.span.weight", "layers.1.memories.expire.span.bias"}


def test_a_small_example_by_hand() -> None:
    """Spans of 6 tokens (w = 0), a ramp of 4: distance 6 is seen, 8 half, 10 not at all."""
    model = make(ExpireConfig(**{**KEYS, "mem_len": 10}), segment_len=10, n_layer=1)
    memory = model.get_submodule("layers.0.memories.expire")
    with torch.no_grad():
        memory.span.weight.zero_()
        memory.span.bias.zero_()
    state = memory.init_state(1, form="hidden", device=torch.device("cpu"), dtype=torch.float64)
    segment = Segment.full(torch.zeros(1, 2, dtype=torch.int64))
    slots = memory.slots({**state, "filled": torch.tensor([9])}, torch.zeros(1, 2, 8, dtype=torch.float64), segment)
    shares = slots.bias[0, 0].exp()  # ages 10, 9, ..., 1; the oldest was never written
    torch.testing.assert_close(shares[0], torch.tensor([0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]).double())
    torch.testing.assert_close(shares[1], torch.tensor([0, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1]).double())


def test_spans_are_shortened_in_training_only() -> None:
    model = make(ExpireConfig(**KEYS, shorten=True), segment_len=6)
    state = model.init_state(3)
    for seed in range(2):
        state = model(text(6, lanes=3, seed=seed), state).state
    tokens = text(6, lanes=3, seed=9)
    calm = [model.eval()(tokens, state).hidden_BTD for _ in range(2)]
    assert torch.equal(*calm)
    memory = model.get_submodule("layers.0.memories.expire").train()
    own = {name.removeprefix("layers.0.expire."): tensor for name, tensor in state.items()}
    biases = [memory.slots(own, torch.zeros(3, 6, 8, dtype=torch.float64), None).bias for _ in range(20)]
    whole = memory.eval().slots(own, torch.zeros(3, 6, 8, dtype=torch.float64), None).bias
    for bias in biases:
        cut = bias != whole
        assert bool((bias[cut] < -1e29).all())
        distance = torch.arange(9, 0, -1) + torch.arange(6)[:, None]
        for lane in range(3):  # beyond one distance nothing is seen, before it all is as it was
            nearest = distance[cut[lane, 0]].min() if cut[lane].any() else 99
            assert bool((bias[lane, 0][distance >= nearest] < -1e29).all())
    assert len({bias.sum().item() for bias in biases}) > 10
