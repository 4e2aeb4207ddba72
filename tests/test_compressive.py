"""The Compressive Transformer's read, compression and losses, against loops over slots, and by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from plain_layers import Plain, Seen, make, read_in_segments, text
from torch import Tensor

from txl_lightning.config import ConfigError, ModelConfig, load
from txl_lightning.memory.compressive import Compressive, CompressiveConfig
from txl_lightning.types import Segment

SIZES: dict[str, Any] = {"mem_len": 8, "compressed_len": 5, "rate": 2}
FUNCTIONS = ("mean", "max", "conv", "dilated", "most_used")


def config(function: str, **keys: Any) -> CompressiveConfig:
    loss = "attention" if function in ("conv", "dilated") else "none"
    return CompressiveConfig(**{**SIZES, "function": function, "loss": loss, **keys})


def convolve(weight: Tensor, bias: Tensor, rows: list[Tensor], *, stride: int, dilation: int, pad: int) -> list[Tensor]:
    """A convolution over a list of rows, tap by tap; zeros beyond the ends."""
    size, found = weight.shape[2], []
    for start in range(-pad, len(rows) + pad - dilation * (size - 1), stride):
        out = bias.clone()
        for tap in range(size):
            place = start + tap * dilation
            if 0 <= place < len(rows):
                out = out + weight[:, :, tap] @ rows[place]
        found.append(out)
    return found


def compress(plain: Plain, layer: int, function: str, rows: list[Tensor], used: list[float]) -> list[Tensor]:
    rate = SIZES["rate"]
    groups = [torch.stack(rows[i : i + rate]) for i in range(0, len(rows), rate)]
    if function == "mean":
        return [group.sum(0) / rate for group in groups]
    if function == "max":
        return [group.amax(0) for group in groups]
    if function == "most_used":
        best = sorted(range(len(rows)), key=lambda i: -used[i])[: len(groups)]
        return [rows[i] for i in sorted(best)]
    name = f"layers.{layer}.memories.compressive.compressor"
    parts = {key.removeprefix(f"{name}."): w for key, w in plain.weights.items() if key.startswith(name)}
    if function == "conv":
        return convolve(parts["weight"], parts["bias"], rows, stride=rate, dilation=1, pad=0)
    near = convolve(parts["0.weight"], parts["0.bias"], rows, stride=1, dilation=1, pad=1)
    near = [row.clamp(min=0) for row in near]
    wide = convolve(parts["2.weight"], parts["2.bias"], near, stride=1, dilation=2, pad=2)
    wide = [row.clamp(min=0) for row in wide]
    return convolve(parts["4.weight"], parts["4.bias"], wide, stride=rate, dilation=1, pad=0)


class Kept:
    """Memory of one layer as lists, oldest first."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.born: list[int] = []  # absolute place of each row of memory
        self.used: list[float] = []
        self.compressed: list[Tensor] = []
        self.stands: list[int] = []  # absolute place of each compressed row


