"""A linear layer and the cross-entropy of its logits in one, so that they never need to be there all at once.

    nll = logsumexp(z) - z_target,   z = h W^T + b
    dz = (softmax(z) - onehot(target)) g,   dh = dz W,   dW = dz^T h,   db = sum over tokens of dz

for a gradient g of each token's loss. N tokens times V columns are taken in shares of a few tokens. Logits of the first
shares are kept, up to a budget; backward computes those of the others anew. On CUDA what is done between the matrix
products is one kernel forward and one backward (`kernels/cross_entropy.py`). The plain twin is `plain`, which also does
what is so small that there is nothing to spare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_lightning.model.backends import why_not_compiled

KEPT = 2**25
"""Logits that are kept for backward at most."""

SHARE, SHARE_ON_CPU = 2**25, 2**23
"""Logits of a share, though it has one token at least; on a CPU measured, elsewhere as many as are kept."""

SMALL = 2**22
"""Up to so many logits the plain way is no slower, where there are no kernels: measured on a CPU."""

_PIECE = 2**18  # numbers that stay in a core's cache

_FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_NEVER = torch.iinfo(torch.int64).min  # a target that is passed over


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor) -> Tensor:
    """(N) negative log-likelihood of each target in nats, float32 or wider; differentiable once.

    Matrix products are of autocast's type where that is on. The host waits for nothing.

    Args:
        hidden_ND: may have no row; weights then get a gradient of zeros.
        weight_VD: may be a part of a larger table, or in use elsewhere too.
        bias_V: None: without.
        target_N: int64. One that is no column raises on a CPU; on CUDA its loss is NaN or the device stops.
    """
    kind = hidden_ND.device.type
    cast = _casts(kind) and hidden_ND.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if cast else hidden_ND.dtype
    fused = _has_kernels(kind, dtype)
    if len(hidden_ND) * len(weight_VD) <= SMALL and not fused:
        return plain(hidden_ND, weight_VD, bias_V, target_N)
    room = KEPT if torch.is_grad_enabled() else 0
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, bias_V, target_N, dtype if cast else None, fused, room)


def plain(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor) -> Tensor:
    """The same over all logits at once."""
    logits = _wide(F.linear(hidden_ND, weight_VD, bias_V))
    return F.cross_entropy(logits, target_N, reduction="none", ignore_index=_NEVER)


class _LinearCrossEntropy(torch.autograd.Function):
    """What is kept of a share ("scores") are log-probabilities, or logits for the kernels.

    Beside the tensors it takes the type of products (None: the one that there is), whether kernels serve, and how many
    logits may be kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: Any,
        fused: bool,
        room: int,
    ) -> Tensor:
        h, w, b = _in_type(hidden, dtype), _in_type(weight, dtype), None if bias is None else _in_type(bias, dtype)
        kept: list[Tensor] = []
        parts: list[Tensor] = []
        with _as_it_is(h):
            for rows in _shares(h, w):
                scores = _scores(h[rows], w, b, fused)
                parts.append(_losses(scores, target[rows], fused))
                if rows.stop * len(w) <= room or h.device.type == "meta":
                    kept.append(scores)
                del scores
        nll = _joined(parts)
        ctx.save_for_backward(h, w, b, target, nll, *kept)
        ctx.fused, ctx.types = fused, (hidden.dtype, weight.dtype)
        return nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # `once_differentiable` would take a constant gradient for one whose own gradient is zero
            raise RuntimeError("linear_cross_entropy is differentiable once: it has no backward for create_graph=True")
        h, w, b, target, nll, *kept = ctx.saved_tensors
        wants_h, wants_w, wants_b, *_ = ctx.needs_input_grad
        parts: list[Tensor] = []
        dw = db = None
        with _as_it_is(h):
            for index, rows in enumerate(_shares(h, w)):
                keep = index < len(kept)
                scores = kept[index] if keep else _scores(h[rows], w, b, ctx.fused)
                gradient = _gradient_by_kernels if ctx.fused else _gradient
                dz = gradient(scores, target[rows], nll[rows], grad[rows], keep=keep, dtype=h.dtype)
                del scores
                if wants_h:
                    parts.append(dz @ w)
                if wants_w:
                    dw = _plus_product(dw, dz.t(), h[rows])
                if wants_b:
                    db = _plus(db, dz.sum(0))
                del dz
        of_h, of_w = ctx.types
        dh = _joined(parts) if wants_h else None
        return (_in_type(dh, of_h), _in_type(dw, of_w), _in_type(db, of_w), None, None, None, None)


