"""`txl analyze ANALYSIS`: hands over to the analysis, which is a file in `commands/analyses`."""

from __future__ import annotations

import importlib
from types import ModuleType

from txl_lightning.analyses import analysis_of, check_keys
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.config import Config
from txl_lightning.help import list_analyses
from txl_lightning.options import AnalyzeOptions
from txl_lightning.overrides import list_items


def check(config: Config, options: AnalyzeOptions) -> None:
    """Everything about an analysis that can be refused. Writes nothing; raises ConfigError."""
    if options.action is None:
        list_analyses()
    analysis = analysis_of(options)
    check_keys(options)
    if options.ckpt is not None and list_items(options.ckpt) is not None:
        if not analysis.several:
            raise options.refuse("ckpt", f"{options.action} takes one checkpoint", "give it without brackets")
    elif options.ckpt is not None:
        load_checkpoint(options.ckpt, config)
    elif analysis.needs_ckpt:
        raise options.refuse("ckpt", f"{options.action} needs trained weights", CURES.get(str(options.action), CURE))
    _module(options).check(config, options)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Measure, print, and write what was asked for."""
    _module(options).run(config, options)


def _module(options: AnalyzeOptions) -> ModuleType:
    return importlib.import_module(f"txl_lightning.commands.analyses.{options.action}")


CURE = "give ckpt=PATH: a checkpoint file or a run folder"
CURES = {"retrieval": "train one with txl fit experiment=recall and give ckpt=PATH"}
