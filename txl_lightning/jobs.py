"""Runs a command that has been checked: as a job of `hydra.main`, in its run folder, ready to be relaunched by rank.

Hydra runs one job, or with -m as many as the sweep has, here or wherever a launcher plug-in puts them.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import itertools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from txl_lightning import resume, trust
from txl_lightning.choices import CONFIG_PACKAGE, names_to_options
from txl_lightning.compose import HYDRA_VERSION_BASE, MAIN, STORED, compose_job, expand, registered, translate
from txl_lightning.config import Config, Options, build_section
from txl_lightning.errors import ConfigError
from txl_lightning.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED, REQUEUE, worst
from txl_lightning.keys import names
from txl_lightning.options import COMMANDS
from txl_lightning.overrides import Typed, list_items, quote, read_hydra, to_hydra
from txl_lightning.process import (
    first_rank_prints,
    fresh_hydra,
    leave_process_group,
    own_environment,
    printable,
    quiet_lightning,
    replaced_argv,
)
from txl_lightning.ranks import is_first_rank, ranks_started
from txl_lightning.watch import tell, watching


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A command with its overrides, read but not composed."""

    command: str
    typed: tuple[Typed, ...]
    config_dir: str | None = None
    multirun: bool = False


def command_module(command: str) -> ModuleType:
    """The module with `check` and `run`."""
    name = {"eval": "evaluate", "import": "import_"}.get(command, command)
    return importlib.import_module(f"txl_lightning.commands.{name}")


def call(function: str, config: Config, options: Options, request: Request) -> None:
    """`check` or `run` of the request's command."""
    more = {"request": request} if COMMANDS[request.command].composes else {}
    getattr(command_module(request.command), function)(config, options, **more)


def has_run_folder(command: str) -> bool:
    """Whether it writes into a run folder."""
    return COMMANDS[command].reads("run_dir")


def stored_config(command: str, typed: Sequence[Typed]) -> Mapping[str, Any] | None:
    """The configuration of the checkpoint that the command starts from; None if it takes none or none is given."""
    if "resume" in names(COMMANDS[command].options):
        path = resume.checkpoint_of(typed)
        return None if path is None else resume.start_values(_read_config(path, key="resume"))
    if "ckpt" not in names(COMMANDS[command].options):
        return None
    given = [item.text for item in typed if item.key == "ckpt"]
    if not given and not COMMANDS[command].needs_ckpt:
        return None
    if not given:
        raise ConfigError("ckpt", "", "is missing", "give ckpt=PATH: a checkpoint file or a run folder")
    several = list_items(given[-1]) if COMMANDS[command].several_ckpts else None
    if several == []:
        raise ConfigError("ckpt", given[-1], "names no checkpoint", "write ckpt=[runs/a,runs/b]")
    return _read_config(several[0] if several else given[-1], key="ckpt")


def _read_config(path: str, *, key: str) -> Mapping[str, Any]:
    if path not in _stored:
        from txl_lightning.checkpoints import read_config

        _stored[path] = read_config(path, key=key)
    return _stored[path]


_stored: dict[str, Mapping[str, Any]] = {}  # a checkpoint may be large: it is read once for the checks and the jobs


def build(
    typed: Sequence[Typed], *, command: str, config_dir: str | None, stored: Mapping[str, Any] | None
) -> tuple[Config, Options]:
    """The typed configuration of one job. Raises ConfigError."""
    values = compose_job(typed, config_dir=config_dir, command=command, stored=stored)
    schema = COMMANDS[command].options
    own = {name: values.pop(name) for name in names(schema)}
    if stored is not None and "resume" in own:
        resume.check_ranks(values, stored)
    config, options = Config.from_dict(values), build_section(schema, own, path="")
    if stored is not None and "resume" in own:
        resume.check_agreement(config, stored)
    return config, options


def settled(request: Request) -> Request:
    """The request with `resume` looked up. Raises ConfigError."""
    if "resume" not in names(COMMANDS[request.command].options):
        return request
    typed = resume.settle(request.typed, config_dir=request.config_dir, multirun=request.multirun)
    return dataclasses.replace(request, typed=typed)