@overload
def _in_type(x: Tensor, dtype: torch.dtype | None) -> Tensor: ...
@overload
def _in_type(x: None, dtype: torch.dtype | None) -> None: ...
def _in_type(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return x if x is None or dtype is None else x.to(dtype)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shares(h: Tensor, w: Tensor) -> Iterator[slice]:
    """Tokens of each share, about equally many; one share at least, though it may be empty."""
    n, kind = len(h), h.device.type
    if kind == "meta":  # what has no numbers takes no room
        yield slice(0, n)
        return
    most = max(1, (SHARE_ON_CPU if kind == "cpu" else SHARE) // max(1, len(w)))
    times = max(1, -(-n // most))
    step = max(1, -(-n // times))
    for start in range(0, max(n, 1), step):
        yield slice(start, min(start + step, n))


def _as_it_is(like: Tensor) -> AbstractContextManager[Any]:
    """Numbers keep the type they have, whatever autocast would do."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if _casts(kind) else nullcontext()


def _casts(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _has_kernels(kind: str, dtype: torch.dtype) -> bool:
    return kind == "cuda" and dtype in _FUSED_TYPES and why_not_compiled("cuda") is None


def _wide(x: Tensor) -> Tensor:
    """In float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(h: Tensor, w: Tensor, b: Tensor | None, fused: bool) -> Tensor:
    """(n, V) logits; without kernels the log-probabilities made of them."""
    logits = F.linear(h, w, b)
    if fused:
        return logits
    logits = _wide(logits)
    # in place but for the compiler, which does not take it
    return logits.log_softmax(-1) if torch.compiler.is_compiling() else torch.log_softmax(logits, -1, out=logits)


def _losses(scores: Tensor, target: Tensor, fused: bool) -> Tensor:
    if fused:
        from txl_lightning.model.kernels import cross_entropy

        return cross_entropy.losses(scores, target)
    return -scores.gather(1, target[:, None])[:, 0]


def _gradient(scores: Tensor, target: Tensor, nll: Tensor, grad: Tensor, *, keep: bool, dtype: torch.dtype) -> Tensor:
    """(n, V) dz in a type; scores stay as they are if they are to be kept, else it may be written over them."""
    dz = scores if scores.dtype == dtype and not keep else torch.empty_like(scores, dtype=dtype)
    whole = scores.device.type != "cpu" or torch.compiler.is_compiling()
    step = max(1, len(scores) if whole else _PIECE // scores.shape[1])
    for start in range(0, len(scores), step):
        rows = slice(start, start + step)
        given = torch.zeros_like(scores[rows]).scatter_(1, target[rows, None], -grad[rows, None])
        dz[rows] = torch._log_softmax_backward_data(given, scores[rows], 1, scores.dtype)
    return dz


def _gradient_by_kernels(
    logits: Tensor, target: Tensor, nll: Tensor, grad: Tensor, *, keep: bool, dtype: torch.dtype
) -> Tensor:
    from txl_lightning.model.kernels import cross_entropy

    assert logits.dtype == dtype
    return cross_entropy.gradient_(logits.clone() if keep else logits, target, nll, grad)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b."""
    if total is not None and total.dtype == a.dtype:
        return total.addmm_(a, b)
    return _plus(total, a @ b)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    """Summed over shares in float32 or wider."""
    return _wide(part) if total is None else total.add_(part)
