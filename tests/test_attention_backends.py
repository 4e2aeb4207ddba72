"""Every backend of attention against the terms written out: outputs, every gradient, dropout, memory, who is chosen.

Where there is no CUDA device the kernels run in Triton's interpreter (`conftest.py`), on tiles of 16 times 16.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import interpreter
import pytest
import torch
from tiny import tiny_config
from torch import Tensor, library
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from txl_lightning import registry
from txl_lightning.commands import fit as fit_command
from txl_lightning.config import Config, ConfigError, DataConfig, ModelConfig
from txl_lightning.memory.base import MemoryPlan
from txl_lightning.memory.cache import CacheConfig
from txl_lightning.memory.compressive import CompressiveConfig
from txl_lightning.memory.tokens import Tokens, TokensConfig
from txl_lightning.memory.window import WindowConfig
from txl_lightning.model import attention as attention_module
from txl_lightning.model import backends, kernels
from txl_lightning.model.attention import Attention
from txl_lightning.model.backends import Need, check_backend, choose
from txl_lightning.model.positions import Biases, Mask, Reading, distance_table
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import FitOptions
from txl_lightning.types import MASKED, Segment

pytest.importorskip("triton", reason="Triton is for Linux")
from txl_lightning.model.kernels import launch, relative

BATCH, HEADS, WIDTH, MODEL = 2, 2, 5, 6


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with interpreter.quick():
        yield


class Case(NamedTuple):
    """One attention: sizes, what is known about its keys, and the model's keys."""

    n_token: int
    n_slot: int
    oldest: int | None = None  # None: n_slot
    ahead: int = 0
    slots: str = "flat"  # bias of the slots: "flat", "per lane", "per token" or "per head and token"
    limits: tuple[int | None, int | None] = (None, None)  # of slots, of tokens
    documents: bool = False
    own: bool = False  # whether tokens' mask is written out (and some see later ones)
    ages: str = "contiguous"  # or "shuffled": per lane, with gaps and equal ones
    unplaced: bool = False
    capped: bool = False
    keys: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "odd sizes": Case(19, 14),
    "one token": Case(1, 5),
    "no slot": Case(17, 0),
    "whole tiles": Case(16, 32),
    "clamp_len": Case(6, 21, keys={"clamp_len": 4}),
    "same_length": Case(21, 30, limits=(12, 12)),
    "own band": Case(17, 5, limits=(None, 4)),
    "dead lane, learned bias": Case(5, 9, slots="per lane"),
    "bias of tokens": Case(7, 9, slots="per token"),
    "bias of heads": Case(5, 18, slots="per head and token"),
    "documents": Case(7, 5, documents=True),
    "tokens that look ahead": Case(7, 9, ahead=6, own=True),
    "any ages": Case(6, 19, oldest=70, ages="shuffled", slots="per lane", limits=(40, 9)),
    "slots without position": Case(5, 19, oldest=40, ages="shuffled", unplaced=True, limits=(9, None)),
    "sinks": Case(7, 9, oldest=24, ages="shuffled", unplaced=True, capped=True),
    "terms a b": Case(5, 4, keys={"terms": ("a", "b")}),
    "terms a c": Case(5, 4, keys={"terms": ("a", "c")}),
    "terms a d": Case(5, 4, keys={"terms": ("a", "d")}),
    "no positions": Case(5, 9, ages="shuffled", keys={"position": "none"}),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(case: Case, *, way: str, dtype: torch.dtype, **keys: Any) -> Attention:
    torch.manual_seed(0)
    wanted = "reference" if way == "reference" else "auto"
    config = ModelConfig(d_model=MODEL, n_head=HEADS, d_head=WIDTH, attention=wanted, **case.keys, **keys)
    layer = Attention(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.5)
    return layer.to(dtype)


