"""Adaptive embedding and softmax against dense ones built from the same weights; losses stay with their targets."""

from __future__ import annotations

import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from txl_lightning.config import Config, ConfigError, DataConfig, ModelConfig, load
from txl_lightning.memory.none import NoneConfig
from txl_lightning.model import cross_entropy
from txl_lightning.model.embedding import TokenEmbedding
from txl_lightning.model.softmax import OutputSoftmax
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment

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
    "one table, no biases": {"cutoffs": (10, 22), "bias": False},
    "one table, untied": {"cutoffs": (10, 22), "tie_weights": False},
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


def in_shares(monkeypatch: pytest.MonkeyPatch, n_logit: int) -> None:
    """Let shares have so many logits, and keep those of one."""
    for name, value in (("SMALL", -1), ("SHARE", n_logit), ("SHARE_ON_CPU", n_logit), ("KEPT", n_logit)):
        monkeypatch.setattr(cross_entropy, name, value)


TARGETS = {  # first symbol and the one after the last
    "all in the head": (0, 10),
    "one cluster empty": (10, 22),
    "all in the last cluster": (22, V),
    "all of one symbol": (V - 1, V),
}


@pytest.mark.parametrize("n_logit", [1, 90, 2**24])
@pytest.mark.parametrize("among", TARGETS)
@pytest.mark.parametrize("shape", ["one table", "one table, no biases", "narrower", "narrower, untied"])
def test_clusters_of_any_size_in_shares_of_any_size(
    shape: str, among: str, n_logit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_shares(monkeypatch, n_logit)
    config, _, softmax = pair(**SHAPES[shape])
    hidden, _ = text()
    targets = torch.randint(*TARGETS[among], (2, 40), generator=torch.Generator().manual_seed(3))
    expected = -dense_log_probs(config, softmax, hidden).gather(-1, targets[..., None])[..., 0]
    losses = softmax.losses(hidden, targets)
    torch.testing.assert_close(losses, expected, atol=1e-10, rtol=1e-10)
    weight = torch.linspace(0.5, 2.0, 80, dtype=torch.float64).view(2, 40)
    ours, theirs = (grads((found * weight).sum(), hidden, softmax) for found in (losses, expected))
    for name in ours:
        # the dense way has none for clusters without a target
        torch.testing.assert_close(
            ours[name], theirs.get(name, torch.zeros_like(ours[name])), atol=1e-9, rtol=1e-9, msg=name
        )
    assert ours.keys() == {"hidden", *(name for name, _ in softmax.named_parameters())}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_losses_and_gradients_in_fewer_digits(
    shape: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_shares(monkeypatch, 400)
    (_, _, exact), (_, _, softmax) = pair(**SHAPES[shape]), pair(dtype, **SHAPES[shape])
    hidden, targets = text()
    given = hidden.detach().to(dtype).requires_grad_()
    true = exact.losses(hidden, targets)
    losses = softmax.losses(given, targets)
    assert losses.dtype == torch.float32
    assert float((losses.detach().double() - true.detach()).norm() / true.detach().norm()) < tolerance / 3
    ours, theirs = grads(losses.sum(), given, softmax), grads(true.sum(), hidden, exact)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((ours[name].double() - gradient).norm()) <= tolerance * float(gradient.norm()), name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_known_counts_change_nothing(shape: str, order: str) -> None:
    _, _, softmax = pair(**SHAPES[shape], cluster_order=order)
    hidden, targets = text()
    counts = softmax.target_counts(targets)
    edges = [0, *SHAPES[shape].get("cutoffs", ()), V]
    in_turn = targets.flatten().tolist()
    assert counts == tuple(sum(start <= symbol < end for symbol in in_turn) for start, end in pairwise(edges))
    assert torch.equal(softmax.losses(hidden, targets, counts=counts), softmax.losses(hidden, targets))


@pytest.mark.parametrize("counts", [(80,), (30, 50), (30, 30, 21), (20, 20, 20, 20)])
def test_counts_of_other_targets_are_refused(counts: tuple[int, ...]) -> None:
    _, _, softmax = pair(cutoffs=(10, 22), div_val=2)
    hidden, targets = text()
    with pytest.raises(ValueError, match="there are 3 clusters and 80 targets"):
        softmax.losses(hidden, targets, counts=counts)


class NoWaiting(TorchDispatchMode):
    """Refuses operations that a host waits for a device for: reading numbers, and sizes that depend on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "item", "equal.default", "masked_select", "unique", "bincount")
        if any(word in str(func) for word in waits):
            raise AssertionError(f"{func} waits")
        return func(*args, **(kwargs or {}))


class NoReading(TorchFunctionMode):
    """Refuses what reads the numbers of a tensor on the CPU without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__):
            raise AssertionError(f"{func} waits")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n_logit", [90, 2**24])
@pytest.mark.parametrize("shape", SHAPES)
def test_with_known_counts_the_host_waits_for_nothing(
    shape: str, n_logit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_shares(monkeypatch, n_logit)
    _, _, softmax = pair(**SHAPES[shape])
    hidden, targets = text()
    counts = softmax.target_counts(targets)
    with NoWaiting(), NoReading():
        softmax.losses(hidden, targets, counts=counts).sum().backward()
    if len(counts) > 1:
        with NoWaiting(), NoReading(), pytest.raises(AssertionError, match="waits"):
            softmax.losses(hidden, targets)


@pytest.mark.parametrize("shape", SHAPES)
def test_targets_without_data_serve_where_their_counts_are_known(shape: str) -> None:
    """What no data can be read of waits for nothing."""
    _, targets = text()
    counts = pair(**SHAPES[shape])[2].target_counts(targets)
    config = ModelConfig(d_model=D, vocab_size=V, n_head=2, d_head=8, **SHAPES[shape])
    with torch.device("meta"):
        softmax = OutputSoftmax(config, TokenEmbedding(config))
        hidden, unknown = torch.empty(2, 40, D, requires_grad=True), torch.empty(2, 40, dtype=torch.int64)
    softmax.losses(hidden, unknown, counts=counts).sum().backward()
    assert all(leaf.grad is not None for leaf in (hidden, *softmax.parameters()))


def model_of(**keys: Any) -> TransformerXL:
    sizes = {"n_layer": 2, "d_model": D, "vocab_size": V, "n_head": 2, "d_head": 8, "d_inner": 20, "init_std": 0.3}
    torch.manual_seed(0)
    return TransformerXL(Config(model=ModelConfig(**{**sizes, **keys}), memory=NoneConfig(), data=DataConfig()))


def test_a_model_with_known_counts_waits_for_nothing() -> None:
    model = model_of(cutoffs=(10, 22), div_val=2)
    _, targets = text()
    state, segment = model.init_state(2), Segment(torch.zeros(2, dtype=torch.bool), torch.tensor([40, 17]))
    expected = model(targets, state, segment, targets).losses_BT
    counts = model.softmax.target_counts(targets)
    with NoWaiting(), NoReading():
        out = model(targets, state, segment, targets, target_counts=counts)
        out.losses_BT.sum().backward()
    assert torch.equal(out.losses_BT, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks
def test_a_compiled_model_is_one_graph_whatever_the_clusters_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graphs = model_of(cutoffs=(10, 22), div_val=2), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    state = model.init_state(2)
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    for step in range(4):
        targets = torch.randint(*[(0, V), (0, 10), (10, V), (22, V)][step], (2, 40))
        segment = Segment(torch.zeros(2, dtype=torch.bool), torch.tensor([40, 17 + step]))
        counts = model.softmax.target_counts(targets)
        found, exact = (
            run(targets, state, segment, targets, target_counts=counts).losses_BT for run in (compiled, model)
        )
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
        ours, theirs = (torch.autograd.grad(losses.sum(), list(model.parameters())) for losses in (found, exact))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        state = {name: tensor.detach() for name, tensor in model(targets, state, segment).state.items()}
    assert len(graphs) == 1 and graphs[0] > 50


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


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize("keys", [{}, {"cutoffs": (50, 500)}, {"cutoffs": (50, 500), "div_val": 2}])
@pytest.mark.parametrize("vocab_size", [2000, 8000])
def test_no_tensor_is_larger_than_the_weights_or_the_budget(
    vocab_size: int, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_shares(monkeypatch, 10_000)
    config = ModelConfig(d_model=8, n_head=1, d_head=8, vocab_size=vocab_size, **keys)
    softmax = OutputSoftmax(config, TokenEmbedding(config))
    targets = torch.randint(vocab_size, (1, 400), generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(1, 400, 8, requires_grad=True)
    with Largest() as largest:
        softmax.losses(hidden, targets).sum().backward()
    table = max(weight.numel() for weight in softmax.weights)
    assert largest.numel <= max(table, 10_000, hidden.numel()) < 400 * vocab_size / 10


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


@pytest.mark.parametrize("cutoffs", [(), (40, 90)])
def test_the_script_that_times_it_times_the_same(
    cutoffs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parent.parent / "scripts" / "output_layer.py"
    script = runpy.run_path(str(path))
    keys = ["model.vocab_size=130", "model.d_model=16", f"model.cutoffs={list(cutoffs)}"]
    layer = script["Layer"](load(keys), n_token=50, half=False)
    found = []
    for way in ("ours", "plain"):
        losses = layer.run(script[way])
        found.append([losses, layer.hidden_BTD.grad, *(weight.grad for weight in layer.softmax.parameters())])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(sys, "argv", [str(path), "--tokens", "50", "--repeats", "1", *keys])
    script["main"]()
    told, *lines = capsys.readouterr().out.splitlines()
    assert float(told.split()[-1]) < 1e-5
    assert [line.split()[0] for line in lines] == ["ours", "plain", "plain"]
