"""The model as a pure function of weights, tokens and state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from txl_lightning import registry
from txl_lightning.config import Config, DataConfig, MemoryConfig, ModelConfig
from txl_lightning.memory.base import Aux, LayerHandle, MemoryPlan, MemoryStrategy, Tap
from txl_lightning.memory.cache import Cache, CacheConfig
from txl_lightning.memory.none import NoneConfig
from txl_lightning.memory.tokens import Tokens, TokensConfig
from txl_lightning.model.block import Block, Layout, _join_bias
from txl_lightning.model.transformer import ModelOutput, TransformerXL, token_mask
from txl_lightning.types import MASKED, Segment, Slots, State

VOCAB = 23
TINY: dict[str, Any] = {"n_layer": 3, "d_model": 16, "n_head": 2, "d_head": 6, "d_inner": 20, "vocab_size": VOCAB}


def make(memory: MemoryConfig | None = None, *, plan: MemoryPlan | None = None, **keys: Any) -> TransformerXL:
    """A tiny model with weights large enough that everything in it shows, the same every time."""
    torch.manual_seed(5)
    model = ModelConfig(**{"init_std": 0.3, **TINY, **keys})
    memory = memory if memory is not None else CacheConfig(mem_len=8)
    config = Config(model=model, memory=memory, data=DataConfig(segment_len=8, batch_size=3))
    return TransformerXL(config, plan=plan)


def text(n_token: int, lanes: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and next tokens (B, N)."""
    tokens = torch.randint(VOCAB, (lanes, n_token + 1), generator=torch.Generator().manual_seed(n_token))
    return tokens[:, :-1], tokens[:, 1:]


def losses(out: ModelOutput) -> Tensor:
    assert out.losses_BT is not None
    return out.losses_BT


def gradients(model: TransformerXL, out: ModelOutput) -> dict[str, Tensor]:
    """Gradient of the summed losses of one output, by parameter."""
    model.zero_grad()
    (losses(out).sum() + sum(out.aux_losses.values())).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def in_segments(
    model: TransformerXL, tokens: Tensor, targets: Tensor, *, size: int, form: str
) -> tuple[Tensor, Tensor]:
    """Losses (B, N) and hidden states (B, N, D) of a text read segment by segment."""
    state, found, hidden = model.init_state(tokens.shape[0], form=form), [], []
    for start in range(0, tokens.shape[1], size):
        part = slice(start, start + size)
        out = model(tokens[:, part], state, None, targets[:, part])
        state = out.state
        found.append(losses(out))
        hidden.append(out.hidden_BTD)
    return torch.cat(found, dim=1), torch.cat(hidden, dim=1)


# ---- segments and one long pass


@pytest.mark.parametrize("form", ["hidden", "projected"])
@pytest.mark.parametrize("size", [1, 3, 8, 64])
@pytest.mark.parametrize(
    "keys",
    [{}, {"pre_norm": True}, {"untie_r": True}, {"clamp_len": 20, "attention": "reference"}],
    ids=["paper", "pre-norm", "untie_r", "clamp_len, reference"],
)
def test_segment_by_segment_equals_one_long_pass(keys: dict[str, Any], size: int, form: str) -> None:
    tokens, targets = text(64)
    with torch.no_grad():
        whole = make(NoneConfig(), **keys).double()
        out = whole(tokens, whole.init_state(3), None, targets)
        model = make(CacheConfig(mem_len=64), **keys).double()
        found, hidden = in_segments(model, tokens, targets, size=size, form=form)
    torch.testing.assert_close(found, losses(out), atol=1e-9, rtol=0)
    torch.testing.assert_close(hidden, out.hidden_BTD, atol=1e-9, rtol=0)


