"""`txl --help`, `txl COMMAND --help` and `txl --version`, written from the schema itself."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version

from rich.console import Console
from rich.table import Table

from txl_lightning.choices import option_files
from txl_lightning.config import COMMANDS, SECTIONS, Config
from txl_lightning.overrides import GROUPS, PLUGGED, SEVERAL, own_keys

SUMMARIES = {
    "fit": "train; the run folder gets configuration, checkpoints, curves and result.json",
    "eval": "score a checkpoint; starts from its stored configuration",
    "generate": "sample from a checkpoint with the memory carried along",
    "data": "build the token files (prepare) or show what is in the corpus (inspect)",
    "strategies": "list every memory strategy: keys, paper, state bytes per lane",
    "demo": "train, evaluate and sample: two minutes on a laptop",
}

FLAGS = {
    "-m, --multirun": "one job for each combination of values: txl fit -m memory=none,cache seed=1,2",
    "-c, --cfg WHAT": "print the composed configuration (job, hydra or all) and stop",
    "-p, --package KEY": "with --cfg: only this part of it",
    "--resolve": "with --cfg hydra or all: resolve interpolations",
    "-cd, --config-dir PATH": "a folder with more options: PATH/experiment/mine.yaml is experiment=mine",
    "-i, --info WHAT": "what Hydra knows: all, config, defaults, defaults-tree, plugins or searchpath",
    "-sc, --shell-completion": 'in bash: eval "$(txl -sc install=bash)"; also zsh and fish',
    "-h, --help": "this text; after a command: its keys",
    "--version": "versions of txl_lightning and of what it stands on",
}

EXIT_CODES = {
    "0": "done",
    "1": "failed while running",
    "2": "refused: one line says which key, why and what to do; nothing was written (TXL_DEBUG=1: traceback)",
    "75": "stopped by SIGTERM or SIGUSR1 after saving: start it again",
    "130": "interrupted with Ctrl-C after saving",
}


def show_versions() -> None:
    """One line for each package that matters."""
    console = Console(highlight=False)
    for name in ("txl-lightning", "torch", "lightning"):
        console.print(f"{name} {_version(name)}")
    console.print(f"python {platform.python_version()}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def show_help(config_dir: str | None = None) -> None:
    """Commands, groups with their options, flags and exit codes."""
    console = Console(highlight=False)
    console.print("[bold]txl COMMAND[/bold] KEY=VALUE ...    for example: txl fit memory=cache trainer.max_steps=500\n")
    _print(console, "Commands", SUMMARIES.items())
    _print(console, "Groups", _groups(config_dir))
    _print(console, "Flags", FLAGS.items())
    _print(console, "Exit codes", EXIT_CODES.items())
    console.print("txl COMMAND --help lists its keys with their defaults.")


def show_command_help(command: str, config_dir: str | None = None) -> None:
    """Every key of a command with its default and meaning."""
    console = Console(highlight=False)
    action = " prepare|inspect" if command == "data" else ""
    console.print(f"[bold]txl {command}{action}[/bold] KEY=VALUE ...    {SUMMARIES[command]}\n")
    own = [key for key in own_keys(command) if key != "action"]
    schemas = {item.name: item for schema in (Config, COMMANDS[command]) for item in dataclasses.fields(schema)}
    _print(console, "Keys", [_row(name, schemas[name]) for name in own])
    _print(console, "Groups", _groups(config_dir))
    for section, schema in SECTIONS.items():
        _print(console, section, _keys(f"{section}.", schema))
    for kind, registry in PLUGGED.items():
        for name in registry.names():
            path = f"callbacks.{name}." if kind == "callbacks" else f"{kind}."
            _print(console, f"{kind}={name}", _keys(path, registry.get(name).config))
    console.print(
        f"These are the defaults before options and experiments: txl {command} --cfg job prints what applies."
    )


def _keys(path: str, schema: type) -> Iterator[tuple[str, str]]:
    for item in dataclasses.fields(schema):
        if item.name != "name" or path in ("optim.", "strategy."):
            yield _row(f"{path}{item.name}", item)


def _row(key: str, item: dataclasses.Field[object]) -> tuple[str, str]:
    default = item.default if item.default is not dataclasses.MISSING else None
    if callable(item.default_factory):
        default = item.default_factory()
    return f"{key}={_yaml(default)}", str(item.metadata.get("help", ""))


def _yaml(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(item)}" for name, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _groups(config_dir: str | None) -> Iterator[tuple[str, str]]:
    for group in GROUPS:
        plugged = PLUGGED.get(group)
        extra = {point.name for point in entry_points(group=plugged.home)} if plugged else set()
        options = sorted({*option_files(group, config_dir=config_dir), *extra})
        yield f"{group}={'[...]' if group in SEVERAL else '...'}", ", ".join(options)


def _print(console: Console, title: str, rows: object) -> None:
    table = Table(
        show_header=False, box=None, padding=(0, 2, 0, 2), title=title, title_justify="left", title_style="bold"
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for left, right in rows:  # type: ignore[attr-defined]
        table.add_row(left, right)
    console.print(table, markup=False)
    console.print()
