"""The commands of `txl`: what each is for, its own keys, and which keys of the configuration it reads."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from txl_lightning.errors import ConfigError
from txl_lightning.section import Section, key


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Keys of one command beside those of the configuration; they have no dots."""

    def refuse(self, name: str, rule: str, cure: str) -> ConfigError:
        return ConfigError(name, getattr(self, name), rule, cure)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Options):
    """`txl eval`."""

    ckpt: str | None = key(None, "checkpoint file or run folder to evaluate (required)")
    split: str = key("test", "part of the corpus to score", choices=("train", "valid", "test"))
    other_text: bool = key(False, "score although the text is not what the checkpoint was trained on")
    out: str | None = key(None, "also write the result to this JSON file")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """`txl generate`."""

    ckpt: str | None = key(None, "checkpoint file or run folder to sample from (required)")
    prompt: str | None = key(None, "text to continue; - reads standard input")
    prompt_file: str | None = key(None, "file with the text to continue")
    tokens: int = key(300, "tokens to sample", minimum=1)
    temperature: float = key(0.8, "divides the logits; 0: always the likeliest token", minimum=0)
    top_k: int = key(0, "sample among this many likeliest tokens; 0: all", minimum=0)
    top_p: float = key(1.0, "sample among the likeliest tokens that hold this much probability", above=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """`txl data prepare|inspect`."""

    action: str = key("inspect", "build the token files, or show what is in the corpus", choices=("prepare", "inspect"))
    out: str | None = key(None, "also write what is shown to this JSON file")


@dataclass(frozen=True, kw_only=True)
class StrategiesOptions(Options):
    """`txl strategies`."""

    out: str | None = key(None, "also write the table to this JSON file")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        summary: one line for the help.
        options: its own keys.
        read: patterns of what it reads of the configuration: `model` is the group, `model.*` are its keys.
        unread: patterns of what it has no use for nevertheless.
    """

    summary: str
    options: type[Options] = Options
    read: tuple[str, ...] = ("*",)
    unread: tuple[str, ...] = ()

    def reads(self, key: str) -> bool:
        """Whether a key or group of the configuration has any effect on it."""
        used, unused = (any(fnmatchcase(key, pattern) for pattern in part) for part in (self.read, self.unread))
        return used and not unused


_MODEL = ("model", "model.*", "memory", "memory.*")
_FOR_TRAINING = ("model.dropout", "model.dropatt", "model.init_std", "model.checkpointing")
_DATA = ("data", "data.*")
_DEVICES = (
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.precision",
    "strategy",
    "strategy.*",
)
_BAR = ("callbacks", "callbacks.progress_bar.*")
_LANES = ("data.segment_len", "data.batch_size", "data.num_workers")

COMMANDS = {
    "fit": Command(summary="train; the run folder gets configuration, checkpoints, curves and result.json"),
    "eval": Command(
        summary="score a checkpoint; starts from its stored configuration",
        options=EvalOptions,
        read=(*_MODEL, *_DATA, "eval.*", *_DEVICES, *_BAR),
        unread=_FOR_TRAINING,
    ),
    "generate": Command(
        summary="sample from a checkpoint with the memory carried along",
        options=GenerateOptions,
        read=(*_MODEL, "data.segment_len", "trainer.accelerator", "seed"),
        unread=_FOR_TRAINING,
    ),
    "data": Command(
        summary="build the token files (prepare) or show what is in the corpus (inspect)",
        options=DataOptions,
        read=("experiment", *_DATA),
        unread=_LANES,
    ),
    "strategies": Command(
        summary="list every memory strategy: keys, paper, state bytes per lane",
        options=StrategiesOptions,
        read=("experiment", *_MODEL),
        unread=_FOR_TRAINING,
    ),
    "demo": Command(summary="train, evaluate and sample: two minutes on a laptop", unread=("dry_run",)),
}

FREE_TEXT = (
    "prompt",
    "prompt_file",
    "ckpt",
    "out",
    "run_dir",
    "data.path",
    "data.train",
    "data.valid",
    "data.test",
    "data.cache_dir",
)
"""Keys whose values are taken letter by letter: they may hold =, quotes, ~, spaces, or look like numbers."""
