"""Rows that strategies keep of what a layer read, in the form the state asks for, and a few things done with them.

    hidden form     {"hidden": (B, N, D)}                          inputs of the layer
    projected form  {"keys": (B, N, G, K), "values": the same}     with G key and value heads (G = H unless `n_kv_head`)

Newest row last. Rows of several kinds live in one state under a prefix: `memory_hidden`, `compressed_hidden`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from txl_lightning.config import ModelConfig
from txl_lightning.memory.base import LayerHandle, State, Tap
from txl_lightning.types import MASKED


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a row is made of in a layer.

    Attributes:
        d_model: D.
        d_head: K.
        n_head: H.
        n_kept: G heads of keys and values that are kept, each for H / G heads that are copies of one another.
    """

    d_model: int
    d_head: int
    n_head: int
    n_kept: int

    @classmethod
    def of(cls, model: ModelConfig) -> Rows:
        """The rows of a model's layers."""
        return cls(d_model=model.d_model, d_head=model.d_head, n_head=model.n_head, n_kept=model.kv_heads)

    def empty(self, batch: int, n_row: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        """N rows of zeros for each of `batch` lanes."""
        if form == "hidden":
            return {"hidden": torch.zeros(batch, n_row, self.d_model, device=device, dtype=dtype)}
        keys = torch.zeros(batch, n_row, self.n_kept, self.d_head, device=device, dtype=dtype)
        return {"keys": keys, "values": keys.clone()}

    def of_segment(self, tap: Tap, *, form: str) -> State:
        """The rows (B, T, ...) of the segment under way, with their graph."""
        if form == "hidden":
            return {"hidden": tap.x_BTD}
        return self._kept(tap.k_BHTK, tap.v_BHTK)

    def of_hidden(self, hidden_BND: Tensor, layer: LayerHandle, *, form: str) -> State:
        """Rows (B, N, ...) made of layer inputs."""
        return {"hidden": hidden_BND} if form == "hidden" else self._kept(*layer.project_slots(hidden_BND))

    def offered(self, rows: State) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """`hidden` and `keys_values` of `Slots`."""
        if "hidden" in rows:
            return rows["hidden"], None
        return None, (self._for_all_heads(rows["keys"]), self._for_all_heads(rows["values"]))

    def _kept(self, keys_BHNK: Tensor, values_BHNK: Tensor) -> State:
        """One head of each group of copies."""
        step = self.n_head // self.n_kept
        return {
            name: heads[:, ::step].transpose(1, 2) for name, heads in (("keys", keys_BHNK), ("values", values_BHNK))
        }

    def _for_all_heads(self, kept_BNGK: Tensor) -> Tensor:
        """(B, H, N, K): each kept head for every head of its group."""
        heads, group = kept_BNGK.transpose(1, 2), self.n_head // self.n_kept
        return heads if group == 1 else heads.repeat_interleave(group, dim=1)


def form_of(state: State, prefix: str = "") -> str:
    """Which form the rows under a prefix have."""
    return "hidden" if f"{prefix}hidden" in state else "projected"


def with_prefix(prefix: str, rows: State) -> State:
    """The rows' keys as they stand in a state with several kinds of rows."""
    return {f"{prefix}{name}": tensor for name, tensor in rows.items()}


def rows_of(state: State, prefix: str) -> State:
    """The rows under a prefix, without it."""
    names = ("hidden",) if form_of(state, prefix) == "hidden" else ("keys", "values")
    return {name: state[f"{prefix}{name}"] for name in names}


def falling_ages(size: int, *, device: torch.device) -> Tensor:
    """(1, N) int64: N, ..., 2, 1."""
    return torch.arange(size, 0, -1, device=device)[None]


def empty_bias(filled_B: Tensor, size: int) -> Tensor:
    """(B, 1, 1, N) float32: MASKED on the rows that nothing was written to; the newest `filled` are in use."""
    empty = falling_ages(size, device=filled_B.device) > filled_B[:, None]
    return torch.zeros_like(empty, dtype=torch.float32).masked_fill(empty, MASKED)[:, None, None]
