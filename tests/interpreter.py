"""Triton's interpreter, made quick enough for tests.

It exchanges the whole of `triton.language` for NumPy anew in every call of a helper function (once per launch is
enough), and computes every sum of integers a second time to see whether it overflows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any


@contextmanager
def quick() -> Iterator[None]:
    """Kernels launched inside are interpreted as ever, but `triton.language` is exchanged once per launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    exchange, under_way = interpreter._patch_lang, []

    def once(fn: Any) -> Any:
        if under_way:
            return interpreter._LangPatchScope()
        under_way.append(fn)
        scopes = [exchange(_sees(tl)), exchange(_sees(tl.core))]
        done = interpreter._LangPatchScope()
        done.restore = lambda: (under_way.clear(), *(scope.restore() for scope in reversed(scopes)))
        return done

    builder = interpreter.interpreter_builder
    options = builder.options
    interpreter._patch_lang, builder.options = once, replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter._patch_lang, builder.options = exchange, options


def _sees(module: Any) -> Any:
    """A function among whose global names stands this module: what the interpreter looks for."""
    return type(once_more)(once_more.__code__, {"lang": module})


def once_more() -> None:
    """Lends its code to `_sees`."""
