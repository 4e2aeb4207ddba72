"""`txl import`: a checkpoint of ours from the weights of another Transformer-XL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from txl_lightning.checkpoints import files, weights_alone
from txl_lightning.checkpoints.conventions import replace_lengths
from txl_lightning.checkpoints.reference import from_reference
from txl_lightning.commands.output import check_out
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.vocab import from_dict
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import LAYOUTS, ImportOptions
from txl_lightning.training.checkpointing import WholeFiles


def check(config: Config, options: ImportOptions) -> None:
    """Everything about an import that can be refused: it is all done but for the writing. Raises ConfigError."""
    if options.src is None:
        raise options.refuse("src", "is required", "give a weight file or a folder with one")
    if options.to is None:
        raise options.refuse("to", "is required", "name the checkpoint to write, for example to=imported.ckpt")
    if options.layout is None:
        raise options.refuse("layout", "is required", f"say whose weights they are: {', '.join(LAYOUTS)}")
    check_out(options.to, key="to")
    target = Path(os.path.expanduser(options.to))
    if target.exists() and target.samefile(files.weight_file(options.src)):
        raise options.refuse("to", "is the file that src names, which would be lost", "name another file")
    convert(config, options)


def run(config: Config, options: ImportOptions) -> None:
    """Write the checkpoint and say what it holds."""
    assert options.to is not None
    model, saved = convert(config, options)
    target = Path(os.path.expanduser(options.to))
    try:
        WholeFiles().save_checkpoint(saved, target)
    except OSError as error:
        raise options.refuse("to", f"cannot be written: {error.strerror}", "name a file elsewhere") from error
    ours, memory = model.config, model.run_config.memory.to_dict()
    print(f"{ours.num_params():,} parameters in {target}")
    print(f"position {ours.position}, mem_len {memory['mem_len']}, cold memory {memory['cold']}, ", end="")
    print(f"same_length {str(ours.same_length).lower()} ({ours.same_length_rule}), cluster_order {ours.cluster_order}")
    print(f"score it: txl eval ckpt={target} data=... (a corpus with {ours.vocab_size} symbols)")


def convert(config: Config, options: ImportOptions) -> tuple[TransformerXL, dict[str, Any]]:
    """The model, and the checkpoint that holds it.

    Raises:
        ConfigError: the file, the configuration, the weights or the vocabulary cannot be used.
    """
    assert options.src is not None and options.layout is not None
    held = files.read(options.src, config=options.config)
    if held.config is None:
        cure = "give config=FILE, the JSON with the arguments of its model"
        raise options.refuse("src", "the file holds no configuration, and none is beside it", cure)
    model = from_reference(held.state, held.config, options.layout)
    whole = replace_lengths(config, model.run_config)
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    vocab = _vocab(options, model)
    return model, weights_alone(weights, config=whole.to_dict(), data_fingerprint=None, vocab=vocab)


def _vocab(options: ImportOptions, model: TransformerXL) -> dict[str, Any] | None:
    """The vocabulary that the user names, if it has as many ids as the model. Raises ConfigError."""
    if options.vocab is None:
        return None
    try:
        found = from_dict(json.loads(Path(os.path.expanduser(options.vocab)).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise options.refuse("vocab", error.rule, error.cure) from error
        raise options.refuse("vocab", f"cannot be read: {error}", "give the vocab.json of a token folder") from error
    if found.size != model.config.vocab_size:
        rule = f"has {found.size} ids, and the weights have {model.config.vocab_size}"
        raise options.refuse("vocab", rule, "give the vocabulary that the model was trained with")
    return found.to_dict()
