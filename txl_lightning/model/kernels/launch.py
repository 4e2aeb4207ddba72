"""From tensors to kernel launches: sizes, strides, tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from txl_lightning.model.kernels import interpreted
from txl_lightning.model.kernels.backward import key_kernel, query_kernel, table_kernel
from txl_lightning.model.kernels.forward import forward_kernel

SPLITS = 4  # groups of lanes that one diagonal's sums are spread over


class Tiles(NamedTuple):
    """How the kernels are cut: queries and keys of a tile, warps of a program, stages of its pipeline."""

    block: int
    forward_warps: int
    backward_warps: int
    stages: int


class Operands(NamedTuple):
    """What is attended to. P = S + T keys, slots first; W rows of distances."""

    q_BHTK: Tensor
    k_BHPK: Tensor
    v_BHPK: Tensor
    r_HWK: Tensor | None  # distances first, first - 1, ...
    u_HK: Tensor | None
    v_HK: Tensor | None
    slot_bias: Tensor | None  # (1|B, 1|H, 1|T, S) additive
    own_mask: Tensor | None  # (1|B, 1, T, T) additive, of the tokens among themselves; None: causal
    document_BT: Tensor | None  # keys of other documents are not seen
    age: Tensor | None  # (1|B, S); None: S, ..., 1
    farthest_S: Tensor | None  # distances at which slots stop growing further away; with `age`
    positioned_S: Tensor | None  # bool, which slots have a position; with `age`
    seed: Tensor | None  # (1,) int64 of dropout


class Numbers(NamedTuple):
    """What is no tensor."""

    n_slot: int
    first: int
    slot_limit: int | None  # largest distance at which a slot with a position is seen
    own_limit: int | None  # largest distance at which a token of the segment is seen
    scale: float
    rate: float  # of dropout
    term_b: bool  # whether queries meet distances, or only v of the paper does


_forced: list[Tiles] = []


@contextmanager
def tiles_as(tiles: Tiles) -> Iterator[None]:
    """Kernels are cut like this, whatever their sizes."""
    _forced.append(tiles)
    try:
        yield
    finally:
        _forced.pop()


def tiles_of(ops: Operands) -> Tiles:
    """How the kernels are cut for these sizes."""
    if _forced:
        return _forced[-1]
    n_token, width = ops.q_BHTK.shape[2], ops.q_BHTK.shape[3]
    if interpreted() or n_token <= 16:
        return Tiles(16, 4, 4, 2)
    wide, halves = _padded(width), ops.q_BHTK.element_size() == 2
    if n_token <= 32 or wide > 128 or not halves:
        return Tiles(32, 4, 4, 2 if wide * ops.q_BHTK.element_size() <= 256 else 1)
    return Tiles(64, 4, 8, 2 if wide <= 64 else 1)  # so cut, the compiler spills next to no registers


def forward(ops: Operands, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Heads' outputs (B, H, T, K) and each query's log-sum-exp (B H, T), float32, in units of log 2."""
    batch, n_head, n_token, width = ops.q_BHTK.shape
    out = ops.q_BHTK.new_empty(batch, n_head, n_token, width)
    lse = ops.q_BHTK.new_empty(batch * n_head, n_token, dtype=torch.float32)
    tiles = tiles_of(ops)
    grid = (triton.cdiv(n_token, tiles.block), batch * n_head)
    forward_kernel[grid](**_tensors(ops), out=out, lse=lse, **_common(ops, numbers, tiles, tiles.forward_warps))
    return out, lse


class Gradients(NamedTuple):
    """Those of the operands of the same names; None where there is no such operand."""

    q_BHTK: Tensor
    k_BHPK: Tensor
    v_BHPK: Tensor
    r_HWK: Tensor | None
    u_HK: Tensor | None
    v_HK: Tensor | None
    slot_bias: Tensor | None


