"""Where model, memory and data meet: the rules that span them."""

from __future__ import annotations

import torch

from txl_lightning import registry
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.store import Meta
from txl_lightning.data.vocab import Vocab
from txl_lightning.memory.base import MemoryPlan, MemoryStrategy, TokenMemory


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
    if unable:
        rule = f"{' and '.join(sorted(unable))} cannot start anew inside a segment"
        cure = "set memory.reset=epoch, or use memory=cache (with memory.cold=absent and no memory.reuse_len)"
        raise config.memory.refuse("reset", rule, cure)


def document_end(vocab: Vocab) -> int | None:
    """The id that ends a document; None: this vocabulary has none."""
    return getattr(vocab, "separator", None)


def _parts(plan: MemoryPlan) -> list[tuple[str, MemoryStrategy | TokenMemory]]:
    tokens: list[tuple[str, MemoryStrategy | TokenMemory]] = [] if plan.tokens is None else [("tokens", plan.tokens)]
    return tokens + [(name, part) for layer in plan.layers for name, part in layer.items()]
