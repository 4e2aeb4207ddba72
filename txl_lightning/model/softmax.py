"""The output layer: hidden states to log-probabilities over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import ModelConfig


class OutputSoftmax(nn.Module):
    """logits = h W^T + b. W may be the embedding's table (set by the model); the bias never is shared."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.vocab_size, config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, V) in float32 or wider."""
        logits = F.linear(hidden_BTD, self.weight, self.bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, V) log-probabilities in nats."""
        return self.logits(hidden_BTD).log_softmax(dim=-1)

    def losses(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """(B, T) negative log-likelihood of each target in nats."""
        logits = self.logits(hidden_BTD)
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="none").view_as(targets_BT)
