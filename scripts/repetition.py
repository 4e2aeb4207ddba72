"""How much a model repeats itself in a long text, with its memory and without.

    python scripts/repetition.py runs/default/NAME              # a run, its checkpoint or folder
    python scripts/repetition.py runs/default/NAME --tokens 4000 --seeds 3

The rate is the share of 4-grams that were there before, 1 - distinct / all, in tokens and in words between white space,
of sampled text (temperature 1) and of as much text of the test split. The process's highest memory so far is read at a
tenth of the way and at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from txl_lightning import load_checkpoint
from txl_lightning.build import document_end
from txl_lightning.checkpoints import read_checkpoint
from txl_lightning.commands.generate import vocab_of
from txl_lightning.comparison import peak
from txl_lightning.config import Config
from txl_lightning.data.vocab import Vocab
from txl_lightning.generation import Session
from txl_lightning.sampling import SamplingRule
from txl_lightning.training.datamodule import TextDataModule

PROMPT = 128  # tokens of the test split


def repeated(items: Sequence[Any], n: int = 4) -> float:
    """Share of n-grams that were there before."""
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def rates(tokens: Sequence[int], vocab: Vocab) -> tuple[float, float]:
    """In tokens and in words."""
    return repeated(tokens), repeated(vocab.decode(tokens).split())


def written(config: Config, path: str, prompt: list[int], *, n_token: int, seed: int) -> tuple[list[int], list[int]]:
    """What a model goes on with, and the process's highest memory at a tenth of the way and at the end, in bytes."""
    vocab = vocab_of(path)
    session = Session(load_checkpoint(path, config), segment_len=config.data.segment_len, separator=document_end(vocab))
    session.feed(prompt)
    tokens: list[int] = []
    memory: list[int] = []
    peak.start("cpu")
    for token in session.sample(n_token, rule=SamplingRule(), generator=torch.Generator().manual_seed(seed)):
        tokens.append(token)
        if len(tokens) in (n_token // 10, n_token):
            memory.append(peak.read("cpu") or 0)
    return tokens, memory


def test_split(config: Config) -> list[int]:
    """All its tokens."""
    return TextDataModule(config).data.require("test").tolist()


def main(path: str, *, n_token: int, seeds: int) -> None:
    config = Config.from_dict(read_checkpoint(path, weights=False)["txl_lightning"]["config"])
    without = dataclasses.replace(config, memory=dataclasses.replace(config.memory, mem_len=0))  # type: ignore[call-arg]
    vocab, text = vocab_of(path), test_split(config)[: PROMPT + n_token]
    found = {"the test split": [rates(text[PROMPT:], vocab)]}
    for name, keys in (("sampled with memory", config), ("sampled with memory.mem_len=0", without)):
        found[name] = []
        for seed in range(seeds):
            tokens, memory = written(keys, path, text[:PROMPT], n_token=n_token, seed=seed)
            found[name].append(rates(tokens, vocab))
            print(f"{name}, seed {seed}: {memory[0] / 2**20:.0f} MiB, at the end {memory[1] / 2**20:.0f} MiB")
    table = Table(title=f"4-grams that were there before, in {n_token:,} {vocab.unit}s")
    for heading in ("text", f"of {vocab.unit}s", "of words"):
        table.add_column(heading)
    for name, pairs in found.items():
        table.add_row(name, *(" ".join(f"{rate:.1%}" for rate in own) for own in zip(*pairs, strict=True)))
    Console().print(table)
    print(
        json.dumps({name: [statistics.fmean(own) for own in zip(*pairs, strict=True)] for name, pairs in found.items()})
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ckpt", help="run folder or checkpoint")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    main(given.ckpt, n_token=given.tokens, seeds=given.seeds)
