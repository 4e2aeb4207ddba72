"""`txl generate`: continue a prompt, with the memory carried along."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.config import Config, GenerateOptions
from txl_lightning.data import vocab
from txl_lightning.generation import SamplingRule, Session
from txl_lightning.training.trainer import check_devices, device_kind


def check(config: Config, options: GenerateOptions) -> None:
    """Everything about a sample that can be refused. Writes nothing; raises ConfigError."""
    if options.ckpt is None:
        raise options.refuse("ckpt", "is required", "give a checkpoint file or run folder: txl generate ckpt=PATH")
    if options.prompt is not None and options.prompt_file is not None:
        raise options.refuse("prompt_file", "a prompt is given as well", "give one of the two")
    if options.prompt is None and options.prompt_file is None:
        raise options.refuse(
            "prompt", "is required", "give prompt=TEXT, prompt=- for standard input, or prompt_file=PATH"
        )
    if options.prompt == "":
        raise options.refuse("prompt", "is empty", "give at least one character to continue")
    if options.prompt_file is not None and not Path(options.prompt_file).expanduser().is_file():
        raise options.refuse("prompt_file", "no such file", "give a text file")
    if options.prompt_file is not None and not read_prompt(options):
        raise options.refuse("prompt_file", "the file is empty", "give at least one character to continue")
    check_devices(config)
    load_checkpoint(options.ckpt, config)


def run(config: Config, options: GenerateOptions) -> None:
    """Print the prompt and, token by token, how the model continues it."""
    assert options.ckpt is not None
    prompt = read_prompt(options)
    if not prompt:
        raise options.refuse("prompt", "standard input is empty", "give at least one character to continue")
    model = load_checkpoint(options.ckpt, config).to(device_kind(config))
    session = Session(model, segment_len=config.data.segment_len)
    session.feed(vocab.ByteVocab().encode(prompt).tolist())
    sys.stdout.write(prompt.decode("utf-8", errors="replace"))
    rule = SamplingRule(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    generator = torch.Generator().manual_seed(config.seed)
    stream(session.sample(options.tokens, rule=rule, generator=generator))


def stream(tokens: Iterable[int]) -> None:
    """Write tokens to standard output as they come; characters of several bytes appear when they are whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    vocabulary = vocab.ByteVocab()
    for token in tokens:
        sys.stdout.write(decoder.decode(vocabulary.to_bytes([token])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")


def read_prompt(options: GenerateOptions) -> bytes:
    """The prompt's bytes from wherever it is given."""
    if options.prompt_file is not None:
        return Path(options.prompt_file).expanduser().read_bytes()
    if options.prompt == "-":
        return sys.stdin.buffer.read()
    assert options.prompt is not None
    return options.prompt.encode()
