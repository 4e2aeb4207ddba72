"""The backward kernels. Scores are computed again from q, k and r; only the log-sum-exp of each query is kept.

    weight p = exp(s - lse)      ds = p (dp - delta)      dp = do . v      delta = sum of p dp = do . out

`query_kernel` goes over the keys for each tile of queries (gradients of q, u, v of the paper and r), `key_kernel` over
the queries for each tile of keys (those of k, v and the slots' bias). `table_kernel` goes along one diagonal of tiles,
which sees one run of distances, and so sums r's gradient in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from txl_lightning.model.kernels.tiles import (
    LOG2E,
    LOW,
    NEVER,
    SIZES,
    ages_of_slots,
    capped_rows,
    is_far,
    kept,
    lined_up,
    load_rows,
    looked_up,
    next_age,
    past,
    permuted,
    position_queries,
    product,
    seen,
    store_rows,
    table_rows,
    with_bias,
)


@triton.jit
def weights(score, lse):
    """[BLOCK, BLOCK] attention weights before dropout."""
    return tl.where(score > LOW, tl.exp2(score - lse[:, None]), 0.0)


@triton.jit
def score_gradient(weight, grad_weight, delta, seed, program, t, p, n_key, rate):
    """[BLOCK, BLOCK] gradient of what the softmax takes."""
    if seed is not None:
        grad_weight = tl.where(kept(seed, program, t, p, n_key, rate), grad_weight / (1.0 - rate), 0.0)
    return weight * (grad_weight - delta[:, None])


@triton.jit
def add_rows(dr, value, distance, wanted, first, n_row, K: tl.constexpr, KP: tl.constexpr):
    """Adds [BLOCK, KP] to the rows of these distances."""
    column = tl.arange(0, KP)
    row = tl.minimum(tl.maximum(first - distance, 0), n_row - 1)
    tl.atomic_add(
        dr + row[:, None] * K + column[None, :], value, mask=wanted[:, None] & (column < K)[None, :], sem="relaxed"
    )


@triton.jit
def of_strip(
    dstrip, distance, qw, dq, r, dr, first, n_row, stride,
    ATOMIC: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient of a strip of position scores: what it adds to that of the queries, and that of the table."""
    rounded = dstrip.to(qw.dtype)
    dq += product(rounded, table_rows(r, distance, first, n_row, stride, K, KP), PRECISION)
    if ATOMIC:
        within = (distance <= first) & (distance > first - n_row)
        value = product(tl.trans(rounded), qw, PRECISION)
        add_rows(dr, value, distance, within, first, n_row, K, KP)
    return dq


