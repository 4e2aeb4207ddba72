"""Every memory strategy keeps every law with every option, wherever it is put.

In CI: for each strategy rows in which any two values of its options and of the places (segments of 8, 7 and 1 tokens, 5
lanes and 1, float32 and bfloat16-mixed, activation checkpointing, pre-norm, two kinds of positions, all layers or one)
occur together, if its rules admit them; all laws on each, but law 8 reads 6 segments and law 2 does not compile.
Segments of 8 tokens have lanes of length 7, 4, 1 and 0 among them. `test_memory_laws.py` compiles each strategy once
and trains it on 200 segments.

Under `slow`: rows for any three values, bfloat16 weights and a third kind of positions among them, and every
combination of the strategy's own options; one graph for any two own options; inductor once per strategy.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import memory_options as options
import pytest
import torch
from covering import Row, covering_rows
from torch import Tensor

from txl_lightning import registry
from txl_lightning.config import load
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.testing import LAWS, check_memory
from txl_lightning.types import Segment

NAMES = registry.memories.names()
PARTS = 8
"""Of the rows under `slow`, so that none takes minutes."""

CASES = [(name, row) for name in NAMES for row in options.rows(name)]


def case_id(value: Any) -> str:
    parts = [v["name"] if isinstance(v, dict) else str(v) for v in value.values()] if isinstance(value, dict) else []
    return "-".join(parts) or value


def hold(name: str, row: Row, **more: Any) -> None:
    keys = {"laws": tuple(LAWS), "compiled": False, "long_run": 6, **more}
    check_memory(name, **keys, **options.arguments(name, row))


@pytest.mark.parametrize(("name", "row"), CASES, ids=case_id)
def test_the_laws_hold_for_any_two_values(name: str, row: Row) -> None:
    hold(name, row)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", NAMES)
def test_the_laws_hold_for_any_three_values_and_all_own_options(name: str, part: int) -> None:
    for row in options.all_rows(name)[part::PARTS]:
        try:
            hold(name, row)
        except AssertionError as error:
            raise AssertionError(f"{name} with {row}") from error


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_any_two_own_options_compile_to_one_graph(name: str) -> None:
    for row in options.own_rows(name):
        note = check_memory(name, laws=[2], **options.arguments(name, row))[2].note
        assert note.endswith("one graph over 5 training steps"), row


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_inductor_gives_the_same_losses_and_gradients(name: str) -> None:
    """Two segments and their backward pass; in the second one lane starts anew and one is short."""
    config = load([f"memory={name}", *SIZES])
    torch.manual_seed(0)
    model = TransformerXL(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    found, wanted = (
        trained_on_two(torch.compile(model, fullgraph=True, dynamic=False), model),
        trained_on_two(model, model),
    )
    torch._dynamo.reset()
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4, msg=lambda said, key=key: f"{key}: {said}")


SIZES = [
    "model.n_layer=1", "model.d_model=16", "model.n_head=2", "model.d_head=8", "model.d_inner=16",
    "model.vocab_size=13", "model.dropout=0", "data.segment_len=8",
]  # fmt: skip


def trained_on_two(run: Any, model: TransformerXL) -> dict[str, Tensor]:
    """Losses, the last state and the gradients of all parameters."""
    text = torch.randint(13, (3, 17), generator=torch.Generator().manual_seed(1))
    state, total, found = model.init_state(3), torch.zeros(()), {}
    facts = [([True] * 3, [8, 8, 8]), ([True, False, False], [8, 5, 8])]
    for i, (reset, length) in enumerate(facts):
        cut = slice(8 * i, 8 * i + 8)
        segment = Segment(torch.tensor(reset), torch.tensor(length))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            out = run(text[:, cut], state, segment, text[:, 1:][:, cut])
        found[f"losses {i}"] = out.losses_BT.detach()
        total, state = total + out.losses_BT.mean() + sum(out.aux_losses.values()), out.state
    model.zero_grad()
    total.backward()
    found.update({f"state {key}": tensor.detach() for key, tensor in state.items()})
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {**found, **{f"gradient of {name}": grad.clone() for name, grad in grads.items() if grad is not None}}


def test_rows_cover_what_is_allowed_and_nothing_else() -> None:
    factors = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (None, 0)}

    def fits(row: Row) -> bool:
        return not (row["a"] == 3 and row["b"] == "y") and not (row["c"] and row["d"] == 0 and row["b"] == "x")

    whole = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    for strength in (2, 3):
        rows = covering_rows(factors, fits, strength=strength)
        assert all(fits(row) for row in rows)
        for names in itertools.combinations(factors, strength):
            wanted, found = (
                {tuple(repr(row[name]) for name in names) for row in some if fits(row)} for some in (whole, rows)
            )
            assert found == wanted
        assert len(rows) <= (8 if strength == 2 else 16)


@pytest.mark.parametrize("name", NAMES)
def test_no_option_is_left_out(name: str) -> None:
    """Words and switches take all their values; of others at least one is named."""
    own = {part for option in options.own_options(name) for part in option.split(",")}
    keys = {item.name for item in dataclasses.fields(registry.memories.get(name).config)}
    if name == "mix":
        assert keys == {"parts"} | options.LEFT_OUT
        return
    assert own == keys - options.LEFT_OUT - options.ALONE.get(name, set())
    fixed = set(options.VALUES[name])
    for item in dataclasses.fields(registry.memories.get(name).config):
        chosen = "choices" in item.metadata or isinstance(item.default, bool) or item.name in ("layers", "name")
        assert chosen or item.name in fixed
