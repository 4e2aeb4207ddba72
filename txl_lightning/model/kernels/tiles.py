"""What the kernels do with one tile of BLOCK queries times BLOCK keys, all of it on the chip.

The distance of query a and key b of a tile is d_0 + a - b, so a tile sees 2 BLOCK - 1 distances. Position scores of its
queries with these rows of the table are two products of the shape of the content scores: `near` (d_0 - BLOCK + 1 to
d_0) and `far` (d_0 + 1 to d_0 + BLOCK). Element (a, b) stands in column (a - b - 1) mod BLOCK: of `far` where that is
less than a, of `near` elsewhere. So one row-wise permutation, its own inverse, lines the scores up, and in backward it
spreads their gradients back over the distances.

t and p are the places of queries (from 0) and keys (slots first), `age` the distance of each key to query 0 (negative
for later ones), so the distance of a pair is t + age. Scores are in units of log 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from txl_lightning.model.kernels import interpreted

LOW = tl.constexpr(-1.0e38)  # score of a pair that is not seen; finite, so nothing is NaN where a tile holds no other
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(interpreted())
SIZES = [
    *("n_batch", "n_head", "n_token", "n_key", "n_slot", "n_row", "first", "slot_limit", "own_limit", "reach"),
    *("start", "stop"),
]
"""Arguments that change from call to call: no kernel is compiled for special values of them."""
NEVER = tl.constexpr(1 << 30)  # larger than any age


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Matrix product, summed in float32. Triton's interpreter takes bfloat16 for whole numbers there."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def load_rows(base, row, n_row, stride, K: tl.constexpr, KP: tl.constexpr):
    """[rows, KP]: the rows of a matrix with K columns of stride 1; 0 where there is none."""
    column = tl.arange(0, KP)
    inside = ((row >= 0) & (row < n_row))[:, None]
    if K != KP:
        inside = inside & (column < K)[None, :]
    return tl.load(base + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, value, row, n_row, stride, K: tl.constexpr, KP: tl.constexpr):
    """The inverse of `load_rows`."""
    column = tl.arange(0, KP)
    inside = (row < n_row)[:, None] & (column < K)[None, :]
    tl.store(base + row[:, None] * stride + column[None, :], value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def with_bias(q, bias, head, K: tl.constexpr, KP: tl.constexpr):
    """Queries plus a bias of their head, rounded as queries are."""
    column = tl.arange(0, KP)
    row = tl.load(bias + head * K + column, mask=column < K, other=0.0)
    return (q.to(tl.float32) + row[None, :].to(tl.float32)).to(q.dtype)


@triton.jit
def position_queries(q, w, head, TERM_B: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """What meets the distance table: q + v of the paper, or one of the two."""
    found = q
    if not TERM_B:
        found = (q.to(tl.float32) * 0.0).to(q.dtype)
    if w is not None:
        found = with_bias(found, w, head, K, KP)
    return found


@triton.jit
def table_rows(r, distance, first, n_row, stride, K: tl.constexpr, KP: tl.constexpr):
    """[BLOCK, KP] rows of the distance table; beyond its ends the last one there is."""
    row = tl.minimum(tl.maximum(first - distance, 0), n_row - 1)
    return load_rows(r, row, n_row, stride, K, KP)


@triton.jit
def permuted(strip, column, BLOCK: tl.constexpr):
    """[BLOCK, BLOCK]: element (a, b) is element (a, (a - column_b - 1) mod BLOCK) of `strip`."""
    a = tl.arange(0, BLOCK)
    return tl.gather(strip, (a[:, None] - column[None, :] - 1) & (BLOCK - 1), axis=1)


@triton.jit
def is_far(BLOCK: tl.constexpr):
    """[BLOCK, BLOCK] whether element (a, j) of a tile's permuted scores belongs to `far`."""
    a = tl.arange(0, BLOCK)
    return a[None, :] < a[:, None]


@triton.jit
def lined_up(near, far, column, BLOCK: tl.constexpr):
    """[BLOCK, BLOCK] position scores of queries and the keys in these columns of a tile."""
    return permuted(tl.where(is_far(BLOCK), far, near), column, BLOCK)


@triton.jit
def next_age(age, beyond, valid):
    """The smallest age from `beyond` on; NEVER: there is none."""
    return tl.min(tl.where(valid & (age >= beyond), age, NEVER), axis=0)


@triton.jit
def capped_rows(r, farthest, p, stop, first, n_row, stride, K: tl.constexpr, KP: tl.constexpr):
    """The distances at which slots stop growing further away, and their rows of the table."""
    cap = tl.load(farthest + p, mask=p < stop, other=NEVER).to(tl.int32)
    return cap, table_rows(r, cap, first, n_row, stride, K, KP)


