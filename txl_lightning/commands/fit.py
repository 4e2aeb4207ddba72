"""`txl fit`: train, and say what came out."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from rich.console import Console
from rich.table import Table

from txl_lightning import registry
from txl_lightning.build import check_resets, check_vocabulary
from txl_lightning.checkpoints import (
    FOLDER,
    LAST,
    check_lane_files,
    checkpoint_file,
    lane_files,
    read_checkpoint,
    read_stand,
)
from txl_lightning.checkpoints.manifest import remove_parts
from txl_lightning.commands.dry_run import segments_per_epoch, show_needs
from txl_lightning.config import RUNS, Config, ConfigError, Options
from txl_lightning.data.store import Meta, Survey, survey
from txl_lightning.data.vocab import from_dict
from txl_lightning.ranks import is_first_rank
from txl_lightning.resume import AUTO, what_changes
from txl_lightning.training import folders
from txl_lightning.training.checkpointing import EndInside, checkpoint_callbacks, keep_if_best
from txl_lightning.training.datamodule import TextDataModule
from txl_lightning.training.layout import show_layout
from txl_lightning.training.lock import check_unlocked, locked
from txl_lightning.training.loggers import build_loggers, check_loggers, close, log_final
from txl_lightning.training.module import TransformerXLModule
from txl_lightning.training.optim import check_optimizer
from txl_lightning.training.run_folder import (
    RESULT,
    check_writable,
    forget_facts,
    go_on,
    read_facts,
    refuse_used_folder,
    write_facts,
    write_json,
)
from txl_lightning.training.stopping import GracefulStop, Stopped, StoppedNow
from txl_lightning.training.strategies import n_parameter
from txl_lightning.training.trainer import build_trainer, check_devices

FINAL = ("memory/benefit/", "memory/probe/", "memory/attention/", "cost/", "perf/peak_memory_gb", "perf/mfu")
"""Curves whose latest figure is a closing figure of the run."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A finished training run."""

    run_dir: Path
    module: TransformerXLModule
    result: dict[str, Any]


def check(config: Config, options: Options) -> None:
    """Everything about a training run that can be refused. Writes nothing; raises ConfigError."""
    wanted = getattr(options, "resume", None)
    if not config.dry_run and wanted is None:
        refuse_used_folder(config.run_dir)
    if not config.dry_run:
        check_writable(config.run_dir if config.run_dir is not None else RUNS)
    if config.run_dir is not None:
        check_unlocked(Path(config.run_dir))
    check_devices(config)
    check_optimizer(config.optim)
    check_loggers(config.logger)
    found = survey(config.data)
    if wanted not in (None, AUTO):
        check_resumable(config, found, str(wanted))
    check_vocabulary(config, found)
    check_resets(config, found.vocab)
    if config.optim.schedule == "plateau":
        check_plateau(config, found)


def check_resumable(config: Config, found: Survey, path: str) -> None:
    """The text is the checkpoint's, and the run is to end behind it. Raises ConfigError."""
    saved = read_checkpoint(path, key="resume", weights=False)
    check_lane_files(path, saved, key="resume")
    check_whole(saved, path)
    own, step = saved["txl_lightning"], saved["global_step"]
    for key in ("stop_at_step", "max_steps"):
        end = getattr(config.trainer, key)
        if end is not None and end < step:
            raise config.trainer.refuse(key, f"the checkpoint has made {step} steps", f"set it to {step} or more")
    there, vocab = own["data_fingerprint"], own.get("vocab")
    if there in (None, found.fingerprint):
        return
    assert config.run_dir is not None
    python = read_facts(Path(config.run_dir)).get("python")
    if config.data.name == "stdlib" and python not in (None, platform.python_version()):
        rule = f"its text is the library of Python {platform.python_version()}, the run was trained on that of {python}"
        raise ConfigError("data", "stdlib", rule, f"go on with Python {python}")
    if vocab is not None and from_dict(vocab).digest != found.vocab_digest:
        rule = f"the run has the vocabulary {from_dict(vocab).digest} of {from_dict(vocab).size} symbols"
        raise ConfigError("data.vocab", found.vocab_digest, rule, "go on with the vocabulary the run was started with")
    rule = f"the text was altered: the run was trained on {there}"
    raise ConfigError("data.fingerprint", found.fingerprint, rule, "restore the text, or start a new run")