def facts_of(case: Case) -> dict[str, Any]:
    """What is known about the slots, and in which documents tokens stand."""
    n_slot, facts = case.n_slot, dict.fromkeys(("age", "positioned", "farthest", "document"))
    generator = torch.Generator().manual_seed(5)
    if case.ages == "shuffled":
        facts["age"] = torch.randint(1, (case.oldest or n_slot) + 1, (BATCH, n_slot), generator=generator)
    if case.unplaced:
        facts["positioned"] = torch.arange(n_slot) % 3 != 1
    if case.capped:
        never = torch.iinfo(torch.int32).max
        facts["farthest"] = torch.where(torch.arange(n_slot) < 3, torch.arange(n_slot) + 7, never)
    if case.documents:
        facts["document"] = torch.stack([torch.zeros(case.n_token), torch.arange(case.n_token) // 4]).long()
    return facts


def bias_of(case: Case) -> Tensor:
    """(1|B, 1|H, 1|T, S) of the slots; the second lane of "per lane" lacks its first ones."""
    sizes = {"flat": (1, 1, 1), "per lane": (BATCH, 1, 1), "per token": (BATCH, 1, case.n_token)}
    shape = sizes.get(case.slots, (1, HEADS, case.n_token))
    bias = drawn(*shape, case.n_slot, seed=7)
    return bias.where(torch.arange(case.n_slot) > 2, MASKED) if case.slots == "per lane" else bias


def own_of(case: Case) -> Tensor | None:
    """(B, 1, T, T) additive: causal, but token 0 sees all, and in the second lane nobody else sees token 1."""
    if not case.own:
        return None
    row = torch.arange(case.n_token)
    seen = ((row <= row[:, None]) | (row[:, None] == 0)).repeat(BATCH, 1, 1)
    seen[1, 2:, 1] = False
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)[:, None]


def spread(case: Case, bias: Tensor, facts: dict[str, Any]) -> Tensor:
    """(B, H, T, P) additive, pair by pair."""
    n_token, n_slot = case.n_token, case.n_slot
    whole = torch.zeros(BATCH, HEADS, n_token, n_slot + n_token, dtype=bias.dtype)
    own, (slot_limit, own_limit) = own_of(case), case.limits
    age = facts["age"] if facts["age"] is not None else torch.arange(n_slot, 0, -1).expand(BATCH, -1)
    hidden = torch.zeros(BATCH, 1, n_token, n_slot + n_token, dtype=torch.bool)
    for b in range(BATCH):
        document = facts["document"][b].tolist() if case.documents else [0] * n_token
        for t in range(n_token):
            for s in range(n_slot):
                placed = facts["positioned"] is None or bool(facts["positioned"][s])
                far = slot_limit is not None and placed and int(age[b, s]) + t > slot_limit
                hidden[b, 0, t, s] = far or document[t] != document[0]
            for s in range(n_token):
                far = own_limit is not None and t - s > own_limit
                later = s > t if own is None else own[b, 0, t, s] == -math.inf
                hidden[b, 0, t, n_slot + s] = far or later or document[t] != document[s]
    whole = torch.cat([whole[..., :n_slot] + bias, whole[..., n_slot:]], dim=-1)
    return whole.masked_fill(hidden, -math.inf)


def attended(
    case: Case, *, way: str, dtype: torch.dtype, layer: Attention | None = None, values: Tensor | None = None
) -> dict[str, Tensor]:
    """Outputs and every gradient of one attention over inputs that depend on the case alone."""
    n_key = case.n_token + case.n_slot
    layer = layer if layer is not None else layer_of(case, way=way, dtype=dtype)
    shapes = [(BATCH, HEADS, case.n_token, WIDTH), *[(BATCH, HEADS, n_key, WIDTH)] * 2, *[(HEADS, WIDTH)] * 2]
    given = [drawn(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    q, k, v, u, w = given
    bias = bias_of(case).to(dtype).requires_grad_()
    facts = facts_of(case)
    mask, whole = None, None
    if way == "triton":
        own = own_of(case)
        mask = Mask(bias, own if own is None else own.float(), facts["document"], *case.limits)
    else:
        whole = spread(case, bias, facts)
    read = Reading(
        k, v if values is None else values.to(dtype), whole, facts["age"], facts["positioned"], case.n_slot,
        facts["farthest"], mask,
    )  # fmt: skip
    table = distance_table(
        oldest=case.n_slot if case.oldest is None else case.oldest,
        n_token=case.n_token,
        ahead=case.ahead,
        d_model=MODEL,
        clamp_len=case.keys.get("clamp_len", -1),
        device=q.device,
        dtype=dtype,
    )
    terms = layer.position.terms if layer.position_name == "transformer_xl" else ("a",)
    biases = Biases(u if "c" in terms else None, w if "d" in terms else None)
    heads, _ = layer.attend(q, read, table, biases, way=way, weights=False)
    heads.backward(drawn(*heads.shape, seed=9).to(dtype))
    found = {"heads": heads.detach(), **dict(zip("qkvuw", (leaf.grad for leaf in given), strict=True))}
    found |= {"bias": bias.grad, **{name: weight.grad for name, weight in layer.named_parameters()}}
    return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.numel()}


def compare(found: dict[str, Tensor], exact: dict[str, Tensor], *, tolerance: float) -> None:
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert (found[name].double() - tensor).abs().max() <= tolerance * (1 + tensor.abs().max()), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernels_give_the_outputs_and_gradients_of_the_written_out_terms(case: Case) -> None:
    exact = attended(case, way="reference", dtype=torch.float64)
    compare(attended(case, way="triton", dtype=torch.float32), exact, tolerance=3e-6)


ATOMIC = ("odd sizes", "any ages")


@pytest.mark.parametrize("name", ATOMIC)
def test_the_tables_gradient_by_atomic_additions_is_the_same(name: str) -> None:
    exact = attended(CASES[name], way="reference", dtype=torch.float64)
    torch.use_deterministic_algorithms(False)
    compare(attended(CASES[name], way="triton", dtype=torch.float32), exact, tolerance=3e-6)


@pytest.mark.parametrize("name", ["odd sizes", "sinks"])
def test_in_bfloat16_the_kernels_are_about_as_exact_as_matrix_products(name: str) -> None:
    case = CASES[name]
    exact = attended(case, way="reference", dtype=torch.float64)
    fused, plain = (attended(case, way=way, dtype=torch.bfloat16) for way in ("triton", "shift"))
    for part, tensor in exact.items():
        errors = [float((found[part].double() - tensor).norm() / tensor.norm()) for found in (fused, plain)]
        assert fused[part].dtype == torch.bfloat16
        assert errors[0] <= 2.5 * errors[1] + 1e-3 and errors[0] < 0.05, part


def test_dropout_takes_its_share_and_backward_uses_the_same_draws() -> None:
    """Values are unit vectors, so outputs are the weights that dropout left."""
    width, rate = 30, 0.25
    case = Case(13, 17)
    config = ModelConfig(d_model=MODEL, n_head=HEADS, d_head=width, dropatt=rate)
    layer = Attention(config).train()
    with torch.no_grad():
        layer.position.r.weight.copy_(drawn(HEADS * width, MODEL, seed=3))
    given = [drawn(BATCH, HEADS, size, width, seed=size).float() for size in (13, 30)]
    q, k = (leaf.mul(0.5).requires_grad_() for leaf in given)
    v = torch.eye(width).expand(BATCH, HEADS, -1, -1).clone().requires_grad_()
    u, w = (drawn(HEADS, width, seed=seed).float().requires_grad_() for seed in (1, 2))
    leaves = [q, k, v, u, w, layer.position.r.weight]
    bias = torch.zeros(1, 1, 1, case.n_slot)
    facts = {**facts_of(case), "document": None}
    read = Reading(k, v, spread(case, bias, facts), None, None, case.n_slot, None, Mask(bias))
    table = distance_table(
        oldest=17, n_token=13, ahead=0, d_model=MODEL, clamp_len=-1, device=q.device, dtype=torch.float32
    )
    torch.manual_seed(11)
    heads, _ = layer.attend(q, read, table, Biases(u, w), way="triton", weights=False)
    other, _ = layer.attend(q, read, table, Biases(u, w), way="triton", weights=False)
    assert not torch.equal(heads, other)
    _, weights = layer.eval().attend(q, read, table, Biases(u, w), way="shift")
    assert weights is not None
    seen, kept = weights > 0, heads.detach() != 0
    n_seen = int(seen.sum())
    assert abs(float((kept & seen).sum()) / n_seen - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / n_seen)
    torch.testing.assert_close(heads[kept], weights[kept] / (1 - rate), atol=1e-6, rtol=1e-5)
    grad = drawn(*heads.shape, seed=9).float()
    found = torch.autograd.grad(heads, leaves, grad)
    exact = torch.autograd.grad((weights * kept / (1 - rate)) @ v, leaves, grad)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-4)


def test_dropouts_mean_is_what_there_is_without_it() -> None:
    """Many lanes that differ in nothing but what dropout draws."""
    n_token, n_slot, rate, n_lane = 3, 4, 0.3, 40
    layer = layer_of(Case(n_token, n_slot), way="triton", dtype=torch.float32, dropatt=rate)
    given = [drawn(1, HEADS, size, WIDTH, seed=size).float() for size in (n_token, n_token + n_slot, n_token + n_slot)]
    q, k, v = (leaf.expand(n_lane, -1, -1, -1) for leaf in given)
    read = Reading(k, v, None, None, None, n_slot, None, Mask(torch.zeros(1, 1, 1, n_slot)))
    table = distance_table(
        oldest=n_slot, n_token=n_token, ahead=0, d_model=MODEL, clamp_len=-1, device=q.device, dtype=torch.float32
    )
    biases = Biases(torch.zeros(HEADS, WIDTH), torch.zeros(HEADS, WIDTH))
    torch.manual_seed(0)
    with torch.no_grad():
        draws = layer.train().attend(q, read, table, biases, way="triton", weights=False)[0]
        first = read._replace(k_BHPK=given[1], v_BHPK=given[2])
        exact = layer.eval().attend(given[0], first, table, biases, way="triton", weights=False)[0]
    error = (draws.mean(0) - exact[0]).abs() / (draws.std(0) / math.sqrt(n_lane))
    assert draws.std(0).min() > 1e-3
    assert error.mean() < 1.2 and error.max() < 4  # 0.8 is the mean for a normal deviate


# ---- nothing of size T x S


class Largest(TorchDispatchMode):
    """The most bytes that any tensor made inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.n_byte = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = [item for item in pytree.tree_leaves(made) if isinstance(item, Tensor)]
        self.n_byte = max([self.n_byte, *(item.numel() * item.element_size() for item in found)])
        return made


@pytest.mark.parametrize("in_order", [False, True])
def test_forward_and_backward_make_nothing_of_the_size_of_the_scores(in_order: bool) -> None:
    n_token, n_slot, width = 64, 256, 2
    n_key = n_token + n_slot
    q, k, v = (drawn(1, 1, size, width, seed=size).float() for size in (n_token, n_key, n_key))
    r, u, w = drawn(1, n_key + 1, width, seed=1).float(), *drawn(2, 1, width, seed=2).float()
    bias = torch.zeros(1, 1, 1, n_slot)
    ops = launch.Operands(q, k, v, r, u, w, bias, None, None, None, None, None, None)
    numbers = launch.Numbers(n_slot, n_key, 40, 40, 0.5, 0.0, True)
    with Largest() as largest:
        out, lse = launch.forward(ops, numbers)
        launch.backward(ops, numbers, torch.ones_like(out), out, lse, bias_wanted=True, in_order=in_order)
    assert 4 * n_key * width <= largest.n_byte < n_token * n_key / 2


class Launched:
    """Stands for a kernel, and compares what it is given with what it takes: the interpreter passes over the rest."""

    def __init__(self, kernel: Any) -> None:
        self.takes, self.n_call = set(kernel.arg_names), 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*, num_warps: int, num_stages: int, **given: Any) -> None:
            assert given.keys() == self.takes
            self.n_call += 1

        return run


def test_kernels_are_given_exactly_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("forward_kernel", "query_kernel", "key_kernel", "table_kernel")
    fakes = {name: Launched(getattr(launch, name)) for name in names}
    for name, fake in fakes.items():
        monkeypatch.setattr(launch, name, fake)
    for case in (CASES["odd sizes"], CASES["sinks"], CASES["no positions"]):
        attended(case, way="triton", dtype=torch.float32)
    assert {name: fake.n_call for name, fake in fakes.items()} == dict(zip(names, (3, 3, 5, 2), strict=True))


# ---- as an operator


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    q = drawn(1, 1, 3, 4, seed=0).float().requires_grad_()
    k, v = (drawn(1, 1, 5, 4, seed=seed).float().requires_grad_() for seed in (1, 2))
    r, u = drawn(1, 6, 4, seed=3).float().requires_grad_(), drawn(1, 4, seed=4).float().requires_grad_()
    bias = drawn(1, 1, 1, 2, seed=5).float().requires_grad_()
    args = (q, k, v, r, u, None, bias, *[None] * 6, 2, 5, None, None, 0.5, 0.0, True)
    library.opcheck(relative._attention, args)


def test_compiled_and_checkpointed_models_take_the_kernels_as_they_are() -> None:
    plain = _two_segments("triton", "cache")
    for keys in ({"checkpointing": True}, {"compile": True}):
        found = _two_segments("triton", "cache", **keys)
        for name, tensor in plain.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5)
    inside = _two_segments("compiled", "cache", compile=True)  # no compilation within the compilation
    for name, tensor in plain.items():
        torch.testing.assert_close(inside[name], tensor, atol=1e-5, rtol=1e-4)


# ---- whole models


def _two_segments(way: str, memory: str, *, compile: bool = False, **keys: Any) -> dict[str, Tensor]:
    """Losses and all gradients over two segments with a reset, a short lane and a lane without tokens."""
    model_keys = {"n_layer": 1, "d_model": 8, "n_head": 1, "d_head": 3, "d_inner": 8, "vocab_size": 11, "init_std": 0.4}
    if memory == "same_length":
        keys |= {"same_length": True}
    model_config = ModelConfig(attention=way, **{**model_keys, **keys})
    kinds = {
        "window": lambda: WindowConfig(window=5, sinks=2),
        "compressive": lambda: CompressiveConfig(mem_len=5, compressed_len=3, rate=5, loss="none", function="mean"),
    }
    memory_config = kinds.get(memory, lambda: CacheConfig(mem_len=6))()
    torch.manual_seed(0)
    plan = registry.memories.get(memory_config.name).build(memory_config, model_config)
    if memory == "tokens":
        plan = MemoryPlan(layers=plan.layers, tokens=Tokens(TokensConfig(read_slots=True, n_tokens=2), model_config))
    config = Config(model=model_config, memory=memory_config, data=DataConfig(segment_len=5, batch_size=3))
    model = TransformerXL(config, plan=plan)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compile else model
    text = torch.randint(11, (3, 11))
    state, losses = model.init_state(3), []
    for part, lengths in ((0, [5, 5, 5]), (1, [5, 3, 0])):
        document = torch.tensor([[0, 0, 1, 1, 2]] * 3) if memory == "documents" else None
        segment = Segment(torch.tensor([part == 0, part == 0, True]), torch.tensor(lengths), document)
        out = run(text[:, 5 * part : 5 * part + 5], state, segment, text[:, 5 * part + 1 : 5 * part + 6])
        state = {name: tensor.detach() for name, tensor in out.state.items()}
        losses.append(out.losses_BT)
    torch.stack(losses).sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"losses": torch.stack(losses).detach(), **found, **state}


@pytest.mark.parametrize("memory", ["cache", "same_length", "documents", "window", "compressive", "tokens"])
def test_a_model_gives_the_same_with_the_kernels(memory: str) -> None:
    keys = {"n_layer": 2, "n_head": 2} if memory == "cache" else {}
    fused, exact = (_two_segments(way, memory, **keys) for way in ("triton", "reference"))
    assert fused.keys() == exact.keys()
    for name, tensor in exact.items():
        torch.testing.assert_close(fused[name], tensor, atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("way", ["triton", "compiled"])
def test_layer_by_layer_attention_is_computed_as_asked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four segments at once, memory before them read, one lane short; calls of `attend` tell the way."""
    monkeypatch.setattr(attention_module, "_compiled", lambda: attention_module._plain)
    taken, attend = [], Attention.attend
    monkeypatch.setattr(Attention, "attend", lambda *args, **keys: taken.append(keys["way"]) or attend(*args, **keys))
    text, found = torch.randint(11, (2, 20), generator=torch.Generator().manual_seed(0)), []
    lengths = [[5, 5], [5, 5], [5, 5], [5, 2]]
    segments = [Segment(torch.tensor([False, False]), torch.tensor(length)) for length in lengths]
    for asked in (way, "reference"):
        torch.manual_seed(0)
        keys = ModelConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, vocab_size=11, attention=asked)
        model = TransformerXL(Config(model=keys, memory=CacheConfig(mem_len=6), data=DataConfig(segment_len=5))).eval()
        state = model.init_state(2, form="projected")
        with torch.no_grad():
            for part in (segments[:1], segments):
                out = model.read_by_layers(text[:, : 5 * len(part)], state, part, text[:, : 5 * len(part)])
                state = out.state
        found.append({"losses": out.losses_BT, **state})
    assert set(taken) == {way, "reference"}
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)


