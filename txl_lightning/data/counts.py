"""What was published about a benchmark, to be laid beside what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Published = Mapping[str, Mapping[str, int]]
"""A quantity to its count in each split, or in "all": tokens, lines, words, documents, bytes, vocabulary, symbols."""


def compare(published: Published, found: Published) -> list[dict[str, Any]]:
    """One row for each published count: what, split, ours, published, differs."""
    rows = []
    for what, counts in published.items():
        for split, count in counts.items():
            ours = found.get(what, {}).get(split)
            rows.append({"what": what, "split": split, "ours": ours, "published": count, "differs": ours != count})
    return rows


def verdict(rows: list[dict[str, Any]]) -> str:
    """One line about all rows."""
    differ = [f"{row['what']} of {row['split']}" for row in rows if row["differs"]]
    if not differ:
        return "all counts are the published ones"
    some = ", ".join(differ[:4]) + (f" and {len(differ) - 4} more" if len(differ) > 4 else "")
    return f"{len(differ)} of {len(rows)} counts differ from the published ones: {some}"