def check_whole(saved: dict[str, Any], path: str) -> None:
    """The checkpoint has what training goes on from, not weights alone. Raises ConfigError."""
    if not checkpoint_file(path).is_dir() and "optimizer_states" not in saved:
        raise ConfigError("resume", path, "holds weights alone, no optimizer state", "give the run's own checkpoint")


def check_plateau(config: Config, found: Meta) -> None:
    """The schedule `plateau` watches validations before the last step. Raises ConfigError."""
    if "valid" not in found.tokens:
        cure = "give the corpus a validation split or take another schedule"
        raise ConfigError("optim.schedule", "plateau", "there is no validation split whose loss it could watch", cure)
    interval, window = config.trainer.val_check_interval, config.trainer.bptt_segments  # a window is one batch
    per_epoch = -(-segments_per_epoch(config, found) // window)
    first = interval if isinstance(interval, int) else max(1, int(per_epoch * interval))
    if first >= config.trainer.segments_of_run() // window:
        rule = f"the first validation would come after {first} batches, when training is over: plateau sees none"
        raise ConfigError("trainer.val_check_interval", interval, rule, "validate more often")


def run(config: Config, options: Options) -> None:
    """Train (or with `dry_run` say what it would take) and print the closing table.

    Raises:
        SystemExit: 130 or 75 when a signal ended training after saving.
    """
    if config.dry_run:
        show_needs(config)
        return
    stop, wanted = graceful_stop(config), getattr(options, "resume", None)
    if wanted == AUTO:
        print("resume=auto: no run to go on with, so this one starts afresh", flush=True)
    try:
        fitted = fit(config, stop=stop, resume=None if wanted == AUTO else wanted)
    except StoppedNow:
        say_what_is_left(config)
        raise
    if fitted.module.trainer.is_global_zero:
        show_result(fitted)
    if stop.exit_code:
        sys.exit(stop.exit_code)


def graceful_stop(config: Config) -> GracefulStop:
    """What ends this invocation early: signals, and the limits that were set."""
    return GracefulStop(at_step=config.trainer.stop_at_step, after_seconds=config.trainer.max_seconds)


def fit(
    config: Config,
    *,
    stop: GracefulStop | None = None,
    resume: str | None = None,
    callbacks: Sequence[L.Callback] = (),
) -> Fitted:
    """Train into `config.run_dir` and write `last`, `best` and `result.json`.

    Args:
        config: the whole configuration.
        stop: what may end it early; by default signals and the limits of the configuration.
        resume: checkpoint to go on from, in the same folder.
        callbacks: more than configured.

    Raises:
        ConfigError: another process is training in the folder.
    """
    stop = stop if stop is not None else graceful_stop(config)
    assert config.run_dir is not None, "the command line names the folder"
    run_dir = Path(config.run_dir)
    with ExitStack() as stack:
        if is_first_rank():
            (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(run_dir))
            remove_parts(run_dir / FOLDER)
            folders.remove_unused(run_dir / FOLDER)
            lane_files.remove_unused(run_dir / FOLDER)
        return _fit(config, run_dir, stop=stop, resume=resume, callbacks=callbacks)


def _fit(
    config: Config, run_dir: Path, *, stop: GracefulStop, resume: str | None, callbacks: Sequence[L.Callback]
) -> Fitted:
    L.seed_everything(config.seed, workers=True, verbose=False)
    data = TextDataModule(config)
    module = TransformerXLModule(config)
    stand = None if resume is None else read_stand(resume)
    step = None if stand is None else stand.step
    loggers = build_loggers(config, run_dir, resumed_at=step)
    trainer = build_trainer(config, callbacks=[*_callbacks(config, data, stop), *callbacks], loggers=loggers)
    with stop.listening(), suppress(Stopped):  # a stop during validation: `last` is written already
        if trainer.is_global_zero:
            write_facts(run_dir, config, data.data.meta, resumed_at=step)
            print(f"run folder {run_dir}{'' if step is None else f', going on from step {step}'}", flush=True)
            if stand is not None and stand.ranks:
                for said in what_changes(
                    config, ranks=stand.ranks, lane_chunks=stand.lane_chunks, strategy=stand.strategy
                ):
                    print(said, file=sys.stderr, flush=True)
        for logger in trainer.loggers:
            logger.log_hyperparams(config.to_dict())
            if step is None:  # else it is there
                show_layout(logger)
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=None if resume is None else True)
        if not config.strategy.sharded:  # else all of this came before training ended
            _close(trainer, module, data, stop=stop, last=run_dir / FOLDER / LAST)
    result = {**_result(module, data), "stopped_by": stop.name}
    if trainer.is_global_zero and not trainer.global_step:
        forget_facts(run_dir)  # nothing was trained: the same command may be given again
    elif trainer.is_global_zero:
        write_json(run_dir / RESULT, result)
        if stop.name is None:  # else the figures of a run that goes on would stand beside its final ones
            log_final(trainer.loggers, config, final_figures(module, result), step=trainer.global_step)
    close(trainer.loggers)
    return Fitted(run_dir=run_dir, module=module, result=result)


