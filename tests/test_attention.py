"""The four-term scores: written out against a loop over pairs, and the fast way against the written-out one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from txl_lightning import registry
from txl_lightning.config import Config, DataConfig, ModelConfig
from txl_lightning.memory.base import MemoryPlan
from txl_lightning.memory.cache import CacheConfig
from txl_lightning.memory.tokens import Tokens, TokensConfig
from txl_lightning.model.attention import Attention
from txl_lightning.model.positions import (
    Biases,
    DistanceTable,
    Reading,
    distance_table,
    reference_scores,
    shifted_scores,
    sinusoid,
)
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import MASKED, Segment

BATCH, HEADS, WIDTH = 2, 3, 5
SIZES = [(n_token, n_slot) for n_token in (1, 7, 63) for n_slot in (0, 1, 17, 64)]


class Inputs(NamedTuple):
    """Leaves that want gradients."""

    q: Tensor  # (B, H, T, K)
    k: Tensor  # (B, H, P, K)
    r: Tensor  # (W, H, K)
    u: Tensor  # (H, K)
    v: Tensor


def inputs(n_token: int, n_slot: int, *, ahead: int = 0, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(n_token * 100 + n_slot)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    n_key = n_token + n_slot
    return Inputs(
        leaf(BATCH, HEADS, n_token, WIDTH),
        leaf(BATCH, HEADS, n_key, WIDTH),
        leaf(n_key + 1 + ahead, HEADS, WIDTH),
        leaf(HEADS, WIDTH),
        leaf(HEADS, WIDTH),
    )


def rows(n_token: int, n_slot: int) -> Tensor:
    """(1, T, P) row of the table for each pair: row 0 is distance P, so distance d is row P - d."""
    distance = n_slot + torch.arange(n_token)[:, None] - torch.arange(n_token + n_slot)
    return (n_token + n_slot - distance)[None]


def seen(n_token: int, n_slot: int) -> Tensor:
    """(T, P) bool: the key is not later than the query."""
    return torch.arange(n_token + n_slot) <= n_slot + torch.arange(n_token)[:, None]


def both(n_token: int, n_slot: int, *, ahead: int = 0, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Masked scores and all gradients, first the fast way, then written out."""
    scale = 1 / math.sqrt(WIDTH)
    mask = torch.ones(n_token, n_token + n_slot, dtype=torch.bool) if ahead else seen(n_token, n_slot)
    found = []
    for fast in (True, False):
        given = inputs(n_token, n_slot, ahead=ahead, dtype=dtype)
        biases = Biases(given.u, given.v)
        if fast:
            by_row = (given.q + given.v[:, None]) @ given.r.permute(1, 2, 0)
            scores = shifted_scores(given.q + given.u[:, None], given.k, by_row, scale=scale)
        else:
            row = rows(n_token, n_slot).clamp(max=given.r.shape[0] - 1)
            scores = reference_scores(given.q, given.k, given.r, biases, row=row) * scale
        scores = scores.masked_fill(~mask, 0.0)
        weight = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        (scores * weight).sum().backward()
        found.append([scores.detach(), *(leaf.grad for leaf in given if leaf.grad is not None)])
    return found


