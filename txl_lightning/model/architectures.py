"""The model that `model.architecture` names."""

from __future__ import annotations

from typing import Any

from txl_lightning.config import Config
from txl_lightning.model.lstm import LSTM
from txl_lightning.model.transformer import TransformerXL

KINDS: dict[str, Any] = {"transformer": TransformerXL, "lstm": LSTM}
"""`model.architecture` to its class. All have what `LSTM` has."""


def make_model(config: Config) -> Any:
    """A model with fresh weights: a TransformerXL, or what can stand in for one where lanes are read in order."""
    return KINDS[config.model.architecture](config)
