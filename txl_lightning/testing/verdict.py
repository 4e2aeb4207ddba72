"""What a law says: its name, how it was broken, or why it does not apply."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LAWS = {
    1: "forward is pure",
    2: "shapes are static",
    3: "lanes are independent",
    4: "a reset lane is a fresh lane",
    5: "dead lanes and padding move nothing",
    6: "causal across borders",
    7: "memory matters",
    8: "no graph older than it should be",
    9: "every parameter is trained by its own loss",
    10: "state saves and loads bit-equal",
    11: "segment by segment equals one pass; projected equals hidden",
    12: "evaluation leaves the training state alone",
}
"""The contract between a memory strategy and the model, by number."""


class LawBroken(AssertionError):
    """A strategy broke a law. Says which, what was compared, and the figures.

    Attributes:
        law: its number in `LAWS`.
    """

    def __init__(self, law: int, what: str) -> None:
        super().__init__(f"law {law} ({LAWS[law]}): {what}")
        self.law = law
        self.what = what


class DoesNotApply(Exception):
    """A law has nothing to say about this strategy; the message tells why."""


class Verdict(NamedTuple):
    """The outcome of one law."""

    law: int
    outcome: str  # "ok", "broken" or "does not apply"
    note: str  # what was compared, how it broke, or why the law does not apply

    def __str__(self) -> str:
        return f"law {self.law:>2}  {self.outcome:<14}  {LAWS[self.law]}: {self.note}"


def difference(ours: Tensor, theirs: Tensor, *, tolerance: float = 0.0) -> str | None:
    """None if two tensors agree, else the figures.

    Args:
        ours, theirs: any two tensors.
        tolerance: allowed |ours - theirs| / (1 + |theirs|); 0 demands equal bits.
    """
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} against {tuple(theirs.shape)}"
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} against {theirs.dtype}"
    if torch.equal(ours, theirs):
        return None
    if not ours.dtype.is_floating_point:
        return f"{int((ours != theirs).sum())} of {ours.numel()} entries differ"
    ours, theirs = ours.detach().double(), theirs.detach().double()
    apart = (ours - theirs).abs()
    if tolerance and bool((apart <= tolerance * (1 + theirs.abs())).all()):
        return None
    return f"largest difference {apart.max().item():.3g} (allowed {tolerance:g})"


def demand_equal(
    law: int, what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], *, tolerance: float = 0.0
) -> None:
    """Compare two groups of named tensors.

    Raises:
        LawBroken: the first name that differs, with the figures.
    """
    if ours.keys() != theirs.keys():
        raise LawBroken(law, f"{what}: not the same names: {', '.join(sorted(ours.keys() ^ theirs.keys()))}")
    for name in ours:
        figures = difference(ours[name], theirs[name], tolerance=tolerance)
        if figures is not None:
            raise LawBroken(law, f"{what}: {name}: {figures}")