# ---- torch.compile


# dynamo asks non-leaves for their gradient and hides the warning, but not where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_compiled_formula_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: whole(function, backend="aot_eager", fullgraph=True))
    attention_module._compiled.cache_clear()
    for name in ("odd sizes", "sinks"):
        exact = attended(CASES[name], way="shift", dtype=torch.float64)
        compare(attended(CASES[name], way="compiled", dtype=torch.float64), exact, tolerance=1e-12)
    attention_module._compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.torch.jit.script_method. is deprecated")
def test_what_the_compiler_makes_of_it_is_right() -> None:
    attention_module._compiled.cache_clear()
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 0.1)):
        for name in ("odd sizes", "sinks"):
            exact = attended(CASES[name], way="reference", dtype=torch.float64)
            compare(attended(CASES[name], way="compiled", dtype=dtype), exact, tolerance=tolerance)


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """For Hopper, whose programs have 227 KB of shared memory, with matrix instructions in each."""
    cases = ("plain", "odd head", "everything", "few tokens", "content alone", "float32")
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compile_kernels.py"))
    done = subprocess.run([sys.executable, script, *cases], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["case"] for row in rows} == set(cases)
    for row in rows:
        assert row["shared"] <= 227 * 1024 and row["tensor_cores"] > 0, row


