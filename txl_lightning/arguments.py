"""The command line taken apart: flags, the command, and what follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from txl_lightning.errors import ConfigError, suggest
from txl_lightning.options import COMMANDS, POSITIONAL


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of `txl`."""

    help: str
    short: str = ""
    value: str = ""  # what stands for its value in the help; empty: it takes none
    values: tuple[str, ...] = ()  # the ones there are; empty: any


FLAGS = {
    "--multirun": Flag(
        short="-m", help="one job for each combination of values: txl fit -m memory=none,cache seed=1,2"
    ),
    "--cfg": Flag(
        short="-c",
        value="WHAT",
        values=("job", "hydra", "all"),
        help="print the composed configuration (job, hydra or all) and stop",
    ),
    "--package": Flag(short="-p", value="KEY", help="with --cfg: only this part of it"),
    "--resolve": Flag(help="with --cfg hydra or all: resolve interpolations"),
    "--config-dir": Flag(
        short="-cd", value="PATH", help="a folder with more options: PATH/experiment/mine.yaml is experiment=mine"
    ),
    "--info": Flag(
        short="-i",
        value="WHAT",
        values=("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
        help="what Hydra knows: all, config, defaults, defaults-tree, plugins or searchpath",
    ),
    "--shell-completion": Flag(short="-sc", help='in bash: eval "$(txl -sc install=bash)"; also zsh and fish'),
    "--help": Flag(short="-h", help="this text; after a command: its keys"),
    "--version": Flag(help="versions of txl_lightning and of what it stands on"),
}
"""Every flag by its long name."""


@dataclass(frozen=True)
class Arguments:
    """The command line, taken apart."""

    flags: Mapping[str, str]  # long name -> value, empty where it takes none
    words: tuple[str, ...]  # the command and what follows it

    @property
    def command(self) -> str:
        """Raises ConfigError: there is none, or none of that name."""
        name = self.words[0] if self.words else ""
        if "=" in name or not name:
            cure = f"write txl fit {name}" if name else f"choose one of {', '.join(COMMANDS)}; txl --help explains them"
            raise ConfigError("command", "", "is missing", cure)
        if name not in COMMANDS:
            raise ConfigError("command", name, "no such command", suggest(name, COMMANDS))
        return name

    @property
    def overrides(self) -> list[str]:
        """Everything after the command; `txl data inspect` is `txl data action=inspect`."""
        rest = list(self.words[1:])
        if self.command in POSITIONAL and rest and "=" not in rest[0]:
            rest[0] = f"{POSITIONAL[self.command]}={rest[0]}"
        return rest


def take_apart(argv: Sequence[str]) -> Arguments:
    """Flags and words of a command line. Raises ConfigError for a flag that does not exist or lacks its value."""
    flags: dict[str, str] = {}
    words: list[str] = []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("-"):
            words.append(arg)
            continue
        written, equals, value = arg.partition("=")
        name = {flag.short: long for long, flag in FLAGS.items() if flag.short}.get(written, written)
        if name not in FLAGS:
            cure = suggest(written, FLAGS)
            known = cure.startswith("did you mean")
            raise ConfigError(
                "flag", written, "no such flag", cure if known else "keys are set as KEY=VALUE, without -"
            )
        flag = FLAGS[name]
        if flag.value and not equals:
            value = _value(name, rest)
        if (equals and not flag.value) or (flag.values and value not in flag.values):
            raise ConfigError(written, value, "no such value", f"it takes {', '.join(flag.values) or 'none'}")
        flags[name] = value
    return Arguments(flags=flags, words=tuple(words))


def _value(name: str, rest: list[str]) -> str:
    flag = FLAGS[name]
    if name == "--info":
        return rest.pop(0) if rest and rest[0] in flag.values else "all"
    if not rest or rest[0].startswith("-"):
        raise ConfigError(name, "", "needs a value", f"for example {name} {(flag.values or (flag.value,))[0]}")
    return rest.pop(0)
