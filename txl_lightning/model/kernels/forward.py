"""The forward kernel: one program per tile of queries, online softmax over the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from txl_lightning.model.kernels.tiles import (
    LOG2E,
    LOW,
    SIZES,
    ages_of_slots,
    kept,
    lined_up,
    load_rows,
    looked_up,
    position_queries,
    product,
    seen,
    store_rows,
    table_rows,
    with_bias,
)


@triton.jit
def absorb(score, top, total, sums, values, seed, program, t, p, n_key, rate, PRECISION: tl.constexpr):
    """Online softmax (Milakov and Gimelshein 2018): running maximum, normaliser and weighted sum of values."""
    higher = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.where(score > LOW, tl.exp2(score - higher[:, None]), 0.0)
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    if seed is not None:
        weight = tl.where(kept(seed, program, t, p, n_key, rate), weight / (1.0 - rate), 0.0)
    sums = sums * shrink[:, None] + product(weight.to(values.dtype), values, PRECISION)
    return higher, total, sums


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, r, u, w, slot_bias, own_mask, document, age, farthest, positioned, seed, out, lse,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kp, stride_vb, stride_vh, stride_vp,
    stride_rh, stride_rw, stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_ab, stride_db,
    n_head, n_token, n_key, n_slot, n_row, first, slot_limit, own_limit, reach, scale, rate,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, TERM_B: tl.constexpr, BIAS_OF_T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, H, T, K) and the log-sum-exp (B H, T) of each query's scores, in units of log 2."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most keys first
    program = tl.program_id(1)
    batch, head = program // n_head, program % n_head
    a = tl.arange(0, BLOCK)
    t0 = tile * BLOCK
    t = t0 + a
    qu = load_rows(q + batch.to(tl.int64) * stride_qb + head * stride_qh, t, n_token, stride_qt, K, KP)
    k += batch.to(tl.int64) * stride_kb + head * stride_kh
    v += batch.to(tl.int64) * stride_vb + head * stride_vh
    qw = qu
    if r is not None:
        r += head * stride_rh
        qw = position_queries(qu, w, head, TERM_B, K, KP)
    if u is not None:
        qu = with_bias(qu, u, head, K, KP)
    top = tl.full([BLOCK], LOW, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, KP], tl.float32)
    start = 0
    if age is not None:  # slots of any age; the loop below then begins behind them
        for p0 in range(0, n_slot, BLOCK):
            p = p0 + a
            stored, placed = ages_of_slots(age + batch * stride_ab, positioned, p, n_slot)
            score = product(qu, tl.trans(load_rows(k, p, n_slot, stride_kp, K, KP)), PRECISION)
            if r is not None:
                score += looked_up(
                    qw, r, t, p, placed, farthest, first, n_row, stride_rw, n_slot, K, KP, BLOCK, PRECISION
                )
            score = seen(
                score * (scale * LOG2E), t, p, stored, slot_bias, own_mask, document, positioned, batch, head,
                stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_db,
                n_token, n_slot, n_slot, slot_limit, own_limit, BIAS_OF_T,
            )  # fmt: skip
            values = load_rows(v, p, n_slot, stride_vp, K, KP)
            top, total, sums = absorb(score, top, total, sums, values, seed, program, t, p, n_key, rate, PRECISION)
        start = n_slot
    elif reach is not None:
        start = tl.maximum(n_slot + t0 - reach, 0) // BLOCK * BLOCK
    end = n_key
    if own_mask is None:
        end = tl.minimum(n_key, n_slot + t0 + BLOCK)
    far = tl.zeros([BLOCK, BLOCK], tl.float32)
    if r is not None:
        rows = table_rows(r, n_slot + t0 - start + 1 + a, first, n_row, stride_rw, K, KP)
        far = product(qw, tl.trans(rows), PRECISION)
    for p0 in range(start, end, BLOCK):
        p = p0 + a
        score = product(qu, tl.trans(load_rows(k, p, n_key, stride_kp, K, KP)), PRECISION)
        if r is not None:
            rows = table_rows(r, n_slot + t0 - p0 - BLOCK + 1 + a, first, n_row, stride_rw, K, KP)
            near = product(qw, tl.trans(rows), PRECISION)
            score += lined_up(near, far, a, BLOCK)
            far = near  # the next tile's keys are BLOCK nearer
        score = seen(
            score * (scale * LOG2E), t, p, n_slot - p, slot_bias, own_mask, document, None, batch, head,
            stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_db,
            n_token, n_slot, n_key, slot_limit, own_limit, BIAS_OF_T,
        )  # fmt: skip
        values = load_rows(v, p, n_key, stride_vp, K, KP)
        top, total, sums = absorb(score, top, total, sums, values, seed, program, t, p, n_key, rate, PRECISION)
    total = tl.where(total > 0, total, 1.0)  # rows beyond the last query
    store_rows(out + program.to(tl.int64) * n_token * K, sums / total[:, None], t, n_token, K, K, KP)
    tl.store(lse + program * n_token + t, top + tl.log2(total), mask=t < n_token)