def by_token(plain: Plain, tokens_N: Tensor, *, size: int, function: str, positions: str) -> tuple[Tensor, list[Kept]]:
    """(N, D) outputs and what the layers kept; segments of `size` tokens, a multiple of the rate."""
    kept, found, rate = [Kept() for _ in range(plain.config.n_layer)], [], SIZES["rate"]
    for start in range(0, len(tokens_N), size):
        rows = plain.embed(tokens_N[start : start + size])
        for layer, held in enumerate(kept):
            out, received = [], [0.0] * len(rows)
            for t, row in enumerate(rows):
                n_memory, n_compressed = len(held.memory), len(held.compressed)
                seen = [Seen(old, n_memory - i + t) for i, old in enumerate(held.memory)]
                for j, old in enumerate(held.compressed):
                    place = SIZES["mem_len"] + n_compressed - j if positions == "slot" else start - held.stands[j]
                    seen.append(Seen(old, place + t))
                seen += [Seen(rows[j], t - j) for j in range(t + 1)]
                weights = plain.weigh(layer, row, seen).sum(0).tolist()
                held.used = [old + new for old, new in zip(held.used, weights[:n_memory], strict=True)]
                own = weights[n_memory + n_compressed :] + [0.0] * (len(rows) - t - 1)
                received = [old + new for old, new in zip(received, own, strict=True)]
                out.append(plain.finish(layer, row, plain.attend(layer, row, seen)))
            held.memory, held.used = held.memory + rows, held.used + received
            held.born += range(start, start + len(rows))
            gone = max(0, len(held.memory) - SIZES["mem_len"])
            if gone:
                ages = [start + len(rows) - born for born in held.born[:gone]]
                used = [total / age for total, age in zip(held.used, ages, strict=False)]
                new = compress(plain, layer, function, held.memory[:gone], used)
                if function == "most_used":
                    stands = sorted(sorted(range(gone), key=lambda i: -used[i])[: len(new)])
                else:
                    stands = [i * rate + rate // 2 for i in range(len(new))]
                held.compressed = (held.compressed + new)[-SIZES["compressed_len"] :]
                held.stands = (held.stands + [held.born[i] for i in stands])[-SIZES["compressed_len"] :]
                held.memory, held.born, held.used = held.memory[gone:], held.born[gone:], held.used[gone:]
            rows = out
        found += rows
    return torch.stack(found), kept


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_read_and_compressed(function: str) -> None:
    tokens = text(28)
    for positions, pre_norm in (("slot", False), ("time", function in ("conv", "most_used"))):
        model = make(config(function, positions=positions), segment_len=4, pre_norm=pre_norm)
        expected, kept = by_token(Plain(model), tokens[0], size=4, function=function, positions=positions)
        for form in ("hidden", "projected"):
            found = read_in_segments(model, tokens, cuts=[4], form=form)
            torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=0)
        state = model.init_state(1)
        for start in range(0, 28, 4):
            state = model(tokens[:, start : start + 4], state).state
        for layer, held in enumerate(kept):
            own = state[f"layers.{layer}.compressive.compressed_hidden"][0]
            torch.testing.assert_close(own, torch.stack(held.compressed), atol=1e-6, rtol=0)
            if positions == "time":
                ages = state[f"layers.{layer}.compressive.compressed_age"][0].tolist()
                assert ages == [28 - place for place in held.stands]


@pytest.mark.parametrize("function", ["mean", "most_used"])
def test_a_memory_that_segments_do_not_divide(function: str) -> None:
    """8 rows of memory and segments of 6: the first eviction is of 4 rows only."""
    model = make(config(function, positions="time"), segment_len=6)
    tokens = text(24)
    expected, _ = by_token(Plain(model), tokens[0], size=6, function=function, positions="time")
    for form in ("hidden", "projected"):
        found = read_in_segments(model, tokens, cuts=[6], form=form)
        torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=0)


# ---- tiny examples by hand

EXAMPLE = torch.tensor([[1.0, 0.0], [3.0, -2.0], [5.0, 7.0], [1.0, 9.0]])


def example(function: str, rows: Tensor = EXAMPLE) -> Compressive:
    keys = {"mem_len": 4, "compressed_len": 3, "rate": 2}
    model = ModelConfig(n_layer=1, d_model=2, n_head=1, d_head=2, d_inner=4, vocab_size=5)
    return Compressive(config(function, **keys), model)


def compressed_example(memory: Compressive, used: list[float] | None = None) -> list[list[float]]:
    score = torch.tensor([used]) if used is not None else None
    rows, _ = memory._compress(EXAMPLE[None], score, torch.tensor([2]))
    return rows[0].tolist()


