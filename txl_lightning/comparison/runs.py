"""The matrix of runs: each made once, its figures kept, whatever happens to the others."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.fit import fit
from txl_lightning.comparison import peak
from txl_lightning.comparison.plan import Entrant
from txl_lightning.comparison.progress import MatrixProgress
from txl_lightning.comparison.recall import count_answers
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.recall import RecallConfig
from txl_lightning.errors import yaml_text
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.options import CompareOptions
from txl_lightning.training.divergence import Diverged
from txl_lightning.training.run_folder import write_json
from txl_lightning.training.stopping import GracefulStop
from txl_lightning.training.trainer import device_kind

PLAN, RUNS, MEASURED = "plan.json", "runs", "measured.json"
TEXT, RECALL = "text", "recall"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One place in the matrix.

    Attributes:
        label: of what is compared.
        config: with its seed and folder.
        task: what it is trained on: "text" or "recall".
        seconds: that it trains; None: trainer.max_steps.
    """

    label: str
    config: Config
    task: str = TEXT
    seconds: float | None = None

    @property
    def folder(self) -> Path:
        assert self.config.run_dir is not None
        return Path(self.config.run_dir)

    def measured(self) -> dict[str, Any] | None:
        """Its figures, or None before it has finished."""
        path = self.folder / MEASURED
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class TimeLimit(L.Callback):
    """Ends training after so many seconds of it, at the end of an optimizer step; validation does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.at_border and pl_module.clock.seconds >= self.seconds:
            trainer.should_stop = True


def matrix(
    entrants: Sequence[Entrant], *, seeds: int, folder: Path, task: str = TEXT, seconds: float | None = None
) -> list[Run]:
    """Every run of a task, all of one seed before the next."""
    found = []
    for number in range(seeds):
        for item in entrants:
            seed = item.config.seed + number
            place = folder / (RUNS if task == TEXT else task) / folder_name(item.label) / f"seed_{seed}"
            config = replace(item.config, seed=seed, run_dir=str(place))
            found.append(Run(label=item.label, config=config, task=task, seconds=seconds))
    return found


def folder_name(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^\w.-]", "_", label).lstrip(".") or "_"


def plan_facts(entrants: Sequence[Entrant], options: CompareOptions, *, fingerprint: str) -> dict[str, Any]:
    """All that finished runs depend on, as JSON holds it. More seeds may be asked for later."""
    budget = {name: getattr(options, name) for name in ("budget", "state_bytes", "seconds")}
    facts = {
        **budget,
        "memories": list(options.memories),
        "data_fingerprint": fingerprint,
        "configs": {item.label: item.config.to_dict() for item in entrants},
    }
    return json.loads(json.dumps(facts))


def recall_facts(entrants: Sequence[Entrant], *, fingerprint: str) -> dict[str, Any]:
    """The same of the runs on the recall task, which may be asked for after the others were made."""
    configs = {item.label: item.config.to_dict() for item in entrants}
    return json.loads(json.dumps({"data_fingerprint": fingerprint, "configs": configs}))


TYPED = {"memories": "memory"}
"""What of the plan is typed under another name."""


def check_folder(folder: Path, facts: Mapping[str, Any]) -> None:
    """Refuse a folder that holds something else than these runs. Raises ConfigError."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("out", folder, "is a file", "name a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / PLAN).exists():
        raise ConfigError("out", folder, f"the folder holds other things and no {PLAN}", "name another folder")
    there = dict(_flat(json.loads((folder / PLAN).read_text(encoding="utf-8"))))
    here = dict(_flat(facts))
    for key in [*here, *there]:
        if here.get(key) != there.get(key):
            name = TYPED.get(key, key)
            rule = f"its runs have {name}={yaml_text(there.get(key))}, and now it is {yaml_text(here.get(key))}"
            raise ConfigError("out", folder, rule, "name another folder, or ask for the same again")


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{path}.{name}" if path else str(name))


def run_all(runs: Sequence[Run]) -> int:
    """Make the runs that are not there yet; the exit code of a signal that ended them early, else 0."""
    missing = [run for run in runs if run.measured() is None]
    with MatrixProgress(len(runs)) as progress:
        progress.skip(len(runs) - len(missing))
        for run in missing:
            stop = GracefulStop()
            shutil.rmtree(run.folder, ignore_errors=True)  # what an interrupted run left
            figures = measure(run, progress=progress, stop=stop)
            if stop.received is not None:
                return stop.exit_code
            run.folder.mkdir(parents=True, exist_ok=True)
            write_json(run.folder / MEASURED, figures)
            progress.finish(_in_words(figures))
    return 0


def _in_words(figures: Mapping[str, Any]) -> str:
    if "failed" in figures:
        return str(figures["failed"])
    recalled = f", {figures['recall']:.1%} of the answers right" if "recall" in figures else ""
    return f"test loss {figures['loss']:.4f}{recalled}"


def measure(run: Run, *, progress: MatrixProgress, stop: GracefulStop) -> dict[str, Any]:
    """Train and score one run; {"failed": why} if its loss became infinite."""
    config, kind = run.config, device_kind(run.config)
    task = "" if run.task == TEXT else f" on {run.task}"
    watch = progress.begin(f"{run.label}{task}, seed {config.seed}", seconds=run.seconds)
    limit = [] if run.seconds is None else [TimeLimit(run.seconds)]
    peak.start(kind)
    try:
        with redirect_stdout(io.StringIO()):
            result = fit(config, stop=stop, callbacks=[watch, *limit]).result
    except Diverged as error:
        return {"failed": str(error)}
    peak_bytes = peak.read(kind)
    if stop.received is not None:
        return {}
    with stop.listening():
        model = load_checkpoint(str(run.folder), config)
        found = evaluate(config, model, split="test", callbacks=[watch, stop])
        answers = count_answers(config, model.to(kind)) if isinstance(config.data, RecallConfig) else {}
    return {
        **found.scores,
        **answers,
        "scored_targets": found.n_target,
        "steps": result["steps"],
        "tokens": result["tokens"],
        "train_seconds": result["train_seconds"],
        "tokens_per_second": result["tokens_per_second"],
        "peak_bytes": peak_bytes,
        "precision": result["precision"],
        "device": kind,
    }
