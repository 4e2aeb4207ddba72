"""The command `txl`: reads the arguments, refuses what cannot work, then lets `jobs` run it.

First everything is composed and checked without touching the disk; only then does Hydra start the job or the sweep.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from txl_lightning.arguments import Arguments, take_apart
from txl_lightning.errors import ConfigError, suggest
from txl_lightning.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED, REQUEUE
from txl_lightning.options import COMMANDS
from txl_lightning.signals import EARLY, stopping_early

if TYPE_CHECKING:
    from txl_lightning.config import Config, Options
    from txl_lightning.jobs import Request


def _share_cores() -> None:
    """Let torch's threads give way soon when they wait for one another (read when torch is loaded).

    By default they keep their cores busy, and training crawls as soon as anything else wants one of them.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `txl` and return its exit code.

    Args:
        argv: arguments after the program's name; None: those of this process.
    """
    _share_cores()
    try:
        with stopping_early():
            return _dispatch(take_apart(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        from txl_lightning.jobs import refuse

        return refuse(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit:
        if EARLY:
            return REQUEUE
        raise
    except Exception:
        traceback.print_exc()
        return FAILED


def _dispatch(arguments: Arguments) -> int:
    flags = arguments.flags
    if "--version" in flags:
        from txl_lightning.help import show_versions

        show_versions()
        return DONE
    if "--shell-completion" in flags:
        return _complete(arguments)
    config_dir = flags.get("--config-dir")
    if config_dir is not None:
        from txl_lightning.choices import check_config_dir

        check_config_dir(config_dir)
    if "--help" in flags:
        from txl_lightning.help import show_command_help, show_help

        show_command_help(arguments.command, config_dir) if arguments.words else show_help(config_dir)
        return DONE
    if not arguments.words and not set(flags) - {"--config-dir"}:
        from txl_lightning.help import show_help

        show_help(config_dir, stderr=True)
        return REFUSED
    return _execute(arguments, config_dir)


def _execute(arguments: Arguments, config_dir: str | None) -> int:
    from txl_lightning import trust
    from txl_lightning.jobs import Request, refuse
    from txl_lightning.overrides import read

    flags, command = arguments.flags, arguments.command
    _check_flags(flags)
    typed = written = tuple(read(arg, command=command) for arg in arguments.overrides)
    if COMMANDS[command].composes:
        from txl_lightning.comparison.typed import gather

        typed = gather(typed)
    request = Request(command=command, typed=typed, config_dir=config_dir, multirun="--multirun" in flags)
    try:
        with trust.as_typed(typed):
            return _check_and_run(request, flags)
    except ConfigError as error:
        return refuse(error, () if request.multirun else written)


def _check_and_run(request: Request, flags: Mapping[str, str]) -> int:
    from txl_lightning.jobs import call, check_all, launch, settled
    from txl_lightning.ranks import is_first_rank

    request = settled(request)
    shown = "--cfg" in flags or "--info" in flags

    def check(config: Config, options: Options) -> None:
        if is_first_rank() and not shown:
            call("check", config, options, request)  # imported late: most refusals come before

    configs, options, stored = check_all(request, check=check)
    if flags.get("--cfg") == "job":
        return _show_job({**configs[0].to_dict(), **options.to_dict()}, flags.get("--package"))
    if shown:
        return _show_hydra(request, flags, stored)
    return launch(request, configs, stored=stored)


def _check_flags(flags: Mapping[str, str]) -> None:
    modes = [name for name in ("--multirun", "--cfg", "--info") if name in flags]
    if len(modes) > 1:
        raise ConfigError("flag", modes[1], f"cannot go with {modes[0]}", "leave one of them out")
    for name in ("--package", "--resolve"):
        if name in flags and "--cfg" not in flags:
            raise ConfigError("flag", name, "only says how --cfg prints", "add --cfg job or leave it out")


def _show_job(values: Mapping[str, Any], package: str | None) -> int:
    """Print what the job would run with: defaults, options and overrides put together and checked."""
    import yaml

    part: Any = values
    for name in package.split(".") if package else ():
        if not isinstance(part, Mapping) or name not in part:
            known = part if isinstance(part, Mapping) else ()
            raise ConfigError("--package", package, "no such part of the configuration", suggest(name, known))
        part = part[name]
    print(yaml.safe_dump(part, sort_keys=False, allow_unicode=True).removesuffix("...\n"), end="")
    return DONE


def _show_hydra(request: Request, flags: Mapping[str, str], stored: Mapping[str, Any] | None) -> int:
    from txl_lightning.jobs import run_hydra
    from txl_lightning.process import own_logging

    passed = [f"{name}={flags[name]}" for name in ("--cfg", "--info", "--package") if name in flags]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), own_logging():
            return run_hydra(request, [*passed, *(["--resolve"] if "--resolve" in flags else [])], stored=stored)
    except SystemExit as error:
        key = "--package" if "--package" in flags else "--cfg"
        raise ConfigError(key, flags.get(key), complaint.getvalue().strip(), "see --cfg all") from error


def _complete(arguments: Arguments) -> int:
    """Let Hydra print the completion script or complete a line; the command, which Hydra does not know, is ours."""
    from txl_lightning.jobs import Request, run_hydra

    command, line = "fit", os.environ.get("COMP_LINE", "")
    if any(word.startswith("query=") for word in arguments.words):
        words = line.split()
        if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
            print(" ".join(name for name in COMMANDS if name.startswith("".join(words[1:]))))
            return DONE
        if words[1] not in COMMANDS:
            return DONE
        command = words[1]
        os.environ["COMP_LINE"] = line.replace(f" {command}", "", 1)
    try:
        return run_hydra(Request(command=command, typed=()), ["--shell-completion"], arguments.words, stored=None)
    except (SystemExit, ValueError) as error:
        raise ConfigError("--shell-completion", "", str(error), "for example install=bash, zsh or fish") from error
    finally:
        os.environ.update({"COMP_LINE": line} if line else {})