def backward(
    ops: Operands, numbers: Numbers, grad: Tensor, out: Tensor, lse: Tensor, *, bias_wanted: bool, in_order: bool
) -> Gradients:
    """Gradients of everything that may have one.

    Args:
        grad, out: (B, H, T, K), contiguous: the gradient of the outputs, and the outputs.
        lse: as `forward` gave it.
        bias_wanted: whether that of `slot_bias` is among them.
        in_order: sum r's gradient over lanes and queries in a fixed order where ages are contiguous.
    """
    q, k, v = ops.q_BHTK, ops.k_BHPK, ops.v_BHPK
    batch, n_head, n_token, width = q.shape
    tiles = tiles_of(ops)
    common = _common(ops, numbers, tiles, tiles.backward_warps)
    n_tile = triton.cdiv(n_token, tiles.block)
    delta = torch.empty_like(lse)
    dq, dk, dv = (torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (q, k, v))
    dr = None if ops.r_HWK is None else torch.zeros(ops.r_HWK.shape, dtype=torch.float32, device=q.device)
    du, dw = (
        None if bias is None else q.new_empty(batch, n_head, n_tile, width, dtype=torch.float32)
        for bias in (ops.u_HK, ops.v_HK)
    )
    seen: dict[str, Any] = {"lse": lse, "grad": grad, "delta": delta}
    query_kernel[(n_tile, batch * n_head)](
        **_tensors(ops), **seen, out=out, dq=dq, dr=dr, du=du, dw=dw, ATOMIC=not in_order, **common
    )
    dbias = _launch_keys(ops, numbers, seen, common, tiles, dk=dk, dv=dv, bias_wanted=bias_wanted)
    if dr is not None and in_order:
        dr += _table_gradient(ops, numbers, seen, common, tiles)
    du, dw = (None if part is None else part.sum(dim=(0, 2)).to(q.dtype) for part in (du, dw))
    return Gradients(dq, dk, dv, None if dr is None else dr.to(q.dtype), du, dw, dbias)


def _launch_keys(
    ops: Operands,
    numbers: Numbers,
    seen: dict[str, Any],
    common: dict[str, Any],
    tiles: Tiles,
    *,
    dk: Tensor,
    dv: Tensor,
    bias_wanted: bool,
) -> Tensor | None:
    """Fills dk and dv, and returns the gradient of the slots' bias if it is wanted."""
    bias, (batch, n_head, n_key, _) = ops.slot_bias, ops.k_BHPK.shape
    dbias, of_t = None, common["BIAS_OF_T"]
    if bias is not None and bias_wanted:
        shape = bias.shape if of_t else (batch, n_head, 1, numbers.n_slot)
        dbias = torch.zeros(shape, dtype=torch.float32, device=bias.device)
    tensors = _tensors(ops)
    kinds = [(0, n_key, tensors)]
    if ops.age is not None:
        own = {**tensors, "age": None, "farthest": None, "positioned": None}
        kinds = [(0, numbers.n_slot, tensors), (numbers.n_slot, n_key, own)]
    for start, stop, given in kinds:
        if stop > start:
            grid = (triton.cdiv(stop - start, tiles.block), batch * n_head)
            key_kernel[grid](**given, **seen, dk=dk, dv=dv, dbias=dbias, start=start, stop=stop, **common)
    if dbias is None or bias is None:
        return None
    return dbias.sum_to_size(bias.shape).to(bias.dtype)


def _table_gradient(
    ops: Operands, numbers: Numbers, seen: dict[str, Any], common: dict[str, Any], tiles: Tiles
) -> Tensor:
    """(H, W, K) float32, each diagonal of tiles summed by one program."""
    assert ops.r_HWK is not None
    batch, n_head, n_token, width = ops.q_BHTK.shape
    start = numbers.n_slot if ops.age is not None else 0
    n_query_tile = triton.cdiv(n_token, tiles.block)
    n_key_tile = triton.cdiv(ops.k_BHPK.shape[2] - start, tiles.block)
    n_diagonal, splits = n_query_tile + n_key_tile - 1, min(SPLITS, batch)
    parts = _like(seen["lse"], n_head, splits, n_diagonal, 2, tiles.block, width)
    skipped = ("age", "farthest", "positioned")
    given = {name: tensor for name, tensor in _tensors(ops).items() if name not in skipped}
    sizes = {name: number for name, number in common.items() if name != "stride_ab"}
    table_kernel[(n_diagonal, n_head, splits)](**given, **seen, parts=parts, n_batch=batch, start=start, **sizes)
    near, far = parts.sum(dim=1).unbind(dim=2)  # (H, diagonals, BLOCK, K) each
    # the far rows of a diagonal are the near rows of the next one
    runs = near.new_zeros(n_head, n_diagonal + 1, tiles.block, width)
    runs[:, :-1] += near
    runs[:, 1:] += far
    run = runs.flatten(1, 2)  # rising distances, without a gap
    nearest, n_row = numbers.n_slot - start - n_key_tile * tiles.block + 1, ops.r_HWK.shape[1]
    of_row_0 = numbers.first - nearest  # place of that distance in the run; rows fall
    high, low = min(run.shape[1] - 1, of_row_0), max(0, of_row_0 - n_row + 1)
    rows = run[:, low : high + 1].flip(1)
    return F.pad(rows, (0, 0, of_row_0 - high, n_row - 1 - (of_row_0 - low)))


