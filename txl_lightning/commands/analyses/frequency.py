"""`txl analyze frequency`: what memory gains for rare and for frequent words."""

from __future__ import annotations

from rich.table import Table

from txl_lightning.commands.analyses.common import (
    check_files,
    check_text,
    give,
    model_of,
    separator_of,
    settings,
    text_of,
)
from txl_lightning.commands.analyses.plot import Panel
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.episodes import EpisodesConfig
from txl_lightning.data.store import survey
from txl_lightning.evaluation.frequency import Bucket, ByFrequency, by_frequency, count_words
from txl_lightning.evaluation.place import both_ways
from txl_lightning.options import AnalyzeOptions


def check(config: Config, options: AnalyzeOptions) -> None:
    """There are words, and a training split that counts them. Raises ConfigError."""
    assert options.ckpt is not None
    check_files(options)
    if isinstance(config.data, EpisodesConfig):
        raise ConfigError("data", config.data.name, "holds no words", "give text")
    check_text(config, options, ckpt=options.ckpt)
    found = survey(config.data, training=False)
    if "train" not in found.tokens:
        rule = "this corpus has no training split to count words in"
        raise ConfigError("data", config.data.name, rule, "give training text, for example data.train=FILE")


def run(config: Config, options: AnalyzeOptions) -> None:
    """Count words in the training split, read with the memory and without it."""
    data, tokens = text_of(config, options)
    own, cold = both_ways(config, model_of(config, options), tokens, separator=separator_of(data))
    buckets = by_frequency(tokens, data.vocab, count_words(data.require("train"), data.vocab), own=own, cold=cold)
    found = ByFrequency(
        buckets=buckets,
        words=sum(bucket.words for bucket in buckets),
        segment_len=config.eval_segment_len,
        memory=config.memory.to_dict(),
        split=options.split,
        data_fingerprint=data.meta.fingerprint,
    )
    table = Table(
        title=f"nats per word by the word's count in the training split, {found.split} split",
        caption=settings(found.memory, segment_len=found.segment_len),
    )
    for name in ("count in training", "words", "with memory", "without", "gain", "perplexity"):
        table.add_column(name, justify="right")
    for bucket in buckets:
        gain = bucket.loss_without - bucket.loss
        row = (f"{bucket.loss:.4f}", f"{bucket.loss_without:.4f}", f"{gain:+.4f}", f"{bucket.ppl_change:+.1%}")
        table.add_row(_range(bucket), f"{bucket.words:,}", *row)
    x = [float(max(bucket.least, 0.5)) for bucket in buckets]
    gains = {"gain": (x, [bucket.loss_without - bucket.loss for bucket in buckets])}
    panel = Panel(x="count in the training split (never: 0.5)", y="gain (nats per word)", curves=gains, log=True)
    give(options, table, found.to_dict(), [panel])


def _range(bucket: Bucket) -> str:
    return "never" if not bucket.most else f"{bucket.least:,}-{bucket.most:,}"
