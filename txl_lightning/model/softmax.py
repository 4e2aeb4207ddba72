"""The output layer: hidden states to log-probabilities over the vocabulary.

Adaptive softmax (Grave et al. 2017, arXiv:1609.04309), as in the authors' Transformer-XL code. With n cutoffs the head
is a softmax over the first cluster's symbols and n clusters of rarer ones, and

    log p(w) = log p_head(w)                              for w in the first cluster
    log p(w) = log p_head(cluster i) + log p_i(w)         for w in cluster i

    logits of cluster i = (h P_i) W_i^T + b_i;  the head's have the rows [W_0; cluster_weight] and go through P_0

A cluster's logits are computed only for the tokens whose target lies in it, so training never holds tokens times
vocabulary numbers. Losses come back in the order of the targets. N is the number of tokens, n of cutoffs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import ModelConfig
from txl_lightning.model.embedding import TokenEmbedding


class OutputSoftmax(nn.Module):
    """Weights (V_i, E_i), biases (V_i) and projections (D, E_i) by cluster; one table and bias with div_val 1.

    With `tie_weights` the weights are the embedding's tables and with `tie_projs[i]` a projection is its too; biases
    never are shared. `cluster_weight` (n, E_0) and `cluster_bias` (n) hold the head's rows of the clusters, ordered as
    `cluster_order` says.
    """

    def __init__(self, config: ModelConfig, embedding: TokenEmbedding) -> None:
        super().__init__()
        self.cutoffs, self.vocab_size = config.cutoffs, config.vocab_size
        self.reversed = config.cluster_order == "reversed"
        tables: list[nn.Embedding] = list(embedding.tables)  # type: ignore[arg-type]
        self.weights = nn.ParameterList(
            table.weight if config.tie_weights else nn.Parameter(torch.zeros_like(table.weight)) for table in tables
        )
        self.biases = nn.ParameterList(
            nn.Parameter(torch.zeros(table.num_embeddings)) for table in tables if config.bias
        )
        self.projections = nn.ParameterDict(
            {str(i): self._projection(i, config, embedding) for i in range(config.n_cluster) if config.projects(i)}
        )
        if self.cutoffs:
            self.cluster_weight = nn.Parameter(torch.zeros(len(self.cutoffs), config.embed_width))
            self.cluster_bias = nn.Parameter(torch.zeros(len(self.cutoffs))) if config.bias else None

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, V) log-probabilities in nats, float32 or wider."""
        head = self._head(hidden_BTD)
        if not self.cutoffs:
            return head
        parts = [head[..., : self.cutoffs[0]]]
        for i in range(1, len(self.cutoffs) + 1):
            parts.append(self._tail(i, hidden_BTD) + head[..., self._column(i), None])
        return torch.cat(parts, dim=-1)

    def losses(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """(B, T) negative log-likelihood of each target in nats.

        Hidden states without data (device "meta") take targets on the CPU: how much is computed depends on them.
        """
        hidden, target_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        if not self.cutoffs:
            logits = _wide(self._logits(0, hidden, 0, self.vocab_size))
            return F.cross_entropy(logits, target_N.to(logits.device), reduction="none").view_as(targets_BT)
        head = self._head(hidden)
        column_N = target_N  # of the head: the target itself, or its cluster
        for i, cut in enumerate(self.cutoffs, start=1):
            column_N = torch.where(target_N >= cut, self._column(i), column_N)
        log_prob_N = head.gather(1, column_N[:, None].to(head.device))[:, 0]
        for i, (start, end) in enumerate(self._tails(), start=1):
            # an empty cluster runs too, over no token: all weights get a gradient in every step
            own = target_N >= start if end == self.vocab_size else (target_N >= start) & (target_N < end)
            index = own.nonzero()[:, 0]
            column, index = (target_N[index] - start)[:, None].to(hidden.device), index.to(hidden.device)
            tail = self._tail(i, hidden[index]).gather(1, column)[:, 0]
            log_prob_N = log_prob_N.index_add(0, index, tail)
        return -log_prob_N.view_as(targets_BT)

    def _projection(self, cluster: int, config: ModelConfig, embedding: TokenEmbedding) -> nn.Parameter:
        if config.ties_projection(cluster):
            return embedding.projections["0" if config.div_val == 1 else str(cluster)]
        return nn.Parameter(torch.zeros(config.d_model, config.cluster_widths[cluster]))

    def _tails(self) -> Sequence[tuple[int, int]]:
        """First symbol of each tail cluster and the one after its last."""
        return list(zip(self.cutoffs, (*self.cutoffs[1:], self.vocab_size), strict=True))

    def _column(self, cluster: int) -> int:
        """Column of the head that stands for a tail cluster."""
        n = len(self.cutoffs)
        return self.cutoffs[0] + (n - cluster if self.reversed else cluster - 1)

    def _head(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., V_0 + n) of the first cluster's symbols and of the clusters."""
        if not self.cutoffs:
            return _log_softmax(self._logits(0, hidden, 0, self.vocab_size))
        weight, bias = self._slice(0, 0, self.cutoffs[0])
        weight = torch.cat([weight, self.cluster_weight])
        bias = None if bias is None or self.cluster_bias is None else torch.cat([bias, self.cluster_bias])
        return _log_softmax(F.linear(self._project(0, hidden), weight, bias))

    def _tail(self, cluster: int, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., V_i) of a tail cluster's symbols within it."""
        return _log_softmax(self._logits(cluster, hidden, *self._tails()[cluster - 1]))

    def _logits(self, cluster: int, hidden: Tensor, start: int, end: int) -> Tensor:
        return F.linear(self._project(cluster, hidden), *self._slice(cluster, start, end))

    def _project(self, cluster: int, hidden: Tensor) -> Tensor:
        key = str(cluster)
        return hidden @ self.projections[key] if key in self.projections else hidden

    def _slice(self, cluster: int, start: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Weights and bias of symbols start <= id < end, which are those of the cluster."""
        if len(self.weights) > 1:
            return self.weights[cluster], self.biases[cluster] if len(self.biases) else None
        return self.weights[0][start:end], self.biases[0][start:end] if len(self.biases) else None


def _wide(x: Tensor) -> Tensor:
    """In float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _log_softmax(logits: Tensor) -> Tensor:
    return _wide(logits).log_softmax(dim=-1)
