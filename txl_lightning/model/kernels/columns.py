"""Kernels over rows of logits, one program per row: what cross-entropy does between its matrix products."""

from __future__ import annotations

import triton
import triton.language as tl

from txl_lightning.model.kernels.tiles import LOW


@triton.jit
def target_logit(logits, label, n_column):
    """The logit of the target; NaN where it is no column, so that its loss is seen to be wrong."""
    inside = (label >= 0) & (label < n_column)
    return tl.load(logits + label, mask=inside, other=float("nan")).to(tl.float32)


@triton.jit
def losses_kernel(logits, target, nll, stride, n_column, BLOCK: tl.constexpr):
    """nll = logsumexp(logits) - logit of the target, logits read once, BLOCK columns at a time."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top, total = tl.full([], LOW, tl.float32), tl.zeros([], tl.float32)
    for start in range(0, n_column, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < n_column, other=LOW).to(tl.float32)
        higher = tl.maximum(top, tl.max(logit, axis=0))
        weight = tl.where(column < n_column, tl.exp(logit - higher), 0.0)
        total = total * tl.exp(top - higher) + tl.sum(weight, axis=0)
        top = higher
    # differences of logits first: how high they are together then costs no digits
    behind = top - target_logit(logits, tl.load(target + row), n_column)
    tl.store(nll + row, behind + tl.log(total))


@triton.jit
def gradient_kernel(logits, target, nll, grad, stride, n_column, BLOCK: tl.constexpr):
    """logits <- (softmax(logits) - onehot(target)) grad, in place."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label, scale = tl.load(target + row), tl.load(grad + row)
    own, loss = target_logit(logits, label, n_column), tl.load(nll + row)
    tl.debug_barrier()  # every thread has read it before it is overwritten
    for start in range(0, n_column, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < n_column, other=LOW).to(tl.float32)
        share = tl.exp(logit - own - loss)
        share = tl.where(column == label, share - 1.0, share) * scale
        tl.store(logits + column, share.to(logits.dtype.element_ty), mask=column < n_column)
