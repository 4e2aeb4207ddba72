"""`resume=`: which run is gone on with, and what may differ from how it was started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from txl_lightning.compose import compose_job
from txl_lightning.config import RUNS, Config, StrategyConfig
from txl_lightning.errors import ConfigError, yaml_text
from txl_lightning.keys import names
from txl_lightning.options import FitOptions
from txl_lightning.overrides import Typed
from txl_lightning.ranks import chunks_for_fewer

AUTO = "auto"
OF_ONE_INVOCATION = ("stop_at_step", "max_time")
MAY_DIFFER = (
    *("run_dir", "dry_run", "experiment", "logger*", "callbacks*", "eval*", "strategy*"),
    *("data.num_workers", "data.cache_dir", "trainer.detect_anomaly", "trainer.compile"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.lane_chunks"),
    *("memory.offload", "model.attention"),
    *("trainer.log_every_n_steps", "trainer.val_check_interval", "trainer.num_sanity_val_steps"),
    *(f"trainer.{name}" for name in ("on_divergence", "max_loss_rise", "max_skipped_steps")),
    *(f"trainer.{name}" for name in (*OF_ONE_INVOCATION, "save_every_steps", "save_every_minutes", "save_top_k")),
)
"""Patterns of keys that stopping, logging, validation and devices are about: training is the same, but for rounding.
And of what is done with steps that would ruin it: a run that diverged may be gone on with, leaving them out."""


def settle(typed: Sequence[Typed], *, config_dir: str | None, multirun: bool) -> tuple[Typed, ...]:
    """The overrides of `txl fit` with `resume` and `run_dir` as the checkpoint file and the folder they stand for.

    With `auto` only the typed keys that may differ stay, for the others agree; and `resume=auto` itself stays where
    there is no run to go on with.

    Raises:
        ConfigError: there is no such run, or the one in `run_dir` differs from what is typed.
    """
    given = [item.text for item in typed if item.key == "resume"]
    if not given or given[-1] == "null":
        return tuple(typed)
    if multirun:
        raise ConfigError("resume", given[-1], "one run is resumed at a time", "leave -m out")
    folders = [os.path.abspath(os.path.expanduser(item.text)) for item in typed if item.key == "run_dir"]
    rest = [item for item in typed if item.key not in ("resume", "run_dir")]
    if given[-1] == AUTO:
        fresh = _composed(rest, config_dir=config_dir)
        file = _in_folder(folders[-1], fresh) if folders else _newest(fresh)
        if file is None:
            return tuple(typed)
        rest = [item for item in rest if item.is_hydra or may_differ(item.key, fresh)]
    else:
        file = _of_run(given[-1])
        rest = [item for item in rest if item.key != "experiment" or item.text != _experiment(file)]
    folder = str(file.parent.parent)
    if folders and folders[-1] != folder:
        rule = f"resume goes on in the folder of its run, {folder}"
        raise ConfigError("run_dir", folders[-1], rule, "leave run_dir out")
    return (Typed(key="resume", text=str(file)), *rest, Typed(key="run_dir", text=folder))


def checkpoint_of(typed: Sequence[Typed]) -> str | None:
    """The checkpoint that settled overrides go on with; None: a fresh start."""
    given = [item.text for item in typed if item.key == "resume"]
    return given[-1] if given and given[-1] not in (AUTO, "null") else None


def start_values(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's configuration without what belonged to the invocation that wrote it."""
    ended = dict.fromkeys(OF_ONE_INVOCATION)
    return {**stored, "trainer": {**stored["trainer"], **ended}, "dry_run": False}