@pytest.mark.parametrize(("n_token", "n_slot"), [(1, 0), (1, 4), (3, 0), (3, 5), (5, 2)])
def test_the_written_out_scores_are_the_papers_formula_pair_by_pair(n_token: int, n_slot: int) -> None:
    q, k, r, u, v = (leaf.detach() for leaf in inputs(n_token, n_slot))
    scores = reference_scores(q, k, r, Biases(u, v), row=rows(n_token, n_slot).clamp(max=r.shape[0] - 1))
    for i in range(n_token):
        for j in range(n_slot + i + 1):
            distance = n_slot + i - j
            r_d = r[n_token + n_slot - distance]
            for b in range(BATCH):
                for h in range(HEADS):
                    content = sum(float(q[b, h, i, c] * k[b, h, j, c]) for c in range(WIDTH))
                    position = sum(float(q[b, h, i, c] * r_d[h, c]) for c in range(WIDTH))
                    content_bias = sum(float(u[h, c] * k[b, h, j, c]) for c in range(WIDTH))
                    position_bias = sum(float(v[h, c] * r_d[h, c]) for c in range(WIDTH))
                    expected = content + position + content_bias + position_bias
                    assert float(scores[b, h, i, j]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n_token", "n_slot"), SIZES)
def test_shifted_scores_and_every_gradient_equal_the_written_out_ones(n_token: int, n_slot: int) -> None:
    fast_ones, slow_ones = both(n_token, n_slot)
    assert len(slow_ones) == 6
    for fast, slow in zip(fast_ones, slow_ones, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(("n_token", "n_slot"), SIZES)
def test_with_enough_negative_distances_the_scores_of_later_keys_are_right_too(n_token: int, n_slot: int) -> None:
    for fast, slow in zip(*both(n_token, n_slot, ahead=max(1, n_token - 1)), strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize(("n_token", "n_slot"), [(1, 0), (7, 17), (63, 64)])
def test_shifted_scores_in_lower_precision(n_token: int, n_slot: int, dtype: torch.dtype, tolerance: float) -> None:
    exact = both(n_token, n_slot)[1]
    for fast, slow in zip(both(n_token, n_slot, dtype=dtype)[0], exact, strict=True):
        assert fast.dtype == dtype
        error = (fast.double() - slow).abs().max() / slow.abs().max()
        assert error < tolerance


def attention(**keys: Any) -> Attention:
    """One attention layer in float64, its weights drawn at random."""
    torch.manual_seed(0)
    model = ModelConfig(d_model=16, n_head=HEADS, d_head=WIDTH, **keys)
    layer = Attention(model).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.5)
    return layer


def causal_bias(n_token: int, n_slot: int) -> Tensor:
    return torch.zeros(n_token, n_token + n_slot).masked_fill(~seen(n_token, n_slot), -math.inf)[None, None]


def table(n_token: int, oldest: int, *, clamp_len: int = -1, ahead: int = 0) -> DistanceTable:
    return distance_table(
        oldest=oldest,
        n_token=n_token,
        ahead=ahead,
        d_model=16,
        clamp_len=clamp_len,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )


def reading(n_token: int, n_slot: int, **changes: Any) -> tuple[Tensor, Reading]:
    """Queries, and what they read."""
    given = inputs(n_token, n_slot)
    values = torch.randn(BATCH, HEADS, n_token + n_slot, WIDTH, dtype=torch.float64)
    known = Reading(given.k.detach(), values, causal_bias(n_token, n_slot).double(), None, None, n_slot)
    return given.q.detach(), known._replace(**changes)


@pytest.mark.parametrize("clamp_len", [-1, 1, 5, 400])
@pytest.mark.parametrize("untie_r", [False, True])
def test_both_ways_of_a_layer_agree(clamp_len: int, untie_r: bool) -> None:
    q, read = reading(7, 17)
    found = []
    for way in ("auto", "reference"):
        layer = attention(attention=way, untie_r=untie_r)
        shared = (
            None
            if untie_r
            else Biases(*torch.randn(2, HEADS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
        )
        found.append(layer.attend(q, read, table(7, 17, clamp_len=clamp_len), layer.position.biases(shared)))
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=1e-12)


def test_ages_that_are_looked_up_may_come_in_any_order() -> None:
    q, read = reading(7, 17)
    layer = attention()
    biases = Biases(*torch.randn(2, HEADS, WIDTH, dtype=torch.float64))
    base, _ = layer.attend(q, read, table(7, 17), biases)
    order = torch.randperm(17)
    columns = torch.cat([order, torch.arange(17, 24)])
    shuffled = Reading(
        read.k_BHPK[:, :, columns],
        read.v_BHPK[:, :, columns],
        read.bias[..., columns],
        torch.arange(17, 0, -1)[order][None].expand(BATCH, -1),
        None,
        17,
    )
    for oldest in (17, 40):  # a table that reaches further than needed
        found, _ = layer.attend(q, shuffled, table(7, oldest), biases)
        torch.testing.assert_close(found, base, atol=1e-12, rtol=1e-12)


def test_slots_without_position_have_content_terms_only() -> None:
    q, read = reading(3, 4)
    layer = attention()
    u, v = torch.randn(2, HEADS, WIDTH, dtype=torch.float64)
    placed = torch.tensor([True, False, True, False])
    _, weights = layer.attend(q, read._replace(positioned=placed), table(3, 4), Biases(u, v))
    _, every = layer.attend(q, read, table(3, 4), Biases(u, v))
    unplaced_pair = (weights[..., 1] / weights[..., 3]).log() / layer.position.scale
    content = torch.einsum("bhtk,bhpk->bhtp", q + u[:, None], read.k_BHPK)
    torch.testing.assert_close(unplaced_pair, content[..., 1] - content[..., 3])
    placed_pair = (weights[..., 0] / weights[..., 2]).log()
    torch.testing.assert_close(placed_pair, (every[..., 0] / every[..., 2]).log())
    _, same = layer.attend(q, read._replace(positioned=torch.ones(4, dtype=torch.bool)), table(3, 4), Biases(u, v))
    torch.testing.assert_close(same, every, atol=1e-12, rtol=1e-12)


def test_distances_beyond_clamp_len_look_like_it() -> None:
    rows_WD = table(4, 10, clamp_len=6).rows_WD  # distances 14, 13, ..., 0
    torch.testing.assert_close(rows_WD[:9], rows_WD[8].expand(9, -1), atol=0, rtol=0)
    torch.testing.assert_close(rows_WD[8:], table(4, 10).rows_WD[8:], atol=0, rtol=0)
    assert not torch.equal(rows_WD[8], rows_WD[9])


def test_sinusoids_are_halves_over_falling_distances() -> None:
    found = table(2, 3, ahead=2)
    assert (found.first, found.ahead, found.rows_WD.shape) == (5, 2, (8, 16))
    for row, distance in enumerate((5, 4, 3, 2, 1, 0, 0, 0)):  # negative distances look like 0
        for i in range(8):
            angle = distance * 10000 ** (-2 * i / 16)
            assert float(found.rows_WD[row, i]) == pytest.approx(math.sin(angle), abs=1e-6)
            assert float(found.rows_WD[row, 8 + i]) == pytest.approx(math.cos(angle), abs=1e-6)
    part = found.for_slots(1, 2)
    assert (part.first, part.ahead) == (3, 2)
    torch.testing.assert_close(part.rows_WD, found.rows_WD[2:], atol=0, rtol=0)


def test_positions_are_exact_far_beyond_what_bfloat16_counts() -> None:
    distance = torch.tensor([256, 257, 4095, 4096])
    low = sinusoid(distance, d_model=16, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), sinusoid(distance, d_model=16), atol=4e-3, rtol=0)


def test_an_absent_slot_has_no_weight_at_all() -> None:
    q, read = reading(3, 4)
    bias = read.bias.expand(BATCH, -1, -1, -1).clone()
    bias[1, ..., :4] = MASKED
    biases = Biases(*torch.randn(2, HEADS, WIDTH, dtype=torch.float64))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        layer = attention().to(dtype)
        lower = Reading(read.k_BHPK.to(dtype), read.v_BHPK.to(dtype), bias.to(dtype), None, None, 4)
        heads, weights = layer.attend(q.to(dtype), lower, DistanceTable(table(3, 4).rows_WD.to(dtype), 7, 0), biases)
        assert torch.equal(weights[1, ..., :4], torch.zeros_like(weights[1, ..., :4]))
        assert weights[0, ..., :4].gt(0).all()
        assert heads.isfinite().all() and heads.dtype == dtype


def test_dropout_of_weights_keeps_their_mean_and_zeroes_the_given_share() -> None:
    n_token, rate = 40, 0.25
    layer = attention(dropatt=rate).train()
    uniform = Reading(
        torch.zeros(BATCH, HEADS, n_token, WIDTH, dtype=torch.float64),
        torch.eye(n_token, dtype=torch.float64).expand(BATCH, HEADS, -1, -1),
        torch.zeros(1, 1, n_token, n_token, dtype=torch.float64),
        None,
        None,
        0,
    )
    zeros = Biases(*torch.zeros(2, HEADS, WIDTH, dtype=torch.float64))
    q = torch.zeros(BATCH, HEADS, n_token, WIDTH, dtype=torch.float64)
    torch.manual_seed(0)
    # values are the unit vectors, so the heads' outputs are the weights themselves
    found = torch.stack([layer.attend(q, uniform, table(n_token, 0, ahead=n_token), zeros)[0] for _ in range(20)])
    n_draw = found.numel()
    share = (found == 0).double().mean()
    assert abs(float(share) - rate) < 4 * math.sqrt(rate * (1 - rate) / n_draw)
    kept = found[found != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / n_token / (1 - rate)))
    weights = layer.attend(q, uniform, table(n_token, 0, ahead=n_token), zeros)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))  # reported before dropout
    layer.eval()
    torch.testing.assert_close(layer.attend(q, uniform, table(n_token, 0, ahead=n_token), zeros)[0], weights)


