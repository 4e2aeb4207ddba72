"""Where curves go: the loggers that a configuration switches on, all writing into the run folder or naming it."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from txl_lightning.checkpoints.manifest import replace_text
from txl_lightning.config import Config, LoggerConfig
from txl_lightning.ranks import is_first_rank

IDS = "logger_ids.json"
"""File of a run folder: what its run is called at Weights & Biases and in MLflow, so that it goes on there."""


def check_loggers(config: LoggerConfig) -> None:
    """The packages of the loggers asked for are installed. Raises ConfigError."""
    for name in ("wandb", "mlflow"):
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            cure = f"pip install 'txl-lightning[{name}]'"
            raise config.refuse(name, f"the package {name} is not installed", cure)


def build_loggers(config: Config, run_dir: Path, *, resumed_at: int | None = None) -> list[Logger]:
    """The loggers that are switched on.

    Args:
        config: the whole configuration.
        run_dir: the folder.
        resumed_at: curves that are there already have no point behind this optimizer step; None: no point at all. At
            Weights & Biases and in MLflow what was drawn stays.
    """
    upto, keys = -1 if resumed_at is None else resumed_at, config.logger
    loggers: list[Logger] = []
    if keys.tensorboard:
        purge: dict[str, Any] = {"purge_step": upto + 1} if any(run_dir.glob("events.out.*")) else {}
        loggers.append(TensorBoardLogger(run_dir, name="", version="", default_hp_metric=False, **purge))
    if keys.csv:
        loggers.append(CSVLogger(run_dir, name="csv", version=""))
        if is_first_rank() and (run_dir / "csv").exists():
            loggers[-1]._experiment = GrowingTable(run_dir / "csv", upto=upto)  # type: ignore[attr-defined]
    ids = _read_ids(run_dir) if resumed_at is not None else {}
    if keys.wandb:
        ids["wandb"] = ids.get("wandb") or secrets.token_hex(4)
        loggers.append(_wandb(config, run_dir, run_id=ids["wandb"]))
    if keys.mlflow and is_first_rank():  # the others would open its store too, for nothing
        loggers.append(_mlflow(config, run_dir, run_id=ids.get("mlflow")))
        ids["mlflow"] = loggers[-1].run_id  # type: ignore[attr-defined]
    if ids and is_first_rank():
        replace_text(run_dir / IDS, json.dumps(ids))
    return loggers


def log_final(loggers: Sequence[Logger], config: Config, figures: Mapping[str, float], *, step: int) -> None:
    """The closing figures of a run as `final/<name>`: TensorBoard's HParams tab shows them beside the configuration."""
    named = {f"final/{name}": value for name, value in figures.items()}
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(config.to_dict(), named, step)
            logger.save()
        elif isinstance(logger, (WandbLogger, MLFlowLogger)):
            logger.log_metrics(named, step=step)


def close(loggers: Sequence[Logger]) -> None:
    """Let go of what a later run of this process would go on writing into."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and is_first_rank():
            logger.experiment.finish()


def _wandb(config: Config, run_dir: Path, *, run_id: str) -> WandbLogger:
    keys = config.logger
    return WandbLogger(project=keys.project, name=run_dir.name, save_dir=run_dir, id=run_id, offline=keys.offline)


def _mlflow(config: Config, run_dir: Path, *, run_id: str | None) -> MLFlowLogger:
    place, uri = run_dir.absolute(), config.logger.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return MLFlowLogger(
        experiment_name=config.logger.project,
        run_name=run_dir.name,
        tracking_uri=uri or f"sqlite:///{place / 'mlflow.db'}",
        artifact_location=None if uri else str(place / "mlruns"),  # else it would be where the process was started
        run_id=run_id,
    )


def _read_ids(run_dir: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        return dict(json.loads((run_dir / IDS).read_text(encoding="utf-8")))
    return {}


class GrowingTable(ExperimentWriter):
    """Lightning's CSV file, with the rows of a run that goes on; Lightning itself would delete them.

    Args:
        folder: where `metrics.csv` is.
        upto: the last optimizer step whose rows stay.
    """

    def __init__(self, folder: Path, *, upto: int) -> None:
        super().__init__(log_dir=str(folder))
        file = folder / self.NAME_METRICS_FILE
        if not file.exists():
            return
        with file.open(newline="") as opened:
            table = csv.DictReader(opened)
            self.metrics_keys = list(table.fieldnames or [])
            rows = [row for row in table if int(row.get("step") or 0) <= upto]
        if not rows:
            file.unlink()
            self.metrics_keys = []
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=self.metrics_keys)
        writer.writeheader()
        writer.writerows(rows)
        replace_text(file, text.getvalue())

    def _check_log_dir_exists(self) -> None:
        """Nothing is in the way."""
