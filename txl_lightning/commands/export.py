"""`txl export`: a checkpoint's weights and configuration as another Transformer-XL code reads them."""

from __future__ import annotations

from txl_lightning.checkpoints import files, load_checkpoint
from txl_lightning.checkpoints.conventions import LAYOUTS, differences
from txl_lightning.checkpoints.reference import to_reference
from txl_lightning.commands.output import check_out
from txl_lightning.config import Config
from txl_lightning.options import ExportOptions


def check(config: Config, options: ExportOptions) -> None:
    """Everything about an export that can be refused. Writes nothing; raises ConfigError."""
    if options.ckpt is None:
        raise options.refuse("ckpt", "is required", "give a checkpoint file or run folder: txl export ckpt=PATH")
    if options.to is None:
        raise options.refuse("to", "is required", "name the file to write, for example to=model.safetensors")
    if options.layout is None:
        raise options.refuse("layout", "is required", f"say whose names to use: {', '.join(LAYOUTS)}")
    target = files.weight_target(options.to)
    for file in (target, files.config_target(target)):
        check_out(str(file), key="to")
    to_reference(load_checkpoint(options.ckpt, config), options.layout)


def run(config: Config, options: ExportOptions) -> None:
    """Write weights and configuration; say where, and what that code will do differently."""
    assert options.ckpt is not None and options.to is not None and options.layout is not None
    state, values = to_reference(load_checkpoint(options.ckpt, config), options.layout)
    for file in files.write(options.to, state, values):
        print(file)
    for note in differences(values, LAYOUTS[options.layout]):
        print(f"note: {note}; scores differ there, not here after txl import")