def check_all(
    request: Request, *, check: Callable[[Config, Options], None]
) -> tuple[list[Config], Options, Mapping[str, Any] | None]:
    """Compose and check every job of a request without touching the disk.

    Returns:
        The configuration of each job, the options of the last one, and the checkpoint's configuration if there is one.

    Raises:
        ConfigError: one of them is refused.
    """
    _stored.clear()
    stored = stored_config(request.command, request.typed)
    jobs = expand(request.typed, config_dir=request.config_dir) if request.multirun else [list(request.typed)]
    configs = []
    for number, typed in enumerate(jobs):
        try:
            config, options = build(typed, command=request.command, config_dir=request.config_dir, stored=stored)
            _check_common_folder(config, request)
            check(_placed(config, number) if request.multirun else config, options)
        except ConfigError as error:
            raise as_typed(error, typed) from error
        configs.append(config)
    return configs, options, stored


def _placed(config: Config, number: int) -> Config:
    """The job of a sweep with its own folder in `run_dir`."""
    return config if config.run_dir is None else dataclasses.replace(config, run_dir=f"{config.run_dir}/{number}")


def _check_common_folder(config: Config, request: Request) -> None:
    """Ranks that lightning does not start itself cannot agree on a folder that is named after the time."""
    ranks = config.trainer.devices * config.trainer.num_nodes
    apart = ranks > 1 and max(ranks_started(), config.trainer.num_nodes) > 1
    if not has_run_folder(request.command) or config.dry_run or not apart:
        return
    if config.run_dir is None:
        raise ConfigError("run_dir", "null", "ranks that are started one by one need one folder", "set run_dir=PATH")
    if request.multirun:
        raise ConfigError("flag", "--multirun", "ranks are started one by one here", "start one job at a time")


def launch(request: Request, jobs: Sequence[Config], *, stored: Mapping[str, Any] | None) -> int:
    """Run the request under `hydra.main`; the exit code of its worst job."""
    with ExitStack() as stack:
        folder, fresh = _folder(request, jobs, stack)
        places = [f"hydra.run.dir={quote(folder)}", f"hydra.sweep.dir={quote(folder)}"]
        try:
            return run_hydra(request, ["--multirun"] if request.multirun else [], places, stored=stored)
        finally:
            if fresh and not os.listdir(folder):
                os.rmdir(folder)


def run_hydra(
    request: Request, flags: Sequence[str], overrides: Sequence[str] = (), *, stored: Mapping[str, Any] | None
) -> int:
    """`hydra.main` with the request's overrides, in the state of its globals it expects."""
    typed = names_to_options(request.typed)
    where = [f"--config-dir={request.config_dir}"] if request.config_dir else []
    arguments = [*flags, *where, *map(to_hydra, typed), *overrides, f"hydra.job.name={request.command}"]
    app = hydra.main(
        config_path=f"pkg://{CONFIG_PACKAGE}",
        config_name=MAIN if stored is None else STORED,
        version_base=HYDRA_VERSION_BASE,
    )(job)
    codes = _codes[os.getpid()] = []
    with ExitStack() as stack:
        known = registered(typed, command=request.command, config_dir=request.config_dir, stored=stored)
        stack.enter_context(known)
        stack.enter_context(fresh_hydra())
        stack.enter_context(replaced_argv(arguments))
        try:
            app()
        except JobFailed as failed:  # a launcher ran it in another process
            codes.append(failed.code)
        except SystemExit:  # a signal ended a job, or Hydra has a complaint of its own
            if not codes:
                raise
        except (HydraException, OmegaConfBaseException) as error:
            raise translate(error, typed) from error
    return worst(codes)


