"""`txl analyze ANALYSIS`: hands over to the analysis, which is a file in `commands/analyses`."""

from __future__ import annotations

import importlib
from types import ModuleType

from txl_lightning.analyses import ANALYSES, check_keys
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.config import Config
from txl_lightning.options import AnalyzeOptions
from txl_lightning.overrides import list_items


def check(config: Config, options: AnalyzeOptions) -> None:
    """Everything about an analysis that can be refused. Writes nothing; raises ConfigError."""
    check_keys(options)
    if options.ckpt is not None and list_items(options.ckpt) is not None:
        if not ANALYSES[options.action].several:
            raise options.refuse("ckpt", f"{options.action} takes one checkpoint", "give it without brackets")
    elif options.ckpt is not None:
        load_checkpoint(options.ckpt, config)
    elif ANALYSES[options.action].needs_ckpt:
        raise options.refuse("ckpt", f"{options.action} needs trained weights", CURES.get(options.action, CURE))
    _module(options).check(config, options)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Measure, print, and write what was asked for."""
    _module(options).run(config, options)


def _module(options: AnalyzeOptions) -> ModuleType:
    return importlib.import_module(f"txl_lightning.commands.analyses.{options.action}")


CURE = "give ckpt=PATH: a checkpoint file or a run folder"
CURES = {"retrieval": "train one with txl fit experiment=recall and give ckpt=PATH"}
