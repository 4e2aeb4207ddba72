"""Training with observers, and every point of the curves it draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import Logger

from txl_lightning import TextDataModule, TransformerXLModule, registry
from txl_lightning.config import Config
from txl_lightning.training.trainer import build_trainer


class Points(Logger):
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name, version = "points", "0"  # type: ignore[assignment]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None and all(type(value) is float for value in metrics.values())
        self.rows.append((step, dict(metrics)))

    def curve(self, name: str) -> dict[int, float]:
        """A figure by the optimizer step of its point."""
        return {step: row[name] for step, row in self.rows if name in row}


def observers(config: Config) -> list[L.Callback]:
    """The callbacks that a configuration names."""
    return [registry.callbacks.get(name).build(options) for name, options in config.callbacks.items()]


def watched(config: Config, *others: L.Callback, module: Any = None) -> tuple[Points, Any]:
    """Train with the configured callbacks and others before them."""
    points, module = Points(), module if module is not None else TransformerXLModule(config)
    callbacks: Sequence[L.Callback] = [*others, *observers(config)]
    build_trainer(config, callbacks=callbacks, loggers=[points]).fit(module, TextDataModule(config))
    return points, module
