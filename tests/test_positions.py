"""Every kind of position against its formula pair by pair; what tokens see; where cold memory begins; the backbone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from test_model import TINY, gradients, in_segments, losses, make, text
from torch import Tensor

from txl_lightning.config import POSITIONS, Config, ConfigError, DataConfig, ModelConfig
from txl_lightning.generation import Session
from txl_lightning.memory.base import MemoryPlan
from txl_lightning.memory.cache import Cache, CacheConfig
from txl_lightning.memory.mix import MixConfig
from txl_lightning.memory.none import NoneConfig
from txl_lightning.model.attention import Attention
from txl_lightning.model.parts import RMSNorm
from txl_lightning.model.positions import KINDS, Biases, DistanceTable, Reading, distance_table, rotate, sinusoid
from txl_lightning.types import Segment

BATCH, HEADS, WIDTH, D = 2, 3, 6, 18
READING = [name for name, reads in POSITIONS.items() if reads]
BACKBONES: dict[str, dict[str, Any]] = {
    "today": {
        "norm": "rmsnorm",
        "ffn": "swiglu",
        "n_head": 4,
        "n_kv_head": 2,
        "qk_norm": True,
        "bias": False,
        "final_norm": True,
        "pre_norm": True,
        "position": "rotary",
    },
    "gelu, one key head": {"ffn": "gelu", "n_kv_head": 1, "norm": "rmsnorm"},
    "no biases, normed queries": {"bias": False, "qk_norm": True, "pre_norm": True},
    "swiglu, biases": {"ffn": "swiglu", "final_norm": True, "pre_norm": True, "position": "shaw"},
    "queries as they are": {"pre_norm": True, "norm_queries": False},
}


def attention(**keys: Any) -> Attention:
    torch.manual_seed(0)
    config = ModelConfig(**{"d_model": D, "n_head": HEADS, "d_head": WIDTH, **keys})
    layer = Attention(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.5)
    return layer


def reading(n_token: int, n_slot: int, **changes: Any) -> tuple[Tensor, Reading]:
    """Queries, and keys they may all see."""
    generator = torch.Generator().manual_seed(n_token + n_slot)
    q, k, v = (
        torch.randn(BATCH, HEADS, size, WIDTH, dtype=torch.float64, generator=generator)
        for size in (n_token, n_token + n_slot, n_token + n_slot)
    )
    bias = torch.zeros(1, 1, n_token, n_token + n_slot, dtype=torch.float64)
    return q, Reading(k, v, bias, None, None, n_slot)._replace(**changes)


def table(n_token: int, oldest: int, clamp_len: int = -1) -> DistanceTable:
    size = {"oldest": oldest, "n_token": n_token, "ahead": 0, "d_model": D, "clamp_len": clamp_len}
    return distance_table(**size, device=torch.device("cpu"), dtype=torch.float64)


def shared() -> Biases:
    u, v = torch.randn(2, HEADS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return Biases(u, v)


def pairs(n_token: int, n_slot: int) -> list[tuple[int, int, int]]:
    """Query, key and distance of every pair a causal mask leaves."""
    return [(t, p, n_slot + t - p) for t in range(n_token) for p in range(n_slot + t + 1)]


# ---- the formulas


@pytest.mark.parametrize("terms", [c for n in range(4) for c in itertools.combinations("bcd", n)])
def test_any_subset_of_the_four_terms(terms: tuple[str, ...]) -> None:
    q, read = reading(4, 5)
    u, v = shared()
    found = []
    for way in ("auto", "reference"):
        layer = attention(terms=("a", *terms), attention=way)
        given = Biases(u if "c" in terms else None, v if "d" in terms else None)
        found.append(layer.position.scores(q, read, table(4, 5), given))
    distances = sinusoid(torch.arange(10), d_model=D, dtype=torch.float64)
    has_r = bool({"b", "d"} & set(terms))
    r = layer.position.r(distances).unflatten(-1, (HEADS, WIDTH)) if has_r else torch.zeros(10, HEADS, WIDTH)
    assert has_r == hasattr(layer.position, "r")
    for t, p, d in pairs(4, 5):
        expected = (q[:, :, t] * read.k_BHPK[:, :, p]).sum(-1)
        expected = expected + (q[:, :, t] * r[d]).sum(-1) * ("b" in terms)
        expected = expected + (u * read.k_BHPK[:, :, p]).sum(-1) * ("c" in terms)
        expected = (expected + (v * r[d]).sum(-1) * ("d" in terms)) / math.sqrt(WIDTH)
        for scores in found:
            torch.testing.assert_close(scores[:, :, t, p], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("way", ["auto", "reference"])
@pytest.mark.parametrize("clamp_len", [-1, 1, 3])
@pytest.mark.parametrize("max_distance", [1, 4, 6, 30])
def test_shaw_scores(max_distance: int, clamp_len: int, way: str) -> None:
    q, read = reading(3, 4)
    layer = attention(position="shaw", max_distance=max_distance, clamp_len=clamp_len, attention=way)
    part = layer.position
    scores = part.scores(q, read, table(3, 4), Biases(None, None))
    for t, p, d in pairs(3, 4):
        row = max(max_distance - 1 - d, 0, max_distance - clamp_len if clamp_len > 0 else 0)
        expected = ((q[:, :, t] + part.u) * read.k_BHPK[:, :, p]).sum(-1) + (q[:, :, t] * part.rows[row]).sum(-1)
        expected = (expected + part.row_bias[row]) / math.sqrt(WIDTH)
        torch.testing.assert_close(scores[:, :, t, p], expected, atol=1e-12, rtol=1e-12)


def test_rotary_scores_pair_by_pair() -> None:
    q, read = reading(4, 5)
    scores = attention(position="rotary").position.scores(q, read, table(4, 5), Biases(None, None))
    frequency = [float(torch.tensor(1.0) / torch.tensor(10000.0) ** (2 * i / WIDTH)) for i in range(WIDTH // 2)]
    for t, p, d in pairs(4, 5):
        expected = torch.zeros(BATCH, HEADS, dtype=torch.float64)
        for i, f in enumerate(frequency):  # as complex numbers: Re(q e^(i d f) conj(k)), the turn by the distance alone
            a = torch.complex(q[:, :, t, i], q[:, :, t, i + WIDTH // 2])
            b = torch.complex(read.k_BHPK[:, :, p, i], read.k_BHPK[:, :, p, i + WIDTH // 2])
            expected += (a * b.conj() * torch.polar(torch.tensor(1.0).double(), torch.tensor(d * f).double())).real
        torch.testing.assert_close(scores[:, :, t, p], expected / math.sqrt(WIDTH), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", READING)
def test_ages_in_any_order_and_slots_without_position(name: str) -> None:
    q, read = reading(4, 6)
    part = attention(position=name).position
    base = part.scores(q, read, table(4, 6), shared())
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    columns = torch.cat([order, torch.arange(6, 10)])
    moved = read._replace(k_BHPK=read.k_BHPK[:, :, columns], age=torch.arange(6, 0, -1)[order][None].expand(BATCH, -1))
    allowed = torch.arange(10) <= 6 + torch.arange(4)[:, None]
    found = part.scores(q, moved, table(4, 9), shared())
    for p, column in enumerate(columns.tolist()):
        seen = allowed[:, column]
        torch.testing.assert_close(found[:, :, seen, p], base[:, :, seen, column], atol=1e-12, rtol=1e-12)
    placed = torch.tensor([True, False, True, True, True, True])
    partly = part.scores(q, read._replace(positioned=placed), table(4, 6), shared())
    content = q + shared().u_HK[:, None] if name == "transformer_xl" else q
    content = content + part.u[:, None] if name == "shaw" else content
    expected = content @ read.k_BHPK[:, :, 1, :, None] / math.sqrt(WIDTH)
    torch.testing.assert_close(partly[..., 1], expected[..., 0], atol=1e-12, rtol=1e-12)
    keys = [0, 2, 3, 4, 5]
    torch.testing.assert_close(partly[..., keys], base[..., keys], atol=1e-12, rtol=1e-12)


# ---- what depends on the distance alone


def pair_score(name: str, query: int, key: int) -> float:
    """Score of two fixed contents at two places of a long segment."""
    layer = attention(position=name, max_distance=16)
    generator = torch.Generator().manual_seed(3)
    contents = torch.randn(2, D, dtype=torch.float64, generator=generator)
    x = torch.zeros(1, query + 1, D, dtype=torch.float64)
    x[0, query], x[0, key] = contents[0], contents[1]
    x = torch.cat([x, torch.zeros(1, 110 - query - 1, D, dtype=torch.float64)], dim=1)
    x = layer.position.at_layer(layer.position.at_embedding(x))
    q, k, v = layer.project(x)
    read = Reading(k, v, torch.zeros(1, 1, 110, 110, dtype=torch.float64), None, None, 0)
    scores = layer.position.scores(q, read, table(110, 0), shared())
    return float(scores[0, 0, query, key].detach())


@pytest.mark.parametrize("name", KINDS)
def test_the_same_contents_at_the_same_distance_score_the_same_wherever_they_stand(name: str) -> None:
    here, there = pair_score(name, 5, 3), pair_score(name, 105, 103)
    assert (abs(here - there) < 1e-9) is POSITIONS[name]


@pytest.mark.parametrize("form", ["hidden", "projected"])
@pytest.mark.parametrize(
    "keys",
    [{"position": name, "max_distance": 20} for name in READING] + list(BACKBONES.values()) + [{"terms": ("a", "d")}],
    ids=[*READING, *BACKBONES, "two terms"],
)
def test_segments_with_a_long_memory_equal_one_pass(keys: dict[str, Any], form: str) -> None:
    tokens, targets = text(32)
    with torch.no_grad():
        whole = make(NoneConfig(), **keys).double()
        expected = losses(whole(tokens, whole.init_state(3), None, targets))
        model = make(CacheConfig(mem_len=32), **keys).double()
        for size in (1, 5, 8):
            found, _ = in_segments(model, tokens, targets, size=size, form=form)
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_a_group_of_heads_shares_its_keys_and_the_memory_holds_them_once() -> None:
    model = make(CacheConfig(mem_len=8), n_head=4, n_kv_head=2)
    assert model.init_state(3, form="projected")["layers.0.cache.keys"].shape == (3, 8, 2, 6)
    attend = model.layers[0].attention
    _, k, v = attend.project(torch.randn(1, 5, 16))
    for heads in (k, v):
        assert heads.shape == (1, 4, 5, 6)
        assert torch.equal(heads[:, 0], heads[:, 1]) and torch.equal(heads[:, 2], heads[:, 3])
        assert not torch.equal(heads[:, 1], heads[:, 2])


@pytest.mark.parametrize("name", BACKBONES)
def test_every_weight_of_a_backbone_learns_and_is_counted(name: str) -> None:
    model = make(CacheConfig(mem_len=8), **BACKBONES[name])
    tokens, targets = text(16)
    state = model(tokens[:, :8], model.init_state(3)).state
    found = gradients(model, model(tokens[:, 8:], state, None, targets[:, 8:]))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(grad.abs().sum() > 0 for grad in found.values())
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_params()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("untie_r", [False, True])
def test_positions_are_counted_without_building(name: str, untie_r: bool) -> None:
    if untie_r and name != "transformer_xl":
        with pytest.raises(ConfigError, match=r"^model.untie_r=true: model.position=.* shares no biases"):
            ModelConfig(position=name, untie_r=True)
        return
    for terms in [("a", "b", "c", "d"), ("a",), ("a", "d")] if name == "transformer_xl" else [("a", "b", "c", "d")]:
        model = make(NoneConfig(), position=name, untie_r=untie_r, terms=terms, max_distance=11)
        assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_params()


def test_the_root_mean_square_norm_keeps_its_inputs_type() -> None:
    norm = RMSNorm(8, eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(3, 5, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x.bfloat16()).float(), expected, atol=0.05, rtol=0.02)


def test_swiglu_and_gelu_are_what_they_say() -> None:
    x = torch.randn(2, 3, 16)
    gated = make(ffn="swiglu").layers[0].feed_forward
    up, gate = gated.up(x), gated.gate(x)
    torch.testing.assert_close(gated(x), gated.down(up * gate * torch.sigmoid(gate)))
    plain = make(ffn="gelu").layers[0].feed_forward
    inner = plain[0](x)
    torch.testing.assert_close(plain(x), plain[3](inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))))


# ---- absolute positions


@pytest.mark.parametrize("name", [name for name, reads in POSITIONS.items() if not reads])
def test_absolute_positions_read_no_memory(name: str) -> None:
    model = ModelConfig(**TINY, position=name)
    mixed = MixConfig(parts=({"name": "cache", "mem_len": 4, "layers": (0,)},))
    for memory in (CacheConfig(mem_len=4), mixed):
        with pytest.raises(ConfigError, match=f"^model.position={name}: numbers the tokens of one segment, .*=none"):
            Config(model=model, memory=memory, data=DataConfig())
    for none in (CacheConfig(mem_len=0), NoneConfig()):
        Config(model=model, memory=none, data=DataConfig())
    plan = MemoryPlan(layers=[{"cache": Cache(mem_len=4, d_model=16, n_head=2, d_head=6)} for _ in range(3)])
    with pytest.raises(ValueError, match=f"^position {name} cannot tell where the slots"):
        make(NoneConfig(), plan=plan, position=name)


@pytest.mark.parametrize("name", ["absolute", "absolute_per_layer"])
def test_places_count_from_the_segments_end_and_generation_reads_them_so(name: str) -> None:
    model = make(NoneConfig(), position=name, max_distance=5).double().eval()
    tokens, _ = text(8, lanes=1)
    with torch.no_grad():
        whole = model.log_probs(model(tokens, model.init_state(1)).hidden_BTD)[0]
        x = model.embedding(tokens)
        first = model.layers[0].attention.position
        if name == "absolute":
            place = sinusoid(torch.arange(7, -1, -1), d_model=16, dtype=torch.float64)
            torch.testing.assert_close(first.at_embedding(x), x + place)
        else:
            torch.testing.assert_close(first.at_layer(x), x + first.rows[[0, 0, 0, 0, 1, 2, 3, 4]])
    session = Session(model, segment_len=8)
    for t in range(8):
        session.feed([int(tokens[0, t])])
        torch.testing.assert_close(session.log_probs_V, whole[t])


# ---- same_length, cold memory


@pytest.mark.parametrize("rule", ["mem_len", "mem_len+1"])
@pytest.mark.parametrize("mem_len", [1, 5, 8, 13])
@pytest.mark.parametrize("way", ["auto", "reference"])
def test_every_token_sees_equally_many_keys(mem_len: int, rule: str, way: str) -> None:
    """As one pass over the whole text with a mask made by hand; from the first, half-empty memory on."""
    tokens, targets = text(32)
    model = make(CacheConfig(mem_len=mem_len), same_length=True, same_length_rule=rule, attention=way).double()
    with torch.no_grad():
        found = {form: in_segments(model, tokens, targets, size=8, form=form)[0] for form in ("hidden", "projected")}
    n_key = mem_len + (rule == "mem_len+1")
    whole = make(NoneConfig(), attention=way).double()
    row = torch.arange(32)
    distance = row[:, None] - row
    visible = (distance >= 0) & (distance < n_key)
    assert visible.sum(1).max() == n_key
    layout = whole._layout(Segment.full(tokens), 32, device=torch.device("cpu"))
    mask = torch.zeros(1, 1, 32, 32).masked_fill(~visible, float("-inf"))
    whole._layout = lambda *_, **__: layout._replace(mask=mask)  # type: ignore[method-assign]
    with torch.no_grad():
        expected = losses(whole(tokens, whole.init_state(3), None, targets))
    for losses_BT in found.values():
        assert losses_BT.isfinite().all()
        torch.testing.assert_close(losses_BT, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("form", ["hidden", "projected"])
def test_cold_memory_absent_or_zeros(pre_norm: bool, form: str) -> None:
    tokens, targets = text(24)
    found = {}
    with torch.no_grad():
        for cold in ("absent", "zeros"):
            model = make(CacheConfig(mem_len=8, cold=cold), pre_norm=pre_norm).double()
            found[cold] = in_segments(model, tokens, targets, size=8, form=form)[0]
        filled = make(CacheConfig(mem_len=8), pre_norm=pre_norm).double()
        state = filled.init_state(3)  # hidden zeros, said to be real
        state.update({key: torch.full_like(old, 8) for key, old in state.items() if key.endswith("filled")})
        expected = losses(filled(tokens[:, :8], state, None, targets[:, :8]))
    torch.testing.assert_close(found["zeros"][:, :8], expected, atol=1e-9, rtol=0)
    assert (found["zeros"] - found["absent"])[:, :8].abs().max() > 1e-3


def test_same_length_asks_for_a_memory_length() -> None:
    model = ModelConfig(**TINY, same_length=True)
    for memory in (NoneConfig(), CacheConfig(mem_len=0)):
        with pytest.raises(ConfigError, match=r"^model.same_length=true: needs memory.mem_len >= 1"):
            Config(model=model, memory=memory, data=DataConfig())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"terms": ("b", "c")}, r"^model.terms=\[b,c\]: must hold a"),
        ({"terms": ("a", "a")}, "^model.terms=.*: must hold a, and each term once"),
        ({"terms": ("a", "e")}, "^model.terms=.*: no such choice"),
        ({"terms": ("a",), "position": "shaw"}, "^model.terms=.*: model.position=shaw has other terms"),
        ({"position": "rotary", "d_head": 7}, "^model.d_head=7: must be even for rotary"),
        ({"position": "rotary", "clamp_len": 5}, "^model.clamp_len=5: model.position=rotary cannot clamp"),
        ({"position": "absolute_per_layer", "clamp_len": 5}, "^model.clamp_len=5: .* has no distances to clamp"),
        ({"n_head": 4, "n_kv_head": 3}, "^model.n_kv_head=3: must divide model.n_head=4"),
        ({"norm_queries": False}, "^model.norm_queries=false: model.pre_norm is false"),
        ({"position": "rope"}, "^model.position=rope: no such choice"),
    ],
)
def test_combinations_that_cannot_work_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**keys)


# ---- dropout


def test_variational_dropout_has_one_mask_for_all_tokens_of_a_lane() -> None:
    model = make(dropout=0.5, variational_dropout=True)
    x = torch.ones(3, 9, 16)
    dropped = model.train().dropout(x)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(model.eval().dropout(x), x)


def test_embedding_dropout_drops_whole_symbols() -> None:
    model = make(dropemb=0.5).train()
    tokens, _ = text(64)
    x, plain = model.embedding(tokens), model.eval().embedding(tokens)
    kept = (x != 0).any(-1)
    for symbol in tokens.unique():
        assert len(kept[tokens == symbol].unique()) == 1
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(x[kept], 2 * plain[kept])


def test_rotation_keeps_lengths_and_place_zero_turns_nothing() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    turned = rotate(x, torch.arange(5)[None])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