def test_a_memory_shorter_than_the_history_is_another_model() -> None:
    tokens, targets = text(64)
    with torch.no_grad():
        long, short = (
            in_segments(make(CacheConfig(mem_len=n)).double(), tokens, targets, size=8, form="hidden")[0]
            for n in (64, 8)
        )
    torch.testing.assert_close(
        short[:, :16], long[:, :16], atol=1e-9, rtol=0
    )  # the second segment still sees all before it
    assert (short[:, 24:] - long[:, 24:]).abs().max() > 1e-3


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_cache_of_length_zero_equals_no_memory_bit_for_bit(pre_norm: bool) -> None:
    found = []
    for memory in (CacheConfig(mem_len=0), NoneConfig()):
        model = make(memory, pre_norm=pre_norm)
        tokens, targets = text(24)
        state = model.init_state(3)
        for start in (0, 8):
            state = model(tokens[:, start : start + 8], state, None, targets[:, start : start + 8]).state
        out = model(tokens[:, 16:], state, None, targets[:, 16:])
        found.append({"losses": losses(out), "hidden": out.hidden_BTD, **out.state, **gradients(model, out)})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_weights_learn_through_memory() -> None:
    """Keys and values of memory are projected with the current weights, so W_k and W_v get gradient from it."""
    tokens, targets = text(16)
    grads = []
    for cut in (False, True):
        model = make(CacheConfig(mem_len=8), n_layer=1)
        state = model(tokens[:, :8], model.init_state(3), None, targets[:, :8]).state
        assert not any(tensor.requires_grad for tensor in state.values())
        if cut:  # the same contents, projected beforehand
            projected = model(tokens[:, :8], model.init_state(3, form="projected"), None, targets[:, :8]).state
            state = {key: tensor.detach() for key, tensor in projected.items()}
        out = model(tokens[:, 8:], state, None, targets[:, 8:])
        grads.append((losses(out).detach(), gradients(model, out)["layers.0.attention.qkv.weight"]))
    torch.testing.assert_close(grads[0][0], grads[1][0], atol=1e-5, rtol=1e-5)
    keys_and_values = slice(12, None)
    assert (grads[0][1] - grads[1][1])[keys_and_values].abs().max() > 1e-2
    torch.testing.assert_close(grads[0][1][:12], grads[1][1][:12], atol=1e-4, rtol=1e-4)


# ---- slots


class UnorderedCache(Cache):
    """The cache, its slots in an order of their own."""

    ages = "any"

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        slots = super().slots(state, x_BTD, segment)
        order = torch.randperm(self.max_age, generator=torch.Generator().manual_seed(0))
        assert slots.hidden is not None
        return Slots(slots.hidden[:, order], None, slots.age[:, order], slots.bias[..., order])


@pytest.mark.parametrize("with_tokens", [False, True])
def test_slots_in_another_order_read_the_same(with_tokens: bool) -> None:
    tokens, targets = text(24)
    found = []
    for kind in (Cache, UnorderedCache):
        model = ModelConfig(**TINY)
        caches = [kind(mem_len=11, d_model=16, n_head=2, d_head=6) for _ in range(3)]
        torch.manual_seed(0)
        extra = Tokens(TokensConfig(read_slots=True, n_tokens=2), model) if with_tokens else None
        plan = MemoryPlan(layers=[{"cache": cache} for cache in caches], tokens=extra)
        found.append(in_segments(make(plan=plan).double(), tokens, targets, size=6, form="hidden")[0])
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=0)


def test_two_half_memories_in_one_layer_are_read_side_by_side() -> None:
    """Two equal caches double every slot: the same as one cache whose slots weigh twice."""

    class Doubled(Cache):
        def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
            slots = super().slots(state, x_BTD, segment)
            return slots._replace(bias=slots.bias + math.log(2))

    tokens, targets = text(24)
    size = {"mem_len": 7, "d_model": 16, "n_head": 2, "d_head": 6}
    pair = MemoryPlan(layers=[{"one": Cache(**size), "two": Cache(**size)} for _ in range(3)])
    heavy = MemoryPlan(layers=[{"one": Doubled(**size)} for _ in range(3)])
    found = [
        in_segments(make(plan=plan).double(), tokens, targets, size=6, form="projected")[0] for plan in (pair, heavy)
    ]
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)  # log 2 is a float32 number


