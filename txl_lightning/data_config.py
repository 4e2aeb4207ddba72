"""What the keys of every corpus are; each adds its own in its own file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from txl_lightning.section import Section, key


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What every corpus has; each adds its own keys in its own file."""

    section: ClassVar[str] = "data"

    name: str = key("stdlib", "corpus: see configs/data/")
    segment_len: int = key(64, "tokens of one segment, per lane and step", minimum=1)
    batch_size: int = key(16, "lanes read side by side, over all ranks", minimum=1)
    shuffle: str = key(
        "none",
        "units of the training split in a new order each epoch, drawn from the seed; memory runs straight on",
        choices=("none", "document", "line"),
    )
    segment_len_std: float = key(
        0.0, "tokens that lengths of training segments spread below segment_len; 0: all alike", minimum=0
    )
    num_workers: int = key(0, "processes that read ahead; 0: read in the training process", minimum=0, maximum=256)
    cache_dir: str | None = key(None, "where token files are kept; null: the user's cache folder")

    def documents_begin_segments(self, *, lanes: int, segment_len: int) -> bool:
        """Whether no document begins inside a segment when a split is read in so many lanes and tokens at a time."""
        return False
