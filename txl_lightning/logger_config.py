"""The keys of where curves go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from txl_lightning.section import Section, key


@dataclass(frozen=True, kw_only=True)
class LoggerConfig(Section):
    """Where curves go. Several loggers may be on at once."""

    section: ClassVar[str] = "logger"

    tensorboard: bool = key(False, "write TensorBoard events into the run folder")
    csv: bool = key(False, "write csv/metrics.csv into the run folder")
    wandb: bool = key(False, "log to Weights & Biases; needs the extra wandb")
    mlflow: bool = key(False, "log to MLflow; needs the extra mlflow")
    project: str = key("txl_lightning", "project at Weights & Biases, experiment in MLflow")
    offline: bool = key(False, "wandb: only write into the run folder; `wandb sync` sends it later")
    mlflow_uri: str | None = key(None, "where MLflow's store is; null: MLFLOW_TRACKING_URI, else in the run folder")
