"""What `txl analyze` can measure: one line for the help, and which of the command's own keys each analysis reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from txl_lightning.errors import ConfigError
from txl_lightning.options import AnalyzeOptions


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """One analysis.

    Attributes:
        summary: one line for the help.
        keys: keys of `AnalyzeOptions` that it reads beside ckpt, trust and out.
        needs_ckpt: it takes no random weights.
        several: it takes a list of checkpoints.
    """

    summary: str
    keys: tuple[str, ...] = ()
    needs_ckpt: bool = True
    several: bool = False


ANALYSES = {
    "reach": Analysis(
        summary="how far back one changed token still matters, beside the memory's formula",
        keys=("segments",),
        needs_ckpt=False,
    ),
    "scores": Analysis(
        summary="the loss of every token with its text and offsets, as JSON Lines or Parquet",
        keys=("split", "tokens", "to", "plot"),
    ),
    "sliding": Analysis(
        summary="cached evaluation against the sliding window without cache: losses and time per token",
        keys=("split", "tokens", "lengths", "windows", "plot"),
    ),
    "recl": Analysis(
        summary="relative effective context length of a group: ckpt=[A,B,...]",
        keys=("split", "tokens", "targets", "block", "start", "step", "longest", "shares", "mem_len", "to", "plot"),
        several=True,
    ),
    "position": Analysis(
        summary="loss by position in the segment, with the memory and without it",
        keys=("split", "tokens", "plot"),
    ),
    "age": Analysis(
        summary="loss by tokens since memory started anew, and what memory's content adds",
        keys=("split", "tokens", "longest_age", "plot"),
    ),
    "frequency": Analysis(
        summary="what memory gains for rare and for frequent words",
        keys=("split", "tokens", "plot"),
    ),
    "sweep": Analysis(
        summary="lengths of memory, segment and clamped distances: the best on valid, reported on test",
        keys=("tokens", "mem_lens", "segment_lens", "clamp_lens", "plot"),
    ),
    "confidence": Analysis(
        summary="a mean loss with its interval over documents, and differences between checkpoints with theirs",
        keys=("split", "tokens", "samples", "plot"),
        several=True,
    ),
    "retrieval": Analysis(
        summary="what comes back: answers of data=recall, passkey or selective_copy, needles by length and depth",
        keys=("task", "grid_segments", "depths", "needles", "plot"),
    ),
}
"""Every analysis by its name."""

COMMON = ("action", "ckpt", "trust", "out")
"""Keys that all of them read."""


def analysis_of(options: AnalyzeOptions) -> Analysis:
    """The analysis that was asked for. Raises ConfigError: none was."""
    if options.action is None:
        cure = "write txl analyze ANALYSIS, for example txl analyze age ckpt=runs/book"
        raise ConfigError("action", "", "no analysis is named", cure)
    return ANALYSES[options.action]


def check_keys(options: AnalyzeOptions) -> None:
    """Refuse keys that were set and that this analysis does not read. Raises ConfigError."""
    read = {*COMMON, *analysis_of(options).keys}
    for item in dataclasses.fields(options):
        if item.name in read or getattr(options, item.name) == item.default:
            continue
        *others, last = [f"txl analyze {name}" for name, other in ANALYSES.items() if item.name in other.keys]
        owners = f"{', '.join(others)} and {last}" if others else last
        raise options.refuse(item.name, f"is of {owners} only", "leave it out")