# ---- the same through a whole model


MODELS = {
    "plain": {},
    "clamp_len": {"clamp_len": 3},
    "untie_r and pre-norm": {"untie_r": True, "pre_norm": True},
    "memory tokens": {"tokens": True},
}


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_a_model_gives_the_same_both_ways(keys: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    fast, slow = (_two_segments(way, dtype=dtype, **keys) for way in ("auto", "reference"))
    for name in slow:
        assert slow[name].norm() > 0
        assert (fast[name] - slow[name]).norm() <= tolerance * (1e-3 + slow[name].norm()), name


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_in_bfloat16_the_fast_way_is_about_as_exact_as_the_other(keys: dict[str, Any]) -> None:
    exact = _two_segments("reference", dtype=torch.float64, **keys)
    fast, slow = (_two_segments(way, dtype=torch.bfloat16, **keys) for way in ("auto", "reference"))
    ratios = []
    for name in exact:
        errors = [float((found[name].double() - exact[name]).norm() / exact[name].norm()) for found in (fast, slow)]
        assert errors[0] <= 4 * errors[1] + 1e-3 and errors[0] < 0.25, name
        ratios.append(errors[0] / errors[1])
    assert sum(ratios) / len(ratios) < 1.5


def _two_segments(way: str, *, dtype: torch.dtype, tokens: bool = False, **keys: Any) -> dict[str, Tensor]:
    model_config = ModelConfig(
        n_layer=2, d_model=16, n_head=2, d_head=6, d_inner=24, vocab_size=19, attention=way, init_std=0.3, **keys
    )
    memory = CacheConfig(mem_len=9)
    torch.manual_seed(0)
    plan = registry.memories.get("cache").build(memory, model_config)
    if tokens:
        plan = MemoryPlan(layers=plan.layers, tokens=Tokens(TokensConfig(read_slots=True, n_tokens=3), model_config))
    config = Config(model=model_config, memory=memory, data=DataConfig(segment_len=7, batch_size=3))
    model = TransformerXL(config, plan=plan).to(dtype)
    text = torch.randint(19, (3, 15))
    state = model.init_state(3)
    first = Segment(torch.ones(3, dtype=torch.bool), torch.tensor([7, 7, 4]))
    out = model(text[:, :7], state, first, text[:, 1:8])
    last = model(text[:, 7:14], out.state, None, text[:, 8:15])
    assert out.losses_BT is not None and last.losses_BT is not None
    (out.losses_BT.sum() + last.losses_BT.sum()).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"losses": last.losses_BT.detach(), "hidden": last.hidden_BTD.detach(), **grads}