def test_compressors_by_hand() -> None:
    assert compressed_example(example("mean")) == [[2, -1], [3, 8]]
    assert compressed_example(example("max")) == [[3, 0], [5, 9]]
    assert compressed_example(example("most_used"), [0.1, 0.4, 0.3, 0.2]) == [[3, -2], [5, 7]]
    assert compressed_example(example("most_used"), [0.5, 0.1, 0.2, 0.6]) == [[1, 0], [1, 9]]
    conv = example("conv")
    with torch.no_grad():  # first row + 10 times the second, features exchanged, + (0, 1)
        conv.compressor.weight.copy_(torch.tensor([[[0.0, 0.0], [1.0, 10.0]], [[1.0, 10.0], [0.0, 0.0]]]))
        conv.compressor.bias.copy_(torch.tensor([0.0, 1.0]))
    assert compressed_example(conv) == [[-20, 32], [97, 16]]
    dilated = example("dilated")
    with torch.no_grad():
        for module, taps in zip(
            dilated.compressor, ([1.0, 0, 1.0], None, [1.0, 0, 1.0], None, [1.0, 1.0]), strict=True
        ):
            if taps is not None:  # each feature on its own: neighbours at distance 1, at distance 2, then a sum of two
                module.weight.copy_(torch.stack([torch.eye(2) * tap for tap in taps], dim=-1))
                module.bias.zero_()
    # feature 0: 1 3 5 1 -> 3 6 4 5 -> 4 5 3 6 -> 9 9; feature 1: 0 -2 7 9 -> -2 7 7 7 -> (0) 7 7 7 -> 7 7 0 7 -> 14 7
    assert compressed_example(dilated) == [[9, 14], [9, 7]]


# ---- losses


def plain_attention(plain: Plain, layer: int, row: Tensor, rows: list[Tensor]) -> Tensor:
    """(H, K) content attention: no u, v or position."""
    q, _, _ = plain.heads_of(layer, row)
    keys, values = (torch.stack([plain.heads_of(layer, other)[i] for other in rows], dim=1) for i in (1, 2))
    weights = ((q[:, None] * keys).sum(-1) / plain.config.d_head**0.5).softmax(-1)
    return (weights[..., None] * values).sum(1)