def test_more_slots_than_declared_are_refused() -> None:
    plan = MemoryPlan(layers=[{"cache": Cache(mem_len=7, d_model=16, n_head=2, d_head=6)} for _ in range(3)])
    model = make(plan=plan)
    state = model.init_state(3)
    state["layers.0.cache.hidden"] = torch.zeros(3, 9, 16)
    for strategy in (layer["cache"] for layer in plan.layers):
        strategy.max_age = 9
    with pytest.raises(ValueError, match=r"^memory cache offers 9 slots but declares max_age=7$"):
        model(*text(8)[:1], state)


def test_a_plan_for_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the memory plan has 2 layers, the model 3$"):
        make(plan=MemoryPlan(layers=[{}, {}]))


# ---- what a strategy is shown


class Spy(Cache):
    """A cache that shows what it was given. Only a test may keep such things on a module."""

    def __init__(self, *, needs_usage: bool, mem_len: int) -> None:
        super().__init__(mem_len=mem_len, d_model=16, n_head=2, d_head=6)
        self.needs_usage = needs_usage
        self.shown: list[tuple[Tap, LayerHandle]] = []

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        self.shown.append((tap, layer))
        return super().write(state, tap, layer, segment)


def spied(*, tokens: bool = False, **keys: Any) -> tuple[TransformerXL, list[Tensor], dict[str, Spy]]:
    """A layer with two spies after its second segment, in which lanes have 8, 3 and 0 tokens."""
    model_config = ModelConfig(**{**TINY, "n_layer": 1, **keys})
    spies = {"one": Spy(needs_usage=False, mem_len=5), "two": Spy(needs_usage=True, mem_len=7)}
    extra = Tokens(TokensConfig(read_slots=True, n_tokens=2), model_config) if tokens else None
    model = make(plan=MemoryPlan(layers=[dict(spies)], tokens=extra), n_layer=1, **keys).double()
    inputs, _ = text(16)
    state = model(inputs[:, :8], model.init_state(3)).state
    out = model(inputs[:, 8:], state, Segment(torch.zeros(3, dtype=torch.bool), torch.tensor([8, 3, 0])))
    return model, [out.hidden_BTD, state["layers.0.one.hidden"], state["layers.0.two.hidden"]], spies


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_tap_shows_the_real_tokens_and_the_strategys_own_slots(pre_norm: bool, tokens: bool) -> None:
    _, (hidden, *memories), spies = spied(tokens=tokens, pre_norm=pre_norm)
    for spy, memory in zip(spies.values(), memories, strict=True):
        tap, layer = spy.shown[-1]
        assert tap.x_BTD.shape == tap.h_BTD.shape == (3, 8, 16)
        assert torch.equal(tap.h_BTD, tap.x_BTD) is not pre_norm
        assert tap.y_BTD is not None and torch.equal(tap.y_BTD, hidden)
        for shown, expected in zip((tap.slot_k_BHSK, tap.slot_v_BHSK), layer.project_slots(memory), strict=True):
            assert shown is not None and torch.equal(shown, expected)
        # the same rows as memory and as the segment's own tokens have the same keys and values
        for shown, expected in zip((tap.k_BHTK, tap.v_BHTK), layer.project_slots(tap.x_BTD), strict=True):
            torch.testing.assert_close(shown, expected, atol=1e-12, rtol=0)
        assert (tap.suffix_BND is not None) is tokens
        if tap.suffix_BND is not None:
            assert tap.suffix_BND.shape == (3, 2, 16)


