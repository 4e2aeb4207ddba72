"""Associative Recurrent Memory Transformer: learned tokens behind the segment write to a matrix in every layer.

Rodkin et al. 2024, arXiv:2407.04841. A matrix W (F, D) and a sum of keys z (F) per lane and layer; m (N, D) the layer's
output at the `n_tokens` suffix tokens, which see the whole segment and are the same learned rows in every segment:

    read    x <- x + phi(W_q x) W / (z . phi(W_q x) + eps)         before the layer, for every token it runs over
    write   k = phi(W_k m),  v = W_v m,  beta = sigmoid(w_b m + b)
            W += k (v - known)^T beta,  known = k W / (z . k + eps)       delta rule
            z += gamma k,  gamma = clip(1 - z . k / |k|^2, 0, 1), without gradient
    phi     DPFP-nu (arXiv:2102.11174): r = relu([x ; -x]),  phi(x) = [r * roll(r, 1) ; ... ; r * roll(r, nu)]
            of width F = 2 nu d_mem, and under `normalise` divided by its length

gamma is the correction: a key that z already holds is not counted a second time, so a value that is written over does
not fade. `correction: false` takes gamma = 1. W_v starts at zero: at first nothing is written. eps = 1e-5.

The authors' first code has no `normalise`, their later code has. Features are quadratic, so without it a layer whose
input is not bounded by a norm (pre-norm) can answer itself into overflow.

One after the other the tokens of a segment write, each reading what those before it wrote. In their code all read the
matrix of the segment before (`together`): then tokens whose keys are alike correct one error N times, and on a lane
that never starts anew the matrix grew without end, from 1 to 1e5 within 85 segments of a trial with 8 tokens.

Where we differ from their code otherwise: its flag for the first segment is not needed, as W = 0 and z = 0 answer 0; W
and z are float32 and belong to each lane; eps stands below |k|^2 too, because phi may be zero.

Gradient: through W and z over `trainer.bptt_segments` segments. What is written is read from the next segment on, so
with bptt_segments=1 no loss teaches these tokens to write; that is why there is no key to stop the gradient.
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
    TokenMemory,
    full_precision,
    plan_per_layer,
    register,
)

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class AssociativeTokensConfig(LayerMemoryConfig):
    """Keys of `memory=associative_tokens`."""

    unbounded: ClassVar[bool] = True
    size_key: ClassVar[str | None] = "d_mem"

    name: str = key("associative_tokens", "tokens behind the segment write to a matrix in every layer")
    n_tokens: int = key(4, "learned tokens behind every segment", minimum=1)
    d_mem: int = key(16, "width of queries and keys before their features are made", minimum=1)
    nu: int = key(3, "products per feature; queries and keys have 2 nu d_mem features", minimum=1)
    normalise: bool = key(True, "features of unit length")
    correction: bool = key(True, "a key is counted once however often it is written")
    together: bool = key(
        False, "all tokens of a segment read the matrix before they write, as in the authors' code; false: in turn"
    )

    def check(self) -> None:
        super().check()
        if self.nu >= self.d_mem:
            rule = f"must be < memory.d_mem={self.d_mem}: from there on products are 0 or repeat"
            raise self.refuse("nu", rule, "lower it, or raise memory.d_mem")

    @property
    def carries(self) -> bool:
        return True


class SuffixTokens(TokenMemory):
    """Learned tokens behind the segment, the same every time: what they carry is in the layers, so no state.

    Args:
        n_tokens: N.
        d_model: D.
        std: deviation of their first values.
    """

    gradient = "stop"
    token_by_token = True

    def __init__(self, *, n_tokens: int, d_model: int, std: float) -> None:
        super().__init__()
        self.n_suffix = n_tokens
        self.rows = nn.Parameter(std * torch.randn(n_tokens, d_model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        return {}

    def wrap(self, state: State, x_BTD: Tensor, segment: Segment) -> Tensor:
        return torch.cat([x_BTD, self.rows.to(x_BTD.dtype).expand(x_BTD.shape[0], -1, -1)], dim=1)

    def write(self, state: State, hidden: Tensor, segment: Segment) -> State:
        return state


class AssociativeTokens(MemoryStrategy):
    """The matrix of one layer.

    State, float32, with F = 2 nu d_mem:
        matrix (B, F, D): W
        norm (B, F): z

    Args:
        d_mem, nu, normalise: see the module.
        correction: whether gamma is computed or 1.
        together: whether the tokens of a segment write at once.
        d_model: D.
    """

    gradient = "carry"
    token_by_token = True

    def __init__(self, *, d_mem: int, nu: int, normalise: bool, correction: bool, together: bool, d_model: int) -> None:
        super().__init__()
        self.nu, self.normalise, self.correction, self.together = nu, normalise, correction, together
        self.shape = (2 * nu * d_mem, d_model)
        self.query, self.key = (nn.Linear(d_model, d_mem, bias=False) for _ in range(2))
        self.value = nn.Linear(d_model, d_model, bias=False)
        nn.init.zeros_(self.value.weight)
        self.rate = nn.Linear(d_model, 1)

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        matrix = torch.zeros(batch, *self.shape, device=device)
        return {"matrix": matrix, "norm": torch.zeros(batch, self.shape[0], device=device)}

    def residual(self, state: State, x_BED: Tensor, segment: Segment) -> Tensor:
        x = x_BED.to(self.query.weight.dtype)
        return x_BED + read(state, self._features(self.query(x))).to(x_BED.dtype)

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        assert tap.suffix_BND is not None
        m = tap.suffix_BND.to(self.key.weight.dtype)
        k, v, rate = self._features(self.key(m)), self.value(m).float(), self.rate(m).float().sigmoid()
        new, fresh = state, []
        size = k.shape[1] if self.together else 1
        for rows in zip(k.split(size, dim=1), v.split(size, dim=1), rate.split(size, dim=1), strict=True):
            fresh.append(self._fresh(new, rows[0]))
            new = written(new, *rows, fresh[-1])
        change = (new["matrix"] - state["matrix"]).square().mean().sqrt()
        metrics = {"rate": rate.mean(), "fresh": torch.cat(fresh, dim=1).mean(), "change": change}
        return new, Aux(metrics={name: value.detach() for name, value in metrics.items()})

    def _features(self, x: Tensor) -> Tensor:
        """(B, N, F) float32."""
        features = dpfp(x.float(), nu=self.nu)
        return F.normalize(features, dim=-1, eps=EPS) if self.normalise else features

    def _fresh(self, state: State, k_BNF: Tensor) -> Tensor:
        """(B, N, 1) gamma: the share of each key that z does not hold yet."""
        if not self.correction:
            return torch.ones_like(k_BNF[..., :1])
        k = k_BNF.detach()
        held = (k * state["norm"].detach()[:, None]).sum(dim=-1, keepdim=True)
        return (1 - held / (k.square().sum(dim=-1, keepdim=True) + EPS)).clamp(0, 1)


def dpfp(x: Tensor, *, nu: int) -> Tensor:
    """(..., 2 nu n) features, none negative, of (..., n): products of each with those 1 to nu places before it."""
    both = torch.cat([x, -x], dim=-1).relu()
    return torch.cat([both * both.roll(shift, dims=-1) for shift in range(1, nu + 1)], dim=-1)


def read(state: State, feature_BNF: Tensor) -> Tensor:
    """(B, N, D) what the matrix says to features; 0 where nothing was written."""
    with full_precision(feature_BNF.device):
        return feature_BNF @ state["matrix"] / (feature_BNF @ state["norm"][..., None] + EPS)


def written(state: State, k_BNF: Tensor, v_BND: Tensor, rate_BN1: Tensor, fresh_BN1: Tensor) -> State:
    """The state after tokens that all read it as it is."""
    change = (v_BND - read(state, k_BNF)) * rate_BN1
    with full_precision(k_BNF.device):
        step = k_BNF.mT @ change
    return {"matrix": state["matrix"] + step, "norm": state["norm"] + (fresh_BN1 * k_BNF).sum(dim=1)}


@register("associative_tokens", config=AssociativeTokensConfig, paper="Rodkin et al. 2024, arXiv:2407.04841")
def build(config: AssociativeTokensConfig, model: ModelConfig) -> MemoryPlan:
    """Suffix tokens, and a matrix in each chosen layer."""

    def make() -> AssociativeTokens:
        return AssociativeTokens(
            d_mem=config.d_mem,
            nu=config.nu,
            normalise=config.normalise,
            correction=config.correction,
            together=config.together,
            d_model=model.d_model,
        )

    std = model.init_std * model.d_model**0.5  # as large as embeddings are
    tokens = SuffixTokens(n_tokens=config.n_tokens, d_model=model.d_model, std=std)
    return MemoryPlan(layers=plan_per_layer(config, model, make).layers, tokens=tokens)