def losses_by_slot(plain: Plain, tokens_N: Tensor, function: str, loss: str) -> list[float]:
    """The losses of both layers for the last of five segments of 4 tokens, from what earlier ones left in memory."""
    _, before = by_token(plain, tokens_N[:16], size=4, function=function, positions="slot")
    found, rows = [], plain.embed(tokens_N[16:20])
    for layer, held in enumerate(before):
        evicted = held.memory[:4]
        new = compress(plain, layer, function, evicted, [])
        total = 0.0
        if loss == "attention":
            for row in rows:
                apart = plain_attention(plain, layer, row, evicted) - plain_attention(plain, layer, row, new)
                total += float(apart.square().mean()) / 4
        else:
            name = f"layers.{layer}.memories.compressive.decoder"
            weight, bias = plain.weights[f"{name}.weight"], plain.weights[f"{name}.bias"]
            for i, row in enumerate(evicted):
                told = weight[:, :, i % 2].T @ new[i // 2] + bias
                total += float((row - told).square().mean()) / 4
        found.append(total)
        out = []
        for t, row in enumerate(rows):
            seen = [Seen(old, 8 - i + t) for i, old in enumerate(held.memory)]
            seen += [Seen(old, 8 + len(held.compressed) - i + t) for i, old in enumerate(held.compressed)]
            seen += [Seen(rows[j], t - j) for j in range(t + 1)]
            out.append(plain.finish(layer, row, plain.attend(layer, row, seen)))
        rows = out
    return found


@pytest.mark.parametrize(("function", "loss"), list(product(["conv", "dilated"], ["attention", "autoencoding"])))
@pytest.mark.parametrize("norm", [{}, {"pre_norm": True}, {"pre_norm": True, "norm_queries": False}], ids=str)
def test_the_losses_and_whom_they_train(function: str, loss: str, norm: dict[str, bool]) -> None:
    keys = {"loss": loss, "loss_weight": 2.0}
    model = make(config(function, **keys), segment_len=4, dropout=0.0, **norm).train()
    tokens = text(24)
    state, told = model.init_state(1), []
    for start in range(0, 20, 4):
        out = model(tokens[:, start : start + 4], state, None, tokens[:, start + 1 : start + 5])
        told.append([out.aux_losses[f"compressive/compression/L{layer}"].item() for layer in range(2)])
        state = out.state
    expected = losses_by_slot(Plain(model), tokens[0], function, loss)
    assert told[4] == pytest.approx([2 * each for each in expected], rel=1e-6)
    assert told[:2] == [[0.0, 0.0], [0.0, 0.0]]  # memory fills, nothing leaves
    assert out.metrics["compressive/reconstruction/L1"].item() == pytest.approx(told[4][1] / 2)
    own = {name for name, _ in model.named_parameters() if ".memories." in name}
    assert own and trained_by(model, sum(out.aux_losses.values())) == own
    assert not own & trained_by(model, out.losses_BT.sum())
    assert len(trained_by(model, out.losses_BT.sum())) == len(list(model.named_parameters())) - len(own)


def trained_by(model: torch.nn.Module, loss: Any) -> set[str]:
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {name for name, grad in zip(named, grads, strict=True) if grad is not None and bool(grad.any())}


def test_the_next_segments_loss_does_not_reach_the_compressor_either() -> None:
    model = make(config("conv"), segment_len=4).train()
    state, total = model.init_state(1), torch.zeros(())
    tokens = text(33)
    for start in range(0, 32, 4):
        out = model(tokens[:, start : start + 4], state, None, tokens[:, start + 1 : start + 5])
        state, total = out.state, total + out.losses_BT.sum()
    assert not any(".memories." in name for name in trained_by(model, total))


def test_lanes_that_are_not_full_have_no_loss() -> None:
    """Lanes that evict a whole segment count by their tokens, others add nothing: here lane 0 of a full, an empty and a
    short one, with 4 of 11 tokens. So a lane adds the same whichever lanes it shares a rank or a chunk with."""
    model = make(config("conv"), segment_len=4, dropout=0.0).train()
    tokens = text(20)
    state = model.init_state(1)
    for start in range(0, 16, 4):
        state = model(tokens[:, start : start + 4], state).state
    alone = model(tokens[:, 16:], state).aux_losses["compressive/compression/L0"]
    three = {name: tensor.expand(3, *tensor.shape[1:]) for name, tensor in state.items()}
    segment = Segment(torch.tensor([False, True, False]), torch.tensor([4, 4, 3]))
    out = model(tokens[:, 16:].expand(3, -1), three, segment)
    torch.testing.assert_close(out.aux_losses["compressive/compression/L0"], alone * 4 / 11)
    assert out.metrics["compressive/compressed/L0"].item() == pytest.approx(1 / 3)
    new = out.state["layers.0.compressive.compressed_filled"]
    assert new.tolist() == [5, 0, 5]


def test_a_short_segment_loses_the_remainder_only() -> None:
    """3 tokens push 3 rows out: two become one, the third is lost; a segment of 1 compresses nothing."""
    model = make(config("mean"), segment_len=4, n_layer=1)
    tokens = text(12)
    state = model.init_state(1)
    for start in range(0, 8, 4):
        state = model(tokens[:, start : start + 4], state).state
    short = Segment(torch.tensor([False]), torch.tensor([3]))
    padded, cut = model(tokens[:, 8:], state, short).state, model(tokens[:, 8:11], state).state
    rows = state["layers.0.compressive.memory_hidden"]
    for after in (padded, cut):
        assert after["layers.0.compressive.compressed_filled"].tolist() == [1]
        made = after["layers.0.compressive.compressed_hidden"][0, -1]
        torch.testing.assert_close(made, rows[0, :2].mean(dim=0))
    one = model(tokens[:, 8:9], state).state
    assert one["layers.0.compressive.compressed_filled"].tolist() == [0]


# ---- refusals


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ["memory.mem_len=100", "memory.rate=3", "data.segment_len=64"],
            "memory.rate=3: must divide data.segment_len=64; take a divisor, or another segment length",
        ),
        (
            ["memory.mem_len=48", "data.segment_len=64"],
            "memory.mem_len=48: must be >= data.segment_len=64: a segment's rows are compressed when they leave "
            "memory; raise it, or shorten the segment",
        ),
        (
            ["memory.loss=none"],
            "memory.loss=none: nothing would train memory.function=conv: no other loss reaches it; "
            "take attention or autoencoding, or a function without weights",
        ),
        (
            ["model.same_length=true"],
            "model.same_length=true: would hide the compressed rows, which are further away than memory.mem_len; "
            "set it to false, or use memory=cache",
        ),
        (
            ["eval.segment_len=6"],
            "memory.rate=4: must divide eval.segment_len=6; take a divisor, or another segment length",
        ),
    ],
)
def test_what_does_not_fit_is_refused(typed: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["memory=compressive", *typed])
    assert str(caught.value) == said