def test_usage_is_shown_to_those_who_declare_the_need() -> None:
    _, _, spies = spied()
    without, tap = spies["one"].shown[-1][0], spies["two"].shown[-1][0]
    assert without.usage_BS is None and without.usage_BT is None
    assert tap.usage_BS is not None and tap.usage_BT is not None
    assert tap.usage_BS.shape == (3, 7) and tap.usage_BS.dtype == torch.float32
    # real queries times heads, less what the other strategy's slots got: these weigh more than nothing
    total = tap.usage_BS.sum(-1) + tap.usage_BT.sum(-1)
    assert total[2] == 0
    assert ((total[:2] < torch.tensor([16.0, 6.0])) & (total[:2] > 0)).all()
    assert tap.usage_BT[1].tolist() == sorted(
        tap.usage_BT[1].tolist(), key=lambda value: value == 0
    )  # later ones unseen
    alone = make(plan=MemoryPlan(layers=[{"spy": Spy(needs_usage=True, mem_len=7)}]), n_layer=1).double()
    spy = alone.get_submodule("layers.0.memories.spy")
    assert isinstance(spy, Spy)
    inputs, _ = text(16)
    state = alone(inputs[:, :8], alone.init_state(3)).state
    alone(inputs[:, 8:], state, Segment(torch.zeros(3, dtype=torch.bool), torch.tensor([8, 3, 0])))
    tap = spy.shown[-1][0]
    assert tap.usage_BS is not None and tap.usage_BT is not None
    torch.testing.assert_close(tap.usage_BS.sum(-1) + tap.usage_BT.sum(-1), torch.tensor([16.0, 6.0, 0.0]))


def test_each_strategy_gets_the_usage_of_its_own_slots() -> None:
    """Wherever its slots stand among those of others."""
    model_config = ModelConfig(**{**TINY, "n_layer": 1})
    inputs, _ = text(16)
    usages = []
    for order in (["wide", "one", "two"], ["two", "wide", "one"]):
        spies = {"one": Spy(needs_usage=True, mem_len=7), "two": Spy(needs_usage=True, mem_len=7)}
        parts = {"wide": Cache(mem_len=4, d_model=16, n_head=2, d_head=6), **spies}
        torch.manual_seed(0)
        plan = MemoryPlan(
            layers=[{name: parts[name] for name in order}],
            tokens=Tokens(TokensConfig(read_slots=True, n_tokens=2), model_config),
        )
        model = make(plan=plan, n_layer=1).double()
        model(inputs[:, 8:], model(inputs[:, :8], model.init_state(3)).state)
        usages += [spy.shown[-1][0] for spy in spies.values()]
    for tap in usages[1:]:  # the two spies hold the same
        torch.testing.assert_close(tap.usage_BS, usages[0].usage_BS)
        torch.testing.assert_close(tap.usage_BT, usages[0].usage_BT)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_frozen_attention_is_content_attention_that_trains_nothing_but_its_inputs(pre_norm: bool) -> None:
    model, (_, memory, _), spies = spied(pre_norm=pre_norm)
    tap, layer = spies["one"].shown[-1]
    m = memory.clone().requires_grad_()
    found = layer.frozen_attention(tap.h_BTD.detach(), m)
    block = model.get_submodule("layers.0")
    assert isinstance(block, Block)
    rows = block.attention_norm(m) if pre_norm else m
    q, _, _ = block.attention.project(tap.h_BTD)
    _, k, v = block.attention.project(rows)
    expected = (q @ k.transpose(-1, -2) / math.sqrt(6)).softmax(-1) @ v
    torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2), atol=1e-12, rtol=0)
    found.square().sum().backward()
    assert m.grad is not None and m.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- memory tokens


