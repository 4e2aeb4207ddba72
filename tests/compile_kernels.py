"""Compiles the kernels for a GPU that need not be there, and prints what each takes of its shared memory and registers.

python tests/compile_kernels.py CASE ...        one process, without TRITON_INTERPRET
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from txl_lightning.model.kernels import backward, columns, cross_entropy, launch
from txl_lightning.model.kernels.forward import forward_kernel

HOPPER = GPUTarget("cuda", 90, 32)
KERNELS = {
    "forward": forward_kernel,
    "query": backward.query_kernel,
    "key": backward.key_kernel,
    "table": backward.table_kernel,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd head": {"width": 41},
    "everything": {"looked_up": True, "seed": True, "mask": True, "bias_of_t": True},
    "float32": {"dtype": torch.float32},
    "wide": {"width": 256},
    "wide float32": {"dtype": torch.float32, "width": 128},
    "few tokens": {"n_token": 4},
    "content alone": {"table": False},
}
LOSSES = {
    "losses bfloat16": (torch.bfloat16, 20_003),
    "losses float32": (torch.float32, 20_003),
    "losses few columns": (torch.bfloat16, 204),
}
NAMES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def operands(
    *,
    dtype: torch.dtype = torch.bfloat16,
    width: int = 64,
    n_token: int = 100,
    looked_up: bool = False,
    seed: bool = False,
    mask: bool = False,
    bias_of_t: bool = False,
    table: bool = True,
) -> tuple[launch.Operands, launch.Numbers]:
    """Shapes and types, no numbers."""
    n_slot = 70

    def of(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    q, k = of(2, 3, n_token, width), of(2, 3, n_slot + n_token, width)
    ops = launch.Operands(
        *(q, k, k),
        *((of(3, n_slot + n_token + 1, width), of(3, width), of(3, width)) if table else (None, None, None)),
        of(2, 3, n_token if bias_of_t else 1, n_slot, kind=torch.float32),
        of(1, 1, n_token, n_token, kind=torch.float32) if mask else None,
        of(2, n_token, kind=torch.int64) if mask else None,
        of(2, n_slot, kind=torch.int64) if looked_up else None,
        of(n_slot, kind=torch.int64) if looked_up else None,
        of(n_slot, kind=torch.bool) if looked_up else None,
        of(1, kind=torch.int64) if seed else None,
    )
    limit = 30 if mask else None
    return ops, launch.Numbers(n_slot, n_slot + n_token, limit, limit, 0.1, 0.1 if seed else 0.0, True)


def compiled(name: str, ops: launch.Operands, numbers: launch.Numbers) -> dict[str, int]:
    """One kernel, with the arguments that `launch` would give it."""
    kernel, tiles = KERNELS[name], launch.tiles_of(ops)
    warps = tiles.forward_warps if name == "forward" else tiles.backward_warps
    wide = torch.empty(1, dtype=torch.float32, device="meta")
    like = ops.q_BHTK
    given = {
        **launch._tensors(ops),
        **launch._common(ops, numbers, tiles, warps),
        **{"out": like, "grad": like, "dq": like, "dk": like, "dv": like},
        **{"lse": wide, "delta": wide, "dr": wide, "du": wide, "dw": wide, "dbias": wide, "parts": wide},
        **{"start": 3, "stop": 77, "n_batch": 2, "ATOMIC": True},
    }
    return found_of(kernel, given, warps=warps, stages=tiles.stages)


def of_losses(kernel: Any, dtype: torch.dtype, n_column: int) -> dict[str, int]:
    """One kernel of cross-entropy, with the arguments that `cross_entropy` would give it."""
    logits = torch.empty(5, n_column, dtype=dtype, device="meta")
    wide, target = (torch.empty(5, dtype=kind, device="meta") for kind in (torch.float32, torch.int64))
    cut = cross_entropy._cut(logits)
    given = {"logits": logits, "target": target, "nll": wide, "grad": wide, **cut}
    return found_of(kernel, given, warps=cut["num_warps"], stages=3)


def found_of(kernel: Any, given: dict[str, Any], *, warps: int, stages: int) -> dict[str, int]:
    """What a kernel takes once it is compiled."""
    signature, constants = {}, {}
    for argument, parameter in zip(kernel.arg_names, kernel.params, strict=True):
        value = given[argument]
        if parameter.is_constexpr or value is None:
            signature[argument], constants[argument] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[argument] = NAMES[value.dtype]
        else:
            signature[argument] = "fp32" if isinstance(value, float) else "i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    found = compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})
    return {"shared": found.metadata.shared, "tensor_cores": found.asm["ptx"].count("mma")}


def main() -> None:
    for case in sys.argv[1:]:
        if case in LOSSES:
            for name, kernel in (("losses", columns.losses_kernel), ("gradient", columns.gradient_kernel)):
                print(json.dumps({"case": case, "kernel": name, **of_losses(kernel, *LOSSES[case])}), flush=True)
            continue
        ops, numbers = operands(**CASES[case])
        for name in KERNELS:
            if name == "table" and (ops.age is not None or ops.r_HWK is None):
                continue
            print(json.dumps({"case": case, "kernel": name, **compiled(name, ops, numbers)}), flush=True)


if __name__ == "__main__":
    main()
