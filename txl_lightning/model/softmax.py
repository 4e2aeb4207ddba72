"""The output layer: hidden states to log-probabilities over the vocabulary.

Adaptive softmax (Grave et al. 2017, arXiv:1609.04309), as in the authors' Transformer-XL code. With n cutoffs the head
is a softmax over the first cluster's symbols and n clusters of rarer ones, and

    log p(w) = log p_head(w)                              for w in the first cluster
    log p(w) = log p_head(cluster i) + log p_i(w)         for w in cluster i

    logits of cluster i = (h P_i) W_i^T + b_i;  the head's have the rows [W_0; cluster_weight] and go through P_0

A cluster's logits are computed only for the tokens whose target lies in it, a few at a time (`cross_entropy.py`), so
training never holds tokens times vocabulary numbers. Tokens of the tails are put in the order of their clusters once;
each cluster is then a run of them. Losses come back in the order of the targets. N is the number of tokens, n that of
cutoffs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import ModelConfig
from txl_lightning.model.cross_entropy import linear_cross_entropy
from txl_lightning.model.embedding import TokenEmbedding

Cluster = TypeVar("Cluster", int, Tensor)


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
        first, *tails = self._of_clusters()
        head = _log_softmax(F.linear(self._project(0, hidden_BTD), *self._of_head(*first)))
        if not self.cutoffs:
            return head
        parts = [head[..., : self.cutoffs[0]]]
        for i, own in enumerate(tails, start=1):
            tail = _log_softmax(F.linear(self._project(i, hidden_BTD), *own))
            parts.append(tail + head[..., self._column(i), None])
        return torch.cat(parts, dim=-1)

    def target_counts(self, targets_BT: Tensor) -> tuple[int, ...]:
        """How many targets each cluster has, as the function of that name says."""
        return target_counts(targets_BT, cutoffs=self.cutoffs)

    def losses(self, hidden_BTD: Tensor, targets_BT: Tensor, *, counts: Sequence[int] | None = None) -> Tensor:
        """(B, T) negative log-likelihood of each target in nats.

        Hidden states without data (device "meta") take targets on the CPU: how much is computed depends on them.

        Args:
            hidden_BTD: the last layer's output.
            targets_BT: int64.
            counts: what `target_counts` says of them; with cutoffs the host does not have to wait for them then.

        Raises:
            ValueError: there are other numbers of clusters or targets than `counts` says.
        """
        if not self.cutoffs:
            hidden, target_N = self._project(0, hidden_BTD.flatten(0, 1)), targets_BT.flatten()
            losses_N = linear_cross_entropy(hidden, *self._of_clusters()[0], target_N.to(hidden.device))
            return losses_N.view_as(targets_BT)
        counts = tuple(counts) if counts is not None else self.target_counts(targets_BT)
        if len(counts) != len(self.cutoffs) + 1 or sum(counts) != targets_BT.numel():
            here = f"there are {len(self.cutoffs) + 1} clusters and {targets_BT.numel()} targets"
            raise ValueError(f"counts={counts}: {here}; give what target_counts says of these targets")
        return self._clustered(hidden_BTD.flatten(0, 1), targets_BT.flatten(), counts).view_as(targets_BT)

    def _clustered(self, hidden: Tensor, target_N: Tensor, counts: tuple[int, ...]) -> Tensor:
        """(N) losses: the head's of all tokens, and within each tail cluster of those whose target it has."""
        target_N, (first, *tails) = target_N.to(hidden.device), self._of_clusters()
        cluster_N = torch.stack([target_N >= cut for cut in self.cutoffs]).sum(dim=0)
        column_N = torch.where(cluster_N > 0, self._column(cluster_N), target_N)
        losses_N = linear_cross_entropy(self._project(0, hidden), *self._of_head(*first), column_N)
        order = cluster_N.argsort(stable=True)[counts[0] :]
        hiddens, targets = (x.index_select(0, order).split(counts[1:]) for x in (hidden, target_N))
        within = []
        for i, (own, target, rows) in enumerate(zip(hiddens, targets, tails, strict=True), start=1):
            # an empty cluster runs too, over no token: all weights get a gradient in every step
            within.append(linear_cross_entropy(self._project(i, own), *rows, target - self.cutoffs[i - 1]))
        return losses_N.index_add(0, order, torch.cat(within))

    def _projection(self, cluster: int, config: ModelConfig, embedding: TokenEmbedding) -> nn.Parameter:
        if config.ties_projection(cluster):
            return embedding.projections["0" if config.div_val == 1 else str(cluster)]
        return nn.Parameter(torch.zeros(config.d_model, config.cluster_widths[cluster]))

    def _column(self, cluster: Cluster) -> Cluster:
        """Column of the head that stands for a tail cluster."""
        n = len(self.cutoffs)
        return self.cutoffs[0] + (n - cluster if self.reversed else cluster - 1)

    def _of_head(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weights and bias of the first cluster's symbols, which are given, and of the clusters."""
        if not self.cutoffs:
            return weight, bias
        joined = None if bias is None or self.cluster_bias is None else torch.cat([bias, self.cluster_bias])
        return torch.cat([weight, self.cluster_weight]), joined

    def _project(self, cluster: int, hidden: Tensor) -> Tensor:
        key = str(cluster)
        return hidden @ self.projections[key] if key in self.projections else hidden

    def _of_clusters(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weights and bias of each cluster's symbols."""
        weights, biases = list(self.weights), list(self.biases)
        if len(weights) == 1 and self.cutoffs:
            # cut once, so that backward joins all gradients in one table instead of adding up one for each cluster
            sizes = [end - start for start, end in pairwise((0, *self.cutoffs, self.vocab_size))]
            weights, biases = list(weights[0].split(sizes)), [part for bias in biases for part in bias.split(sizes)]
        return list(zip(weights, biases or [None] * len(weights), strict=True))


def target_counts(targets_BT: Tensor, *, cutoffs: Sequence[int]) -> tuple[int, ...]:
    """How many targets each cluster has, the head's first; without cutoffs, of all there are.

    The host waits for the targets, so they are best counted before they go to a device.
    """
    if not cutoffs:
        return (targets_BT.numel(),)
    beyond = torch.stack([(targets_BT >= cut).sum() for cut in cutoffs]).tolist()
    return tuple(more - less for more, less in zip((targets_BT.numel(), *beyond), (*beyond, 0), strict=True))


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
