"""What token files already say about a corpus: counts and vocabulary need not be made twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from txl_lightning.data.vocab import Vocab, from_dict

COUNTS = ("documents", "tokens", "bytes", "words", "scored_bytes")


def known(root: Path, made_from: str) -> tuple[Vocab, dict[str, Any]] | None:
    """Vocabulary, and details and counts as fields of a Scan, from token files made from the same content and rules.

    Args:
        root: the folder of all token files.
        made_from: what stands in their details under this name.
    """
    for path in root.glob("*/meta.json"):
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            if meta["details"].get("made_from") != made_from:
                continue
            vocab = from_dict(json.loads(path.with_name("vocab.json").read_text(encoding="utf-8")))
            if vocab.digest == meta["vocab_digest"]:
                return vocab, {"details": meta["details"]} | {name: meta[name] for name in COUNTS}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # no token folder, or a damaged one
    return None