def test_what_tokens_see_of_one_another() -> None:
    segment = Segment(torch.zeros(2, dtype=torch.bool), torch.tensor([3, 1]))
    mask = token_mask(segment, n_prefix=2, n_token=3, n_suffix=2, device=torch.device("cpu"))
    seen = [["".join("x" if bool(cell == 0) else "." for cell in row) for row in lane[0]] for lane in mask]
    both = ["xx.....", "xx.....", "xxx....", "xxxx...", "xxxxx.."]  # prefix in both directions, then causal
    assert seen[0] == [*both, "xxxxxxx", "xxxxxxx"]
    assert seen[1] == [*both, "xxx..xx", "xxx..xx"]  # suffix tokens do not see padding
    plain = token_mask(segment, n_prefix=0, n_token=3, n_suffix=0, device=torch.device("cpu"))
    assert plain.shape == (1, 1, 3, 3)
    assert torch.equal(plain[0, 0] == 0, torch.ones(3, 3).tril().bool())


def test_a_bias_for_real_tokens_is_stretched_over_the_tokens_around_them() -> None:
    segment = Segment(torch.zeros(2, dtype=torch.bool), torch.tensor([3, 2]))
    mask = token_mask(segment, n_prefix=1, n_token=3, n_suffix=2, device=torch.device("cpu"))
    rows = torch.tensor([10.0, 20.0, 30.0]).view(1, 1, 3, 1)
    slots = Slots(torch.zeros(2, 1, 4), None, torch.ones(1, 1, dtype=torch.int64), rows)
    joined = _join_bias([slots], segment, Layout(1, 3, 2, mask, None), dtype=torch.float32)
    assert joined.shape == (2, 1, 6, 7)
    assert joined[0, 0, :, 0].tolist() == [10, 10, 20, 30, 30, 30]
    assert joined[1, 0, :, 0].tolist() == [10, 10, 20, 30, 20, 20]  # the last real token of this lane is the second
    hidden = torch.tensor([True, False, False, False, True, True])[:, None]
    joined = _join_bias([slots], segment, Layout(1, 3, 2, mask, hidden), dtype=torch.float32)
    assert joined[0, 0, :, 0].tolist() == [-math.inf, 10, 20, 30, -math.inf, -math.inf]


@pytest.mark.parametrize("read_slots", [True, False])
def test_whether_memory_tokens_read_slots(read_slots: bool) -> None:
    model_config = ModelConfig(**{**TINY, "n_layer": 1})
    cache = registry.memories.get("cache").build(CacheConfig(mem_len=8), model_config)
    memory_tokens = Tokens(TokensConfig(n_tokens=2, read_slots=read_slots), model_config)
    model = make(plan=MemoryPlan(layers=cache.layers, tokens=memory_tokens), n_layer=1)
    tokens, targets = text(16)
    state = model(tokens[:, :8], model.init_state(3), None, targets[:, :8]).state
    other = {key: tensor + 1 if key.endswith("cache.hidden") else tensor for key, tensor in state.items()}
    ours, theirs = (model(tokens[:, 8:], each, None, targets[:, 8:]) for each in (state, other))
    assert not torch.equal(losses(ours), losses(theirs))  # real tokens do
    # in the only layer memory tokens see slots directly or not at all
    assert torch.equal(ours.state["tokens.memory"], theirs.state["tokens.memory"]) is not read_slots


def test_documents_inside_a_segment_are_refused() -> None:
    tokens, _ = text(8)
    segment = Segment.full(tokens)._replace(document=torch.zeros_like(tokens))
    with pytest.raises(
        ValueError, match=r"^Segment.document is set, but memory tokens cannot start anew inside a segment$"
    ):
        model = make(plan=MemoryPlan(layers=[{} for _ in range(3)], tokens=Tokens(TokensConfig(), ModelConfig(**TINY))))
        model(tokens, model.init_state(3), segment)


def test_documents_of_one_segment_do_not_see_one_another() -> None:
    tokens, targets = text(8, lanes=1)
    document = torch.tensor([[4, 4, 4, 5, 5, 5, 5, 6]])
    model = make(NoneConfig()).double()
    with torch.no_grad():
        out = model(tokens, model.init_state(1), Segment.full(tokens)._replace(document=document), targets)
        alone = [
            losses(model(tokens[:, part], model.init_state(1), None, targets[:, part]))
            for part in (slice(0, 3), slice(3, 7), slice(7, 8))
        ]
    torch.testing.assert_close(losses(out), torch.cat(alone, dim=1), atol=1e-12, rtol=0)
    assert out.state["age"].tolist() == [1]


