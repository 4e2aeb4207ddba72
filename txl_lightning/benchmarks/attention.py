"""One layer's attention alone, forward and backward, each backend beside the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_lightning.benchmarks.timing import Task
from txl_lightning.benchmarks.workloads import common, state_dtype
from txl_lightning.config import Config
from txl_lightning.model import chunked
from txl_lightning.model.attention import Attention
from txl_lightning.model.backends import Need, choose
from txl_lightning.model.positions import Biases, Mask, Reading, distance_table
from txl_lightning.training.trainer import device_kind

BACKENDS = ("reference", "shift", "compiled", "triton")
BOUND = "flash, no positions"


def tasks(config: Config, *, backends: Sequence[str]) -> list[Task]:
    """A task for each backend that runs here, and one for torch's attention without positions.

    Args:
        config: lanes, segment, memory, heads, precision and device.
        backends: some of `BACKENDS`; empty: all.
    """
    found = [_task(config, way) for way in backends or BACKENDS if _runs(config, way)]
    return [*found, _bound(config)]


def _runs(config: Config, way: str) -> bool:
    kind = torch.device(device_kind(config))
    if way == "triton" and kind.type == "cpu":
        return False
    keys = config.model
    need = Need(kind, state_dtype(config), keys.d_head, keys.position, weights=False)
    return choose(way, need) == way


def _leaves(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, T, K), keys and values (B, H, M + T, K)."""
    keys, lanes, n_token = config.model, config.data.batch_size, config.data.segment_len
    n_key = memory_length(config) + n_token
    torch.manual_seed(config.seed)
    device, dtype = torch.device(device_kind(config)), state_dtype(config)

    def leaf(size: int) -> Tensor:
        drawn = torch.randn(lanes, keys.n_head, size, keys.d_head, device=device, dtype=dtype)
        return drawn.requires_grad_()

    return leaf(n_token), leaf(n_key), leaf(n_key)


def memory_length(config: Config) -> int:
    """Slots beside the segment, by the strategy's own key."""
    return getattr(config.memory, config.memory.size_key) if config.memory.size_key else 0


def _facts(config: Config) -> dict[str, object]:
    n_token, lanes = config.data.segment_len, config.data.batch_size
    sizes = (lanes, config.model.n_head, n_token, memory_length(config), config.model.d_head)
    return {**common(config, "data.segment_len", n_token, lanes), "B,H,T,M,K": sizes}


def _task(config: Config, way: str) -> Task:
    q, k, v = _leaves(config)
    keys, slots, n_token = config.model, memory_length(config), q.shape[2]
    layer = Attention(replace(keys, attention=way)).to(q.device, q.dtype).train()
    bias = torch.zeros(1, 1, 1, slots, device=q.device)
    causal = torch.full((n_token, n_token), float("-inf"), device=q.device).triu(1)
    spread = torch.cat([bias.expand(-1, -1, n_token, -1), causal[None, None]], dim=-1).to(q.dtype)
    pair = torch.zeros(2, keys.n_head, keys.d_head, device=q.device, dtype=q.dtype).requires_grad_()
    read = Reading(k, v, None if way == "triton" else spread, None, None, slots, mask=Mask(bias))
    plain = "shift" if way == "reference" else way
    table = distance_table(
        oldest=slots, n_token=n_token, ahead=0, d_model=keys.d_model, clamp_len=keys.clamp_len, device=q.device,
        dtype=q.dtype,
    )  # fmt: skip
    given, wanted = torch.randn_like(q), [q, k, v, pair, *layer.position.parameters()]

    def heads() -> Tensor:
        biases = Biases(*pair)
        if way == "shift" and chunked.can_chunk(layer, q, read):  # as a layer does
            return chunked.chunked(layer, q, read, table, biases)
        return layer.attend(q, read, table, biases, way=plain, weights=False)[0]

    def run() -> object:
        return torch.autograd.grad(heads(), wanted, given, allow_unused=True)

    return Task(part="attention", label=way, run=run, amount=q.shape[0] * n_token, facts=_facts(config))


def _bound(config: Config) -> Task:
    """What scores without positions cost, the best that the library has."""
    q, k, v = _leaves(config)
    seen = torch.ones(q.shape[2], k.shape[2], device=q.device, dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    given = torch.randn_like(q)

    def run() -> object:
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return torch.autograd.grad(heads, [q, k, v], given)

    amount = q.shape[0] * q.shape[2]
    return Task(part="attention", label=BOUND, run=run, amount=amount, facts=_facts(config))
