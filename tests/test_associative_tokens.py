"""The Associative Recurrent Memory Transformer against loops over tokens and features."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from by_hand import MODEL, STORY, fresh, moved, random_tap, started, written
from torch import Tensor

from txl_lightning import registry
from txl_lightning.config import Config, ConfigError, DataConfig, ModelConfig, load
from txl_lightning.memory import associative_tokens
from txl_lightning.memory.associative_tokens import AssociativeTokens, AssociativeTokensConfig, dpfp
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.testing import check_memory
from txl_lightning.types import Segment, State

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # the memory is float32


def make(**keys: Any) -> AssociativeTokens:
    plan = associative_tokens.build(AssociativeTokensConfig(**{"d_mem": 4, **keys}), MODEL)
    part = moved(plan.layers[0]["associative_tokens"])
    assert isinstance(part, AssociativeTokens)
    return part


def features(x: list[float], part: AssociativeTokens) -> list[float]:
    both = [max(value, 0.0) for value in x] + [max(-value, 0.0) for value in x]
    made = [both[i] * both[i - shift] for shift in range(1, part.nu + 1) for i in range(len(both))]
    size = sum(value * value for value in made) ** 0.5 if part.normalise else 1.0
    return [value / size for value in made] if size else made


class ByHand:
    """The matrix and the sum of keys of one lane."""

    def __init__(self, part: AssociativeTokens) -> None:
        self.part, self.n_feature = part, part.shape[0]
        self.matrix = [[0.0] * MODEL.d_model for _ in range(self.n_feature)]
        self.norm = [0.0] * self.n_feature

    def read(self, f: list[float]) -> list[float]:
        below = sum(a * b for a, b in zip(f, self.norm, strict=True)) + 1e-5
        return [sum(f[i] * self.matrix[i][d] for i in range(self.n_feature)) / below for d in range(MODEL.d_model)]

    def write(self, rows: Tensor) -> None:
        part, changes = self.part, []
        for m in rows:
            k = features(part.key(m).tolist(), part)
            rate, old = part.rate(m).sigmoid().item(), self.read(k)
            change = [(v - o) * rate for v, o in zip(part.value(m).tolist(), old, strict=True)]
            held = sum(a * b for a, b in zip(self.norm, k, strict=True)) / (sum(a * a for a in k) + 1e-5)
            changes.append((k, change, min(max(1 - held, 0.0), 1.0) if part.correction else 1.0))
        for k, change, fresh_share in changes:
            for i in range(self.n_feature):
                self.norm[i] += fresh_share * k[i]
                for d in range(MODEL.d_model):
                    self.matrix[i][d] += k[i] * change[d]


@pytest.mark.parametrize(
    "keys",
    [
        {"nu": 1},
        {"normalise": False},
        {"together": True},
        {"nu": 2, "correction": False},
        {"nu": 2, "d_mem": 3, "n_tokens": 1},
    ],
)
def test_tokens_read_and_suffix_tokens_write(keys: dict[str, Any]) -> None:
    part = make(**keys)
    state, lanes = fresh(part), [ByHand(part) for _ in range(3)]
    with torch.no_grad():
        for number, facts in enumerate(STORY):
            tap = random_tap(number, n_suffix=keys.get("n_tokens", 3))
            assert tap.suffix_BND is not None
            found = part.residual(started(part, state, facts), tap.x_BTD, facts.segment())
            state = written(part, state, tap, facts)
            for lane, (reset, length) in enumerate(zip(*facts, strict=True)):
                if reset and length:
                    lanes[lane] = ByHand(part)
                for t in range(length):
                    x = tap.x_BTD[lane, t]
                    said = lanes[lane].read(features(part.query(x).tolist(), part))
                    torch.testing.assert_close(found[lane, t], x + torch.tensor(said, dtype=x.dtype), **CLOSE)
                if length:
                    rows = tap.suffix_BND[lane]
                    for group in [rows] if part.together else rows[:, None]:
                        lanes[lane].write(group)
                for name in ("matrix", "norm"):
                    wanted = torch.tensor(getattr(lanes[lane], name))
                    torch.testing.assert_close(state[name][lane], wanted, **CLOSE)


def test_features_by_hand() -> None:
    """[x ; -x] without what is negative: 1 0 0 3 for (1, -3); times the one before, and the one before that."""
    assert dpfp(torch.tensor([1.0, -3.0]), nu=2).tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    assert dpfp(torch.tensor([2.0, 5.0]), nu=2).tolist() == [0, 10, 0, 0, 0, 0, 0, 0]
    assert dpfp(torch.tensor([2.0, 5.0, 7.0]), nu=2).tolist() == [0, 10, 35, 0, 0, 0, 0, 0, 14, 0, 0, 0]


@pytest.mark.parametrize("correction", [True, False])
def test_a_key_written_again_takes_the_new_value_and_does_not_fade(correction: bool) -> None:
    """The same key with value 1, then 3, all of it written: read 3, or half of it where the key is counted twice."""
    part = make(nu=1, n_tokens=1, correction=correction, normalise=False)
    with torch.no_grad():
        part.key.weight.copy_(torch.eye(4, 6))  # features of (2, 2, 0, 0): 2 2 = 4 in one place
        part.query.weight.copy_(torch.eye(4, 6))
        part.value.weight.zero_()
        part.value.weight[0, 5] = 1.0
        part.rate.weight.zero_()
        part.rate.bias.fill_(50.0)
        state, tap = fresh(part, n_lane=1), random_tap(0, n_lane=1, n_suffix=1)
        for value in (1.0, 3.0):
            m = torch.tensor([[[2.0, 2.0, 0.0, 0.0, 0.0, value]]], dtype=torch.float64)
            state, aux = part.write(state, tap._replace(suffix_BND=m), None, Segment.full(tap.x_BTD[..., 0]))
        asked = torch.tensor([[[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
        said = part.residual(state, asked, Segment.full(asked[..., 0])) - asked
    assert state["norm"].sum().item() == pytest.approx(4.0 if correction else 8.0, rel=1e-4)
    # the second write adds 4 (3 - 1) to the 4 of the first, so the matrix holds 12
    assert said[0, 0, 0].item() == pytest.approx(3.0 if correction else 1.5, rel=1e-3)
    assert aux.metrics["fresh"].item() == pytest.approx(0.0 if correction else 1.0, abs=1e-4)


def model_with(**keys: Any) -> tuple[TransformerXL, TransformerXL]:
    """The model with this memory and the plain one with the same weights."""
    torch.manual_seed(0)
    config = dataclasses.replace(MODEL, n_layer=2)
    none = registry.memories.get("none").config()
    whole = Config(model=config, memory=none, data=DataConfig(segment_len=4, batch_size=2))
    plan = associative_tokens.build(AssociativeTokensConfig(**{"d_mem": 4, "n_tokens": 2, **keys}), config)
    model, plain = TransformerXL(whole, plan=plan).eval(), TransformerXL(whole).eval()
    plain.load_state_dict({name: weight for name, weight in model.state_dict().items() if name in plain.state_dict()})
    return model, plain


def run(model: TransformerXL, n_segment: int) -> tuple[list[Tensor], State]:
    state, losses = model.init_state(2), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(n_segment):
        tokens = torch.randint(7, (2, 4), generator=generator)
        out = model(tokens, state, None, tokens)
        assert out.losses_BT is not None
        losses.append(out.losses_BT)
        state = out.state
    return losses, state


def test_nothing_is_written_at_first_and_the_first_segment_is_the_plain_one() -> None:
    model, plain = model_with()
    losses, state = run(model, 3)
    for mine, other in zip(losses, run(plain, 3)[0], strict=True):
        torch.testing.assert_close(mine, other)
    assert not state["layers.0.associative_tokens.matrix"].any()
    with torch.no_grad():
        for layer in model.layers:
            layer.memories["associative_tokens"].value.weight.normal_()
    first, *later = run(model, 3)[0]
    torch.testing.assert_close(first, run(plain, 3)[0][0])
    for mine, other in zip(later, run(plain, 3)[0][1:], strict=True):
        assert not torch.allclose(mine, other, atol=1e-4)


def test_writing_is_learned_from_later_segments() -> None:
    """The suffix rows and what writes get gradient from the second segment on, none from the first."""
    model, _ = model_with()
    with torch.no_grad():
        for layer in model.layers:
            layer.memories["associative_tokens"].value.weight.normal_()
    losses, _ = run(model, 2)
    own = [weight for name, weight in model.named_parameters() if ".memories." in name or name.startswith("tokens.")]
    for segment, reached in ((0, 0), (1, len(own))):
        found = torch.autograd.grad(losses[segment].sum(), own, allow_unused=True, retain_graph=True)
        assert sum(grad is not None and bool(grad.any()) for grad in found) == reached


def test_the_first_rows_are_as_large_as_embeddings() -> None:
    torch.manual_seed(0)
    plan = associative_tokens.build(AssociativeTokensConfig(n_tokens=300), ModelConfig(d_model=64, init_std=0.05))
    assert plan.tokens is not None
    assert plan.tokens.rows.std().item() == pytest.approx(0.05 * 8, rel=0.05)


def test_products_that_repeat_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["memory=associative_tokens", "memory.nu=16"])
    said = "memory.nu=16: must be < memory.d_mem=16: from there on products are 0 or repeat; lower it, or raise"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "beside", [{"name": "cache", "mem_len": 7}, {"name": "titans", "variant": "mal", "persistent": 1}]
)
def test_the_laws_hold_beside_another_memory(beside: dict[str, Any]) -> None:
    parts = [{"name": "associative_tokens", "d_mem": 4, "n_tokens": 2}, beside]
    check_memory("mix", parts=parts, laws=[1, 3, 5, 6, 9, 11], compiled=False)