def _like(lse: Tensor, *shape: int) -> Tensor:
    """Unwritten float32 memory beside another tensor."""
    return torch.empty(shape, dtype=torch.float32, device=lse.device)


def _tensors(ops: Operands) -> dict[str, Tensor | None]:
    """The operands by the names that kernels give them."""
    return {
        "q": ops.q_BHTK,
        "k": ops.k_BHPK,
        "v": ops.v_BHPK,
        "r": ops.r_HWK,
        "u": ops.u_HK,
        "w": ops.v_HK,
        "slot_bias": ops.slot_bias,
        "own_mask": ops.own_mask,
        "document": ops.document_BT,
        "age": ops.age,
        "farthest": ops.farthest_S,
        "positioned": ops.positioned_S,
        "seed": ops.seed,
    }


def _padded(width: int) -> int:
    """Columns that a head of this width takes on the chip."""
    return max(16, triton.next_power_of_2(width))


def _common(ops: Operands, numbers: Numbers, tiles: Tiles, warps: int) -> dict[str, Any]:
    """Strides, sizes and constants that every kernel takes."""
    q, k, v, r, bias = ops.q_BHTK, ops.k_BHPK, ops.v_BHPK, ops.r_HWK, ops.slot_bias
    found: dict[str, Any] = {}
    for letter, tensor, row in (("q", q, "t"), ("k", k, "p"), ("v", v, "p")):
        found |= {f"stride_{letter}{dim}": tensor.stride(place) for place, dim in enumerate(("b", "h", row))}
    found |= {"stride_rh": 0 if r is None else r.stride(0), "stride_rw": 0 if r is None else r.stride(1)}
    found |= {f"stride_s{dim}": _stride(bias, place) for place, dim in enumerate(("b", "h", "t"))}
    found |= {"stride_mb": _stride(ops.own_mask, 0), "stride_mt": _stride(ops.own_mask, 2)}
    found |= {"stride_ab": _stride(ops.age, 0), "stride_db": _stride(ops.document_BT, 0)}
    width = q.shape[3]
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return {
        **found,
        "n_head": q.shape[1],
        "n_token": q.shape[2],
        "n_key": k.shape[2],
        "n_slot": numbers.n_slot,
        "n_row": 0 if r is None else r.shape[1],
        "first": numbers.first,
        "slot_limit": numbers.slot_limit,
        "own_limit": numbers.own_limit,
        "reach": _reach(ops, numbers),
        "scale": numbers.scale,
        "rate": numbers.rate,
        "K": width,
        "KP": _padded(width),
        "BLOCK": tiles.block,
        "TERM_B": numbers.term_b,
        "BIAS_OF_T": bias is not None and bias.shape[2] > 1,
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": warps,
        "num_stages": tiles.stages,
    }


def _stride(tensor: Tensor | None, dim: int) -> int:
    """0 where the tensor is the same for all."""
    return 0 if tensor is None or tensor.shape[dim] == 1 else tensor.stride(dim)


def _reach(ops: Operands, numbers: Numbers) -> int | None:
    """Largest distance at which any key is seen, where distances are contiguous; None: any."""
    slots = numbers.slot_limit if numbers.n_slot else -1
    if ops.age is not None or ops.own_mask is not None or slots is None or numbers.own_limit is None:
        return None
    return max(slots, numbers.own_limit)