@triton.jit
def of_looked_up(
    ds, dq, qw, t, p, age, farthest, r, dr, first, n_row, stride, stop,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The backward of `looked_up`: gathers slots of one age, then goes on as for keys of falling ages."""
    j = tl.arange(0, BLOCK)
    valid = p < stop
    t0 = tl.min(t, axis=0)
    ds = tl.where((age < NEVER)[None, :], ds, 0.0)
    if farthest is not None:
        cap, rows = capped_rows(r, farthest, p, stop, first, n_row, stride, K, KP)
        beyond = past(t, age, cap)
        capped = tl.where(beyond, ds, 0.0).to(qw.dtype)
        ds = tl.where(beyond, 0.0, ds)
        dq += product(capped, rows, PRECISION)
        value = product(tl.trans(capped), qw, PRECISION)
        add_rows(dr, value, cap, valid & (cap < NEVER), first, n_row, K, KP)
    start = next_age(age, -NEVER, valid)
    while start < NEVER:
        inside = valid & (age >= start) & (age < start + BLOCK)
        column = tl.where(inside, BLOCK - 1 - (age - start), -1)
        chosen = tl.where(column[:, None] == j[None, :], 1.0, 0.0).to(qw.dtype)
        by_age = product(ds.to(qw.dtype), chosen, PRECISION)
        strip = permuted(by_age, j, BLOCK)
        d0 = t0 + start + BLOCK - 1
        near = tl.where(is_far(BLOCK), 0.0, strip)
        far = tl.where(is_far(BLOCK), strip, 0.0)
        dq = of_strip(near, d0 - BLOCK + 1 + j, qw, dq, r, dr, first, n_row, stride, True, K, KP, PRECISION)
        dq = of_strip(far, d0 + 1 + j, qw, dq, r, dr, first, n_row, stride, True, K, KP, PRECISION)
        start = next_age(age, start + BLOCK, valid)
    return dq


@triton.jit(do_not_specialize=SIZES)
def query_kernel(
    q, k, v, r, u, w, slot_bias, own_mask, document, age, farthest, positioned, seed, out, lse,
    grad, delta, dq, dr, du, dw,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kp, stride_vb, stride_vh, stride_vp,
    stride_rh, stride_rw, stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_ab, stride_db,
    n_head, n_token, n_key, n_slot, n_row, first, slot_limit, own_limit, reach, scale, rate,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, TERM_B: tl.constexpr, BIAS_OF_T: tl.constexpr,
    PRECISION: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """dq (B, H, T, K), delta (B H, T), dr (H, W, K) by atomic additions, sums of du and dw (B H, tiles, K)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    program = tl.program_id(1)
    batch, head = program // n_head, program % n_head
    a = tl.arange(0, BLOCK)
    t0 = tile * BLOCK
    t = t0 + a
    row_base = program.to(tl.int64) * n_token * K
    qu = load_rows(q + batch.to(tl.int64) * stride_qb + head * stride_qh, t, n_token, stride_qt, K, KP)
    do = load_rows(grad + row_base, t, n_token, K, K, KP)
    dt = tl.sum(do.to(tl.float32) * load_rows(out + row_base, t, n_token, K, K, KP).to(tl.float32), axis=1)
    tl.store(delta + program * n_token + t, dt, mask=t < n_token)
    top = tl.load(lse + program * n_token + t, mask=t < n_token, other=0.0)
    k += batch.to(tl.int64) * stride_kb + head * stride_kh
    v += batch.to(tl.int64) * stride_vb + head * stride_vh
    qw = qu
    if r is not None:
        r += head * stride_rh
        dr += head * n_row * K
        qw = position_queries(qu, w, head, TERM_B, K, KP)
    if u is not None:
        qu = with_bias(qu, u, head, K, KP)
    dqu = tl.zeros([BLOCK, KP], tl.float32)
    dqw = tl.zeros([BLOCK, KP], tl.float32)
    start = 0
    if age is not None:
        for p0 in range(0, n_slot, BLOCK):
            p = p0 + a
            stored, placed = ages_of_slots(age + batch * stride_ab, positioned, p, n_slot)
            keys = load_rows(k, p, n_slot, stride_kp, K, KP)
            score = product(qu, tl.trans(keys), PRECISION)
            if r is not None:
                score += looked_up(
                    qw, r, t, p, placed, farthest, first, n_row, stride_rw, n_slot, K, KP, BLOCK, PRECISION
                )
            score = seen(
                score * (scale * LOG2E), t, p, stored, slot_bias, own_mask, document, positioned, batch, head,
                stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_db,
                n_token, n_slot, n_slot, slot_limit, own_limit, BIAS_OF_T,
            )  # fmt: skip
            dp = product(do, tl.trans(load_rows(v, p, n_slot, stride_vp, K, KP)), PRECISION)
            ds = score_gradient(weights(score, top), dp, dt, seed, program, t, p, n_key, rate) * scale
            dqu += product(ds.to(keys.dtype), keys, PRECISION)
            if r is not None:
                dqw = of_looked_up(
                    ds, dqw, qw, t, p, placed, farthest, r, dr, first, n_row, stride_rw, n_slot,
                    K, KP, BLOCK, PRECISION,
                )  # fmt: skip
        start = n_slot
    elif reach is not None:
        start = tl.maximum(n_slot + t0 - reach, 0) // BLOCK * BLOCK
    end = n_key
    if own_mask is None:
        end = tl.minimum(n_key, n_slot + t0 + BLOCK)
    far = tl.zeros([BLOCK, BLOCK], tl.float32)
    dnear = tl.zeros([BLOCK, BLOCK], tl.float32)  # what tiles so far say of their near strip: the next one's far strip
    if r is not None:
        rows = table_rows(r, n_slot + t0 - start + 1 + a, first, n_row, stride_rw, K, KP)
        far = product(qw, tl.trans(rows), PRECISION)
    for p0 in range(start, end, BLOCK):
        p = p0 + a
        keys = load_rows(k, p, n_key, stride_kp, K, KP)
        score = product(qu, tl.trans(keys), PRECISION)
        d0 = n_slot + t0 - p0
        if r is not None:
            rows = table_rows(r, d0 - BLOCK + 1 + a, first, n_row, stride_rw, K, KP)
            near = product(qw, tl.trans(rows), PRECISION)
            score += lined_up(near, far, a, BLOCK)
            far = near
        score = seen(
            score * (scale * LOG2E), t, p, n_slot - p, slot_bias, own_mask, document, None, batch, head,
            stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_db,
            n_token, n_slot, n_key, slot_limit, own_limit, BIAS_OF_T,
        )  # fmt: skip
        dp = product(do, tl.trans(load_rows(v, p, n_key, stride_vp, K, KP)), PRECISION)
        ds = score_gradient(weights(score, top), dp, dt, seed, program, t, p, n_key, rate) * scale
        dqu += product(ds.to(keys.dtype), keys, PRECISION)
        if r is not None:
            strip = permuted(ds, a, BLOCK)
            dfar = dnear + tl.where(is_far(BLOCK), strip, 0.0)
            dqw = of_strip(dfar, d0 + 1 + a, qw, dqw, r, dr, first, n_row, stride_rw, ATOMIC, K, KP, PRECISION)
            dnear = tl.where(is_far(BLOCK), 0.0, strip)
    if r is not None:
        d0 = n_slot + t0 - start - tl.cdiv(end - start, BLOCK) * BLOCK
        dqw = of_strip(dnear, d0 + 1 + a, qw, dqw, r, dr, first, n_row, stride_rw, ATOMIC, K, KP, PRECISION)
    column = tl.arange(0, KP)
    sums = (program * tl.num_programs(0) + tile) * K + column
    if du is not None:
        tl.store(du + sums, tl.sum(dqu, axis=0), mask=column < K)
    if dw is not None:
        tl.store(dw + sums, tl.sum(dqw, axis=0), mask=column < K)
    if r is not None and TERM_B:
        dqu += dqw
    store_rows(dq + row_base, dqu, t, n_token, K, K, KP)


@triton.jit(do_not_specialize=SIZES)
def key_kernel(
    q, k, v, r, u, w, slot_bias, own_mask, document, age, farthest, positioned, seed, lse, grad, delta,
    dk, dv, dbias,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kp, stride_vb, stride_vh, stride_vp,
    stride_rh, stride_rw, stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_ab, stride_db,
    n_head, n_token, n_key, n_slot, n_row, first, slot_limit, own_limit, reach, scale, rate, start, stop,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, TERM_B: tl.constexpr, BIAS_OF_T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv (B, H, P, K) of keys `start` to `stop`, and dbias: (B, H, S), or like the bias where it depends on t."""
    program = tl.program_id(1)
    batch, head = program // n_head, program % n_head
    a = tl.arange(0, BLOCK)
    p0 = start + tl.program_id(0) * BLOCK
    p = p0 + a
    keys = load_rows(k + batch.to(tl.int64) * stride_kb + head * stride_kh, p, stop, stride_kp, K, KP)
    values = load_rows(v + batch.to(tl.int64) * stride_vb + head * stride_vh, p, stop, stride_vp, K, KP)
    q += batch.to(tl.int64) * stride_qb + head * stride_qh
    grad += program.to(tl.int64) * n_token * K
    if r is not None:
        r += head * stride_rh
    stored = n_slot - p
    placed = stored
    if age is not None:
        stored, placed = ages_of_slots(age + batch * stride_ab, positioned, p, stop)
    dkeys = tl.zeros([BLOCK, KP], tl.float32)
    dvalues = tl.zeros([BLOCK, KP], tl.float32)
    dadded = tl.zeros([BLOCK], tl.float32)
    low = 0
    if own_mask is None:
        low = tl.maximum(p0 - n_slot, 0) // BLOCK * BLOCK
    high = n_token
    if reach is not None:
        high = tl.minimum(n_token, reach + p0 + BLOCK - n_slot)
    for t0 in range(low, high, BLOCK):
        t = t0 + a
        qu = load_rows(q, t, n_token, stride_qt, K, KP)
        do = load_rows(grad, t, n_token, K, K, KP)
        top = tl.load(lse + program * n_token + t, mask=t < n_token, other=0.0)
        dt = tl.load(delta + program * n_token + t, mask=t < n_token, other=0.0)
        qw = qu
        if r is not None:
            qw = position_queries(qu, w, head, TERM_B, K, KP)
        if u is not None:
            qu = with_bias(qu, u, head, K, KP)
        score = product(qu, tl.trans(keys), PRECISION)
        if r is not None:
            if age is not None:
                score += looked_up(
                    qw, r, t, p, placed, farthest, first, n_row, stride_rw, stop, K, KP, BLOCK, PRECISION
                )
            else:
                d0 = n_slot + t0 - p0
                rows = table_rows(r, d0 - BLOCK + 1 + a, first, n_row, stride_rw, K, KP)
                near = product(qw, tl.trans(rows), PRECISION)
                rows = table_rows(r, d0 + 1 + a, first, n_row, stride_rw, K, KP)
                far = product(qw, tl.trans(rows), PRECISION)
                score += lined_up(near, far, a, BLOCK)
        score = seen(
            score * (scale * LOG2E), t, p, stored, slot_bias, own_mask, document, positioned, batch, head,
            stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_db,
            n_token, n_slot, stop, slot_limit, own_limit, BIAS_OF_T,
        )  # fmt: skip
        weight = weights(score, top)
        dp = product(do, tl.trans(values), PRECISION)
        ds = score_gradient(weight, dp, dt, seed, program, t, p, n_key, rate)
        if seed is not None:
            weight = tl.where(kept(seed, program, t, p, n_key, rate), weight / (1.0 - rate), 0.0)
        dvalues += product(tl.trans(weight.to(do.dtype)), do, PRECISION)
        dkeys += product(tl.trans((ds * scale).to(qu.dtype)), qu, PRECISION)
        if dbias is not None:
            if BIAS_OF_T:
                where = dbias + batch * stride_sb + head * stride_sh + t[:, None] * stride_st + p[None, :]
                inside = (t < n_token)[:, None] & ((p < n_slot) & (p < stop))[None, :]
                tl.atomic_add(where, ds, mask=inside, sem="relaxed")
            else:
                dadded += tl.sum(ds, axis=0)
    base = program.to(tl.int64) * n_key * K
    store_rows(dk + base, dkeys, p, stop, K, K, KP)
    store_rows(dv + base, dvalues, p, stop, K, K, KP)
    if dbias is not None:
        if not BIAS_OF_T:
            tl.store(dbias + program * n_slot + p, dadded, mask=(p < n_slot) & (p < stop))


@triton.jit(do_not_specialize=SIZES)
def table_kernel(
    q, k, v, r, u, w, slot_bias, own_mask, document, seed, lse, grad, delta, parts,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kp, stride_vb, stride_vh, stride_vp,
    stride_rh, stride_rw, stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_db,
    n_batch, n_head, n_token, n_key, n_slot, n_row, first, slot_limit, own_limit, reach, scale, rate, start,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, TERM_B: tl.constexpr, BIAS_OF_T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """parts (H, splits, diagonals, 2, BLOCK, K): gradients of the near and far rows of each diagonal of tiles.

    Diagonal i holds the tiles of queries x and keys y with i = x - y + tiles of keys - 1, keys counted from `start`.
    """
    diagonal, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    a = tl.arange(0, BLOCK)
    n_key_tile = tl.cdiv(n_key - start, BLOCK)
    shift = diagonal - n_key_tile + 1  # tile of queries minus tile of keys
    d0 = n_slot - start + shift * BLOCK
    x_low = tl.maximum(shift, 0)
    n_tile = tl.maximum(tl.minimum(tl.cdiv(n_token, BLOCK), n_key_tile + shift) - x_low, 0)
    if own_mask is None:
        n_tile = tl.where(d0 + BLOCK - 1 < 0, 0, n_tile)
    if reach is not None:
        n_tile = tl.where(d0 - BLOCK + 1 > reach, 0, n_tile)
    r += head * stride_rh
    near_rows = tl.trans(table_rows(r, d0 - BLOCK + 1 + a, first, n_row, stride_rw, K, KP))
    far_rows = tl.trans(table_rows(r, d0 + 1 + a, first, n_row, stride_rw, K, KP))
    dnear = tl.zeros([BLOCK, KP], tl.float32)
    dfar = tl.zeros([BLOCK, KP], tl.float32)
    n_lane = tl.cdiv(n_batch - split, tl.num_programs(2))
    for step in range(0, n_lane * n_tile):
        batch = split + step // n_tile * tl.num_programs(2)
        x = x_low + step % n_tile
        program = batch * n_head + head
        t = x * BLOCK + a
        p = start + (x - shift) * BLOCK + a
        qu = load_rows(q + batch.to(tl.int64) * stride_qb + head * stride_qh, t, n_token, stride_qt, K, KP)
        keys = load_rows(k + batch.to(tl.int64) * stride_kb + head * stride_kh, p, n_key, stride_kp, K, KP)
        values = load_rows(v + batch.to(tl.int64) * stride_vb + head * stride_vh, p, n_key, stride_vp, K, KP)
        do = load_rows(grad + program.to(tl.int64) * n_token * K, t, n_token, K, K, KP)
        top = tl.load(lse + program * n_token + t, mask=t < n_token, other=0.0)
        dt = tl.load(delta + program * n_token + t, mask=t < n_token, other=0.0)
        qw = position_queries(qu, w, head, TERM_B, K, KP)
        if u is not None:
            qu = with_bias(qu, u, head, K, KP)
        near = product(qw, near_rows, PRECISION)
        far = product(qw, far_rows, PRECISION)
        score = product(qu, tl.trans(keys), PRECISION) + lined_up(near, far, a, BLOCK)
        score = seen(
            score * (scale * LOG2E), t, p, n_slot - p, slot_bias, own_mask, document, None, batch, head,
            stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_db,
            n_token, n_slot, n_key, slot_limit, own_limit, BIAS_OF_T,
        )  # fmt: skip
        dp = product(do, tl.trans(values), PRECISION)
        ds = score_gradient(weights(score, top), dp, dt, seed, program, t, p, n_key, rate) * scale
        strip = permuted(ds, a, BLOCK)
        of_near = tl.where(is_far(BLOCK), 0.0, strip).to(qw.dtype)
        of_far = tl.where(is_far(BLOCK), strip, 0.0).to(qw.dtype)
        dnear += product(tl.trans(of_near), qw, PRECISION)
        dfar += product(tl.trans(of_far), qw, PRECISION)
    place = ((head * tl.num_programs(2) + split) * tl.num_programs(0) + diagonal).to(tl.int64) * 2 * BLOCK * K
    store_rows(parts + place, dnear, a, BLOCK, K, K, KP)
    store_rows(parts + place + BLOCK * K, dfar, a, BLOCK, K, K, KP)
