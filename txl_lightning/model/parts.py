"""Norms, dropout and feed-forward parts, chosen by the `model` keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    Computed in the weight's type: autocast leaves half-precision inputs beside a float32 weight to us.

    Args:
        width: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and type."""
        return self.scaled(x, self.weight)

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `forward` with another weight."""
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)


Norm = nn.LayerNorm | RMSNorm


def make_norm(config: ModelConfig) -> Norm:
    """A norm over the model's width."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


def frozen_norm(norm: Norm, x: Tensor) -> Tensor:
    """What the norm gives, its weights cut out of the graph."""
    weight = norm.weight.detach()
    if isinstance(norm, RMSNorm):
        return norm.scaled(x, weight)
    bias = norm.bias.detach() if norm.bias is not None else None
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """torch's dropout; on a CPU with noise from 16 random bits, which is drawn several times sooner.

    There p is rounded to a multiple of 2^-16, and what is kept is scaled by exactly its share. The plain twin is
    torch's own.
    """
    if not training or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p, training)
    return x if p == 0 else x * noise_like(x, p)


class Dropout(nn.Dropout):
    """`dropout` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return dropout(x, self.p, self.training)


def noise_like(x: Tensor, p: float) -> Tensor:
    """What dropout multiplies x with on a CPU: 0 with probability p, else the inverse of what is kept."""
    dropped = round(p * 2**16)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    return (bits >= dropped - 2**15).to(x.dtype).mul_(2**16 / (2**16 - dropped))


class VariationalDropout(nn.Module):
    """One mask for all tokens of a lane's segment (Gal and Ghahramani 2016, arXiv:1512.05287).

    Args:
        p: share of the features that are dropped.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D)."""
        if not self.training or self.p == 0:
            return x_BTD
        mask = torch.full_like(x_BTD[:, :1], 1 - self.p).bernoulli() / (1 - self.p)
        return x_BTD * mask


def make_dropout(config: ModelConfig) -> nn.Module:
    """Dropout of (B, T, ...) activations."""
    return VariationalDropout(config.dropout) if config.variational_dropout else Dropout(config.dropout)


class FeedForward(nn.Sequential):
    """Linear, ReLU or GELU, Linear with dropout behind each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(
            nn.Linear(config.d_model, config.d_inner, bias=config.bias),
            nn.ReLU() if config.ffn == "relu" else nn.GELU(),
            make_dropout(config),
            nn.Linear(config.d_inner, config.d_model, bias=config.bias),
            make_dropout(config),
        )


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)): Shazeer 2020, arXiv:2002.05202, SwiGLU; dropout as in `FeedForward`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_inner, bias=config.bias)
        self.up = nn.Linear(config.d_model, config.d_inner, bias=config.bias)
        self.down = nn.Linear(config.d_inner, config.d_model, bias=config.bias)
        self.dropout = make_dropout(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D)."""
        return self.dropout(self.down(self.dropout(F.silu(self.gate(x_BTD)) * self.up(x_BTD))))


def make_feed_forward(config: ModelConfig) -> nn.Module:
    """The feed-forward part of a layer."""
    return GatedFeedForward(config) if config.ffn == "swiglu" else FeedForward(config)
