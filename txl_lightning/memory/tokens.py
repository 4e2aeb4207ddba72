"""Recurrent Memory Transformer: memory is m vectors, read and written as extra tokens of the segment.

Bulatov et al. 2022, arXiv:2207.06881:

    read    input = [mem ; x ; mem]                   the first block is read, the last block writes
    write   mem' = the last layer's output at the last block

The reading block comes before all real tokens and is seen by them; the writing block sees the whole segment. Within a
block tokens see one another in both directions. They have ordinary relative distances in the extended sequence, and no
position where `model.position` is absolute. The initial memory is learned. Nothing else carries over, so the reach is
unlimited, and what is worth keeping is learned through the segments: `gradient=carry` and trainer.bptt_segments matter
more than the size.

Where we differ: truncated back-propagation really cuts (the paper's code detaches a local name, so its depth has no
effect). Under pre-norm the written vectors are normalised (no weights): the last layer's sum is not, and would grow
from segment to segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import MemoryConfig, ModelConfig, key
from txl_lightning.memory.base import MemoryPlan, Segment, State, TokenMemory, register


@dataclass(frozen=True, kw_only=True)
class TokensConfig(MemoryConfig):
    """Keys of `memory=tokens`."""

    unbounded: ClassVar[bool] = True
    size_key: ClassVar[str | None] = "n_tokens"

    name: str = key("tokens", "memory vectors read and written as tokens around the segment")
    n_tokens: int = key(8, "memory vectors, per lane; the segment grows by twice as many tokens", minimum=1)
    read_slots: bool = key(False, "whether they see the slots of other memories in their layers (memory=mix)")
    gradient: str = key(
        "carry",
        "carry: what to write is learned, trainer.bptt_segments segments back; stop: the graph ends at the border",
        choices=("stop", "carry"),
    )


class Tokens(TokenMemory):
    """m memory vectors for the whole model.

    State: memory (B, m, D), in both forms. Parameter: rows (m, D), the memory of a lane that starts anew.
    """

    token_by_token = True

    def __init__(self, config: TokensConfig, model: ModelConfig) -> None:
        super().__init__()
        self.n_prefix = self.n_suffix = config.n_tokens
        self.prefix_reads_slots = self.suffix_reads_slots = config.read_slots
        self.gradient = config.gradient
        self.normed = model.pre_norm
        # as large as embeddings are
        self.rows = nn.Parameter(model.init_std * model.d_model**0.5 * torch.randn(config.n_tokens, model.d_model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        return {"memory": torch.zeros(batch, *self.rows.shape, device=device, dtype=dtype)}

    def initial(self) -> State:
        return {"memory": self.rows}

    def wrap(self, state: State, x_BTD: Tensor, segment: Segment) -> Tensor:
        memory = state["memory"].to(x_BTD.dtype)
        return torch.cat([memory, x_BTD, memory], dim=1)

    def write(self, state: State, hidden: Tensor, segment: Segment) -> State:
        memory = hidden[:, hidden.shape[1] - self.n_suffix :]
        if self.normed:
            memory = F.layer_norm(memory, memory.shape[-1:])
        memory = memory.to(state["memory"].dtype)
        return {"memory": memory.detach() if self.gradient == "stop" else memory}


@register("tokens", config=TokensConfig, paper="Bulatov et al. 2022, arXiv:2207.06881")
def build(config: TokensConfig, model: ModelConfig) -> MemoryPlan:
    """Memory tokens, and no memory in any layer."""
    return MemoryPlan(layers=[{} for _ in range(model.n_layer)], tokens=Tokens(config, model))
