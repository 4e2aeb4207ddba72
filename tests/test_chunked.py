"""The CPU's training path: attention in chunks, noise from random bits, fused updates; each beside its plain twin."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import load
from txl_lightning.model import chunked
from txl_lightning.model.parts import Dropout, noise_like
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training.optim import build_optimizer
from txl_lightning.types import detach

SMALL = "model.n_layer=2 model.d_model=32 model.n_head=4 model.d_head=8 model.d_inner=64 memory=cache".split()


def made(*more: str, dtype: torch.dtype = torch.float64) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(load([*SMALL, "memory.mem_len=17", *more])).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.to(dtype)


def gradients(model: TransformerXL, *, n_token: int, half: bool = False) -> dict[str, Tensor]:
    """Losses of the second of two segments, and every gradient; the same dropout each time."""
    torch.manual_seed(1)
    model.zero_grad()
    tokens = torch.randint(0, 257, (3, 2 * n_token + 1))
    state = model.init_state(3)
    with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        state = detach(model(tokens[:, :n_token], state).state)
        out = model(tokens[:, n_token:-1], state, None, tokens[:, n_token + 1 :])
    assert out.losses_BT is not None
    (out.losses_BT.sum() + sum(out.aux_losses.values())).backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {**found, "losses": out.losses_BT.detach()}


def both(monkeypatch: pytest.MonkeyPatch, model: TransformerXL, **more: Any) -> tuple[dict[str, Tensor], ...]:
    """In chunks, and plain."""
    fast = gradients(model, **more)
    with monkeypatch.context() as patch:
        patch.setattr(chunked, "can_chunk", lambda *_: False)
        return fast, gradients(model, **more)


@pytest.mark.parametrize("n_byte", [1, 5000, 2**20])  # a lane of a head, several lanes, several heads at a time
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["model.untie_r=true", "model.dropout=0.1", "model.dropatt=0.2"],
        ["model.terms=[a,b]"],
        ["model.terms=[a,b,d]", "model.clamp_len=9"],
        ["model.same_length=true", "model.n_kv_head=2"],
        ["memory.mem_len=0"],
    ],
)
def test_chunks_and_every_gradient_equal_the_plain_way(
    more: list[str], n_byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run = chunked._Attend.apply
    monkeypatch.setattr(chunked, "CHUNK_BYTES", n_byte)
    monkeypatch.setattr(chunked._Attend, "apply", lambda *args: calls.append(1) or run(*args))
    fast, plain = both(monkeypatch, made(*more), n_token=13)
    assert len(calls) == 4  # layers times segments
    assert fast.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(fast[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def test_chunks_at_odd_sizes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, plain = both(monkeypatch, made(dtype=torch.float32), n_token=63)
    for name, tensor in plain.items():
        torch.testing.assert_close(fast[name], tensor, rtol=1e-4, atol=2e-4 * float(tensor.abs().max()))


def test_chunks_in_bfloat16_are_as_near_to_the_exact_as_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(dtype=torch.float32)
    exact = gradients(model, n_token=13)
    fast, plain = both(monkeypatch, model, n_token=13, half=True)

    def error(found: dict[str, Tensor], name: str) -> float:
        return float((found[name] - exact[name]).norm() / exact[name].norm())

    for name in exact:
        assert error(fast, name) < max(0.02, 1.5 * error(plain, name)), name


@pytest.mark.parametrize(
    "more",
    [
        ["memory=expire"],  # a learned bias, which gets a gradient
        ["memory=window", "memory.sinks=2"],  # distances stop growing
        ["model.position=rotary"],
        ["model.terms=[a,c]"],
        ["model.attention=reference"],
    ],
)
def test_what_does_not_fit_is_left_to_the_plain_way(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("was asked")

    monkeypatch.setattr(chunked, "chunked", never)
    torch.manual_seed(0)
    model = TransformerXL(load([*SMALL, *more])).train()
    assert gradients(model, n_token=8)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_drops_the_share_and_scales_the_rest(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    noise = noise_like(torch.empty(201, 1003, dtype=dtype), p)
    kept = noise != 0
    spread = (p * (1 - p) / noise.numel()) ** 0.5
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * spread + 2**-16
    for rows in (kept[:, ::4], kept[:, 3::4], kept[::2]):  # no place is special
        assert abs(float(rows.double().mean()) - (1 - p)) < 5 * spread * (kept.numel() / rows.numel()) ** 0.5 + 2**-16
    torch.testing.assert_close(noise[kept], torch.full_like(noise[kept], 1 / (1 - p)), rtol=2e-4, atol=0)
    together = float((kept[:, 1:] & kept[:, :-1]).double().mean())  # neighbours do not know each other
    assert abs(together - (1 - p) ** 2) < 0.01


def test_dropout_is_torchs_own_but_for_the_draw() -> None:
    x = torch.randn(50, 40, requires_grad=True)
    layer = Dropout(0.3)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    kept = y != 0
    torch.testing.assert_close(y[kept], F.dropout(x, 0.0)[kept] / 0.7, rtol=1e-4, atol=0)
    torch.testing.assert_close(gradient, kept / 0.7, rtol=1e-4, atol=0)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert layer.eval()(x) is x
    assert Dropout(0.0)(x) is x


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_fused_updates_equal_the_plain_ones_and_show(name: str) -> None:
    config = load([f"optim={name}", "optim.weight_decay=0.1", "optim.lr=0.01"]).optim
    plain, fused = (
        nn.ParameterDict({"a": torch.ones(3, 4), "b": torch.ones(5), "unused": torch.ones(2)}) for _ in "12"
    )
    other = build_optimizer(plain.items(), config)
    optimizer = build_optimizer(fused.items(), config, fuse=True)
    assert optimizer.defaults["fused"] is True
    for step in range(3):
        for weights, updater in ((plain, other), (fused, optimizer)):
            torch.manual_seed(step)
            versions = {key: weight._version for key, weight in weights.items()}
            for key in "ab":
                weights[key].grad = torch.randn_like(weights[key])
            updater.step()
            moved = {key for key, weight in weights.items() if weight._version > versions[key]}
            assert moved == {"a", "b"}  # those who keep projections look at it
    for key in plain:
        torch.testing.assert_close(fused[key], plain[key], rtol=1e-5, atol=1e-6)


def test_kept_distances_are_projected_anew_after_a_fused_update() -> None:
    model = made("model.terms=[a,b]", dtype=torch.float32).eval()
    optimizer, tables = build_optimizer(model.named_parameters(), load(["optim=adam"]).optim, fuse=True), Tables()
    tokens = torch.randint(0, 257, (1, 8))

    def read(kept: Tables | None) -> Tensor:
        with torch.no_grad():
            return model(tokens, model.init_state(1, form="projected"), tables=kept).hidden_BTD

    read(tables)
    model(tokens, model.init_state(1), None, tokens).losses_BT.sum().backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.testing.assert_close(read(tables), read(None), rtol=0, atol=0)
