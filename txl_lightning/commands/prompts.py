"""Prompts of a file, continued side by side: JSON Lines in, JSON Lines out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from txl_lightning.data.vocab import Tokens, Vocab
from txl_lightning.errors import ConfigError
from txl_lightning.generation import Session
from txl_lightning.keys import names
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import GenerateOptions
from txl_lightning.sampling import SamplingRule, cut

OF_THE_COMMAND = ("ckpt", "prompt", "prompt_file", "prompts", "interactive", "out", "lanes", "trust")
"""Its keys that do not say how one prompt is continued."""

OF_ALL_LINES = ("seed", *(name for name in names(GenerateOptions) if name not in OF_THE_COMMAND))
"""Those that do, which a line might be thought to set for itself."""


def read_prompts(options: GenerateOptions, vocab: Vocab) -> list[tuple[dict[str, Any], Tokens]]:
    """Each line's object and the ids (N,) of its prompt.

    Raises:
        ConfigError: the file cannot be read, or a line has no prompt that the vocabulary can write.
    """
    assert options.prompts is not None
    path = Path(os.path.expanduser(options.prompts))
    if not path.is_file():
        raise options.refuse("prompts", "no such file", "give a file of JSON objects, one per line")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() also splits inside JSON texts
    except (OSError, UnicodeDecodeError) as error:
        raise options.refuse("prompts", f"cannot be read: {error}", "give a file in UTF-8") from error
    found = [_prompt(options, line, vocab, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise options.refuse("prompts", "has no line", 'write one object per line, as {"prompt": "Once"}')
    return found


def _prompt(options: GenerateOptions, line: str, vocab: Vocab, number: int) -> tuple[dict[str, Any], Tokens]:
    cure = 'write one object per line, as {"prompt": "Once"}'
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise options.refuse("prompts", f"line {number} is no JSON", cure) from error
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str):
        raise options.refuse("prompts", f'line {number} has no text under "prompt"', cure)
    _check_keys(options, values, number)
    try:
        tokens = vocab.encode(values["prompt"])
    except ConfigError as error:
        raise options.refuse("prompts", f"line {number}: {error.value} {error.rule}", error.cure) from error
    if not len(tokens):
        raise options.refuse("prompts", f"line {number}: the prompt holds no token", f"give at least one {vocab.unit}")
    return values, tokens


def _check_keys(options: GenerateOptions, values: dict[str, Any], number: int) -> None:
    """Nothing of a line would be lost or passed over. Raises ConfigError."""
    for name in values:
        if name in OF_ALL_LINES:
            rule = f'line {number} has "{name}", which is the same for all lines'
            raise options.refuse("prompts", rule, f"type {name}=VALUE instead, or give it another name there")
        if name in written(options):
            rule = f'line {number} has "{name}", under which the result is written'
            raise options.refuse("prompts", rule, "give it another name there")


def written(options: GenerateOptions) -> tuple[str, ...]:
    """What is put into each line's object."""
    more = ("tokens", "log_probs", "prompt_tokens", "prompt_log_probs") if options.log_probs else ()
    return ("text", *(("sample",) if options.samples > 1 else ()), *more)


def rule_of(options: GenerateOptions) -> SamplingRule:
    """How tokens are chosen."""
    return SamplingRule(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        repetition_window=options.repetition_window,
    )


def continued(
    model: TransformerXL,
    prompts: list[tuple[dict[str, Any], Tokens]],
    options: GenerateOptions,
    *,
    segment_len: int,
    separator: int | None,
    vocab: Vocab,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Each line's object with what the model goes on with under "text", in the order of the lines.

    With `samples` above 1 each line comes so many times, with its number under "sample". Continuation i of all is drawn
    from seed + i, so it does not depend on how many are read side by side. With `log_probs` come "tokens", "log_probs"
    (nats, as long), "prompt_tokens" and "prompt_log_probs", of all but the prompt's first token.
    """
    work = [(values, tokens, sample) for values, tokens in prompts for sample in range(options.samples)]
    for first in range(0, len(work), options.lanes):
        group = work[first : first + options.lanes]
        session = Session(model, segment_len=segment_len, separator=separator, lanes=len(group), vocab=vocab)
        given, read = [tokens.tolist() for _, tokens, _ in group], [[]] * len(group)  # type: list[list[int]], Any
        if options.log_probs:
            read = session.score(given)
        else:
            session.feed(given)
        generators = [torch.Generator().manual_seed(seed + first + lane) for lane in range(len(group))]
        drawn = session.draw(options.tokens, rule=rule_of(options), generators=generators, stop=options.stops)
        for (values, tokens, sample), judged, said in zip(group, read, drawn, strict=True):
            own = np.array([choice.token for choice in said], dtype=np.int64)
            line = {**values, "text": cut(vocab.decode(own), options.stops)}
            if options.samples > 1:
                line["sample"] = sample
            if options.log_probs:
                line |= {"tokens": own.tolist(), "log_probs": [choice.log_prob for choice in said]}
                line |= {"prompt_tokens": tokens.tolist(), "prompt_log_probs": judged}
            yield line
