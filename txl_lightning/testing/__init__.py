"""`check_memory`: does a memory strategy keep every law of the interface? For ours and for anyone's own.

    check_memory("cache", mem_len=16)                    a registered name and its keys
    check_memory(CacheConfig(mem_len=16))                its typed configuration
    check_memory(MyMemory, size=8)                       a class with `Config` and `build`, not registered
    check_memory(my_build, MyConfig(size=8))             a function (config, model_config) -> MemoryPlan

The strategy is put into a tiny Transformer-XL on random text, so a check takes seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from txl_lightning import registry
from txl_lightning.config import MemoryConfig, ModelConfig, build_section
from txl_lightning.memory.base import MemoryPlan
from txl_lightning.testing import reading_laws, state_laws, training_laws
from txl_lightning.testing.bench import Bench
from txl_lightning.testing.verdict import LAWS, DoesNotApply, LawBroken, Verdict

__all__ = ["LAWS", "LawBroken", "Verdict", "check_memory"]

CHECKS: dict[int, Callable[[Bench], str]] = {
    1: state_laws.pure,
    2: state_laws.static,
    3: state_laws.independent,
    4: state_laws.reset,
    5: state_laws.unmoved,
    6: reading_laws.causal,
    7: reading_laws.matters,
    8: training_laws.forgotten,
    9: training_laws.trained,
    10: state_laws.saved,
    11: reading_laws.equal_passes,
    12: state_laws.undisturbed,
}

MODEL = ModelConfig(n_layer=2, d_model=32, n_head=4, d_head=6, d_inner=48, vocab_size=29)
"""The tiny model. H K differs from D, so that mixing them up shows."""


def check_memory(
    memory: str | MemoryConfig | Callable[..., Any],
    config: Any = None,
    *,
    laws: Iterable[int] = tuple(LAWS),
    collect: bool = False,
    lossless: bool = False,
    longer: Mapping[str, Any] | None = None,
    both_losses: Iterable[str] = (),
    segment_len: int = 6,
    batch_size: int = 4,
    warm_segments: int = 8,
    bptt_segments: int = 2,
    long_run: int = 200,
    compiled: bool = True,
    model: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    mixed: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **keys: Any,
) -> dict[int, Verdict]:
    """Run the laws on a strategy.

    Args:
        memory: a registered name, a typed configuration, a class with `Config` and `build`, or a build function.
        config: what a build function is called with, if it is not made from keys.
        laws: numbers of the laws to run; see `LAWS`.
        collect: do not raise; the verdicts say what is broken.
        lossless: the strategy promises to lose nothing of a text that fits into its memory (law 11).
        longer: keys of the longer memory of law 12; by default twice the `mem_len`, if it has one.
        both_losses: endings of names of parameters that the language model's loss and an auxiliary loss may both
            train (law 9).
        segment_len, batch_size: T and B of the tiny model. With 5 lanes one is full, one short by a token, one dead,
            one of a single token and one of half the length at once; fewer lanes are so in turn.
        warm_segments: segments read before a law looks; the memory must be in full use after them.
        bptt_segments: segments whose graph a "carry" strategy keeps in law 8.
        long_run: segments law 8 trains on; below 30 it does not look whether memory piles up.
        compiled: count the compiler's graphs too (law 2; a few seconds).
        model: keys of the tiny model's configuration, e.g. {"pre_norm": True}.
        dtype: of parameters and state; law 11 always runs in float64.
        mixed: as in precision=bf16-mixed: bfloat16 autocast over the parameters' dtype, and a bfloat16 state.
        device: where to run.
        seed: of weights and text.
        keys: keys of the strategy's configuration.

    Returns:
        A verdict for each law that was run.

    Raises:
        LawBroken: the first law that is broken, unless `collect`.
        ConfigError: the strategy's keys are wrong, or do not fit the tiny model.
    """
    if batch_size < 1 or segment_len < 1:
        raise ValueError(f"batch_size={batch_size}, segment_len={segment_len}: need at least one lane and one token")
    model_config = dataclasses.replace(MODEL, **(model or {}))
    build, config = _resolve(memory, config, keys)
    bench = Bench(
        build=build,
        config=config,
        longer=_lengthen(config, longer),
        model=model_config,
        segment_len=segment_len,
        batch_size=batch_size,
        warm_segments=warm_segments,
        bptt_segments=bptt_segments,
        lossless=lossless,
        compiled=compiled,
        both_losses=tuple(both_losses),
        dtype=dtype,
        mixed=mixed,
        device=torch.device(device),
        seed=seed,
        long_run=long_run,
    )
    for each in (bench.config, bench.longer):
        if isinstance(each, MemoryConfig):
            each.check_fit(model_config, segment_len=segment_len)
    with bench.seeded():
        return {law: _try(law, bench, collect=collect) for law in laws}


def _resolve(
    memory: str | MemoryConfig | Callable[..., Any], config: Any, keys: Mapping[str, Any]
) -> tuple[Callable[[Any, ModelConfig], MemoryPlan], Any]:
    """The build function and its configuration."""
    if isinstance(memory, str):
        entry = registry.memories.get(memory)
        return entry.build, build_section(entry.config, {"name": memory, **keys}, path="memory")
    if isinstance(memory, MemoryConfig):
        return registry.memories.get(memory.name).build, memory
    schema = getattr(memory, "Config", None)
    if config is None and schema is not None:
        config = schema(**keys)
    elif keys:
        raise TypeError(f"{memory!r} has no Config to take {', '.join(keys)}; give the configuration itself")
    return getattr(memory, "build", memory), config


def _lengthen(config: Any, keys: Mapping[str, Any] | None) -> Any:
    """The configuration of law 12, or None."""
    if keys is None:
        size = getattr(config, "mem_len", 0)
        keys = {"mem_len": 2 * size} if size else {}
    return dataclasses.replace(config, **keys) if keys else None


def _try(law: int, bench: Bench, *, collect: bool) -> Verdict:
    """Run one law. Anything a strategy raises breaks the law under which it was raised."""
    try:
        return Verdict(law, "ok", CHECKS[law](bench))
    except DoesNotApply as reason:
        return Verdict(law, "does not apply", str(reason))
    except LawBroken as broken:
        if not collect:
            raise
        note = broken.what if broken.law == law else f"cannot be tried: {broken}"
        return Verdict(law, "broken", note)
    except Exception as error:
        raised = LawBroken(law, f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if not collect:
            raise raised from error
        return Verdict(law, "broken", raised.what)
