"""The passkey in words: a number hidden in a long text, asked for at the end. For models that read text.

Mohtashami & Jaggi 2023, arXiv:2305.16300. The answer is right if the model, having read the question, takes every token
of the number to be the likeliest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from txl_lightning.config import Config
from txl_lightning.data.vocab import Vocab
from txl_lightning.errors import ConfigError
from txl_lightning.evaluation.retrieval import depths_of
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment

TASK = "There is an important info hidden inside a lot of irrelevant text. Find it and remember it.\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "What is the pass key? The pass key is"
KEYS = 50_000


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Prompts of one length and depth."""

    length: int  # tokens asked for
    depth: float  # of the needle, in characters of the filler
    right: float  # share of numbers


@dataclass(frozen=True, kw_only=True)
class Passkey:
    """Lengths by depths."""

    cells: list[Cell]
    worst: dict[int, float]  # length to the least share over depths
    needles: int  # per cell
    chance: float
    segment_len: int
    memory: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def prompt(key: int, *, before: int, after: int) -> str:
    """The text up to the answer, with so many characters of filler before and after the needle."""
    return TASK + _filler(before) + NEEDLE.format(key=key) + _filler(after) + QUESTION


def _filler(size: int) -> str:
    return (FILLER * (size // len(FILLER) + 1))[:size]


def check_spelling(vocab: Vocab) -> None:
    """Refuse a vocabulary that has no digits. Raises ConfigError."""
    try:
        spelt = vocab.decode(vocab.encode(prompt(47013, before=200, after=0) + " 47013."))
    except ConfigError:
        spelt = ""
    if "47013" not in spelt or "<unk>" in spelt:
        rule = f"the vocabulary {vocab.name} of this checkpoint cannot spell the passkey's text"
        raise ConfigError("task", "passkey_text", rule, "use task=grid on a checkpoint of experiment=passkey")


def measure_passkey(
    config: Config,
    model: TransformerXL,
    vocab: Vocab,
    *,
    lengths: Sequence[int],
    depths: int,
    needles: int,
) -> Passkey:
    """Ask for hidden numbers at each length and depth.

    Args:
        config: lengths and memory.
        model: in evaluation mode.
        vocab: what text is to it.
        lengths: tokens of a prompt, about.
        depths: how many, from first to last.
        needles: prompts per cell.
    """
    cells = []
    for length in lengths:
        for depth in depths_of(depths):
            rng = random.Random(f"{config.seed} {length} {depth}")
            asked = [_ids(vocab, rng.randint(1, KEYS), length=length, depth=depth) for _ in range(needles)]
            right = [spelt_right(model, *one, segment_len=config.eval_segment_len) for one in asked]
            cells.append(Cell(length=length, depth=depth, right=sum(right) / needles))
    return Passkey(
        cells=cells,
        worst={length: min(cell.right for cell in cells if cell.length == length) for length in lengths},
        needles=needles,
        chance=1 / KEYS,
        segment_len=config.eval_segment_len,
        memory=config.memory.to_dict(),
    )


def _ids(vocab: Vocab, key: int, *, length: int, depth: float) -> tuple[Any, int]:
    """Ids of prompt and answer, and how many of them are the answer; as much filler as the length leaves room for."""
    per_char = len(vocab.encode(FILLER)) / len(FILLER)
    room = max(0, round((length - len(vocab.encode(prompt(key, before=0, after=0)))) / per_char))
    before = round(room * depth)
    asked = prompt(key, before=before, after=room - before)
    ids = vocab.encode(f"{asked} {key}.")
    return ids, len(ids) - len(vocab.encode(asked))


@torch.no_grad()
def spelt_right(model: TransformerXL, ids: Any, n_answer: int, *, segment_len: int) -> bool:
    """Whether each of the last n_answer tokens is the likeliest after those before it, read in a fresh lane."""
    text = torch.from_numpy(np.asarray(ids).astype(np.int64)).to(model.device)[None]
    state, tables, right = model.init_state(1, form="projected"), Tables(), []
    for start in range(0, text.shape[1] - 1, segment_len):
        inputs = text[:, start : min(start + segment_len, text.shape[1] - 1)]
        end = start + inputs.shape[1]
        whole = Segment.full(inputs)
        out = model(inputs, state, whole._replace(reset=torch.full_like(whole.reset, start == 0)), tables=tables)
        state = out.state
        if end < text.shape[1] - n_answer:
            continue
        first = max(0, text.shape[1] - 1 - n_answer - start)
        best = model.log_probs(out.hidden_BTD[:, first:]).argmax(dim=-1)
        right.append(bool((best == text[:, start + first + 1 : end + 1]).all()))
    return all(right)
