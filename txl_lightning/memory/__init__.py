"""Memory strategies. One file each; the line here makes its name known."""

from txl_lightning.memory import cache, mix, none
from txl_lightning.memory.base import MemoryPlan, MemoryStrategy, TokenMemory, register

__all__ = ["MemoryPlan", "MemoryStrategy", "TokenMemory", "cache", "mix", "none", "register"]