# ---- who is chosen


def need(device: str = "cuda", **changes: Any) -> Need:
    known = {"dtype": torch.bfloat16, "d_head": 64, "position": "transformer_xl", "weights": False}
    return Need(torch.device(device), **{**known, **changes})


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is said, as if nothing had been said yet."""
    monkeypatch.setattr(backends, "_said", set())
    caplog.set_level(logging.INFO, backends.__name__)
    return caplog


AUTO = {
    "kernels": (need(), "triton"),
    "odd head": (need(d_head=41), "triton"),
    "weights wanted": (need(weights=True), "compiled"),
    "no kernel for these positions": (need(position="shaw"), "compiled"),
    "double precision": (need(dtype=torch.float64), "compiled"),
    "very wide head": (need(d_head=512), "compiled"),
    "cpu": (need("cpu"), "shift"),
    "shapes alone": (need("meta"), "shift"),
}


@pytest.mark.parametrize(("asked", "expected"), AUTO.values(), ids=AUTO)
def test_auto_takes_what_the_device_and_the_layer_allow(asked: Need, expected: str, lines: Any) -> None:
    assert [choose("auto", asked) for _ in range(3)] == [expected] * 3
    (line,) = lines.messages  # once
    assert line == f"model.attention=auto: {expected} on {asked.device.type} in {asked.dtype}"


def test_without_triton_or_compiler_auto_falls_back(monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    monkeypatch.setattr(backends.shutil, "which", lambda name: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose("auto", need()) == "shift"
    assert choose("compiled", need("cpu")) == "shift"
    assert choose("compiled", need("cpu")) == "shift"
    assert lines.messages[1:] == [lines.messages[1]]
    assert lines.messages[1].startswith("model.attention=compiled: there is no C compiler (")
    assert lines.messages[1].endswith("; shift instead")
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert choose("auto", need()) == "shift"


def test_what_is_asked_for_is_taken(lines: Any) -> None:
    for name in ("reference", "shift", "compiled", "triton"):
        assert choose(name, need("cpu")) == name  # the interpreter is on
    assert lines.messages == []


def test_a_layer_whose_weights_are_wanted_says_that_it_has_no_kernel(lines: Any) -> None:
    assert choose("triton", need("cpu", weights=True)) == "shift"
    reason = "a memory wants to see the attention weights, which are never formed"
    assert lines.messages == [f"model.attention=triton: {reason}; shift instead"]
    assert lines.records[0].levelno == logging.WARNING


def test_triton_without_a_device_or_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_backend("triton", "cpu")  # in the interpreter
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for refuse in (lambda: check_backend("triton", "cpu"), lambda: choose("triton", need("cpu"))):
        with pytest.raises(ConfigError) as refused:
            refuse()
        rule = "its kernels need a CUDA device, not cpu"
        assert str(refused.value) == f"model.attention=triton: {rule}; set model.attention=auto"
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        check_backend("triton", "cuda")
    with pytest.raises(
        ConfigError, match=r"^model.attention=triton: there is no kernel for model.position=rotary; set it"
    ):
        ModelConfig(position="rotary", d_head=4, attention="triton")


def test_the_command_refuses_it_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = tiny_config(tmp_path, "model.attention=triton")
    with pytest.raises(ConfigError, match="its kernels need a CUDA device"):
        fit_command.check(config, FitOptions())
    assert not (tmp_path / "run").exists()


# ---- the script for a GPU


def dry(parts: str, folder: Path, *, before: str = "") -> dict[str, Any]:
    """What the script finds in a process of its own."""
    out = folder / "check.json"
    script = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"
    run = [str(script), "--dry-run", "--parts", parts, "--out", str(out)]
    code = f"{before}; import runpy, sys; sys.argv = {run!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["errors"] == []
    assert all(row["right"] for row in found["correctness"])
    return dict(found)


def test_the_gpu_check_runs_dry(tmp_path: Path) -> None:
    """What it finds out about attention, in a process without the heavy packages."""
    hide = "import sys; sys.modules.update(dict.fromkeys(('omegaconf', 'hydra', 'deepspeed', 'lightning')))"
    found = dry("correctness,attention,tune", tmp_path, before=hide)
    assert {row["at"].split()[-1] for row in found["correctness"]} == {"triton", "shift", "dropout"}
    assert found["attention"] and found["tune"]


def test_the_gpu_check_measures_dry(tmp_path: Path) -> None:
    """What it leaves to `txl bench`, without what a machine may lack."""
    hide = "import sys; sys.modules.update(dict.fromkeys(('deepspeed', 'wandb')))"
    found = dry("training,overhead", tmp_path, before=hide)
    assert [len(found[part]) for part in ("training", "overhead")] == [2, 1]
    assert all(row["rows"] for part in ("training", "overhead") for row in found[part])
