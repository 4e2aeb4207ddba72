"""`txl analyze age`: loss by the age of the context, and what memory's content adds to it."""

from __future__ import annotations

from rich.table import Table

from txl_lightning.build import document_end
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
from txl_lightning.config import Config
from txl_lightning.data.store import prepare
from txl_lightning.evaluation.age import cohort_of, measure_by_age
from txl_lightning.options import AnalyzeOptions


def check(config: Config, options: AnalyzeOptions) -> None:
    """There are two documents or more that reach into the oldest bucket. Raises ConfigError."""
    assert options.ckpt is not None
    longest = options.longest_age
    if longest & (longest - 1):
        below = 1 << (longest.bit_length() - 1)
        raise options.refuse("longest_age", "must be a power of two", f"set it to {below} or {2 * below}")
    check_files(options)
    check_text(config, options, ckpt=options.ckpt, least=2 * longest)
    data = prepare(config.data, training=False)
    tokens = data.require(options.split)[: options.tokens]
    cohort, _ = cohort_of(tokens, longest=longest, separator=document_end(data.vocab))
    if len(cohort) < 2:
        rule = f"{len(cohort)} documents of the {options.split} split have so many tokens, and two are needed"
        raise options.refuse("longest_age", rule, "lower it, or give longer documents")


def run(config: Config, options: AnalyzeOptions) -> None:
    """Read the cohort in three ways."""
    data, tokens = text_of(config, options)
    cohort, cut = cohort_of(tokens, longest=options.longest_age, separator=separator_of(data))
    found = measure_by_age(
        config,
        model_of(config, options),
        cohort,
        cut=cut,
        split=options.split,
        data_fingerprint=data.meta.fingerprint,
    )
    what = "pieces of the one document" if cut else "documents, each in all buckets"
    table = Table(
        title=f"nats per token by tokens since memory started anew: {found.documents:,} {what}",
        caption=settings(found.memory, segment_len=found.segment_len),
    )
    for name in ("age", "loss", "gain over memory anew each segment", "over the neighbour's memory"):
        table.add_column(name, justify="right")
    for bucket in found.buckets:
        table.add_row(
            str(bucket.first) if bucket.first == bucket.last else f"{bucket.first}-{bucket.last}",
            f"{bucket.loss:.4f}",
            f"{bucket.benefit:+.4f} ± {bucket.benefit_error:.4f}",
            f"{bucket.content:+.4f} ± {bucket.content_error:.4f}",
        )
    x = [float(bucket.first) for bucket in found.buckets]
    differences = {
        "over memory anew each segment": (x, [bucket.benefit for bucket in found.buckets]),
        "over the neighbour's memory": (x, [bucket.content for bucket in found.buckets]),
    }
    loss = {"with its memory": (x, [bucket.loss for bucket in found.buckets])}
    age = "tokens since memory started anew"
    panels = [
        Panel(x=age, y="nats per token", curves=loss, log=True),
        Panel(x=age, y="gain (nats per token)", curves=differences, levels={"none": 0.0}, log=True),
    ]
    give(options, table, found.to_dict(), panels)