def check_ranks(values: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """The lanes of the run divide into the ranks that are to go on with it.

    Args:
        values: the configuration to be, not checked yet.
        stored: that of the checkpoint.

    Raises:
        ConfigError: they do not; the cure names the nearest numbers that do.
    """
    lanes, keys = int(stored["data"]["batch_size"]), values["trainer"]
    nodes, devices = keys.get("num_nodes", 1), keys.get("devices", 1)
    if not all(isinstance(number, int) and number > 0 for number in (nodes, devices)) or lanes % (nodes * devices) == 0:
        return
    able = [number for number in range(1, lanes + 1) if lanes % (number * nodes) == 0]
    near = [number for number in able if number < devices][-1:] + [number for number in able if number > devices][:1]
    rule = f"the {lanes} lanes of the run do not divide into {nodes * devices} ranks"
    raise ConfigError("trainer.devices", devices, rule, f"set it to {' or '.join(map(str, near)) or 'fewer nodes'}")


def what_changes(config: Config, *, ranks: int, lane_chunks: int, strategy: StrategyConfig) -> list[str]:
    """Sentences on what a resume on other ranks, in other chunks or by another engine cannot keep; empty: all is kept.

    Args:
        config: of the run as it goes on.
        ranks, lane_chunks, strategy: those it had.
    """
    now, lanes, chunks = config.trainer.devices * config.trainer.num_nodes, config.data.batch_size, lane_chunks
    said = []
    if now != ranks:
        said.append(
            f"the lanes of {ranks} ranks are shared out among {now}: text, memory, weights, optimizer and schedule go "
            "on as they were, losses agree up to rounding; random numbers are seeded anew from seed, step and rank, so "
            "with dropout the curve is not the one it would have been"
        )
    said += _of_another_engine(config, moved=now != ranks, strategy=strategy)
    if config.trainer.lane_chunks != lane_chunks:
        said.append(
            f"lanes are read in {config.trainer.lane_chunks} chunks instead of {chunks}: losses agree up to rounding, "
            "with dropout up to its masks"
        )
    before, after = lanes // ranks // lane_chunks, lanes // now // config.trainer.lane_chunks
    if after > before:
        proposed = chunks_for_fewer(lanes=lanes // now, at_most=before)
        engine = "strategy=ddp " if config.strategy.sharded else ""  # deepspeed takes no chunks
        said.append(
            f"a rank reads {after} lanes at a time instead of {before}; if that is more than a device holds, "
            f"{engine}trainer.lane_chunks={proposed} reads {lanes // now // proposed}"
        )
    return said


def _of_another_engine(config: Config, *, moved: bool, strategy: StrategyConfig) -> list[str]:
    """What DeepSpeed and Lightning do not have in common. `moved`: to other ranks; `strategy`: the run's so far."""
    here, precision = config.strategy, config.trainer.precision
    same = here.sharded == strategy.sharded and here.stage == strategy.stage
    if not (here.sharded or strategy.sharded) or (same and not moved):
        return []
    if precision.startswith("16"):
        return ["the loss scale of half precision is not kept and starts anew: the first steps may be left out"]
    if precision == "bf16-mixed" and here.sharded != strategy.sharded:
        return [f"in bf16-mixed {here.title} rounds elsewhere than {strategy.title}: the losses are near, not the same"]
    return []


def check_agreement(config: Config, stored: Mapping[str, Any]) -> None:
    """A resumed run trains as it was started. Raises ConfigError with both values."""
    for key, here, there in differences(config.to_dict(), Config.from_dict(stored).to_dict()):
        if not may_differ(key, config):
            rule = f"the run to go on with has {yaml_text(there)}"
            raise ConfigError(key, here, rule, "leave it out, or start a new run without resume")


def may_differ(key: str, config: Config) -> bool:
    """Whether a resumed run may have another value."""
    schedule = config.optim.schedule
    if key == "trainer.max_steps":
        return schedule != "cosine"  # which ends there
    if schedule == "plateau" and (key == "trainer.val_check_interval" or key.startswith("eval")):
        return False  # it watches validations
    return key != "experiment" and any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER)


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key and both values wherever two configurations differ; that of another memory or corpus by its name."""
    for name in [*here, *(name for name in there if name not in here)]:
        one, other = here.get(name), there.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping) and name != "callbacks":
            if one.get("name") != other.get("name"):
                yield name, one.get("name"), other.get("name")
                continue
            for key, ours, theirs in differences(one, other):
                yield f"{name}.{key}", ours, theirs
        elif one != other:
            yield name, one, other


def _composed(typed: Sequence[Typed], *, config_dir: str | None) -> Config:
    values = compose_job(typed, config_dir=config_dir, command="fit", stored=None)
    return Config.from_dict({name: value for name, value in values.items() if name not in names(FitOptions)})


def _of_run(path: str) -> Path:
    """The checkpoint a user means; it stands in a run's folder. Raises ConfigError."""
    from txl_lightning.checkpoints import FOLDER, checkpoint_file

    file = Path(os.path.abspath(checkpoint_file(path, key="resume")))
    if file.parent.name != FOLDER:
        rule = f"stands in no run's folder, which has its checkpoints in {FOLDER}"
        raise ConfigError("resume", path, rule, "give the folder of the run")
    return file


def _experiment(file: Path) -> str | None:
    from txl_lightning.checkpoints import read_config

    return read_config(str(file), key="resume").get("experiment")


def _in_folder(folder: str, fresh: Config) -> Path | None:
    """The `last` of a run in one folder, which must agree; None: it holds none."""
    from txl_lightning.checkpoints import FOLDER, LAST, is_checkpoint, read_config

    file = Path(folder, FOLDER, LAST)
    if not is_checkpoint(file):
        return None
    there = Config.from_dict(start_values(read_config(str(file), key="resume")))
    for key, ours, theirs in differences(fresh.to_dict(), there.to_dict()):
        if key != "experiment" and not may_differ(key, fresh):
            rule = f"the run in {folder} has {yaml_text(theirs)}"
            raise ConfigError(key, ours, rule, "give the values of the run, or another run_dir")
    return file


def _newest(fresh: Config) -> Path | None:
    """The `last` of the run started latest among those under `runs/` that agree with a configuration."""
    from txl_lightning.checkpoints import FOLDER, LAST
    from txl_lightning.training.run_folder import order_of

    def newness(file: Path) -> tuple[int, float]:
        return order_of(file.parent.parent), file.stat().st_mtime

    found = [path for depth in ("*", "*/*", "*/*/*") for path in Path(RUNS).glob(f"{depth}/{FOLDER}/{LAST}")]
    for file in sorted(found, key=newness, reverse=True):
        try:
            text = (file.parent.parent / "config.yaml").read_text(encoding="utf-8")
            there = Config.from_dict(start_values(yaml.safe_load(text)))
        except (OSError, yaml.YAMLError, ConfigError, KeyError, TypeError):
            continue  # not ours, or of another version
        if all(may_differ(key, fresh) for key, *_ in differences(fresh.to_dict(), there.to_dict())):
            return Path(os.path.abspath(file))
    return None
