"""Losses in shares against those of all logits at once: values, every gradient, numbers' types, what is held; kernels.

Where there is no CUDA device the kernels run in Triton's interpreter (`conftest.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from torch import Tensor, library
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from txl_lightning.model import cross_entropy as module
from txl_lightning.model.cross_entropy import linear_cross_entropy
from txl_lightning.training.footprint import LiveBytes

# what torch's compiler does itself
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
BUDGETS = {  # logits of a share, logits that are kept
    "token by token": (1, 0),
    "shares": (90, 0),
    "shares, some kept": (90, 250),
    "kept": (2**24, 2**24),
}


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many logits a share has and how many are kept; nothing is small then."""

    def put(share: int, kept: int = 0) -> None:
        for name, value in (("SMALL", -1), ("SHARE", share), ("SHARE_ON_CPU", share), ("KEPT", kept)):
            monkeypatch.setattr(module, name, value)

    return put


def written_out(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """The twin: all logits, in float32 or wider."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target, reduction="none")


def given(
    n: int, v: int, d: int, *, dtype: torch.dtype = torch.float64, bias: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Leaves, and targets with the first and the last column among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(n, d), (v, d), (v,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    hidden, weight, of_columns = (leaf.requires_grad_() for leaf in drawn)
    target = torch.randint(v, (n,), generator=generator)
    target[:1], target[1:2] = 0, v - 1
    return hidden, weight, of_columns if bias else None, target


def with_gradients(losses: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    """Losses and the gradients of their sum, each with a weight of its own."""
    own = torch.linspace(0.5, -1.5, len(losses), dtype=losses.dtype, device=losses.device)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [losses.detach(), *torch.autograd.grad((losses * own).sum(), wanted)]


@pytest.mark.parametrize("held", BUDGETS)
@pytest.mark.parametrize(("n", "v", "d"), [(1, 1, 1), (23, 17, 5), (37, 41, 8), (5, 301, 3), (64, 2, 4), (0, 7, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients_are_those_of_all_logits(
    n: int, v: int, d: int, bias: bool, held: str, budget: Any
) -> None:
    budget(*BUDGETS[held])
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        *leaves, target = given(n, v, d, dtype=dtype, bias=bias)
        found = with_gradients(linear_cross_entropy(*leaves, target), *leaves)
        exact = with_gradients(written_out(*leaves, target), *leaves)
        torch.testing.assert_close(found, exact, atol=tolerance, rtol=tolerance)


def test_what_is_small_is_computed_plainly_and_alike(budget: Any) -> None:
    *leaves, target = given(23, 17, 5, dtype=torch.float32)
    small = with_gradients(linear_cross_entropy(*leaves, target), *leaves)
    budget(*BUDGETS["kept"])
    kept = with_gradients(linear_cross_entropy(*leaves, target), *leaves)
    for one, other in zip(small, kept, strict=True):
        assert torch.equal(one, other)  # the very same sums


@pytest.mark.parametrize("held", BUDGETS)
def test_gradients_are_those_of_finite_differences(held: str, budget: Any) -> None:
    budget(*BUDGETS[held])
    hidden, weight, bias, target = given(11, 13, 4)
    assert torch.autograd.gradcheck(lambda *leaves: linear_cross_entropy(*leaves, target), (hidden, weight, bias))


@pytest.mark.parametrize("held", BUDGETS)
def test_in_bfloat16_sums_over_shares_are_as_exact_as_over_all(held: str, budget: Any) -> None:
    budget(*BUDGETS[held])
    *halves, target = given(150, 19, 6, dtype=torch.bfloat16)
    doubles = [leaf.detach().double().requires_grad_() for leaf in halves]
    exact = with_gradients(written_out(*doubles, target), *doubles)
    found = with_gradients(linear_cross_entropy(*halves, target), *halves)
    plain = with_gradients(written_out(*halves, target), *halves)
    assert [tensor.dtype for tensor in found] == [torch.float32, *[torch.bfloat16] * 3]
    for ours, theirs, true in zip(found, plain, exact, strict=True):
        errors = [float((tensor.double() - true).norm() / true.norm()) for tensor in (ours, theirs)]
        assert errors[0] <= 1.2 * errors[1] + 1e-4 < 0.05


@pytest.mark.parametrize("held", BUDGETS)
def test_under_autocast_products_are_in_half_precision_and_gradients_of_the_weights_type(
    held: str, budget: Any
) -> None:
    budget(*BUDGETS[held])
    *leaves, target = given(31, 19, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = linear_cross_entropy(*leaves, target), written_out(*leaves, target)
    assert torch.equal(ours, theirs) and not torch.equal(ours, written_out(*leaves, target))
    found, exact = with_gradients(ours, *leaves), with_gradients(theirs, *leaves)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0.02)
    if held == "kept":
        assert all(torch.equal(one, other) for one, other in zip(found[:3], exact[:3], strict=True))


def test_autocast_around_backward_alone_changes_nothing(budget: Any) -> None:
    budget(90)
    *leaves, target = given(31, 19, 6, dtype=torch.float32)
    exact = with_gradients(linear_cross_entropy(*leaves, target), *leaves)
    losses = linear_cross_entropy(*leaves, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients(losses, *leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("held", BUDGETS)
def test_part_of_a_table_that_is_used_elsewhere_too(held: str, budget: Any) -> None:
    budget(*BUDGETS[held])
    _, table, _, target = given(23, 40, 5)
    tokens = torch.arange(23) % 40
    found = with_gradients(linear_cross_entropy(table[tokens], table[9:30], None, target % 21), table)
    exact = with_gradients(written_out(table[tokens], table[9:30], None, target % 21), table)
    torch.testing.assert_close(found, exact, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_gradients_that_are_wanted_are_formed(wanted: tuple[int, ...], budget: Any) -> None:
    budget(90)
    *leaves, target = given(23, 17, 5)
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in wanted)
    own = [leaves[index] for index in wanted]
    found, exact = (with_gradients(way(*leaves, target), *own) for way in (linear_cross_entropy, written_out))
    torch.testing.assert_close(found, exact, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("held", BUDGETS)
@pytest.mark.parametrize("symbol", [-100, -1, 17, 99])
def test_a_target_that_is_no_column_raises(symbol: int, held: str, budget: Any) -> None:
    *leaves, target = given(5, 17, 3)
    target[2] = symbol
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(*leaves, target)
    budget(*BUDGETS[held])
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(*leaves, target)


def test_a_second_derivative_is_refused(budget: Any) -> None:
    budget(90)
    *leaves, target = given(23, 17, 5)
    losses = linear_cross_entropy(*leaves, target)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(losses.sum(), leaves, create_graph=True)


@pytest.mark.parametrize("held", BUDGETS)
def test_backward_may_run_twice_and_forward_be_computed_anew(held: str, budget: Any) -> None:
    budget(*BUDGETS[held])
    *leaves, target = given(23, 17, 5)
    losses = linear_cross_entropy(*leaves, target)
    first = torch.autograd.grad(losses.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(losses.sum(), leaves)
    anew = checkpoint(linear_cross_entropy, *leaves, target, use_reentrant=False)
    recomputed = torch.autograd.grad(anew.sum(), leaves)
    for one, two, three in zip(first, again, recomputed, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


@COMPILES
@pytest.mark.parametrize("held", BUDGETS)
def test_it_compiles_into_one_graph(held: str, budget: Any) -> None:
    budget(*BUDGETS[held])
    torch.compiler.reset()
    *leaves, target = given(7, 17, 5, dtype=torch.float32)
    run = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=False)
    found, exact = (with_gradients(way(*leaves, target), *leaves) for way in (run, written_out))
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


def test_shapes_alone_are_counted_as_if_nothing_were_computed_twice(budget: Any) -> None:
    budget(90)
    counts = []
    for way in (linear_cross_entropy, written_out):
        with torch.device("meta"):
            leaves = [torch.empty(shape, requires_grad=True) for shape in ((23, 5), (17, 5), (17,))]
            target = torch.empty(23, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            losses = way(*leaves, target)
            losses.sum().backward()
        assert losses.shape == (23,) and [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 23 * 17 * 5


def peak_of(n: int, v: int, d: int, *, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that forward and backward hold at their highest point, beside what they are given."""
    *leaves, target = given(n, v, d, dtype=dtype)
    live = LiveBytes()
    live.start([*leaves, target])
    with live:
        linear_cross_entropy(*leaves, target).sum().backward()
    return live.peak


def test_what_is_held_grows_neither_with_tokens_nor_with_columns(budget: Any) -> None:
    """But by what the gradients take: those of hidden states in shares and joined, those of weights once."""
    held = 6000
    budget(held)
    for n, v in ((120, 500), (480, 500), (120, 2000), (480, 2000)):
        gradients = 4 * (2 * n * 8 + v * 8 + v)
        of_tokens = 4 * 8 * n
        assert peak_of(n, v, 8) <= 3 * 4 * max(held, v) + gradients + of_tokens < 4 * n * v * 2
    budget(*BUDGETS["kept"])
    assert peak_of(480, 2000, 8) >= 2 * 4 * 480 * 2000


def test_without_a_gradient_one_share_is_held_at_a_time(budget: Any) -> None:
    budget(6000, 2**24)
    hidden, weight, bias, target = given(480, 500, 8, dtype=torch.float32)
    exact, live = written_out(hidden, weight, bias, target), LiveBytes()
    live.start([hidden, weight, bias, target])  # type: ignore[list-item]
    with torch.no_grad(), live:
        losses = linear_cross_entropy(hidden, weight, bias, target)
    torch.testing.assert_close(losses, exact, atol=1e-5, rtol=1e-5)
    assert live.peak <= 4 * (6000 + 3 * 480)


# ---- kernels


@pytest.fixture
def kernels() -> Iterator[Any]:
    pytest.importorskip("triton", reason="Triton is for Linux")
    from txl_lightning.model.kernels import cross_entropy

    with interpreter.quick():
        yield cross_entropy


def place() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("v", [1, 7, 1000, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_give_what_is_written_out(v: int, dtype: torch.dtype, kernels: Any) -> None:
    generator = torch.Generator().manual_seed(v)
    logits = 4 * torch.randn(5, v, generator=generator)
    logits[1] += 3e4  # nothing overflows
    logits[2] -= 3e4
    logits[3, : v // 2] = -1e30  # as good as impossible
    logits, target = logits.to(dtype).to(place()), torch.tensor([0, v - 1, v // 2, v - 1, v // 3], device=place())
    grad = torch.linspace(-2, 3, 5, device=place())
    exact = logits.double().requires_grad_()
    true = F.cross_entropy(exact, target, reduction="none")
    true.backward(grad.double())
    nll = kernels.losses(logits, target)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll.double(), true.detach(), atol=1e-5, rtol=1e-6)
    found = kernels.gradient_(logits, target, nll, grad)
    assert found.data_ptr() == logits.data_ptr() and found.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 3e-5
    torch.testing.assert_close(found.double(), exact.grad, atol=1e-6, rtol=tolerance)


def test_the_kernels_take_rows_of_a_wider_table_and_no_row(kernels: Any) -> None:
    wide = torch.randn(3, 20, device=place())
    before, target = wide.clone(), torch.tensor([0, 6, 3], device=place())
    nll = kernels.losses(wide[:, :7], target)
    torch.testing.assert_close(nll, F.cross_entropy(wide[:, :7], target, reduction="none"))
    kernels.gradient_(wide[:, :7], target, nll, torch.ones(3, device=place()))
    assert torch.equal(wide[:, 7:], before[:, 7:]) and not torch.equal(wide[:, :7], before[:, :7])
    nothing = wide[:0]
    assert kernels.losses(nothing, target[:0]).shape == (0,)
    assert kernels.gradient_(nothing, target[:0], nll[:0], nll[:0]).shape == (0, 20)


@pytest.mark.parametrize("symbol", [-1, 7, 100])
def test_a_target_that_is_no_column_gives_no_number(symbol: int, kernels: Any) -> None:
    logits, target = torch.randn(2, 7, device=place()), torch.tensor([3, symbol], device=place())
    assert kernels.losses(logits, target).isnan().tolist() == [False, True]


def test_the_operators_are_registered_as_torch_wants_them(kernels: Any) -> None:
    logits, target, nll = torch.randn(3, 7, device=place()), torch.tensor([0, 6, 3], device=place()), torch.rand(3)
    library.opcheck(kernels.losses, (logits, target))
    library.opcheck(kernels._gradient, (logits, target, nll.to(place()), torch.ones(3, device=place())))


@COMPILES
@pytest.mark.parametrize("held", BUDGETS)
def test_losses_by_the_kernels_are_those_of_all_logits(
    held: str, kernels: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget(*BUDGETS[held])
    monkeypatch.setattr(module, "_has_kernels", lambda kind, dtype: True)
    torch.compiler.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=False)
    *leaves, target = given(9, 37, 5, dtype=torch.float32)
    exact = with_gradients(written_out(*leaves, target), *leaves)
    for way in (linear_cross_entropy, compiled):
        losses = way(*leaves, target)
        torch.autograd.grad(losses.sum(), leaves, retain_graph=True)  # leaves what is kept as it was
        torch.testing.assert_close(with_gradients(losses, *leaves), exact, atol=1e-5, rtol=1e-5)


def test_who_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not_compiled", lambda kind: None)
    assert module._has_kernels("cuda", torch.bfloat16)
    assert not module._has_kernels("cuda", torch.float64)
    assert not module._has_kernels("cpu", torch.float32)
    monkeypatch.setattr(module, "why_not_compiled", lambda kind: "the package triton is not installed")
    assert not module._has_kernels("cuda", torch.bfloat16)


def test_who_has_kernels_is_known_while_compiling() -> None:
    torch.compiler.reset()
    run = torch.compile(lambda x: x + module._has_kernels("cuda", torch.bfloat16), backend="eager", fullgraph=True)
    assert run(torch.zeros(1)) == module._has_kernels("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("share", [(2**18, 0), (2**18, 2**19), (2**24, 2**24)])
def test_on_a_gpu_losses_and_gradients_are_those_of_all_logits(
    share: tuple[int, int], dtype: torch.dtype, tolerance: float, budget: Any
) -> None:
    budget(*share)
    *leaves, target = (part.cuda() for part in given(700, 5003, 64, dtype=dtype))
    leaves = [leaf.detach().mul(0.3).requires_grad_() for leaf in leaves]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = with_gradients(linear_cross_entropy(*leaves, target), *leaves)
    exact = with_gradients(written_out(*doubles, target), *doubles)
    for ours, true in zip(found, exact, strict=True):
        assert float((ours.double() - true).norm()) <= tolerance * float(true.norm())


def test_the_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    cases = ("losses bfloat16", "losses float32", "losses few columns")
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compile_kernels.py"))
    done = subprocess.run([sys.executable, script, *cases], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["case"], row["kernel"]) for row in rows] == [
        (case, kernel) for case in cases for kernel in ("losses", "gradient")
    ]
    assert all(row["shared"] <= 227 * 1024 for row in rows)
