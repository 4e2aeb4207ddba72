"""`txl eval`: score a split with a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as L
import torch

from txl_lightning import registry
from txl_lightning.build import check_resets, check_schedule, check_vocabulary, document_end
from txl_lightning.checkpoints import checkpoint_file, load_checkpoint, read_checkpoint
from txl_lightning.commands.output import JSON, check_out, write_out
from txl_lightning.commands.score_table import show
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.store import Meta, Survey, prepare, survey
from txl_lightning.data.tokenizer import TokenizerVocab
from txl_lightning.data.vocab import from_dict
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.evaluation.confidence import Interval, intervals, units_of
from txl_lightning.evaluation.losses import Nats, stretch_losses
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import EvalOptions
from txl_lightning.training.stopping import GracefulStop
from txl_lightning.training.trainer import check_devices, device_kind

READING = ("segment_len", "batch_size", "shuffle", "segment_len_std", "num_workers", "cache_dir")
"""Keys of `data` that say how text is read, not which."""


def check(config: Config, options: EvalOptions) -> None:
    """Everything about an evaluation that can be refused. Writes nothing; raises ConfigError."""
    if options.ckpt is None:
        raise options.refuse("ckpt", "is required", "give a checkpoint file or run folder: txl eval ckpt=PATH")
    check_out(options.out, begins=JSON)
    check_devices(config)
    check_schedule(config)
    for one in settings_of(config, options):
        load_checkpoint(options.ckpt, one)
    ranks = config.trainer.devices * config.trainer.num_nodes
    if config.eval.dynamic != "none" and ranks > 1:
        rule = f"eval.dynamic={config.eval.dynamic} runs on one device"
        raise ConfigError("trainer.devices", config.trainer.devices, rule, "set trainer.devices=1 trainer.num_nodes=1")
    if options.bootstrap and ranks > 1:
        rule = f"needs the losses of all lanes in one rank, and there are {ranks}"
        raise options.refuse("bootstrap", rule, "set trainer.devices=1")
    if options.bootstrap and (config.eval.dynamic != "none" or config.eval.warm):
        rule = "reads the text once more with weights at rest and cold lanes"
        raise options.refuse("bootstrap", rule, "leave it out, or eval.dynamic and eval.warm")
    found = survey(config.data, training=False)
    found.require(options.split)
    if config.eval.dynamic == "rms":
        found.require("train")
    check_vocabulary(config, found)
    check_resets(config, found.vocab)
    check_same_ids(config, found, ckpt=options.ckpt)
    if not options.other_text:
        check_same_text(config, found, ckpt=options.ckpt)


def check_same_ids(config: Config, found: Survey, *, ckpt: str) -> None:
    """Refuse text whose ids mean something else than those the checkpoint was trained on. Raises ConfigError."""
    saved = read_checkpoint(ckpt, weights=False)["txl_lightning"].get("vocab")
    if saved is not None and from_dict(saved).digest != found.vocab_digest:
        rule = f"the ids of this text ({found.vocab_name}) do not mean what the checkpoint's do"
        cure = "read the text it was trained on"
        if isinstance(found.vocab, TokenizerVocab):
            file = checkpoint_file(ckpt)
            cure = f"encode it as that was: data.tokenizer={file} data.tokenizer_size=null"
            if file.is_dir():
                cure = f"txl convert ckpt={ckpt} to=FILE, then data.tokenizer=FILE data.tokenizer_size=null"
        raise ConfigError("data", config.data.name, rule, cure)


def check_same_text(config: Config, found: Meta, *, ckpt: str) -> None:
    """Refuse text that changed since training: its test split may hold what was trained on. Raises ConfigError.

    Other `data` keys than those of the training run say that other text is meant.
    """
    saved = read_checkpoint(ckpt, weights=False)["txl_lightning"]
    there = saved["data_fingerprint"]
    asked = {name: value for name, value in config.data.to_dict().items() if name not in READING}
    trained = {name: value for name, value in saved["config"]["data"].items() if name not in READING}
    if there is not None and there != found.fingerprint and asked == trained:
        rule = f"the text is not what the checkpoint was trained on, {there}"
        cure = "restore the text (and for stdlib the Python) of the training run, or set other_text=true"
        raise ConfigError("data.fingerprint", found.fingerprint, rule, cure)


def settings_of(config: Config, options: EvalOptions) -> list[Config]:
    """The configuration, or one for each memory length. Raises ConfigError: one of them cannot be."""
    if options.mem_lens and not hasattr(config.memory, "mem_len"):
        raise options.refuse("mem_lens", f"memory={config.memory.name} has no mem_len", "leave it out")
    lengths = [{"mem_len": length} for length in options.mem_lens] or [{}]
    with options.said_of({"memory.mem_len": "mem_lens"}):
        return [replace(config, memory=replace(config.memory, **one)) for one in lengths]  # type: ignore[arg-type]


def run(config: Config, options: EvalOptions) -> None:
    """Evaluate, print the table, write the JSON if asked."""
    assert options.ckpt is not None
    found, losses = [], []
    stop = GracefulStop()
    with stop.listening():
        for one in settings_of(config, options):
            model = load_checkpoint(options.ckpt, one)
            found.append(evaluate(one, model, split=options.split, callbacks=[*progress_bar(one), stop]))
            if options.bootstrap:
                losses.append(single_losses(one, model, split=options.split))
    bounds = bootstrapped(config, losses, options) if options.bootstrap else [None] * len(found)
    show(found, bounds)
    results = []
    for score, bound in zip(found, bounds, strict=True):
        named = {} if bound is None else {"interval": bound[0].to_dict(), "difference": bound[1].to_dict()}
        results.append({**score.to_dict(), **named})
    write_out(options.out, {"by_mem_len": results} if options.mem_lens else results[0])


def single_losses(config: Config, model: TransformerXL, *, split: str) -> Nats:
    """(N - 1,) losses of a split, in float32."""
    data = prepare(config.data, training=False)
    where = torch.device(device_kind(config))
    return stretch_losses(config, model.to(where), data.require(split), separator=document_end(data.vocab)).nats


def bootstrapped(config: Config, losses: list[Nats], options: EvalOptions) -> list[tuple[Interval, Interval] | None]:
    """For each setting the interval of its loss, and that of its difference to the first setting's."""
    data = prepare(config.data, training=False)
    units, cut = units_of(data.require(options.split), separator=document_end(data.vocab))
    means, apart = intervals(losses, units, cut=cut, resamples=options.bootstrap, seed=config.seed)
    return list(zip(means, apart, strict=True))


def progress_bar(config: Config) -> list[L.Callback]:
    """The bar, if the configuration has it among its callbacks."""
    name = "progress_bar"
    return [registry.callbacks.get(name).build(config.callbacks[name])] if name in config.callbacks else []