# ---- a pure function


def test_no_segment_means_full_lanes_without_reset() -> None:
    tokens, targets = text(16)
    model = make()
    state = model(tokens[:, :8], model.init_state(3), None, targets[:, :8]).state
    ours = model(tokens[:, 8:], state, None, targets[:, 8:])
    theirs = model(tokens[:, 8:], state, Segment.full(tokens[:, 8:]), targets[:, 8:])
    assert torch.equal(losses(ours), losses(theirs)) and torch.equal(ours.hidden_BTD, theirs.hidden_BTD)
    assert all(torch.equal(ours.state[key], theirs.state[key]) for key in state)


def test_forward_changes_nothing() -> None:
    model = make().train()
    tokens, targets = text(8)
    state = model.init_state(3)
    segment = Segment(torch.tensor([True, False, False]), torch.tensor([8, 3, 0]))
    given = [tokens, targets, *segment[:2], *state.values(), *model.state_dict().values()]
    copies = [tensor.clone() for tensor in given]
    before = [dict(vars(module)) for module in model.modules()]
    model(tokens, state, segment, targets)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, copies, strict=True))
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())


def test_the_state_is_one_flat_dict_and_not_in_the_state_dict() -> None:
    model = make(CacheConfig(mem_len=8, layers=(0, 2)))
    state = model.init_state(5)
    assert list(state) == [
        "age",
        "layers.0.cache.hidden",
        "layers.0.cache.filled",
        "layers.2.cache.hidden",
        "layers.2.cache.filled",
    ]
    assert state["layers.0.cache.hidden"].shape == (5, 8, 16)
    projected = model.init_state(5, form="projected")
    assert projected["layers.2.cache.keys"].shape == projected["layers.2.cache.values"].shape == (5, 8, 2, 6)
    assert all(not tensor.any() for tensor in (*state.values(), *projected.values()))
    before = set(model.state_dict())
    tokens, targets = text(8, lanes=5)
    out = model(tokens, state, None, targets)
    assert list(out.state) == list(state)
    assert set(model.state_dict()) == before
    assert not any("cache" in key or "age" in key for key in before)
    assert list(model.buffers()) == []


def test_age_counts_the_tokens_since_a_lane_started_anew() -> None:
    model = make()
    tokens, _ = text(8)
    state = model.init_state(3)
    ages = []
    for reset, length in (
        ([1, 1, 1], [8, 8, 0]),
        ([0, 0, 0], [8, 3, 0]),
        ([0, 1, 1], [8, 8, 0]),
        ([0, 0, 1], [8, 0, 5]),
    ):
        state = model(tokens, state, Segment(torch.tensor(reset).bool(), torch.tensor(length))).state
        ages.append(state["age"].tolist())
    assert ages == [[8, 8, 0], [16, 11, 0], [24, 8, 0], [32, 8, 5]]
    assert state["age"].dtype == torch.int64


def test_short_and_dead_lanes() -> None:
    model = make()
    tokens, targets = text(24)
    state = model(tokens[:, :8], model.init_state(3), None, targets[:, :8]).state
    segment = Segment(torch.zeros(3, dtype=torch.bool), torch.tensor([8, 3, 0]))
    out = model(tokens[:, 8:16], state, segment, targets[:, 8:16])
    assert torch.equal(losses(out) != 0, segment.mask(8))
    assert all(torch.equal(out.state[key][2], state[key][2]) for key in state)
    assert out.state["layers.0.cache.filled"].tolist() == [8, 8, 8]
    # the short lane holds its last 5 old and 3 new tokens: as one that read exactly these 3
    exact = model(tokens[1:2, 8:11], {key: tensor[1:2] for key, tensor in state.items()}, None, targets[1:2, 8:11])
    torch.testing.assert_close(losses(out)[1, :3], losses(exact)[0], atol=1e-5, rtol=1e-5)
    for key in state:
        torch.testing.assert_close(out.state[key][1], exact.state[key][0], atol=1e-5, rtol=1e-5)


