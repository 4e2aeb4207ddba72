"""Memory strategies. One file each; the line here makes its name known."""

from txl_lightning.memory import (
    associative,
    associative_tokens,
    block_recurrent,
    cache,
    compressive,
    expire,
    knn,
    mix,
    none,
    titans,
    tokens,
    window,
)
from txl_lightning.memory.base import MemoryPlan, MemoryStrategy, TokenMemory, register

__all__ = [
    "MemoryPlan",
    "MemoryStrategy",
    "TokenMemory",
    "associative",
    "associative_tokens",
    "block_recurrent",
    "cache",
    "compressive",
    "expire",
    "knn",
    "mix",
    "none",
    "register",
    "titans",
    "tokens",
    "window",
]