class JobFailed(Exception):
    """A job in another process ended with a code other than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


_codes: dict[int, list[int]] = {}  # process that started Hydra -> exit codes of the jobs that ran in it


def job(hydra_config: DictConfig) -> int:
    """What Hydra calls for each job. It composes anew what the checks composed, so that what was checked runs."""
    settings: Any = HydraConfig.get()
    command = str(settings.job.name)
    task: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)  # as it was written, ${ and all
    typed = [read_hydra(arg) for arg in task]
    folders = [source.path for source in settings.runtime.config_sources if source.provider == "command-line"]
    folder = str(settings.run.dir)  # runtime.output_dir would take ${ in a name for an interpolation
    if settings.mode == RunMode.MULTIRUN:
        folder = os.path.join(settings.sweep.dir, str(settings.sweep.subdir))
        print(printable(f"[{settings.job.num}] {' '.join(map(str, typed))}"), flush=True)
    HydraConfig.instance().cfg = None  # lightning would relaunch ranks with Hydra's own arguments
    request = Request(command=command, typed=tuple(typed), config_dir=folders[0] if folders else None)
    atexit.register(leave_process_group)  # while Python is whole
    code = run_job(request, folder=folder)
    if settings.mode == RunMode.MULTIRUN:
        leave_process_group()
    if os.getpid() in _codes:
        _codes[os.getpid()].append(code)
    elif code:
        raise JobFailed(code)
    if code in (INTERRUPTED, REQUEUE):
        raise SystemExit(code)  # and no further job of the sweep
    return code


def run_job(request: Request, *, folder: str) -> int:
    """One job in this process; its exit code. `folder`: where Hydra put it."""
    with trust.as_typed(request.typed):
        return _run_job(request, folder=folder)


def _run_job(request: Request, *, folder: str) -> int:
    try:
        stored = stored_config(request.command, request.typed)
        config, options = build(request.typed, command=request.command, config_dir=request.config_dir, stored=stored)
        config = dataclasses.replace(config, run_dir=_run_dir(config, command=request.command, folder=folder))
        with _relaunchable(request, run_dir=config.run_dir), own_environment(), first_rank_prints(), quiet_lightning():
            return _run_watched(config, options, request)
    except ConfigError as error:
        return refuse(error, request.typed)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else DONE
    except Exception:
        traceback.print_exc()
        return FAILED


def _run_watched(config: Config, options: Options, request: Request) -> int:
    """Run the command; its exit code. An error that is no refusal is told here, where it is known which ranks live."""
    with watching(ranks=config.trainer.devices * config.trainer.num_nodes) as watch:
        try:
            call("run", config, options, request)
        except ConfigError:
            watch.end(failed=True)
            raise
        except Exception as error:
            from txl_lightning.training.trouble import explain

            training = "resume" in names(COMMANDS[request.command].options) or request.command in ("compare", "demo")
            tell(error, explain(error, config, training=training), watch)
            watch.end(failed=True)
            return FAILED
    return DONE


def refuse(error: ConfigError, typed: Sequence[Typed] = ()) -> int:
    """One line on standard error."""
    if os.environ.get("TXL_DEBUG") == "1":
        traceback.print_exception(error)
    print(f"error: {as_typed(error, typed)}", file=sys.stderr)
    return REFUSED


def as_typed(error: ConfigError, typed: Sequence[Typed]) -> ConfigError:
    """The same error with its value as it was typed, not as Python writes it."""
    value = {item.key: item.text for item in typed}.get(error.key, error.value)
    return ConfigError(error.key, value, error.rule, error.cure)


def _run_dir(config: Config, *, command: str, folder: str) -> str | None:
    if not has_run_folder(command):
        return config.run_dir
    if config.dry_run or not is_first_rank():
        return None if config.run_dir is None else os.path.abspath(os.path.expanduser(config.run_dir))
    return os.path.abspath(folder)


def _folder(request: Request, jobs: Sequence[Config], stack: ExitStack) -> tuple[str, bool]:
    """Where Hydra puts the jobs, and whether that folder was made for it."""
    if not has_run_folder(request.command) or all(config.dry_run for config in jobs) or not is_first_rank():
        return (stack.enter_context(tempfile.TemporaryDirectory()) if request.multirun else "."), False
    if jobs[0].run_dir is not None:
        path = Path(os.path.expanduser(jobs[0].run_dir))
        return str(path), _make(path)
    experiments = {config.experiment for config in jobs}
    prefix = "multirun_" if request.multirun else ""
    name = f"{prefix}{datetime.now():%Y-%m-%d_%H-%M-%S}"
    parent = Path("runs", experiments.pop() if len(experiments) == 1 else "several")
    for count in itertools.count(1):
        path = parent / (name if count == 1 else f"{name}_{count}")
        if _make(path):
            return str(path), True
    raise AssertionError


def _make(path: Path) -> bool:
    """Make a folder with its parents; False if it was there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError as error:
        if path.is_dir():
            return False
        raise ConfigError("run_dir", path, f"{error.filename} is a file", "name a folder") from error
    except OSError as error:
        raise ConfigError("run_dir", path, f"cannot be made: {error.strerror}", "name another folder") from error
    return True


@contextmanager
def _relaunchable(request: Request, *, run_dir: str | None) -> Iterator[None]:
    """While this lasts sys.argv starts this very job in the same folder: lightning runs it for each rank."""
    where = ["--config-dir", request.config_dir] if request.config_dir else []
    typed = [str(item) for item in request.typed if item.key != "run_dir"]
    folder = [f"run_dir={run_dir}"] if run_dir and has_run_folder(request.command) else []
    with replaced_argv([request.command, *where, *typed, *folder]):
        yield
