"""Where model, memory and data meet: the rules that span them."""

from __future__ import annotations

import torch

from txl_lightning import registry
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.store import Meta
from txl_lightning.data.vocab import Vocab
from txl_lightning.memory.base import MemoryPlan, MemoryStrategy, TokenMemory
from txl_lightning.model.positions import KINDS

TOKENS_AT_ONCE = 8192
"""Tokens of all lanes of a rank that `eval.schedule=layers` reads at once: what bounds its memory."""


def check_vocabulary(config: Config, meta: Meta) -> None:
    """The model has exactly the data's symbols.

    Raises:
        ConfigError: it has not.
    """
    if config.model.vocab_size != meta.vocab_size:
        rule = f"the data has {meta.vocab_size} symbols ({meta.vocab_name})"
        raise ConfigError("model.vocab_size", config.model.vocab_size, rule, f"set model.vocab_size={meta.vocab_size}")


def check_resets(config: Config, vocab: Vocab) -> None:
    """Memory can start anew where `memory.reset` says.

    Raises:
        ConfigError: the text does not tell where documents end, or a strategy cannot start anew inside a segment.
    """
    if config.memory.reset != "document":
        return
    if document_end(vocab) is None:
        rule = f"the vocabulary {vocab.name} of this corpus does not tell where a document ends"
        raise config.memory.refuse("reset", rule, "set memory.reset=epoch")
    with torch.device("meta"):
        plan: MemoryPlan = registry.memories.get(config.memory.name).build(config.memory, config.model)
    unable = {name for name, part in _parts(plan) if not part.inner_resets}
    if unable and not _documents_begin_segments(config):
        rule = f"{' and '.join(sorted(unable))} cannot start anew inside a segment"
        cure = "set memory.reset=epoch, or use memory=cache (with memory.cold=absent and no memory.reuse_len)"
        raise config.memory.refuse("reset", rule, cure)


def _documents_begin_segments(config: Config) -> bool:
    """In training and in evaluation."""
    read = ((config.data.batch_size, config.data.segment_len), (config.eval_batch_size, config.eval_segment_len))
    return all(config.data.documents_begin_segments(lanes=lanes, segment_len=size) for lanes, size in read)


def not_layer_parallel(config: Config) -> str | None:
    """Why evaluation cannot run each layer over many segments at once (`eval.schedule=layers`); None: it can."""
    position = config.model.position
    if config.model.architecture != "transformer":
        return f"model.architecture={config.model.architecture} reads token by token"
    if KINDS[position].needs_whole_segments:
        return f"model.position={position} numbers the tokens of each segment"
    with torch.device("meta"):
        plan: MemoryPlan = registry.memories.get(config.memory.name).build(config.memory, config.model)
    others = sorted({name for name, part in _parts(plan) if not getattr(part, "layer_parallel", False)})
    if others:
        return f"{' and '.join(others)} reads more than the last tokens before a segment, as a cache or a window does"
    if any(len(layer) > 1 for layer in plan.layers):
        return "a layer has several memories"
    if config.memory.reset != "epoch" and not all(part.inner_resets for _, part in _parts(plan)):
        return f"memory.reset={config.memory.reset}: this memory cannot start anew among tokens read at once"
    return None


def check_schedule(config: Config) -> None:
    """Evaluation can be run as `eval.schedule` says.

    Raises:
        ConfigError: layers, where it does not apply.
    """
    reason = not_layer_parallel(config) if config.eval.schedule == "layers" else None
    if reason is not None:
        raise config.eval.refuse("schedule", reason, "set eval.schedule=segments, or auto")


def segments_at_once(config: Config, *, lanes: int, segment_len: int) -> int:
    """Segments that evaluation reads at once: 1 where it reads segment by segment.

    Args:
        lanes: of this rank.
        segment_len: tokens of a segment.
    """
    if config.eval.schedule == "segments" or not_layer_parallel(config) is not None:
        return 1
    return max(1, TOKENS_AT_ONCE // (lanes * segment_len))


def document_end(vocab: Vocab) -> int | None:
    """The id that ends a document; None: this vocabulary has none."""
    return getattr(vocab, "separator", None)


def _parts(plan: MemoryPlan) -> list[tuple[str, MemoryStrategy | TokenMemory]]:
    tokens: list[tuple[str, MemoryStrategy | TokenMemory]] = [] if plan.tokens is None else [("tokens", plan.tokens)]
    return tokens + [(name, part) for layer in plan.layers for name, part in layer.items()]
