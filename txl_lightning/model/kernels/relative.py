"""The kernels as one differentiable operator, which torch.compile takes as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from txl_lightning.model.kernels import on_device
from txl_lightning.model.kernels.launch import Numbers, Operands, backward, forward

_OPERANDS = "Tensor q, Tensor k, Tensor v, " + ", ".join(
    f"Tensor? {name}" for name in "r u w slot_bias own_mask document age farthest positioned seed".split()
)
_NUMBERS = "int n_slot, int first, int? slot_limit, int? own_limit, float scale, float rate, bool term_b"
_N_OPERAND, _N_GRADIENT = len(Operands._fields), 7


@library.custom_op(
    "txl_lightning::relative_attention", mutates_args=(), schema=f"({_OPERANDS}, {_NUMBERS}) -> (Tensor, Tensor)"
)
def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    with on_device(args[0]):
        return forward(Operands(*args[:_N_OPERAND]), Numbers(*args[_N_OPERAND:]))


@_attention.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    batch, n_head, n_token, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch * n_head, n_token), dtype=torch.float32)


@library.custom_op(
    "txl_lightning::relative_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, bool bias_wanted, {_OPERANDS}, {_NUMBERS}) -> Tensor[]",
)
def _attention_backward(grad: Tensor, out: Tensor, lse: Tensor, bias_wanted: bool, *args: Any) -> list[Tensor]:
    with on_device(grad):
        found = backward(
            Operands(*args[:_N_OPERAND]),
            Numbers(*args[_N_OPERAND:]),
            grad.contiguous(),
            out,
            lse,
            bias_wanted=bias_wanted,
            in_order=torch.are_deterministic_algorithms_enabled(),
        )
    return [gradient for gradient in found if gradient is not None]


@_attention_backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, bias_wanted: bool, *args: Any) -> list[Tensor]:
    given = _with_gradient(args, bias_wanted)
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in given if tensor is not None
    ]


def _with_gradient(operands: tuple[Tensor | None, ...], bias_wanted: bool) -> list[Tensor | None]:
    """Those operands that backward gives a gradient for; None in the others' places."""
    first = list(operands[:_N_GRADIENT])
    return first if bias_wanted else [*first[:-1], None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_N_OPERAND], *output)
    ctx.numbers = inputs[_N_OPERAND:]
    ctx.bias_wanted = ctx.needs_input_grad[_N_GRADIENT - 1]


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *operands, out, lse = ctx.saved_tensors
    found = iter(_attention_backward(grad, out, lse, ctx.bias_wanted, *operands, *ctx.numbers))
    given = _with_gradient(tuple(operands), ctx.bias_wanted)
    gradients = [None if operand is None else next(found) for operand in given]
    return (*gradients, *[None] * (_N_OPERAND - _N_GRADIENT + len(ctx.numbers)))


_attention.register_autograd(_backward, setup_context=_setup)


def relative_attention(ops: Operands, numbers: Numbers) -> Tensor:
    """(B, H, T, K) softmax(scale (q k + q r + u k + v r) + bias) v, with dropout on the weights.

    All of q, k, v, r, u and v have one dtype; the last dimension of the large ones has stride 1.
    """
    q, k, v, r, u, w, bias, mask, *facts = ops
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    if r is not None and r.stride(-1) != 1:
        r = r.contiguous()
    bias, mask = (part if part is None else part.contiguous() for part in (bias, mask))
    u, w = (part if part is None else part.contiguous() for part in (u, w))
    out, _ = _attention(q, k, v, r, u, w, bias, mask, *facts, *numbers)
    return out
