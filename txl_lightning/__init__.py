"""txl_lightning: trains language models that carry a memory from one segment of text to the next."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from txl_lightning._links import check_links

if TYPE_CHECKING:
    from txl_lightning.checkpoints import load_checkpoint
    from txl_lightning.model.transformer import TransformerXL
    from txl_lightning.training.datamodule import TextDataModule
    from txl_lightning.training.lane_state import LaneState
    from txl_lightning.training.module import TransformerXLModule

check_links()

__version__ = "0.1.0"
__all__ = ["LaneState", "TextDataModule", "TransformerXL", "TransformerXLModule", "__version__", "load_checkpoint"]

_HOMES = {
    "TransformerXL": "txl_lightning.model.transformer",
    "TransformerXLModule": "txl_lightning.training.module",
    "TextDataModule": "txl_lightning.training.datamodule",
    "LaneState": "txl_lightning.training.lane_state",
    "load_checkpoint": "txl_lightning.checkpoints",
}


def __getattr__(name: str) -> Any:
    # torch and lightning take seconds to import; `txl --help` must not wait for them
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
