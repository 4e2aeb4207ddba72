"""What evaluation and decoding keep: distances once per shape and weights, tokens once, buffers where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from txl_lightning import TransformerXL
from txl_lightning.config import Config
from txl_lightning.generation import Session
from txl_lightning.memory.base import keep_last
from txl_lightning.model.tables import Tables
from txl_lightning.types import Segment

T, M = 4, 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_config(tmp_path_factory.mktemp("base"), f"data.segment_len={T}", f"memory.mem_len={M}").to_dict()


def built(base: dict[str, Any], **model: Any) -> TransformerXL:
    torch.manual_seed(0)
    made = TransformerXL(Config.from_dict({**base, "model": {**base["model"], **model}}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    return made.double().eval()


def losses(model: TransformerXL, segments: int, tables: Tables | None) -> torch.Tensor:
    torch.manual_seed(1)
    state, found = model.init_state(2, form="projected"), []
    for _ in range(segments):
        tokens, targets = torch.randint(257, (2, 2, T)).unbind()
        with torch.no_grad():
            out = model(tokens, state, None, targets, tables=tables)
        state = out.state
        found.append(out.losses_BT)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("position", ["transformer_xl", "shaw"])
def test_kept_tables_change_nothing_and_follow_the_weights(position: str, base: dict[str, Any]) -> None:
    model, tables = built(base, position=position), Tables()
    for change in ("none", "in place", "loaded", "exchanged"):
        own = model.blocks()[1].attention.position
        with torch.no_grad():
            if change == "in place":
                for weight in own.parameters():
                    weight.mul_(1.5)
            if change == "loaded":
                model.load_state_dict({name: tensor + 0.01 for name, tensor in model.state_dict().items()})
            if change == "exchanged":
                for weight in own.parameters():
                    weight.data = weight.data - 0.02
        torch.testing.assert_close(losses(model, 3, tables), losses(model, 3, None), atol=1e-12, rtol=1e-12)


def test_distances_are_projected_once_and_tokens_once(base: dict[str, Any]) -> None:
    """Rows that go through W_r and W_qkv: with kept tables and step by step, whatever was read before."""
    model, tables = built(base), Tables()
    rows = {"r": 0, "qkv": 0}

    def count(name: str) -> Any:
        return lambda module, args, out: rows.__setitem__(name, rows[name] + args[0].shape[:-1].numel())

    for layer in model.blocks():
        layer.attention.position.r.register_forward_hook(count("r"))
        layer.attention.qkv.register_forward_hook(count("qkv"))
    losses(model, 5, tables)
    n_layer, table = len(model.blocks()), M + T + 1
    assert rows == {"r": n_layer * table, "qkv": n_layer * 2 * 5 * T}
    session = Session(model)
    session.feed([1])
    rows.update(r=0, qkv=0)
    for step in range(5 * T):
        session.feed([step])
        assert rows == {"r": 0, "qkv": n_layer * (step + 1)}


def test_weights_that_ranks_share_are_projected_once_wherever_they_are_put_together(base: dict[str, Any]) -> None:
    """On one rank again and on another not, as addresses happen to fall, and ranks would wait for each other."""
    model, tables, seen = built(base), Tables(), []
    position = model.blocks()[0].attention.position
    position.r.register_forward_hook(lambda *_: seen.append(1))
    table = model.distances(n_token=T, ahead=0, device=model.device, tables=tables).for_slots(M, T)
    for place in range(4):
        for weight in position.parameters():
            weight.ds_id = 7  # type: ignore[attr-defined]
            weight.data = torch.cat([weight.data, weight.data])[: len(weight)] if place % 2 else weight.data.clone()
        tables.projected(position, table)
    assert seen == [1]


def test_the_table_of_a_short_segment_is_a_part_of_a_long_ones(base: dict[str, Any]) -> None:
    model, tables = built(base), Tables()
    position = model.blocks()[0].attention.position
    for n_token in (5, 2, 9, 1):
        table = model.distances(n_token=n_token, ahead=0, device=model.device, tables=tables)
        plain = model.distances(n_token=n_token, ahead=0, device=model.device, tables=None)
        assert (table.first, table.ahead) == (plain.first, plain.ahead)
        torch.testing.assert_close(table.rows_WD, plain.rows_WD, atol=0, rtol=0)
        own = tables.projected(position, table.for_slots(M, n_token))
        torch.testing.assert_close(own.projected_WHK, position.project(plain.for_slots(M, n_token)))


@pytest.mark.parametrize("n_token", [1, 6, 7, 11])
def test_last_rows_are_the_same_however_they_are_copied(n_token: int) -> None:
    old, new = torch.randn(2, 7, 3), torch.randn(2, n_token, 3)
    for length in (0, 1, n_token):
        lengths = torch.tensor([length, length])
        with torch.enable_grad():
            expected = keep_last(old, new, lengths)
        with torch.no_grad():
            assert torch.equal(keep_last(old, new, lengths), expected)


@pytest.mark.parametrize("new", [True, False])
def test_a_lane_that_stands_by_between_segments_misses_nothing(new: bool, base: dict[str, Any]) -> None:
    """Its memory stays while another lane writes; `starts` counts when the token that begins a document is read."""
    model = built({**base, "memory": {"name": "cache", "mem_len": M, "reset": "document"}})
    texts = torch.randint(1, 257, (2, 2 * T))

    def read_all(turns: list[list[bool]]) -> torch.Tensor:
        state = model.init_state(2, form="projected")
        partial = model.begin(state, segment_len=T, reset="document")
        place, found = [0, 0], torch.zeros(2, 2 * T, model.config.d_model, dtype=model.dtype)
        for active in turns:
            token_B = torch.stack([texts[lane, min(at, 2 * T - 1)] for lane, at in enumerate(place)])
            starts = [new and on and at == T for on, at in zip(active, place, strict=True)]
            hidden_BD, state = model.step(token_B, state, partial, active=active, starts=starts)
            for lane in (lane for lane in (0, 1) if active[lane]):
                found[lane, place[lane]], place[lane] = hidden_BD[lane], place[lane] + 1
        return found

    with torch.no_grad():
        together = read_all([[True, True]] * 2 * T)
        apart = read_all([[True, True]] * T + [[True, False]] * T + [[False, True]] * T)
    torch.testing.assert_close(apart, together, atol=1e-9, rtol=1e-9)


def test_the_state_given_is_not_changed(base: dict[str, Any]) -> None:
    model = built(base)
    state = model.init_state(2, form="projected")
    partial = model.begin(state, segment_len=T)
    for step in range(2 * T + 1):
        before = {key: tensor.clone() for key, tensor in state.items()}
        with torch.no_grad():
            _, new = model.step(torch.tensor([step, step + 9]), state, partial)
        assert all(torch.equal(before[key], tensor) for key, tensor in state.items())
        assert (new is state) == (step % T != T - 1)
        state = new


def test_what_cannot_be_read_token_by_token_says_so(tmp_path: Path) -> None:
    model = TransformerXL(tiny_config(tmp_path, "memory=titans")).eval()
    with pytest.raises(ValueError, match="cannot be read token by token"):
        model.begin(model.init_state(1, form="projected"), segment_len=T)


def test_evaluation_needs_no_gradient_to_be_the_same(base: dict[str, Any]) -> None:
    """The fused attention of evaluation against the plain one, on short and dead lanes with documents inside."""
    model = built({**base, "memory": {"name": "cache", "mem_len": M, "reset": "document"}})
    tokens = torch.randint(1, 257, (3, T))
    state = model.init_state(3, form="projected")
    for length, reset in (([4, 4, 4], True), ([4, 3, 0], False), ([4, 0, 4], False)):
        document = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 2]])
        segment = Segment(torch.full((3,), reset), torch.tensor(length), document)
        with torch.enable_grad():
            plain = model(tokens, state, segment, tokens)
        with torch.no_grad():
            fused = model(tokens, state, segment, tokens)
        torch.testing.assert_close(fused.losses_BT, plain.losses_BT.detach(), atol=1e-12, rtol=1e-12)
        state = {key: tensor.detach() for key, tensor in plain.state.items()}
        torch.testing.assert_close(fused.state, state, atol=1e-12, rtol=1e-12)
