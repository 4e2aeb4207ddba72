"""Several checkpoints on one text: each with the model, memory and segments it was trained with."""

from __future__ import annotations

from dataclasses import replace

from txl_lightning.checkpoints import read_checkpoint, read_config
from txl_lightning.config import Config, ConfigError
from txl_lightning.memory.cache import CacheConfig
from txl_lightning.options import AnalyzeOptions
from txl_lightning.overrides import list_items


def members_of(options: AnalyzeOptions) -> list[str]:
    """The checkpoints that were named."""
    assert options.ckpt is not None
    return list_items(options.ckpt) or [options.ckpt]


def configs_of(config: Config, options: AnalyzeOptions) -> list[Config]:
    """Each checkpoint's model, memory and segments, on the text of the command.

    Raises:
        ConfigError: a checkpoint cannot be read, or its memory cannot be as long as asked for.
    """
    first, *_ = paths = members_of(options)
    typed_eval = config.eval if config.eval != Config.from_dict(read_config(first)).eval else None
    return [_config_of(path, config, options, typed_eval) for path in paths]


def _config_of(path: str, config: Config, options: AnalyzeOptions, typed_eval: object) -> Config:
    own = Config.from_dict(read_config(path))
    lanes = {name: getattr(own.data, name) for name in ("segment_len", "batch_size")}
    found = replace(own, data=replace(config.data, **lanes), eval=typed_eval or own.eval)  # type: ignore[arg-type]
    if options.mem_len is not None and isinstance(own.memory, CacheConfig) and own.memory.mem_len:
        with options.said_of({"memory.mem_len": "mem_len"}):
            found = replace(found, memory=replace(own.memory, mem_len=options.mem_len))
    return found


def check_own_settings(config: Config, first: str) -> None:
    """Nothing was typed that belongs to each checkpoint. Raises ConfigError."""
    stored = Config.from_dict(read_config(first))
    for name in ("memory", "model"):
        there, here = getattr(stored, name).to_dict(), getattr(config, name).to_dict()
        for key, value in here.items():
            if there.get(key) != value:
                cure = "leave it out; mem_len=N sets the length of every cache"
                raise ConfigError(f"{name}.{key}", value, "each checkpoint keeps its own", cure)


def check_vocabularies(paths: list[str], options: AnalyzeOptions) -> None:
    """All checkpoints mean the same by their ids. Raises ConfigError."""
    found = []
    for path in paths:
        saved = read_checkpoint(path, weights=False)["txl_lightning"]
        found.append((saved.get("vocab"), saved["config"]["model"]["vocab_size"]))
    for path, (vocab, size) in zip(paths, found, strict=True):
        if size != found[0][1] or (vocab and found[0][0] and vocab != found[0][0]):
            rule = f"{path} has another vocabulary than {paths[0]}, so their losses are of different targets"
            raise options.refuse("ckpt", rule, "give checkpoints of one vocabulary")
