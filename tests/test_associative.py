"""Infini-attention's sums, against a loop over tokens, and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from plain_layers import Plain, Seen, make, read_in_segments, text
from torch import Tensor

from txl_lightning.memory.associative import AssociativeConfig
from txl_lightning.types import Segment

RULES = ("linear", "delta")


def positive(x: Tensor) -> Tensor:
    """elu(x) + 1."""
    return torch.where(x > 0, x + 1, x.exp())


def by_token(plain: Plain, tokens_N: Tensor, *, size: int, delta: bool) -> tuple[Tensor, list[Tensor]]:
    """(N, D) outputs, and each layer's matrix (H, K, K) after the text; segments of `size` tokens."""
    n_layer, n_head, width = plain.config.n_layer, plain.config.n_head, plain.config.d_head
    matrices = [torch.zeros(n_head, width, width, dtype=torch.float64) for _ in range(n_layer)]
    sums = [torch.zeros(n_head, width, dtype=torch.float64) for _ in range(n_layer)]
    found = []
    for start in range(0, len(tokens_N), size):
        rows = plain.embed(tokens_N[start : start + size])
        for layer in range(n_layer):
            gate = plain.weights[f"layers.{layer}.memories.associative.gate"]
            matrix, norm, out = matrices[layer].clone(), sums[layer].clone(), []
            for t, row in enumerate(rows):
                q, key, value = plain.heads_of(layer, row)
                heads = plain.attend(layer, row, [Seen(rows[j], t - j) for j in range(t + 1)]).clone()
                for head in range(n_head):
                    wanted, given = positive(q[head]), positive(key[head])
                    if start > 0:
                        told = wanted @ matrix[head] / (wanted @ norm[head])
                        share = 1 / (1 + math.exp(-gate[head]))
                        heads[head] = share * told + (1 - share) * heads[head]
                    news = value[head]
                    if delta and start > 0:
                        news = news - given @ matrix[head] / (given @ norm[head])
                    for i in range(width):
                        matrices[layer][head, i] += given[i] * news
                    sums[layer][head] += given
                out.append(plain.finish(layer, row, heads))
            rows = out
        found += rows
    return torch.stack(found), matrices


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keys", [{}, {"pre_norm": True}], ids=["post-norm", "pre-norm"])
def test_what_is_read_and_written(rule: str, keys: dict[str, Any]) -> None:
    model = make(AssociativeConfig(rule=rule), segment_len=5, **keys)
    tokens = text(15)
    expected, matrices = by_token(Plain(model), tokens[0], size=5, delta=rule == "delta")
    state = model.init_state(1)
    with torch.no_grad():
        for start in range(0, 15, 5):
            state = model(tokens[:, start : start + 5], state).state
    for form in ("hidden", "projected"):
        found = read_in_segments(model, tokens, cuts=[5], form=form)
        torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=0)
    for layer, matrix in enumerate(matrices):
        kept = state[f"layers.{layer}.associative.matrix"]
        torch.testing.assert_close(kept[0], matrix, atol=1e-6, rtol=1e-6)


def test_a_small_example_by_hand() -> None:
    """One head of width 2; s(0) = 1, s(1) = 2. Key (1, 0) with value (4, 0), then key (0, 0) with value (0, 6)."""
    model = make(AssociativeConfig(rule="delta"), n_layer=1, n_head=1, d_head=2)
    memory = model.get_submodule("layers.0.memories.associative")

    def tap(key: list[float], value: list[float]) -> Any:
        class Shown:
            x_BTD = torch.zeros(1, 1, 8)
            k_BHTK, v_BHTK, q_BHTK = (torch.tensor(x).view(1, 1, 1, 2) for x in (key, value, [0.0, 1.0]))

        return Shown()

    segment = Segment.full(torch.zeros(1, 1, dtype=torch.int64))
    state = memory.init_state(1, form="hidden", device=torch.device("cpu"), dtype=torch.float32)
    state, _ = memory.write(state, tap([1.0, 0.0], [4.0, 0.0]), None, segment)
    assert state["matrix"].tolist() == [[[[8.0, 0.0], [4.0, 0.0]]]]
    assert state["norm"].tolist() == [[[2.0, 1.0]]]
    # it answers (8 + 4) / (2 + 1) = 4 to (0, 0), so what is new of (0, 6) is (-4, 6)
    state, _ = memory.write(state, tap([0.0, 0.0], [0.0, 6.0]), None, segment)
    assert state["matrix"].tolist() == [[[[4.0, 6.0], [0.0, 6.0]]]]
    assert state["norm"].tolist() == [[[3.0, 2.0]]]
    with torch.no_grad():
        memory.gate.fill_(math.log(3))  # a gate of 3/4
    local = torch.tensor([10.0, 20.0]).view(1, 1, 1, 2)
    heads, _ = memory.side(state, tap([0.0, 0.0], [0.0, 0.0]), local, segment)
    # s(q) = (1, 2): (4 + 0, 6 + 12) / (3 + 4)
    torch.testing.assert_close(heads.flatten(), torch.tensor([0.75 * 4 / 7 + 2.5, 0.75 * 18 / 7 + 5.0]))
    fresh = memory.init_state(1, form="hidden", device=torch.device("cpu"), dtype=torch.float32)
    heads, _ = memory.side(fresh, tap([0.0, 0.0], [0.0, 0.0]), local, segment)
    assert torch.equal(heads, local)


def test_sums_stay_float32_under_autocast() -> None:
    """A thousandth added to a sum of 2000 is lost in bfloat16 and kept in float32."""
    model = make(AssociativeConfig(), n_layer=1).float()
    state = model.init_state(1, dtype=torch.bfloat16)
    assert state["layers.0.associative.norm"].dtype == torch.float32
    large = {name: tensor + 2000.0 if "norm" in name else tensor for name, tensor in state.items()}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(text(1), large).state["layers.0.associative.norm"] - 2000
    with torch.no_grad():
        plain = model(text(1), large).state["layers.0.associative.norm"] - 2000
    torch.testing.assert_close(mixed, plain, atol=5e-2, rtol=0)
    assert mixed.min() > 0


@pytest.mark.parametrize("gradient", ["carry", "stop"])
def test_what_was_written_learns_from_the_next_segment_if_the_graph_is_carried(gradient: str) -> None:
    model = make(AssociativeConfig(gradient=gradient), n_layer=1)
    first = model(text(4), model.init_state(1))
    second = model(text(4, seed=1), first.state)
    carried = first.state["layers.0.associative.matrix"]
    assert carried.requires_grad == (gradient == "carry")
    if gradient == "carry":
        (grad,) = torch.autograd.grad(second.hidden_BTD.square().sum(), [carried])
        assert grad.abs().sum() > 0
    assert set(second.metrics) == {"associative/gate/L0", "associative/update/L0"}
    assert 0 < second.metrics["associative/update/L0"] < 1
