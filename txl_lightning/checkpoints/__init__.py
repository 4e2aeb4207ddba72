"""Checkpoints: those of our runs, and the files of other Transformer-XLs. Loading never runs code from a file."""

from txl_lightning.checkpoints.own import (
    BEST,
    FOLDER,
    LAST,
    check_lane_files,
    checkpoint_file,
    is_checkpoint,
    load_checkpoint,
    read_checkpoint,
    read_config,
    read_stand,
    weights_alone,
)
from txl_lightning.checkpoints.reference import from_reference, to_reference

__all__ = [
    "BEST",
    "FOLDER",
    "LAST",
    "check_lane_files",
    "checkpoint_file",
    "from_reference",
    "is_checkpoint",
    "load_checkpoint",
    "read_checkpoint",
    "read_config",
    "read_stand",
    "to_reference",
    "weights_alone",
]
