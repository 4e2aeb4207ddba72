"""Cached evaluation: a split read in ordered lanes with the memory carried along, every target scored once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import lightning.pytorch as L

from txl_lightning.config import Config, StrategyConfig
from txl_lightning.evaluation.dynamic import dynamic_loss
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training.datamodule import TextDataModule, one_by_one
from txl_lightning.training.metrics import scores
from txl_lightning.training.module import TransformerXLModule
from txl_lightning.training.trainer import build_trainer, device_kind


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A score and everything it depends on."""

    split: str
    scores: dict[str, float]  # loss in nats per token, bits per unit, ppl
    n_target: int  # scored targets
    scored: dict[str, int]  # words and bytes of the scored text, where they are counted: "word", "byte"
    batch_size: int  # lanes asked for
    n_lane: int  # lanes that had tokens
    segment_len: int
    memory: dict[str, Any]
    clamp_len: int
    same_length: str | None  # keys each token sees; None: all there are
    memory_reset: str  # where memory starts anew
    warm: int  # tokens that each lane read unscored before its own
    schedule: str  # "segments": one after the other; "layers": each layer over many of them
    precision: str
    dynamic: dict[str, Any] | None  # what `eval.dynamic` did; None: the weights stayed as they are
    data_fingerprint: str
    seconds: float
    tokens_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def evaluate(config: Config, model: TransformerXL, *, split: str, callbacks: Sequence[L.Callback] = ()) -> Evaluation:
    """Score a split.

    Args:
        config: lengths, data and devices.
        model: its weights.
        split: "train", "valid" or "test".
        callbacks: observers, a progress bar say.

    Raises:
        ConfigError: the corpus has no such split.
    """
    data = TextDataModule(config, test_split=split)
    n_target = len(data.data.require(split)) - 1
    follows = config.eval.dynamic != "none"
    start = time.perf_counter()
    found, precision = (_followed if follows else _read)(config, model, data, callbacks)
    seconds = time.perf_counter() - start
    return Evaluation(
        split=split,
        scores=found,
        n_target=n_target,
        scored=data.data.meta.scored(split),
        batch_size=config.eval_batch_size,
        n_lane=data.eval_lanes(split),
        segment_len=config.eval_segment_len,
        memory=config.memory.to_dict(),
        clamp_len=config.model.clamp_len,
        same_length=config.model.same_length_rule if config.model.same_length else None,
        memory_reset=config.memory.reset,
        warm=config.eval.warm,
        schedule="layers" if data.test_dataloader().group and not follows else "segments",
        precision=precision,
        dynamic=config.eval.dynamic_keys(),
        data_fingerprint=data.data.meta.fingerprint,
        seconds=seconds,
        tokens_per_second=n_target / seconds,
    )


def _read(
    config: Config, model: TransformerXL, data: TextDataModule, callbacks: Sequence[L.Callback]
) -> tuple[dict[str, float], str]:
    """Scores of a split with the weights as they are, and the precision they were computed in."""
    module = TransformerXLModule(config, model=model)
    trainer = build_trainer(_without_engine(config), callbacks=callbacks)
    trainer.test(module, datamodule=data, verbose=False)
    return module.scores["test"], str(trainer.precision)


def _followed(
    config: Config, model: TransformerXL, data: TextDataModule, callbacks: Sequence[L.Callback]
) -> tuple[dict[str, float], str]:
    """The same with weights that follow the text. Nothing calls the observers."""
    meta, split = data.data.meta, data.test_split
    training = TextDataModule(config, test_split="train") if config.eval.dynamic == "rms" else None
    nll, count = dynamic_loss(
        model.to(device_kind(config)),
        one_by_one(data.test_dataloader()),
        config.eval,
        training=() if training is None else one_by_one(training.test_dataloader()),
    )
    per_target = {unit: number / count for unit, number in meta.scored(split).items()}
    return scores(nll / count, meta.unit, per_target=per_target), "32-true"


def _without_engine(config: Config) -> Config:
    """The same with DDP for DeepSpeed: there is no optimizer whose state could be divided."""
    keys = config.strategy
    if not keys.sharded:
        return config
    name = "ddp" if config.trainer.devices * config.trainer.num_nodes > 1 else "auto"
    return replace(config, strategy=StrategyConfig(name=name, timeout_s=keys.timeout_s))
