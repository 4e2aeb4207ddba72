"""Infini-attention: sums of outer products of keys and values, read beside attention and mixed in by a gate.

Munkhdalai et al. 2024, arXiv:2404.07143, per layer and head, with s(x) = elu(x) + 1:

    read    a_mem = s(q) M / (s(q) z)                            the memory of the segments before this one
            heads = g a_mem + (1 - g) attention,   g = sigmoid(gate), one per head
    write   linear   M' = M + sum_t s(k_t)^T v_t                 z' = z + sum_t s(k_t)
            delta    M' = M + sum_t s(k_t)^T (v_t - s(k_t) M / (s(k_t) z)),   z' the same

Queries, keys and values are those of the layer's attention, before positions. M (K, K) and z (K,) are kept and summed
in at least float32: z grows with the text. Nothing is forgotten.

Where the paper is silent: while memory is empty the gate is closed (0/0 else); the denominator is at least 1e-6. The
paper cuts a long input inside each layer and learns through all of it, which is `gradient=carry` with
trainer.bptt_segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import LayerMemoryConfig, ModelConfig, key
from txl_lightning.memory.base import (
    Aux,
    LayerHandle,
    MemoryPlan,
    MemoryStrategy,
    Segment,
    State,
    Tap,
    full_precision,
    plan_per_layer,
    register,
)
from txl_lightning.types import detach, lane_where


@dataclass(frozen=True, kw_only=True)
class AssociativeConfig(LayerMemoryConfig):
    """Keys of `memory=associative`."""

    unbounded: ClassVar[bool] = True

    name: str = key("associative", "a matrix of keys and values per head, read beside attention")
    rule: str = key("linear", "linear: add; delta: add what memory does not say yet", choices=("linear", "delta"))
    gradient: str = key(
        "carry",
        "carry: what to write is learned, trainer.bptt_segments segments back; stop: the graph ends at the border",
        choices=("stop", "carry"),
    )


class Associative(MemoryStrategy):
    """One matrix per head.

    State, at least float32, the same in both forms: matrix (B, H, K, K) with keys along its first K, norm (B, H, K).
    Parameter: gate (H,); 0 mixes half and half.
    """

    inner_resets = True
    token_by_token = True

    def __init__(self, config: AssociativeConfig, model: ModelConfig) -> None:
        super().__init__()
        self.gradient = config.gradient
        self.delta = config.rule == "delta"
        self.n_head, self.d_head = model.n_head, model.d_head
        self.gate = nn.Parameter(torch.zeros(model.n_head))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        pair = (self.n_head, self.d_head)
        wide = torch.promote_types(dtype, torch.float32)
        matrix = torch.zeros(batch, *pair, self.d_head, device=device, dtype=wide)
        return {"matrix": matrix, "norm": torch.zeros(batch, *pair, device=device, dtype=wide)}

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, None]:
        known = (state["norm"].sum(dim=-1) > 0)[..., None, None]  # (B, H, 1, 1); features are above 0
        if segment.document is not None:
            known = known & (segment.document == segment.document[:, :1])[:, None, :, None]
        wide = state["norm"].dtype
        gate = self.gate.to(wide).sigmoid()[:, None, None] * known
        mixed = gate * self._read(state, feature(tap.q_BHTK, wide)) + (1 - gate) * heads_BHTK
        return mixed, None

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        state, real_BT = self._of_last_document(state, tap, segment)
        wide = state["norm"].dtype
        key_feature = feature(tap.k_BHTK, wide) * real_BT[:, None, :, None]
        value = tap.v_BHTK.to(wide)
        if self.delta:
            value = value - self._read(state, key_feature)
        with full_precision(value.device):
            news = key_feature.transpose(-1, -2) @ value
        new = {"matrix": state["matrix"] + news, "norm": state["norm"] + key_feature.sum(dim=2)}
        new = detach(new) if self.gradient == "stop" else new
        return new, Aux(metrics={"gate": self.gate.sigmoid().mean(), "update": _share(news, new["matrix"], segment)})

    def _read(self, state: State, feature_BHTK: Tensor) -> Tensor:
        """(B, H, T, K): what memory answers to each row; 0 while it is empty."""
        with full_precision(feature_BHTK.device):
            weight = feature_BHTK @ state["norm"][..., None]
            return feature_BHTK @ state["matrix"] / weight.clamp(min=1e-6)

    def _of_last_document(self, state: State, tap: Tap, segment: Segment) -> tuple[State, Tensor]:
        """The state and the mask (B, T) of the tokens that belong to the document the segment ends in."""
        real = segment.mask(tap.x_BTD.shape[1])
        if segment.document is None:
            return state, real
        last = segment.document.gather(1, (segment.length - 1).clamp(min=0)[:, None])
        goes_on = (segment.document[:, :1] == last)[:, 0]
        kept = {name: lane_where(goes_on, old, torch.zeros_like(old)) for name, old in state.items()}
        return kept, real & (segment.document == last)


def feature(x_BHTK: Tensor, dtype: torch.dtype) -> Tensor:
    """elu(x) + 1: above 0."""
    return F.elu(x_BHTK.to(dtype)) + 1


@torch.no_grad()
def _share(news: Tensor, matrix: Tensor, segment: Segment) -> Tensor:
    """Norm of what a segment added over the norm of what there is now, mean over lanes with tokens."""
    share = news.flatten(1).norm(dim=1) / matrix.flatten(1).norm(dim=1).clamp(min=1e-6)
    alive = segment.length > 0
    return (share * alive).sum() / alive.sum().clamp(min=1)


@register("associative", config=AssociativeConfig, paper="Munkhdalai et al. 2024, arXiv:2404.07143")
def build(config: AssociativeConfig, model: ModelConfig) -> MemoryPlan:
    """A matrix in each chosen layer."""
    return plan_per_layer(config, model, lambda: Associative(config, model))
