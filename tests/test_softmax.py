"""Adaptive embedding and softmax against dense ones built from the same weights; losses stay with their targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from txl_lightning.config import Config, ConfigError, DataConfig, ModelConfig
from txl_lightning.memory.none import NoneConfig
from txl_lightning.model.embedding import TokenEmbedding
from txl_lightning.model.softmax import OutputSoftmax
from txl_lightning.model.transformer import TransformerXL

V, D = 30, 16
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, projected": {"d_embed": 12},
    "plain, projected to the same width": {"div_val": 2},
    "one table": {"cutoffs": (10, 22)},
    "one table, projected": {"cutoffs": (10, 22), "d_embed": 12, "tie_projs": (False, True, False)},
    "narrower": {"cutoffs": (10, 22), "div_val": 2, "tie_projs": (False, True, True)},
    "narrower, untied": {"cutoffs": (10, 22), "div_val": 2, "tie_weights": False},
    "narrower, nothing to project first": {"cutoffs": (10, 22), "div_val": 4, "proj_same_dim": False},
    "narrower, wider than the model": {"cutoffs": (10, 22), "div_val": 2, "d_embed": 32, "proj_same_dim": False},
    "a cluster of one symbol": {"cutoffs": (1, 2, 29), "div_val": 2, "d_embed": 16},
    "no biases": {"cutoffs": (10,), "div_val": 2, "bias": False},
}
ORDERS = ["ascending", "reversed"]


def pair(dtype: torch.dtype = torch.float64, **keys: Any) -> tuple[ModelConfig, TokenEmbedding, OutputSoftmax]:
    config = ModelConfig(d_model=D, vocab_size=V, n_head=2, d_head=8, **keys)
    torch.manual_seed(0)
    embedding = TokenEmbedding(config)
    softmax = OutputSoftmax(config, embedding)
    with torch.no_grad():
        for parameter in [*embedding.parameters(), *softmax.parameters()]:
            parameter.normal_(0.0, 0.5)
    return config, embedding.to(dtype), softmax.to(dtype)


def text(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Hidden states (2, 40, D) and targets (2, 40) with every symbol of the vocabulary among them."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.cat([torch.arange(V), torch.randint(V, (80 - V,), generator=generator)])
    order = torch.randperm(80, generator=generator)
    hidden = torch.randn(2, 40, D, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), targets[order].view(2, 40)


def table_of(config: ModelConfig, weights: Any) -> list[Tensor]:
    """One (V_i, E_i) table per cluster, whatever way the weights are kept."""
    return list(weights[0].split(list(config.cluster_sizes))) if config.div_val == 1 else list(weights)


def dense_log_probs(config: ModelConfig, softmax: OutputSoftmax, hidden: Tensor) -> Tensor:
    """(..., V) from a loop over symbols: nothing of the code under test but its weights."""
    tables = table_of(config, softmax.weights)
    biases = list(softmax.biases[0].split(list(config.cluster_sizes))) if config.div_val == 1 and config.bias else None
    if config.div_val > 1 and config.bias:
        biases = list(softmax.biases)
    n = len(config.cutoffs)

    def projected(i: int) -> Tensor:
        return hidden @ softmax.projections[str(i)] if str(i) in softmax.projections else hidden

    def logit(i: int, symbol: int) -> Tensor:
        bias = biases[i][symbol] if biases is not None else 0.0
        return (projected(i) * tables[i][symbol]).sum(-1) + bias

    head = [logit(0, symbol) for symbol in range(config.cluster_sizes[0])]
    for tail in range(1, n + 1):
        row = n - tail if config.cluster_order == "reversed" else tail - 1
        bias = softmax.cluster_bias[row] if softmax.cluster_bias is not None else 0.0
        head.append((projected(0) * softmax.cluster_weight[row]).sum(-1) + bias)
    # `head` holds the clusters in ascending order here, whatever the order of the rows
    whole = torch.stack(head, -1).exp()
    whole = whole / whole.sum(-1, keepdim=True)
    columns = [whole[..., symbol] for symbol in range(config.cluster_sizes[0])]
    for tail in range(1, n + 1):
        within = torch.stack([logit(tail, symbol) for symbol in range(config.cluster_sizes[tail])], -1).exp()
        within = within / within.sum(-1, keepdim=True)
        mass = whole[..., config.cluster_sizes[0] + tail - 1]
        columns += [mass * within[..., symbol] for symbol in range(config.cluster_sizes[tail])]
    return torch.stack(columns, -1).log()


def grads(loss: Tensor, hidden: Tensor, softmax: OutputSoftmax) -> dict[str, Tensor]:
    named = {"hidden": hidden, **dict(softmax.named_parameters())}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_log_probs_losses_and_gradients_equal_a_dense_softmax(shape: str, order: str) -> None:
    config, _, softmax = pair(**SHAPES[shape], cluster_order=order)
    hidden, targets = text()
    dense = dense_log_probs(config, softmax, hidden)
    torch.testing.assert_close(softmax.log_probs(hidden), dense, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(dense.exp().sum(-1), torch.ones(2, 40, dtype=torch.float64))
    expected = -dense.gather(-1, targets[..., None])[..., 0]
    losses = softmax.losses(hidden, targets)
    torch.testing.assert_close(losses, expected, atol=1e-10, rtol=1e-10)
    weight = torch.linspace(0.5, 2.0, 80, dtype=torch.float64).view(2, 40)  # so that a mixed-up order shows
    ours, theirs = (grads((found * weight).sum(), hidden, softmax) for found in (losses, expected))
    assert ours.keys() == theirs.keys() and len(ours) > 1
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_embedding_equals_a_lookup_symbol_by_symbol(shape: str) -> None:
    config, embedding, _ = pair(**SHAPES[shape])
    tables = table_of(config, [table.weight for table in embedding.tables])
    tokens = torch.arange(V).view(2, V // 2)
    rows = []
    for symbol in range(V):
        cluster = sum(symbol >= cut for cut in config.cutoffs)
        row = tables[cluster][symbol - ([0, *config.cutoffs][cluster])]
        key = "0" if config.div_val == 1 else str(cluster)
        rows.append((embedding.projections[key] @ row if key in embedding.projections else row) * D**0.5)
    torch.testing.assert_close(embedding(tokens), torch.stack(rows).view(2, V // 2, D), atol=1e-12, rtol=1e-12)
    (embedding(tokens) * torch.randn(2, V // 2, D, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in embedding.parameters())


def test_a_cluster_without_a_target_still_gets_a_gradient() -> None:
    """Of zeros: ranks of a parallel run wait for the gradient of every weight."""
    _, _, softmax = pair(cutoffs=(10, 22), div_val=2)
    hidden, _ = text()
    softmax.losses(hidden, torch.full((2, 40), 3)).sum().backward()
    for name, parameter in softmax.named_parameters():
        assert parameter.grad is not None, name
    assert softmax.weights[2].grad is not None and softmax.weights[2].grad.abs().sum() == 0


def test_half_precision_keeps_log_probabilities_in_float32() -> None:
    _, _, softmax = pair(torch.bfloat16, cutoffs=(10, 22), div_val=2)
    hidden, targets = text()
    exact = pair(cutoffs=(10, 22), div_val=2)[2].losses(hidden, targets)
    losses = softmax.losses(hidden.bfloat16(), targets)
    assert losses.dtype == torch.float32
    assert (losses.double() - exact).abs().mean() < 0.05


class Largest(TorchFunctionMode):
    """Remembers the largest tensor any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_training_never_holds_tokens_times_vocabulary() -> None:
    config = ModelConfig(d_model=8, n_head=1, d_head=8, vocab_size=5000, cutoffs=(50, 500), div_val=2)
    softmax = OutputSoftmax(config, TokenEmbedding(config))
    targets = torch.cat([torch.randint(50, (390,)), torch.randint(50, 5000, (10,))])[None]
    with Largest() as largest:
        softmax.losses(torch.randn(1, 400, 8), targets)
    assert largest.numel <= max(400 * 52, 10 * 4500, 5000 * 8) < 400 * 5000 / 10


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"cutoffs": (30,)},
            r"^model.cutoffs=\[30\]: the last cluster would be empty: .*; keep cutoffs below 30$",
        ),
        ({"cutoffs": (10, 40)}, "^model.cutoffs=.*: the last cluster would be empty"),
        ({"cutoffs": (10, 10)}, "^model.cutoffs=.*: must rise"),
        ({"cutoffs": (20, 10)}, "^model.cutoffs=.*: must rise"),
        ({"cutoffs": (0, 10)}, "^model.cutoffs=.*: must rise, from 1"),
        ({"cutoffs": ((1,),)}, "^model.cutoffs=.*: must be whole numbers"),
        ({"cutoffs": (10, 20), "tie_projs": (True,)}, "^model.tie_projs=.*: there are 3 clusters"),
        ({"cutoffs": (10, 20), "div_val": 8}, "^model.div_val=8: divides the width 16 down to nothing in 3 clusters"),
    ],
)
def test_clusters_that_cannot_be_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(d_model=D, vocab_size=V, **keys)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_counted_without_building(shape: str) -> None:
    keys = {"n_layer": 2, "d_model": D, "vocab_size": V, "n_head": 2, "d_head": 8, "d_inner": 20, **SHAPES[shape]}
    config = Config(model=ModelConfig(**keys), memory=NoneConfig(), data=DataConfig())
    model = TransformerXL(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.model.num_params()


def test_hidden_states_without_data_take_targets_on_the_cpu() -> None:
    config = ModelConfig(d_model=D, vocab_size=V, n_head=2, d_head=8, cutoffs=(10, 22), div_val=2)
    with torch.device("meta"):
        softmax = OutputSoftmax(config, TokenEmbedding(config))
        hidden = torch.empty(2, 40, D)
    _, targets = text()
    losses = softmax.losses(hidden, targets)
    assert losses.shape == (2, 40) and losses.device.type == "meta"


@pytest.mark.parametrize("shape", ["plain", "one table", "narrower"])
@pytest.mark.parametrize("symbol", [-1, V, V + 7])
def test_symbols_that_are_none_raise(shape: str, symbol: int) -> None:
    _, embedding, softmax = pair(**SHAPES[shape])
    with pytest.raises(IndexError):
        embedding(torch.tensor([[3, symbol]]))
    with pytest.raises((IndexError, RuntimeError)):
        softmax.losses(torch.zeros(1, 2, D, dtype=torch.float64), torch.tensor([[3, symbol]]))
