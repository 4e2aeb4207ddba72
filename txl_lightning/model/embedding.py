"""Token embedding: one table, or one per cluster of the vocabulary, narrower for rarer symbols.

Baevski and Auli 2019, arXiv:1809.10853, section 3, as in the authors' Transformer-XL code: cluster i has symbols
cutoffs[i-1] <= id < cutoffs[i] and width E_i = d_embed / div_val^i; a projection P_i (D, E_i) takes it to the model's:

    x = sqrt(D) * P_i row
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import ModelConfig


class TokenEmbedding(nn.Module):
    """Tables (V_i, E_i) and, where `ModelConfig.projects` says so, projections (D, E_i) by cluster.

    With div_val 1 all clusters share one table and at most one projection. In training `dropemb` of the vocabulary is
    dropped per segment: all occurrences of a symbol at once (Merity et al. 2018, arXiv:1708.02182, section 4.3).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = math.sqrt(config.d_model)
        self.dropemb = config.dropemb
        self.vocab_size = config.vocab_size
        one = config.div_val == 1
        self.ends = (config.vocab_size,) if one else (*config.cutoffs, config.vocab_size)
        sizes = (config.vocab_size,) if one else config.cluster_sizes
        widths = config.cluster_widths[:1] if one else config.cluster_widths
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size, width in zip(sizes, widths, strict=True))
        self.projections = nn.ParameterDict(
            {
                str(i): nn.Parameter(torch.zeros(config.d_model, width))
                for i, width in enumerate(widths)
                if config.projects(i)
            }
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T, D)."""
        if len(self.tables) == 1:
            x = self._rows(0, tokens_BT)
        else:
            x = self._clustered(tokens_BT)
        if self.training and self.dropemb:
            kept = torch.rand(self.vocab_size, device=x.device) >= self.dropemb
            x = x * (kept[tokens_BT][..., None] / (1 - self.dropemb)).to(x.dtype)
        return x * self.scale

    def _clustered(self, tokens_BT: Tensor) -> Tensor:
        """Every cluster looks all tokens up and keeps its own: shapes do not depend on the text."""
        first_end, *more = self.ends
        # ids beyond the vocabulary stay with the outer clusters, whose tables then refuse them
        x = self._rows(0, torch.where(tokens_BT < first_end, tokens_BT, 0))
        for i, (start, end) in enumerate(zip(self.ends, more, strict=False), start=1):
            own = tokens_BT >= start if end == self.vocab_size else (tokens_BT >= start) & (tokens_BT < end)
            rows = self._rows(i, torch.where(own, tokens_BT - start, 0))
            x = torch.where(own[..., None], rows, x)
        return x

    def _rows(self, cluster: int, index_BT: Tensor) -> Tensor:
        rows = self.tables[cluster](index_BT)
        key = str(cluster)
        return F.linear(rows, self.projections[key]) if key in self.projections else rows
