"""Transformer-XL's layers once more, token by token, for tests of what memories read and write. Shares no code.

A query reads a list of `Seen`: a row of the layer's inputs, how far back it is, and a number added to its score.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from txl_lightning.config import Config, DataConfig, MemoryConfig, ModelConfig
from txl_lightning.model.transformer import TransformerXL

VOCAB = 11


class Seen(NamedTuple):
    """What a query reads."""

    row: Tensor  # (D,) input of the layer
    distance: int | None  # None: no position term
    added: float | Tensor = 0.0


def make(memory: MemoryConfig, *, segment_len: int = 8, n_layer: int = 2, **keys: object) -> TransformerXL:
    """A tiny float64 model whose weights are large enough that everything in it shows."""
    torch.manual_seed(3)
    sizes = {"n_layer": n_layer, "d_model": 8, "n_head": 2, "d_head": 3, "d_inner": 10, "vocab_size": VOCAB}
    model = ModelConfig(**{**sizes, **keys})  # type: ignore[arg-type]
    memory.check_fit(model, segment_len=segment_len)
    built = TransformerXL(Config(model=model, memory=memory, data=DataConfig(segment_len=segment_len)))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return built.double().eval()


def text(n_token: int, *, lanes: int = 1, seed: int = 0) -> Tensor:
    """(B, N) tokens."""
    return torch.randint(VOCAB, (lanes, n_token), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read_in_segments(model: TransformerXL, tokens_BN: Tensor, *, cuts: list[int], form: str) -> Tensor:
    """(B, N, D) the last layer's outputs of a text read in segments of these lengths, the last one over and over."""
    state = model.init_state(tokens_BN.shape[0], form=form)
    found, start = [], 0
    while start < tokens_BN.shape[1]:
        size = cuts[min(len(found), len(cuts) - 1)]
        out = model(tokens_BN[:, start : start + size], state)
        found.append(out.hidden_BTD)
        state, start = out.state, start + size
    return torch.cat(found, dim=1)


class Plain:
    """The weights of a model and what layers do with them, one token at a time."""

    def __init__(self, model: TransformerXL) -> None:
        self.weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.config = model.config

    def embed(self, tokens_N: Tensor) -> list[Tensor]:
        """Rows (D,)."""
        table = self.weights["embedding.tables.0.weight"]
        return [table[int(token)] * math.sqrt(self.config.d_model) for token in tokens_N]

    def heads_of(self, layer: int, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value (H, K) of a layer input."""
        weight, heads = self.weights[f"layers.{layer}.attention.qkv.weight"], (3, self.config.n_head, -1)
        raw = (weight @ row).view(heads)
        if self.config.pre_norm:
            row = self._norm(f"layers.{layer}.attention_norm", row)
        q, k, v = (weight @ row).view(heads)
        return q if self.config.norm_queries else raw[0], k, v

    def weigh(self, layer: int, row: Tensor, seen: list[Seen]) -> Tensor:
        """(H, N) attention weights of a query."""
        q, _, _ = self.heads_of(layer, row)
        u, v = self.weights["u"], self.weights["v"]
        scores = []
        for other in seen:
            _, key, _ = self.heads_of(layer, other.row)
            score = ((q + u) * key).sum(-1)
            if other.distance is not None:
                score = score + ((q + v) * self._place(layer, other.distance)).sum(-1)
            scores.append(score / math.sqrt(self.config.d_head) + other.added)
        return torch.stack(scores, dim=-1).softmax(-1)

    def attend(self, layer: int, row: Tensor, seen: list[Seen]) -> Tensor:
        """(H, K) what a query reads."""
        values = torch.stack([self.heads_of(layer, other.row)[2] for other in seen], dim=1)  # (H, N, K)
        return (self.weigh(layer, row, seen)[..., None] * values).sum(1)

    def finish(self, layer: int, row: Tensor, heads_HK: Tensor) -> Tensor:
        """The layer's output (D,)."""
        name = f"layers.{layer}"
        y = row + self.weights[f"{name}.attention.out.weight"] @ heads_HK.flatten()
        if self.config.pre_norm:
            return y + self._feed_forward(name, self._norm(f"{name}.feed_forward_norm", y))
        y = self._norm(f"{name}.attention_norm", y)
        return self._norm(f"{name}.feed_forward_norm", y + self._feed_forward(name, y))

    def _place(self, layer: int, distance: int) -> Tensor:
        half = [distance / 10000 ** (2 * i / self.config.d_model) for i in range(self.config.d_model // 2)]
        place = torch.tensor([*map(math.sin, half), *map(math.cos, half)], dtype=torch.float64)
        projected = self.weights[f"layers.{layer}.attention.position.r.weight"] @ place
        return projected.view(self.config.n_head, self.config.d_head)

    def _norm(self, name: str, row: Tensor) -> Tensor:
        centred = row - row.mean()
        scaled = centred / (centred.square().mean() + self.config.norm_eps).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _feed_forward(self, name: str, row: Tensor) -> Tensor:
        first = self.weights[f"{name}.feed_forward.0.weight"] @ row + self.weights[f"{name}.feed_forward.0.bias"]
        second = self.weights[f"{name}.feed_forward.3.weight"] @ first.clamp(min=0)
        return second + self.weights[f"{name}.feed_forward.3.bias"]