def _close(
    trainer: L.Trainer, module: TransformerXLModule, data: TextDataModule, *, stop: GracefulStop, last: Path
) -> None:
    """Write `last`, and validate the final weights if nobody has."""
    module.show_average()  # also if there was nothing left to train
    trainer.save_checkpoint(last)
    if "valid" in data.data.splits and stop.name is None and module.validated_at != trainer.global_step:
        trainer.validate(module, datamodule=data, verbose=False)
        keep_if_best(trainer, loss=module.scores["val"]["loss"])
        trainer.save_checkpoint(last)  # which knows of it


def show_result(fitted: Fitted) -> None:
    """Print the closing table."""
    result, planned = fitted.result, fitted.module.config.trainer.max_steps
    stopped = f"stopped by {result['stopped_by']}" if result["stopped_by"] else "training finished"
    table = Table(title=stopped, show_header=False)
    table.add_row("optimizer steps", f"{result['steps']:,} of {planned:,}")
    table.add_row("parameters", f"{result['parameters']:,}")
    for stage in ("train", "val"):
        for name, value in result.get(stage, {}).items():
            table.add_row(f"{stage}/{name}", f"{value:.4f}")
    table.add_row("trained", f"{result['tokens']:,} tokens in {result['train_seconds']:.1f} s")
    if result["skipped_steps"]:
        table.add_row("skipped", f"{result['skipped_steps']:,} of the steps, whose tokens are counted")
    table.add_row("speed", f"{result['tokens_per_second']:,.0f} tokens/s")
    Console().print(table)
    if not result["steps"]:
        print("nothing was trained: the same command may be given again")
        return
    print(f"checkpoint {fitted.run_dir / FOLDER / LAST}")
    if result["stopped_by"]:
        print(f"to go on: {go_on(fitted.run_dir)}")


def say_what_is_left(config: Config) -> None:
    """After an end at once: how to go on, if anything was saved before."""
    if config.run_dir is None or not is_first_rank():
        return
    saved = (Path(config.run_dir) / FOLDER / LAST).exists()
    again = f"to go on from the last one: {go_on(Path(config.run_dir))}" if saved else "there is none from before"
    print(f"ended at once, without a checkpoint of where it stood; {again}", file=sys.stderr)


def _callbacks(config: Config, data: TextDataModule, stop: GracefulStop) -> list[L.Callback]:
    assert config.run_dir is not None
    chosen = [registry.callbacks.get(name).build(options) for name, options in config.callbacks.items()]
    has_valid = "valid" in data.data.splits
    every = config.trainer.save_every_steps
    kept = checkpoint_callbacks(
        Path(config.run_dir),
        save_every_steps=every,
        has_valid=has_valid,
        save_every_minutes=config.trainer.save_every_minutes,
        save_top_k=config.trainer.save_top_k,
    )
    if config.strategy.sharded:
        kept.append(EndInside(Path(config.run_dir) / FOLDER / LAST, stop, has_valid=has_valid))
    return [*chosen, stop, *kept]


def _result(module: TransformerXLModule, data: TextDataModule) -> dict[str, Any]:
    return {
        "steps": module.trainer.global_step,
        "validated_at_step": module.validated_at if "val" in module.scores else None,
        "parameters": n_parameter(module),
        "tokens": module.clock.tokens,
        "skipped_steps": module.guard.skipped,
        "train_seconds": module.clock.seconds,
        "tokens_per_second": module.clock.rate(),
        "precision": str(module.trainer.precision),
        "data_fingerprint": data.data.meta.fingerprint,
        **module.scores,
    }


def final_figures(module: TransformerXLModule, result: Mapping[str, Any]) -> dict[str, float]:
    """Validation's scores, and the latest of what says whether memory helps, how far back, and what it costs."""
    latest = {name: value for name, value in module.latest.items() if name.startswith(FINAL)}
    speed = {"tokens_per_second": result["tokens_per_second"]}
    return {**result.get("val", {}), "train_loss": result.get("train", {}).get("loss", float("nan")), **speed, **latest}
