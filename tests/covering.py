"""Covering arrays: few rows in which every combination of values of any two (or three) factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Chosen = tuple[tuple[str, int], ...]  # factors and the places of their values, sorted by factor


def covering_rows(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    *,
    strength: int = 2,
    first: Sequence[Row] = (),
    ruled: Sequence[str] | None = None,
    tries: int = 12,
) -> list[Row]:
    """Rows with a value of each factor, in which each combination of `strength` values occurs that is allowed at all.

    Greedy: a row is begun with a combination that no row has yet and filled up with values that bring most others.
    The same rows every time.

    Args:
        factors: values of each factor.
        allowed: whether a whole row is.
        first: rows, or parts of rows, to begin with.
        ruled: the factors that `allowed` looks at; None: all.
        tries: fillings that are tried for a row; a combination none of which is allowed is left to `completion`.
    """
    chance, rows = random.Random(0), []
    strength = min(strength, len(factors))
    open_ = set(combinations(factors, strength))
    given = [{name: list(factors[name]).index(value) for name, value in row.items()} for row in first]
    while given or open_:
        fixed = given.pop(0) if given else dict(min(open_))
        found = [_fill(fixed, factors, open_, chance, strength=strength) for _ in range(tries)]
        found = [row for row in found if allowed(_values(row, factors))]
        if not found:
            row = completion(fixed, factors, allowed, ruled=ruled)
            if row is None:
                open_.discard(tuple(sorted(fixed.items())))
                continue
            found = [row]
        best = max(found, key=lambda row: len(open_ & _covered(row, strength)))
        rows.append(_values(best, factors))
        open_ -= _covered(best, strength)
    return rows


def combinations(factors: Mapping[str, Sequence[Any]], strength: int) -> Iterator[Chosen]:
    """Every choice of a value for each of `strength` factors."""
    for names in itertools.combinations(sorted(factors), strength):
        for places in itertools.product(*(range(len(factors[name])) for name in names)):
            yield tuple(zip(names, places, strict=True))


def completion(
    fixed: Mapping[str, int],
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    *,
    ruled: Sequence[str] | None = None,
) -> dict[str, int] | None:
    """The first allowed row with these values, by trying all values of the factors that the rules look at; None if
    there is none."""
    names = [name for name in factors if name not in fixed and (ruled is None or name in ruled)]
    others = {name: 0 for name in factors if name not in fixed and name not in names}
    for places in itertools.product(*(range(len(factors[name])) for name in names)):
        row = {**fixed, **others, **dict(zip(names, places, strict=True))}
        if allowed(_values(row, factors)):
            return row
    return None


def _fill(
    fixed: Mapping[str, int],
    factors: Mapping[str, Sequence[Any]],
    open_: set[Chosen],
    chance: random.Random,
    *,
    strength: int,
) -> dict[str, int]:
    """A row: each further factor, in a random order, takes the value that brings most open combinations."""
    row = dict(fixed)
    names = [name for name in factors if name not in row]
    chance.shuffle(names)
    for name in names:
        places = list(range(len(factors[name])))
        chance.shuffle(places)
        row[name] = max(places, key=lambda place: _gain({**row, name: place}, name, open_, strength))
    return row


def _gain(row: dict[str, int], name: str, open_: set[Chosen], strength: int) -> int:
    others = sorted(set(row) - {name})
    found = 0
    for names in itertools.combinations(others, strength - 1):
        found += tuple(sorted((n, row[n]) for n in (*names, name))) in open_
    return found


def _covered(row: Mapping[str, int], strength: int) -> set[Chosen]:
    return {tuple((name, row[name]) for name in names) for names in itertools.combinations(sorted(row), strength)}


def _values(row: Mapping[str, int], factors: Mapping[str, Sequence[Any]]) -> Row:
    return {name: factors[name][row[name]] for name in factors if name in row}
