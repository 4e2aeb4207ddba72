"""The second task of a comparison: the made-up corpus `recall`, read with the same model, memory and segments."""

from __future__ import annotations

import functools
from dataclasses import replace

from txl_lightning.config import Config, ConfigError, load
from txl_lightning.data.recall import RecallConfig
from txl_lightning.evaluation.retrieval import measure_retrieval
from txl_lightning.model.transformer import TransformerXL

ANSWERS = ("recall", "recall_by_chance", "nats_per_answer")
"""What `count_answers` finds."""


def on_recall(config: Config, *, label: str, steps: int) -> Config:
    """`experiment=recall` with another run's model, memory and segment length, for a training of `steps` steps.

    What the text decided (vocabulary, its clusters) becomes that of the task. An optimizer step reads one episode of
    every lane, memory starts anew with each, and memories that carry gradient do so through the whole episode: their
    answers lie that far back. Optimizer and lanes are the experiment's, the same for all that are compared.

    Raises:
        ConfigError: the task and this memory or segment do not go together; it names the label.
    """
    task = _experiment()
    text = task.data
    assert isinstance(text, RecallConfig)
    plain = {name: getattr(task.model, name) for name in ("vocab_size", "cutoffs", "div_val", "d_embed", "tie_projs")}
    segments = text.distance + 1
    try:
        return replace(
            task,
            seed=config.seed,
            model=replace(config.model, **plain),
            memory=replace(config.memory, reset="segment" if config.memory.reset == "segment" else "document"),
            data=replace(text, segment_len=config.data.segment_len, cache_dir=config.data.cache_dir),
            trainer=replace(
                task.trainer,
                max_steps=steps,
                accelerator=config.trainer.accelerator,
                precision=config.trainer.precision,
                accumulate_grad_batches=segments,
                bptt_segments=segments if config.memory.carries else 1,
            ),
        )
    except ConfigError as error:
        raise ConfigError(f"{label} on recall: {error.key}", error.value, error.rule, error.cure) from error


@functools.cache  # composing takes a second
def _experiment() -> Config:
    return load(["experiment=recall", "callbacks=none", "logger=none"])


def count_answers(config: Config, model: TransformerXL) -> dict[str, float]:
    """What share of the answers in the test split is right, what chance gets, and nats per answer."""
    found = measure_retrieval(config, model)
    return dict(zip(ANSWERS, (found.accuracy, found.chance, found.answer_loss), strict=True))
