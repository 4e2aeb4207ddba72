"""What analyses share: the text and the model they read, and how their results are given back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from txl_lightning.build import check_resets, check_vocabulary, document_end
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.analyses.plot import Panel, draw
from txl_lightning.commands.evaluate import check_same_ids
from txl_lightning.commands.output import JSON, PNG, check_out, write_out
from txl_lightning.config import Config
from txl_lightning.data.store import TokenData, prepare, survey
from txl_lightning.data.vocab import Tokens
from txl_lightning.errors import yaml_text
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import AnalyzeOptions
from txl_lightning.ranks import is_first_rank
from txl_lightning.training.trainer import device_kind


def check_files(options: AnalyzeOptions) -> None:
    """The files to write can be written. Raises ConfigError."""
    for name, begins in (("out", JSON), ("plot", PNG), ("to", "")):
        check_out(getattr(options, name), key=name, begins=begins)
    if options.plot is not None and not options.plot.lower().endswith(".png"):
        raise options.refuse("plot", "is no PNG file", "let its name end in .png")


def check_text(config: Config, options: AnalyzeOptions, *, ckpt: str, least: int = 2) -> None:
    """The split is there, long enough, and in the checkpoint's vocabulary. Raises ConfigError.

    Args:
        config: of the checkpoint with what was typed.
        options: the command's.
        ckpt: the checkpoint.
        least: tokens that are needed.
    """
    found = survey(config.data, training=False)
    there = found.require(options.split)
    check_vocabulary(config, found)
    check_resets(config, found.vocab)
    check_same_ids(config, found, ckpt=ckpt)
    if options.tokens is not None and options.tokens > there:
        raise options.refuse("tokens", f"the split has {there}", "lower it, or leave it out")
    if min(there, options.tokens or there) < least:
        rule = f"{least} tokens are needed, and {min(there, options.tokens or there)} are read"
        raise options.refuse("tokens", rule, "raise it, or give longer text")


def text_of(config: Config, options: AnalyzeOptions) -> tuple[TokenData, Tokens]:
    """The corpus, and the part of the split that is read."""
    data = prepare(config.data, training=False)
    return data, data.require(options.split)[: options.tokens]


def separator_of(data: TokenData) -> int | None:
    """The id that ends a document, if there is one."""
    return document_end(data.vocab)


def model_of(config: Config, options: AnalyzeOptions) -> TransformerXL:
    """The checkpoint's in evaluation mode on the device of `trainer.accelerator`."""
    assert options.ckpt is not None
    return load_checkpoint(options.ckpt, config).to(torch.device(device_kind(config))).eval()


def give(options: AnalyzeOptions, table: Table, found: dict[str, Any], panels: list[Panel]) -> None:
    """Print the table; write JSON and PNG where they are asked for."""
    Console().print(table)
    write_out(options.out, found)
    if options.plot is not None and is_first_rank():
        draw(panels, Path(os.path.expanduser(options.plot)), title=str(table.title or ""))


def settings(memory: dict[str, Any], *, segment_len: int) -> str:
    """What every result depends on, in one line."""
    return (
        f"segments of {segment_len}; memory {', '.join(f'{key}={yaml_text(value)}' for key, value in memory.items())}"
    )
