"""`txl --help`, `txl COMMAND --help` and `txl --version`, written from the schema itself."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from rich.console import Console
from rich.table import Table

from txl_lightning.analyses import ANALYSES
from txl_lightning.arguments import FLAGS
from txl_lightning.choices import option_files
from txl_lightning.compose import compose
from txl_lightning.config import SECTIONS, Config
from txl_lightning.errors import yaml_text
from txl_lightning.exit_codes import MEANINGS
from txl_lightning.keys import GROUPS, PLUGGED, SEVERAL, own_keys
from txl_lightning.options import COMMANDS, POSITIONAL, Command


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


def show_help(config_dir: str | None = None, *, stderr: bool = False) -> None:
    """Commands, groups with their options, flags and exit codes."""
    console = Console(highlight=False, stderr=stderr)
    console.print("[bold]txl COMMAND[/bold] KEY=VALUE ...    for example: txl fit memory=cache trainer.max_steps=500\n")
    _print(console, "Commands", ((name, command.summary) for name, command in COMMANDS.items()))
    _print(console, "Groups", _groups(GROUPS, config_dir))
    _print(console, "Flags", _flags())
    _print(console, "Exit codes", ((str(code), meaning) for code, meaning in MEANINGS.items()))
    console.print("txl COMMAND --help lists its keys with values, choices and meaning.")


def show_command_help(name: str, config_dir: str | None = None) -> None:
    """Every key that a command reads, with its choices, its meaning and what a plain `txl COMMAND` sets it to."""
    console, command = Console(highlight=False), COMMANDS[name]
    action = {"data": " prepare|inspect", "analyze": " ANALYSIS", "reproduce": " [NAME]"}.get(name, "")
    console.print(f"[bold]txl {name}{action}[/bold] KEY=VALUE ...    {command.summary}")
    plain = _plain_values(name, config_dir)
    kept = "; keys without a value stay as the checkpoint has them" if "model" not in plain else ""
    console.print(f"Values shown: those of a plain txl {name}{kept}. Choices: {{A, B}}.\n", markup=False)
    if name == "analyze":
        _print(console, "Analyses", _analyses())
    own = [key for key in own_keys(name) if key != POSITIONAL.get(name)]
    schemas = {item.name: item for schema in (Config, command.options) for item in dataclasses.fields(schema)}
    _print(console, "Keys", [_row(key, schemas[key], plain) for key in own])
    _print(console, "Groups", _groups(filter(command.reads, GROUPS), config_dir))
    for title, path, schema in _sections():
        _print(console, title, _keys(path, schema, command, _values_at(title, plain, schema)))


def list_analyses() -> None:
    """One line on standard error for each analysis, for somebody who named none."""
    width = max(map(len, ANALYSES))
    for name, analysis in ANALYSES.items():
        print(f"{name:<{width}}  {analysis.summary}", file=sys.stderr)


def _analyses() -> Iterator[tuple[str, str]]:
    for name, analysis in ANALYSES.items():
        keys = ", ".join(analysis.keys)
        yield name, f"{analysis.summary}{f' [{keys}]' if keys else ''}"


def _plain_values(name: str, config_dir: str | None) -> dict[str, Any]:
    """What the command runs with if nothing is typed; its own options only, if the rest comes from a checkpoint."""
    options = COMMANDS[name].options().to_dict()
    takes_all = "ckpt" in options and COMMANDS[name].needs_ckpt
    return options if takes_all else compose([], config_dir=config_dir, command=name)


def _values_at(title: str, plain: Mapping[str, Any], schema: type) -> Mapping[str, Any]:
    """The values of one section; those of a memory, corpus or callback that is not chosen are its defaults."""
    if "model" not in plain:
        return {}
    kind, _, name = title.partition("=")
    section = plain[kind]
    if kind == "callbacks":
        section = section.get(name)
    elif name and section["name"] != name:
        section = None
    return schema().to_dict() if section is None else section


def _sections() -> Iterator[tuple[str, str, type]]:
    """Title, path of the keys and schema of every section there is, chosen or not."""
    for section, schema in SECTIONS.items():
        yield section, f"{section}.", schema
    for kind, registry in PLUGGED.items():
        for name in registry.names():
            path = f"callbacks.{name}." if kind == "callbacks" else f"{kind}."
            yield f"{kind}={name}", path, registry.get(name).config


def _keys(path: str, schema: type, command: Command, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for item in dataclasses.fields(schema):
        chosen_by_group = item.name == "name" and path not in ("optim.", "strategy.")
        if command.reads(f"{path}{item.name}") and not chosen_by_group:
            yield _row(f"{path}{item.name}", item, values)


def _row(key: str, item: dataclasses.Field[Any], values: Mapping[str, Any]) -> tuple[str, str]:
    """KEY=VALUE, or KEY= where no value is known; and the help, with the choices if there are any."""
    value = yaml_text(values[item.name]) if item.name in values else ""
    choices = f" {{{', '.join(map(yaml_text, item.metadata['choices']))}}}" if "choices" in item.metadata else ""
    return f"{key}={value}", f"{item.metadata.get('help', '')}{choices}"


def _flags() -> Iterator[tuple[str, str]]:
    for name, flag in FLAGS.items():
        yield " ".join(filter(None, (f"{flag.short}, {name}" if flag.short else name, flag.value))), flag.help


def _groups(groups: Iterable[str], config_dir: str | None) -> Iterator[tuple[str, str]]:
    for group in groups:
        plugged = PLUGGED.get(group)
        extra = {point.name for point in entry_points(group=plugged.home)} if plugged else set()
        options = sorted({*option_files(group, config_dir=config_dir), *extra})
        yield f"{group}={'[...]' if group in SEVERAL else '...'}", ", ".join(options)


def _print(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """A table of two columns, unless it would be empty."""
    table = Table(
        show_header=False, box=None, padding=(0, 2, 0, 2), title=title, title_justify="left", title_style="bold"
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for left, right in rows:
        table.add_row(left, right)
    if table.row_count:
        console.print(table, markup=False)
        console.print()
