"""Token embedding, scaled by sqrt(D) as in the paper's code."""

from __future__ import annotations

import math

from torch import Tensor, nn

from txl_lightning.config import ModelConfig


class TokenEmbedding(nn.Module):
    """One table (V, D); its rows times sqrt(D) enter the first layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.d_model)
        self.scale = math.sqrt(config.d_model)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T, D)."""
        return self.table(tokens_BT) * self.scale