# ---- losses


@pytest.mark.parametrize("tie_weights", [True, False])
def test_log_probs_are_normalised_and_losses_are_theirs_at_the_targets(tie_weights: bool) -> None:
    model = make(tie_weights=tie_weights).double()
    tokens, targets = text(8)
    out = model(tokens, model.init_state(3), None, targets)
    log_probs = model.log_probs(out.hidden_BTD)
    assert log_probs.shape == (3, 8, VOCAB)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 8, dtype=torch.float64))
    gathered = -log_probs.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses(out), gathered, atol=1e-12, rtol=0)
    logits = out.hidden_BTD @ model.softmax.weights[0].T + model.softmax.biases[0]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1), atol=1e-12, rtol=0)


def test_without_targets_there_are_no_losses() -> None:
    model = make()
    tokens, targets = text(8)
    out = model(tokens, model.init_state(3))
    assert out.losses_BT is None
    assert torch.equal(out.hidden_BTD, model(tokens, model.init_state(3), None, targets).hidden_BTD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_every_precision_gives_finite_losses_and_gradients_with_half_empty_memory(dtype: torch.dtype) -> None:
    exact = make().double()
    model = make().to(dtype)
    tokens, targets = text(16)
    state, exact_state = model.init_state(3), exact.init_state(3)
    assert state["layers.0.cache.hidden"].dtype == dtype
    first = Segment(torch.ones(3, dtype=torch.bool), torch.tensor([8, 3, 0]))
    state = model(tokens[:, :8], state, first).state
    out = model(tokens[:, 8:], state, None, targets[:, 8:])
    exact_state = exact(tokens[:, :8], exact_state, first).state
    truth = losses(exact(tokens[:, 8:], exact_state, None, targets[:, 8:]))
    assert out.hidden_BTD.dtype == dtype
    assert losses(out).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(tensor.isfinite().all() for tensor in gradients(model, out).values())
    assert (losses(out).double() - truth).abs().mean() < {
        torch.float64: 1e-12,
        torch.float16: 0.01,
        torch.bfloat16: 0.1,
    }[dtype]


# ---- initial weights, dropout, checkpointing


def test_initial_weights_are_the_authors() -> None:
    torch.manual_seed(0)
    model_config = ModelConfig(n_layer=2, d_model=128, n_head=4, d_head=32, d_inner=256, vocab_size=257, untie_r=True)
    model = TransformerXL(Config(model=model_config, memory=CacheConfig(mem_len=4), data=DataConfig()))
    seen = set()
    for name, parameter in model.named_parameters():
        kind = "gain" if name.endswith("norm.weight") else "bias" if "bias" in name else "matrix"
        seen.add(kind)
        mean, std = {"gain": (1.0, 0.02), "bias": (0.0, 0.0), "matrix": (0.0, 0.02)}[kind]
        n, values = parameter.numel(), parameter.detach()
        assert abs(float(values.mean()) - mean) <= 5 * std / math.sqrt(n), name
        assert abs(float(values.std()) - std) <= 5 * std / math.sqrt(2 * n), name
    assert seen == {"gain", "bias", "matrix"}
    assert not any(
        isinstance(module, nn.Linear) and module.bias is not None
        for module in model.get_submodule("layers.0.attention").modules()
    )


def test_weights_are_tied_unless_told_otherwise() -> None:
    tied, untied = make(), make(tie_weights=False)
    assert tied.softmax.weights[0] is tied.embedding.tables[0].weight
    assert untied.softmax.weights[0].data_ptr() != untied.embedding.tables[0].weight.data_ptr()
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    assert [name for name, _ in make().named_parameters() if name in ("u", "v")] == ["u", "v"]
    per_layer = [name for name, _ in make(untie_r=True).named_parameters() if name.rpartition(".")[2] in ("u", "v")]
    assert per_layer == [f"layers.{i}.attention.position.{name}" for i in range(3) for name in ("u", "v")]


def test_a_strategy_keeps_its_own_initial_weights() -> None:
    class Marked(MemoryStrategy):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.gate = nn.Parameter(torch.full((2,), 7.0))

    model = make(plan=MemoryPlan(layers=[{"marked": Marked()} for _ in range(3)]))
    parameters = dict(model.named_parameters())
    assert parameters["layers.1.memories.marked.gate"].tolist() == [7.0, 7.0]
    assert parameters["layers.1.memories.marked.norm.weight"].tolist() == [1.0] * 4


def test_dropout_acts_in_training_only() -> None:
    tokens, targets = text(8)
    plain, dropping = make(), make(dropout=0.3, dropatt=0.3)
    dropping.load_state_dict(plain.state_dict())
    still = [losses(model.eval()(tokens, model.init_state(3), None, targets)) for model in (plain, dropping)]
    assert torch.equal(still[0], still[1])
    moving = [losses(dropping.train()(tokens, dropping.init_state(3), None, targets)) for _ in range(2)]
    assert not torch.equal(moving[0], moving[1])
    assert torch.equal(losses(plain.train()(tokens, plain.init_state(3), None, targets)), still[0])


@pytest.mark.parametrize("pre_norm", [False, True])
def test_checkpointing_changes_neither_losses_nor_gradients_even_with_dropout(pre_norm: bool) -> None:
    tokens, targets = text(16)
    found = []
    for checkpointing in (False, True):
        model = make(checkpointing=checkpointing, dropout=0.2, dropatt=0.2, pre_norm=pre_norm).train()
        state = model(tokens[:, :8], model.init_state(3), None, targets[:, :8]).state
        torch.manual_seed(3)
        out = model(tokens[:, 8:], state, None, targets[:, 8:])
        found.append({"losses": losses(out), **out.state, **gradients(model, out)})
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def test_absent_slots_do_not_act_as_zeros() -> None:
    """A fresh memory is absent from the softmax, as if the model had none."""
    tokens, targets = text(8)
    with torch.no_grad():
        cached, plain = make(CacheConfig(mem_len=8)).double(), make(NoneConfig()).double()
        ours = losses(cached(tokens, cached.init_state(3), None, targets))
        theirs = losses(plain(tokens, plain.init_state(3), None, targets))
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
        state = cached.init_state(3)
        state["layers.1.cache.filled"] += 8
        assert (losses(cached(tokens, state, None, targets)) - theirs).abs().max() > 1e-3
    assert MASKED == -1e30


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((12, 512, 8, 64, 2048, 204), 41_055_436),  # enwik8 base
        ((24, 1024, 8, 128, 3072, 204), 277_231_820),  # enwik8 large
        ((12, 512, 8, 64, 2048, 27), 40_964_635),  # text8 base
        ((24, 1024, 8, 128, 3072, 27), 277_050_395),  # text8 large
    ],
)
def test_parameter_counts_are_the_published_ones(size: tuple[int, ...], count: int) -> None:
    names = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "vocab_size")
    assert ModelConfig(**dict(zip(names, size, strict=True))).num_params() == count


@pytest.mark.parametrize("keys", [{}, {"untie_r": True}, {"tie_weights": False}, {"pre_norm": True, "untie_r": True}])
def test_parameters_are_counted_without_building(keys: dict[str, bool]) -> None:
    model = make(**keys)
    assert model.config.num_params() == sum(parameter.numel() for parameter in model.parameters())
