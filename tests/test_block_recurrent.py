"""The Block-Recurrent Transformer against loops over states, tokens, heads and features."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from by_hand import MODEL, STORY, Facts, fresh, moved, random_tap, started, written
from torch import Tensor

from txl_lightning import registry
from txl_lightning.config import Config, ConfigError, DataConfig, ModelConfig, load
from txl_lightning.memory import block_recurrent
from txl_lightning.memory.block_recurrent import BlockRecurrent, BlockRecurrentConfig, FixedGate, LstmGate
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment, Tap

GROUPED = dataclasses.replace(MODEL, n_kv_head=1)


def make(model: ModelConfig = MODEL, **keys: Any) -> BlockRecurrent:
    (layer,) = block_recurrent.build(BlockRecurrentConfig(**{"n_states": 3, "window": 0, **keys}), model).layers
    part = layer["block_recurrent"]
    assert isinstance(part, BlockRecurrent)
    return part


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def times(row: list[float], matrix: Tensor, bias: Tensor | None = None) -> list[float]:
    """row W^T + b, as `nn.Linear` does it."""
    out = [sum(a * b for a, b in zip(row, column, strict=True)) for column in matrix.tolist()]
    return out if bias is None else [a + b for a, b in zip(out, bias.tolist(), strict=True)]


def normed(row: list[float], norm: torch.nn.LayerNorm) -> list[float]:
    mean = sum(row) / len(row)
    spread = math.sqrt(sum((x - mean) ** 2 for x in row) / len(row) + norm.eps)
    return [(x - mean) / spread * g + b for x, g, b in zip(row, norm.weight.tolist(), norm.bias.tolist(), strict=True)]


def attend(query: list[float], keys: list[list[float]], values: list[list[float]]) -> list[float]:
    weights = [math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query))) for key in keys]
    return [sum(w * v[i] for w, v in zip(weights, values, strict=True)) / sum(weights) for i in range(len(values[0]))]


def head(row: list[float], index: int, width: int = 4) -> list[float]:
    return row[index * width : (index + 1) * width]


def gated(gate: FixedGate | LstmGate, s: list[float], x: list[float]) -> list[float]:
    out, n = times(x, gate.update.weight, gate.update.bias), len(s)
    if isinstance(gate, FixedGate):
        g = [sigmoid(value) for value in gate.gate.tolist()]
        return [g[i] * s[i] + (1 - g[i]) * out[i] for i in range(n)]
    return [sigmoid(out[2 * n + i] + 1) * s[i] + sigmoid(out[n + i] - 1) * math.tanh(out[i]) for i in range(n)]


class ByHand:
    """One lane: the states, and the keys and values per head of the tokens that are kept."""

    def __init__(self, part: BlockRecurrent) -> None:
        self.part, self.s = part, part.start.tolist()
        self.kept: list[Any] = []  # one ([key per head], [value per head]) per token

    def own(self) -> tuple[list[list[float]], list[list[float]]]:
        """Numbered states, and their keys and values in one row."""
        ids = self.part.id_bias.tolist()
        numbered = [
            [a + b for a, b in zip(normed(s, self.part.norm), i, strict=True)] for s, i in zip(self.s, ids, strict=True)
        ]
        return numbered, [times(row, self.part.keys_values.weight) for row in numbered]

    def read(self, h: list[float]) -> list[float]:
        _, kv = self.own()
        query, joined = times(h, self.part.read_queries.weight), []
        for i in range(2):
            joined += attend(head(query, i), [head(row, i) for row in kv], [head(row, 2 + i) for row in kv])
        return times(joined, self.part.read_out.weight)

    def block(self, tokens: list[Any]) -> None:
        numbered, kv = self.own()
        seen = self.kept[-self.part.max_age :] if self.part.max_age else []
        seen = seen + tokens
        new = []
        for s, row in zip(self.s, numbered, strict=True):
            query, joined = times(row, self.part.queries.weight), []
            for i in range(2):
                joined += attend(head(query, i), [head(r, i) for r in kv], [head(r, 2 + i) for r in kv])
            for i in range(2):
                joined += attend(head(query, 2 + i), [k[i] for k, _ in seen], [v[i] for _, v in seen])
            moved_s = gated(self.part.attended, s, joined)
            if (part := self.part.fed_forward) is not None:
                up = times(normed(moved_s, part.norm), part.up.weight, part.up.bias)
                moved_s = gated(part.down, moved_s, [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in up])
            new.append(moved_s)
        self.s = new
        self.kept = [*self.kept, *tokens]


class Projects:
    """A layer whose keys and values are what a hidden row's two halves say, so that the window can be hidden too."""

    def __init__(self, model: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(9)
        size = (model.d_model, 2 * model.kv_heads * model.d_head)
        self.matrix, self.model = torch.randn(size, generator=generator, dtype=torch.float64), model

    def project_slots(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        heads = (rows @ self.matrix).unflatten(-1, (-1, self.model.d_head)).transpose(1, 2)
        k, v = heads.chunk(2, dim=1)
        group = self.model.n_head // self.model.kv_heads
        return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def tap(self, part: BlockRecurrent, state: dict[str, Tensor], seed: int) -> Tap:
        tap = random_tap(seed, model=self.model)
        k, v = self.project_slots(tap.x_BTD)
        tap = tap._replace(k_BHTK=k, v_BHTK=v)
        slots = part.slots(state, tap.x_BTD, Segment.full(tap.x_BTD[..., 0]))
        if slots is None:
            return tap
        pair = slots.keys_values if slots.hidden is None else self.project_slots(slots.hidden)
        assert pair is not None
        return tap._replace(slot_k_BHSK=pair[0], slot_v_BHSK=pair[1])


@pytest.mark.parametrize("form", ["hidden", "projected"])
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (MODEL, {"block_len": 8}),
        (MODEL, {"block_len": 2, "gate": "lstm"}),
        (MODEL, {"block_len": 3, "window": 5, "feed_forward": True}),
        (GROUPED, {"block_len": 1, "window": 2, "gate": "lstm", "feed_forward": True}),
    ],
)
def test_states_are_read_and_moved_block_by_block(model: ModelConfig, keys: dict[str, Any], form: str) -> None:
    part = moved(make(model, **keys))
    assert isinstance(part, BlockRecurrent)
    layer, lanes = Projects(model), [ByHand(part) for _ in range(3)]
    state = fresh(part, form=form)
    for number, facts in enumerate(STORY):
        given = started(part, state, facts)
        tap = layer.tap(part, given, number)
        _, extra = part.side(given, tap, torch.zeros(3, 2, 4, 4, dtype=torch.float64), facts.segment())
        state = written(part, state, tap, facts, layer=layer)
        for lane, (reset, length) in enumerate(zip(*facts, strict=True)):
            if reset and length:
                lanes[lane] = ByHand(part)
            by_hand = lanes[lane]
            for start in range(0, length, part.block_len):
                end = min(start + part.block_len, length)
                for t in range(start, end):
                    torch.testing.assert_close(extra[lane, t].tolist(), by_hand.read(tap.h_BTD[lane, t].tolist()))
                rows = ((tap.k_BHTK[lane, :, t].tolist(), tap.v_BHTK[lane, :, t].tolist()) for t in range(start, end))
                by_hand.block(list(rows))
            torch.testing.assert_close(state["vectors"][lane].tolist(), by_hand.s)