@triton.jit
def past(t, age, cap):
    """[BLOCK, BLOCK] whether a slot that has a position stands further away than it may."""
    return (age < NEVER)[None, :] & (t[:, None] + age[None, :] > cap[None, :])


@triton.jit
def looked_up(
    qw, r, t, p, age, farthest, first, n_row, stride, stop,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK] position scores of slots of any age, in as many products as their ages fill runs of BLOCK."""
    j = tl.arange(0, BLOCK)
    valid = p < stop
    found = tl.zeros([BLOCK, BLOCK], tl.float32)
    start = next_age(age, -NEVER, valid)
    t0 = tl.min(t, axis=0)
    while start < NEVER:
        # a tile of made-up keys whose ages fall by one from column to column
        d0 = t0 + start + BLOCK - 1
        rows = table_rows(r, d0 - BLOCK + 1 + j, first, n_row, stride, K, KP)
        near = product(qw, tl.trans(rows), PRECISION)
        rows = table_rows(r, d0 + 1 + j, first, n_row, stride, K, KP)
        far = product(qw, tl.trans(rows), PRECISION)
        inside = valid & (age >= start) & (age < start + BLOCK)
        column = tl.where(inside, BLOCK - 1 - (age - start), 0)
        found = tl.where(inside[None, :], lined_up(near, far, column, BLOCK), found)
        start = next_age(age, start + BLOCK, valid)
    if farthest is not None:
        cap, rows = capped_rows(r, farthest, p, stop, first, n_row, stride, K, KP)
        beyond = past(t, age, cap)
        found = tl.where(beyond, product(qw, tl.trans(rows), PRECISION), found)
    return found


@triton.jit
def seen(
    score, t, p, age, slot_bias, own_mask, document, positioned, batch, head,
    stride_sb, stride_sh, stride_st, stride_mb, stride_mt, stride_db,
    n_token, n_slot, stop, slot_limit, own_limit, BIAS_OF_T: tl.constexpr,
):  # fmt: skip
    """Scores with what is added to them; LOW where the key is not seen."""
    distance = t[:, None] + age[None, :]
    slot = (p < n_slot)[None, :]
    real = (t < n_token)[:, None] & (p < stop)[None, :]
    shown = real
    if own_mask is None:
        shown = shown & (slot | (distance >= 0))
    else:
        where = own_mask + batch * stride_mb + t[:, None] * stride_mt + (p - n_slot)[None, :]
        score += tl.load(where, mask=real & (p >= n_slot)[None, :], other=0.0).to(tl.float32) * LOG2E
    if own_limit is not None:
        shown = shown & (slot | (distance <= own_limit))
    if slot_limit is not None:
        near = distance <= slot_limit
        if positioned is not None:
            near = near | (tl.load(positioned + p, mask=p < n_slot, other=1) == 0)[None, :]
        shown = shown & (near | (p >= n_slot)[None, :])
    if document is not None:
        of_query = tl.load(document + batch * stride_db + t, mask=t < n_token, other=-1)
        key = tl.maximum(p - n_slot, 0)  # slots are seen by the document that runs at token 0
        of_key = tl.load(document + batch * stride_db + key, mask=p < stop, other=-1)
        shown = shown & (of_query[:, None] == of_key[None, :])
    if slot_bias is not None:
        base = slot_bias + batch * stride_sb + head * stride_sh
        if BIAS_OF_T:
            where = base + t[:, None] * stride_st + p[None, :]
            score += tl.load(where, mask=real & slot, other=0.0).to(tl.float32) * LOG2E
        else:
            score += tl.load(base + p, mask=(p < n_slot) & (p < stop), other=0.0).to(tl.float32)[None, :] * LOG2E
    return tl.where(shown, tl.maximum(score, LOW), LOW)


@triton.jit
def kept(seed, program, t, p, n_key, rate):
    """[BLOCK, BLOCK] bool: the weights that dropout leaves, the same in forward and backward."""
    key = tl.load(seed) + program
    return tl.rand(key, t[:, None] * n_key + p[None, :]) >= rate


@triton.jit
def ages_of_slots(age, positioned, p, stop):
    """Ages of a tile of slots as they are stored; where they have no position NEVER stands in the second result."""
    found = tl.load(age + p, mask=p < stop, other=0).to(tl.int32)
    placed = found
    if positioned is not None:
        placed = tl.where(tl.load(positioned + p, mask=p < stop, other=0) != 0, found, NEVER)
    return found, placed
