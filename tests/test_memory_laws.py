"""Every memory strategy keeps every law, and the check of each law finds a strategy that breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import broken_strategies as broken
import pytest
import torch

from txl_lightning import registry
from txl_lightning.config import ConfigError, ModelConfig, build_section
from txl_lightning.memory.associative import Associative, AssociativeConfig
from txl_lightning.memory.base import MemoryPlan, MemoryStrategy
from txl_lightning.memory.cache import Cache, CacheConfig
from txl_lightning.memory.mix import MixConfig
from txl_lightning.testing import LAWS, LawBroken, check_memory

# every registered strategy: arguments of check_memory
STRATEGIES: dict[str, dict[str, Any]] = {
    "none": {},
    "cache": {"mem_len": 16, "lossless": True},
    "compressive": {"mem_len": 12, "compressed_len": 5, "rate": 3},
    "window": {"window": 16, "lossless": True, "longer": {"window": 40}},
    "tokens": {"n_tokens": 2},
    "associative": {},
    "knn": {"mem_len": 10, "top_k": 3},
    "block_recurrent": {"n_states": 3, "block_len": 4, "window": 5},
    "titans": {"chunk_len": 4, "layers": (1,)},
    "associative_tokens": {"n_tokens": 2, "d_mem": 4, "layers": (1,)},
    "expire": {"mem_len": 12, "max_span": 20.0, "ramp": 5.0, "both_losses": ("span.weight", "span.bias")},
    "mix": {
        "parts": [{"name": "cache", "layers": [1], "mem_len": 7}],
        "longer": {"parts": ({"name": "cache", "layers": [1], "mem_len": 70},)},
    },
}

VALUES_ONLY: dict[str, Any] = {
    "laws": [law for law in LAWS if law != 8],
    "compiled": False,
}  # leaves out what takes seconds

VARIANTS: dict[str, dict[str, Any]] = {
    "short memory": {"mem_len": 4, "lossless": False},
    "memory of one": {"mem_len": 1, "lossless": False},
    "reference": {"model": {"attention": "reference", "clamp_len": 5}},
    "float64": {"dtype": torch.float64, "model": {"untie_r": True}},
    "shaw": {"model": {"position": "shaw", "max_distance": 40}},
    "rotary, grouped heads": {"model": {"position": "rotary", "n_kv_head": 1, "qk_norm": True, "norm": "rmsnorm"}},
    "no position, gated": {"model": {"position": "none", "ffn": "swiglu", "bias": False, "final_norm": True}},
    "two terms": {"model": {"terms": ("a", "d"), "ffn": "gelu"}},
    "adaptive": {"model": {"cutoffs": (4, 9), "div_val": 2}, "compiled": False},
}

TODAY = {
    "position": "rotary",
    "norm": "rmsnorm",
    "ffn": "swiglu",
    "n_kv_head": 1,
    "qk_norm": True,
    "bias": False,
    "pre_norm": True,
    "final_norm": True,
}


@pytest.mark.parametrize("name", registry.memories.names())
def test_a_registered_strategy_keeps_every_law(name: str) -> None:
    verdicts = check_memory(name, **STRATEGIES[name])
    assert list(verdicts) == list(range(1, 13))
    assert {verdict.outcome for verdict in verdicts.values()} == {"ok"}


@pytest.mark.parametrize("name", registry.memories.names())
def test_windows_of_segments_are_allowed_where_a_graph_crosses_the_border(name: str) -> None:
    entry = registry.memories.get(name)
    config = build_section(entry.config, {"name": name}, path="memory")
    plan = entry.build(config, ModelConfig())
    parts = [plan.tokens, *(part for layer in plan.layers for part in layer.values())]
    assert config.carries == any(part is not None and part.gradient == "carry" for part in parts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_keeps_the_laws_in_every_model(variant: str) -> None:
    check_memory("cache", **{"mem_len": 13, "lossless": True, **VALUES_ONLY, **VARIANTS[variant]})


def test_a_cache_of_length_zero_is_no_memory() -> None:
    note = check_memory("cache", mem_len=0, **VALUES_ONLY)[7].note
    assert note.startswith("no memory: ")
    assert note.endswith("equal those of the plain model bit for bit")


# ---- the interface, tried with memories of every kind


def part(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, **{key: value for key, value in {**STRATEGIES[name], **keys}.items() if key not in ARGUMENTS}}


ARGUMENTS = ("lossless", "longer", "both_losses")
MIXES: dict[str, list[dict[str, Any]]] = {
    "cache and tokens": [part("cache", mem_len=7), part("tokens", read_slots=True)],
    "cache and tokens that do not see it": [part("cache", mem_len=7), part("tokens")],
    "cache below, associative above": [part("cache", mem_len=7, layers=[0]), part("associative", layers=[1])],
    "compressive and cache in one layer": [part("compressive"), part("cache", mem_len=7)],
    "most used, cache and tokens": [
        part("compressive", function="most_used", loss="none"),
        part("cache", mem_len=7),
        part("tokens", read_slots=True),
    ],
    "everything": [
        part("titans", variant="mac", layers=[0]),
        part("window", sinks=2),
        part("tokens", read_slots=True),
        part("block_recurrent", layers=[1]),
        part("cache", mem_len=7),
    ],
}


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("none", "mix")])
def test_a_strategy_keeps_the_laws_in_a_model_of_today(name: str) -> None:
    check_memory(name, mixed=True, model=TODAY, **VALUES_ONLY, **STRATEGIES[name])


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_keeps_the_laws(name: str) -> None:
    check_memory("mix", parts=MIXES[name], **VALUES_ONLY)


def test_a_mix_of_everything_compiles_to_one_graph() -> None:
    note = check_memory("mix", parts=MIXES["everything"], laws=[2])[2].note
    assert note.endswith("one graph over 5 training steps")


# ---- the laws find what is broken

BROKEN: list[tuple[type, int, str]] = [
    (broken.WritesInPlace, 1, "WritesInPlace.write changed state hidden in place"),
    (broken.EditsTheDict, 1, "EditsTheDict.write changed state hidden in place"),
    (broken.KeepsStateOnItself, 1, "forward left something on the module: layers.0.memories.cache.seen"),
    (broken.KeepsAList, 1, "forward left something on the module: layers.0.memories.cache.norms"),
    (broken.Grows, 2, "Grows.write: hidden was (4, 9, 32) and is (4, 15, 32)"),
    (broken.ClaimsToBeContiguous, 2, "ages are declared contiguous but are not 9, 8, ..., 1"),
    (broken.MixesLanes, 3, "other tokens and memory in lane 0 changed another lane: "),
    (broken.SharesOneMemory, 3, "other tokens and memory in lane 0 changed another lane: "),
    (broken.CountsDown, 4, "lane 0 after its reset against a fresh lane (hidden form): "),
    (broken.StartIsNotLearned, 4, "hidden is learned, but layers.0.memories.cache.start gets no gradient"),
    (broken.ShiftsByT, 5, "other tokens in the padding: "),
    (broken.CountsPadding, 5, "1 tokens padded to 6 against 1 tokens alone (hidden form): losses after it: "),
    (broken.ReadsItsOwnSegment, 6, "another token 1 changed the losses before it (hidden form): "),
    (broken.IgnoresItsState, 7, "another history in layers.0.cache changes no loss of lane 0"),
    (broken.DoesNotDetach, 8, "layers.0.cache.hidden still has a graph after segment 1, but "),
    (broken.DetachesALocalName, 8, "declares gradient='carry', but the next segment's loss does not reach its state"),
    (broken.FreezesTheLayer, 9, "forward took requires_grad from layers.0.attention.qkv.weight"),
    (broken.HasAnIdleParameter, 9, "layers.0.memories.cache.idle gets no gradient from any loss"),
    (broken.AuxiliaryLossReachesTheModel, 9, "an auxiliary loss reaches u, which belongs to the model"),
    (broken.StateIsAParameter, 10, "state layers.0.cache.hidden is a Parameter, not a plain tensor"),
    (broken.ProjectsSomethingElse, 11, "projected form against hidden form in segment 1: losses: "),
]


@pytest.mark.parametrize(("memory", "law", "said"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_a_broken_strategy_is_found_and_the_law_named(memory: type, law: int, said: str) -> None:
    with pytest.raises(LawBroken) as caught:
        check_memory(memory, mem_len=9, laws=[other for other in LAWS if other != 8 or law == 8], compiled=False)
    assert caught.value.law == law
    assert str(caught.value).startswith(f"law {law} ({LAWS[law]}): ")
    assert said in str(caught.value)


def test_what_a_configuration_says_wrongly_is_found() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent(AssociativeConfig):
        carries: ClassVar[bool] = False  # type: ignore[misc]

    @dataclass(frozen=True, kw_only=True)
    class Near(CacheConfig):
        reaches_back: ClassVar[bool] = False  # type: ignore[misc]

    associative, cache = (registry.memories.get(name).build for name in ("associative", "cache"))
    with pytest.raises(LawBroken, match=r"^law 8 .*: Silent.carries is False, so trainer.bptt_segments would be mis"):
        check_memory(associative, Silent(), laws=[8])
    with pytest.raises(LawBroken, match=r"^law 2 .*: Near.reaches_back is False, but max_age is 64 in layers.0.cache"):
        check_memory(cache, Near(), laws=[2])


def test_a_state_that_forgets_its_dtype_is_found_in_bfloat16() -> None:
    check_memory(broken.ForgetsTheDtype, mem_len=9, laws=[1, 2], compiled=False)
    with pytest.raises(LawBroken, match=r"^law 2 .*: hidden was torch.bfloat16 and is torch.float32$"):
        check_memory(broken.ForgetsTheDtype, mem_len=9, dtype=torch.bfloat16, compiled=False)


def test_a_branch_on_data_is_not_one_graph() -> None:
    with pytest.raises(LawBroken, match=r"^law 2 \(shapes are static\): raised UserError: "):
        check_memory(broken.AsksTheData, mem_len=9)


def test_a_wrong_distance_is_not_lossless() -> None:
    check_memory(broken.IsOneTokenOlder, mem_len=14, **VALUES_ONLY)
    with pytest.raises(
        LawBroken, match=r"^law 11 .*: segments of 1 tokens against one pass of 12 \(hidden form\): losses: "
    ):
        check_memory(broken.IsOneTokenOlder, mem_len=14, laws=[11], lossless=True)


def test_an_evaluation_that_leaks_into_training_is_found() -> None:
    with pytest.raises(LawBroken, match=r"^law 12 .*: the training step after an evaluation: losses: "):
        check_memory(broken.EvaluationLeaks, mem_len=9, laws=[12])
    broken.EvaluationLeaks.mean.clear()


@pytest.mark.parametrize(
    ("memory", "law"), [(broken.KeepsStateOnItself, 4), (broken.KeepsStateOnItself, 3), (broken.KeepsAList, 8)]
)
def test_a_fault_is_found_by_other_laws_too(memory: type, law: int) -> None:
    with pytest.raises(LawBroken, match=f"^law {law} "):
        check_memory(memory, mem_len=9, laws=[law])


# ---- how it is called


def test_collect_gives_every_verdict_and_does_not_raise() -> None:
    verdicts = check_memory(broken.DoesNotDetach, mem_len=9, collect=True, compiled=False)
    assert [law for law, verdict in verdicts.items() if verdict.outcome == "broken"] == [8]
    assert verdicts[2].note.endswith("graphs not counted (compiled=False)")
    assert str(verdicts[8]).startswith("law  8  broken          no graph older than it should be: state layers.0.")


def test_a_law_that_cannot_be_tried_says_which_one_is_in_its_way() -> None:
    verdicts = check_memory(broken.Grows, mem_len=9, collect=True, compiled=False, laws=[2, 10])
    assert verdicts[2].note.startswith("Grows.write: ")
    assert verdicts[10].note.startswith("cannot be tried: law 2 (shapes are static): Grows.write: ")


def test_a_memory_without_state_cannot_matter() -> None:
    def build(config: None, model: ModelConfig) -> MemoryPlan:
        return MemoryPlan(layers=[{"nothing": MemoryStrategy()} for _ in range(model.n_layer)])

    verdicts = check_memory(build, laws=[7])
    assert verdicts[7].outcome == "does not apply"
    assert verdicts[7].note == "the memory has no state"


def test_every_way_to_name_a_strategy() -> None:
    def build(config: int, model: ModelConfig) -> MemoryPlan:
        caches = [
            Cache(mem_len=config, d_model=model.d_model, n_head=model.n_head, d_head=model.d_head)
            for _ in range(model.n_layer)
        ]
        return MemoryPlan(layers=[{"mine": cache} for cache in caches])

    ways = [
        check_memory("cache", mem_len=9, laws=[10]),
        check_memory(CacheConfig(mem_len=9), laws=[10]),
        check_memory(broken.Faulty, mem_len=9, laws=[10]),
        check_memory("broken_strategies:Faulty", mem_len=9, laws=[10]),
        check_memory(build, 9, laws=[10]),
    ]
    assert [verdicts[10].outcome for verdicts in ways] == ["ok"] * 5


def test_the_callers_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    check_memory("cache", mem_len=9, laws=[1, 4, 9, 12], model={"dropout": 0.1})
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_asked_wrongly_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^memory.mem_length=9: no such key; did you mean mem_len\?$"):
        check_memory("cache", mem_length=9)
    with pytest.raises(ConfigError, match=r"^memory.rate=4: must divide data.segment_len=6; take a divisor, .*$"):
        check_memory("compressive", rate=4, mem_len=12)
    with pytest.raises(ValueError, match=r"^batch_size=0, segment_len=6: need at least one lane and one token$"):
        check_memory("cache", batch_size=0)
    with pytest.raises(LawBroken, match=r"lossless=True needs a memory of two segments; it holds 9 tokens$"):
        check_memory("cache", mem_len=9, lossless=True, laws=[11])
    with pytest.raises(LawBroken, match=r"raised TypeError: build returned a list; it must return a MemoryPlan$"):
        check_memory(lambda config, model: [], laws=[1])


def test_two_reads_beside_attention_in_one_layer_are_refused() -> None:
    model = ModelConfig()
    one, two = (Associative(AssociativeConfig(), model) for _ in range(2))
    with pytest.raises(ValueError, match=r"^one and two both read beside attention in layer 0$"):
        MemoryPlan(layers=[{"one": one, "two": two}])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            [{"name": "cache"}, {"name": "compressive", "rate": 4, "mem_len": 12}],
            "memory.parts[1].rate=4: must divide data.segment_len=6; take a divisor, or another segment length",
        ),
        (
            [{"name": "associative"}, {"name": "knn", "layers": [1]}],
            "memory.parts=[{name: associative},{name: knn, layers: [1]}]: "
            "associative and knn both read beside attention in layer 1; give them different layers",
        ),
        (
            [{"name": "tokens"}, {"name": "tokens"}],
            "memory.parts=[{name: tokens},{name: tokens}]: two parts add memory tokens to the input; keep one of them",
        ),
    ],
)
def test_a_mix_names_the_parts_at_fault(parts: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MixConfig(parts=parts).check_fit(ModelConfig(), segment_len=6)
    assert str(caught.value) == said