def test_the_gates_by_hand() -> None:
    s, x = torch.tensor([[[2.0, -4.0]]]), torch.zeros(1, 1, 3)
    fixed, lstm = FixedGate(3, 2), LstmGate(3, 2)
    with torch.no_grad():
        fixed.gate.copy_(torch.tensor([0.0, math.log(3.0)]))  # keeps 1/2 and 3/4
        fixed.update.bias.copy_(torch.tensor([6.0, 0.0]))
        lstm.update.bias.copy_(torch.tensor([0.5, 0.5, 1.0, -99.0, -1.0, 99.0]))  # write, write, open, shut, half, keep
    torch.testing.assert_close(fixed(s, x), torch.tensor([[[4.0, -3.0]]]))
    torch.testing.assert_close(lstm(s, x), torch.tensor([[[1 + math.tanh(0.5) / 2, -4.0]]]))
    assert fixed.openness().item() == pytest.approx((1 / 2 + 1 / 4) / 2)


def test_a_fresh_lstm_gate_mostly_remembers() -> None:
    assert LstmGate(3, 2).openness().item() == pytest.approx(sigmoid(-1))


def test_two_blocks_of_a_segment_equal_two_segments_of_one_block() -> None:
    """Exactly, for a model of one layer: the window holds what the second segment lost of the first."""
    config = BlockRecurrentConfig(n_states=3, block_len=4, window=8)
    torch.manual_seed(0)
    none = registry.memories.get("none").config()
    whole = Config(model=MODEL, memory=none, data=DataConfig(segment_len=4, batch_size=2))
    model = TransformerXL(whole, plan=block_recurrent.build(config, MODEL)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(7, (2, 12))
    losses, ends = [], []
    for size in (12, 8, 4):
        state, pieces = model.init_state(2), []
        for start in range(0, 12, size):
            piece = tokens[:, start : start + size]
            out = model(piece, state, None, piece)
            pieces.append(out.losses_BT)
            state = out.state
        losses.append(torch.cat(pieces, dim=1))
        ends.append(state["layers.0.block_recurrent.vectors"])
    for other, end in zip(losses[1:], ends[1:], strict=True):
        torch.testing.assert_close(other[:, :8], losses[0][:, :8], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(end, ends[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gradient", ["stop", "carry"])
def test_gradient_passes_blocks_always_and_segments_when_carried(gradient: str) -> None:
    part = moved(make(block_len=2, gradient=gradient))
    first, second = random_tap(0), random_tap(1)
    state = written(part, fresh(part), first, STORY[0])
    assert state["vectors"].requires_grad is (gradient == "carry")
    heads = torch.zeros(3, 2, 4, 4, dtype=torch.float64)
    _, extra = part.side(state, second, heads, Facts([False] * 3, [4, 4, 4]).segment())
    assert extra is not None
    written_by = [first.v_BHTK, second.v_BHTK, part.attended.update.weight, part.start]
    wanted = {  # whether the read of a block reaches the values of both segments, the write, and the start
        "stop": [[False, False, False, False], [False, True, True, False]],
        "carry": [[True, False, True, True], [True, True, True, True]],
    }
    for block, row in enumerate(wanted[gradient]):
        total = extra[:, 2 * block : 2 * block + 2].sum()
        found = torch.autograd.grad(total, written_by, allow_unused=True, retain_graph=True)
        assert [grad is not None and bool(grad.any()) for grad in found] == row


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["memory.gradient=stop", "memory.block_len=64", "data.segment_len=64"],
            "memory.gradient=stop: needs memory.block_len < data.segment_len=64: no loss would teach the states to "
            "write; lower memory.block_len, or use memory.gradient=carry",
        ),
        (
            ["model.position=absolute"],
            "model.position=absolute: numbers the tokens of one segment, so it cannot tell where a memory's tokens "
            "stand",
        ),
    ],
)
def test_what_cannot_work_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["memory=block_recurrent", *keys])
    assert str(caught.value).startswith(said)
    load(["memory=block_recurrent", "memory.window=0", "model.position=absolute"])
