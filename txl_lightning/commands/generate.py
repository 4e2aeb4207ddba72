"""`txl generate`: continue a prompt, with the memory carried along."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.vocab import ByteVocab, Tokens
from txl_lightning.generation import SamplingRule, Session
from txl_lightning.options import GenerateOptions
from txl_lightning.process import printable
from txl_lightning.training.trainer import device_kind


def check(config: Config, options: GenerateOptions) -> None:
    """Everything about a sample that can be refused. Writes nothing; raises ConfigError."""
    if options.ckpt is None:
        raise options.refuse("ckpt", "is required", "give a checkpoint file or run folder: txl generate ckpt=PATH")
    if options.prompt is not None and options.prompt_file is not None:
        raise options.refuse("prompt_file", "a prompt is given as well", "give one of the two")
    if options.prompt is None and options.prompt_file is None:
        cure = "give prompt=TEXT, prompt=- for standard input, or prompt_file=PATH"
        raise ConfigError("prompt", "", "is missing", cure)
    if options.prompt == "":
        raise options.refuse("prompt", "is empty", "give at least one character to continue")
    if options.prompt_file is not None and not len(read_prompt(options)):
        raise options.refuse("prompt_file", "the file is empty", "give at least one character to continue")
    device_kind(config)
    load_checkpoint(options.ckpt, config)


def run(config: Config, options: GenerateOptions) -> None:
    """Print the prompt and, token by token, how the model continues it."""
    assert options.ckpt is not None
    prompt = read_prompt(options)
    if not len(prompt):
        raise options.refuse("prompt", "standard input is empty", "give at least one character to continue")
    model = load_checkpoint(options.ckpt, config).to(device_kind(config))
    session = Session(model, segment_len=config.data.segment_len)
    session.feed(prompt.tolist())
    sys.stdout.write(printable(ByteVocab().decode(prompt)))
    rule = SamplingRule(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    generator = torch.Generator().manual_seed(config.seed)
    stream(session.sample(options.tokens, rule=rule, generator=generator))


CONTROL = dict.fromkeys([*range(9), *range(11, 32), 127], "\ufffd")
"""Characters that would make the terminal do something instead of showing something."""


def stream(tokens: Iterable[int]) -> None:
    """Write tokens to standard output as they come; characters of several bytes appear when they are whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        sys.stdout.write(printable(decoder.decode(ByteVocab().to_bytes([token])).translate(CONTROL)))
        sys.stdout.flush()
    sys.stdout.write(printable(decoder.decode(b"", final=True)) + "\n")


def read_prompt(options: GenerateOptions) -> Tokens:
    """(N,) ids of the prompt, wherever it is given.

    Raises:
        ConfigError: its file cannot be read.
    """
    if options.prompt_file is not None:
        return ByteVocab().encode(_content(options, os.path.expanduser(options.prompt_file)))
    assert options.prompt is not None
    return ByteVocab().encode(sys.stdin.buffer.read() if options.prompt == "-" else options.prompt)


def _content(options: GenerateOptions, path: str) -> bytes:
    if not os.path.isfile(path):
        raise options.refuse("prompt_file", "no such file", "give a text file")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise options.refuse("prompt_file", f"cannot be read: {error.strerror}", "give a text file") from error
