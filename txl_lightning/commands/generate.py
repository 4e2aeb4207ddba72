"""`txl generate`: continue a prompt, with the memory carried along."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from txl_lightning.build import document_end
from txl_lightning.checkpoints import load_checkpoint, read_checkpoint
from txl_lightning.checkpoints.manifest import replacing
from txl_lightning.commands.output import check_out
from txl_lightning.commands.prompts import continued, read_prompts
from txl_lightning.commands.talk import Talk, said, show
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.vocab import ByteVocab, Tokens, Vocab, from_dict
from txl_lightning.generation import Session
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import GenerateOptions
from txl_lightning.process import printable
from txl_lightning.training.trainer import device_kind


def check(config: Config, options: GenerateOptions) -> None:
    """Everything about a sample that can be refused. Writes nothing; raises ConfigError."""
    if options.ckpt is None:
        raise options.refuse("ckpt", "is required", "give a checkpoint file or run folder: txl generate ckpt=PATH")
    given = [name for name in ("prompt", "prompt_file", "prompts") if getattr(options, name) is not None]
    given += ["interactive"] * options.interactive
    if len(given) > 1:
        raise options.refuse(given[1], f"{given[0]} is given as well", "give one of the two")
    if options.out is not None and options.prompts is None:
        raise options.refuse("out", "only prompts=FILE writes a file", "leave it out, or give prompts=FILE")
    if options.prompts is not None and options.out is None:
        raise ConfigError("out", None, "is missing: many prompts are continued into a file", "give out=FILE")
    if options.log_probs and options.prompts is None:
        raise options.refuse("log_probs", "only prompts=FILE writes them", "leave it out, or give prompts=FILE")
    if not options.tokens and not options.log_probs:
        raise options.refuse("tokens", "must be >= 1", "0 scores prompts: give prompts=FILE and log_probs=true")
    if options.samples > 1 and options.interactive:
        raise options.refuse("samples", "one conversation has one continuation", "leave out samples or interactive")
    if "" in options.stops:
        raise options.refuse("stop", "an empty text ends everything", "leave it out, or give at least one character")
    check_out(options.out)
    if options.out is not None and _same_file(options.out, options.prompts):
        raise options.refuse("out", "is the file of prompts, which would be lost", "name another file")
    if not given:
        cure = "give prompt=TEXT, prompt=- for standard input, prompt_file=PATH, prompts=FILE or interactive=true"
        raise ConfigError("prompt", "", "is missing", cure)
    if options.prompt == "":
        raise options.refuse("prompt", "is empty", "give at least one character to continue")
    if options.prompt_file is not None and not read_text(options):
        raise options.refuse("prompt_file", "the file is empty", "give at least one character to continue")
    device_kind(config)
    load_checkpoint(options.ckpt, config)
    vocab = vocab_of(options.ckpt)
    if options.prompts is not None:
        read_prompts(options, vocab)
    elif options.prompt != "-" and not options.interactive:
        encoded(options, read_text(options), vocab)


def run(config: Config, options: GenerateOptions) -> None:
    """Print the prompt and, token by token, how the model continues it."""
    assert options.ckpt is not None
    if options.prompts is not None:
        return run_many(config, options)
    vocab = vocab_of(options.ckpt)
    if options.interactive:
        model = load_checkpoint(options.ckpt, config).to(device_kind(config))
        return Talk(session_of(model, config, vocab), options, seed=config.seed).run()
    text = read_text(options)
    if not text:
        raise options.refuse("prompt", "standard input is empty", "give at least one character to continue")
    prompt = encoded(options, text, vocab)
    session = session_of(load_checkpoint(options.ckpt, config).to(device_kind(config)), config, vocab)
    session.feed(prompt.tolist())
    prompted = session.stand() if options.samples > 1 else {}
    for sample in range(options.samples):
        if options.samples > 1:
            session.take_up(prompted)
            print(f"--- {sample + 1} of {options.samples}")
        sys.stdout.write(printable(vocab.decode(prompt)))
        show(said(session, options, seed=config.seed + sample))


def session_of(model: TransformerXL, config: Config, vocab: Vocab) -> Session:
    """One lane that has read nothing."""
    return Session(model, segment_len=config.data.segment_len, separator=document_end(vocab), vocab=vocab)


def run_many(config: Config, options: GenerateOptions) -> None:
    """Continue every prompt of a file into another."""
    assert options.ckpt is not None and options.out is not None
    vocab = vocab_of(options.ckpt)
    model = load_checkpoint(options.ckpt, config).to(device_kind(config))
    lines = continued(
        model,
        read_prompts(options, vocab),
        options,
        segment_len=config.data.segment_len,
        separator=document_end(vocab),
        vocab=vocab,
        seed=config.seed,
    )
    with replacing(Path(os.path.expanduser(options.out))) as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _same_file(one: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(os.path.expanduser(one)) == os.path.realpath(
        os.path.expanduser(other)
    )


def vocab_of(ckpt: str) -> Vocab:
    """The vocabulary a checkpoint holds.

    Raises:
        ConfigError: it holds none: it was imported, or trained on a data module of the user's own.
    """
    own = read_checkpoint(ckpt, weights=False)["txl_lightning"]
    if own.get("vocab") is not None:
        return from_dict(own["vocab"])
    stored = own["config"]
    if (
        "vocab" not in own
        and stored["data"]["name"] in ("stdlib", "text")
        and stored["model"]["vocab_size"] == ByteVocab.size
    ):
        return ByteVocab()  # written before checkpoints held their vocabulary
    rule = "this checkpoint has no vocabulary, as is so with imported weights: nothing says which text its ids are"
    raise ConfigError("ckpt", ckpt, rule, "txl eval scores it; to sample, import it again with vocab=FILE")


def read_text(options: GenerateOptions) -> str | bytes:
    """The prompt, wherever it is given. Raises ConfigError if its file cannot be read."""
    if options.prompt_file is not None:
        return _content(options, os.path.expanduser(options.prompt_file))
    assert options.prompt is not None
    return sys.stdin.buffer.read() if options.prompt == "-" else options.prompt


def encoded(options: GenerateOptions, text: str | bytes, vocab: Vocab) -> Tokens:
    """(N,) ids of the prompt. Raises ConfigError if the vocabulary cannot write it."""
    name = "prompt" if options.prompt_file is None else "prompt_file"
    try:
        tokens = vocab.encode(text)
    except ConfigError as error:
        raise options.refuse(name, f"{error.value} {error.rule}", error.cure) from error
    if not len(tokens):
        raise options.refuse(name, "holds no token of the vocabulary", f"give at least one {vocab.unit}")
    return tokens


def _content(options: GenerateOptions, path: str) -> bytes:
    if not os.path.isfile(path):
        raise options.refuse("prompt_file", "no such file", "give a text file")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise options.refuse("prompt_file", f"cannot be read: {error.strerror}", "give a text file") from error
