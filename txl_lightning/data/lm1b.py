"""The corpus `lm1b`: the One Billion Word Benchmark, shuffled sentences (Chelba et al. 2013, arXiv:1312.3005).

A sentence of n words stands between two markers `<S>`. The literature counts its targets in two ways:

- `data.targets=authors` (n + 1): the authors' PyTorch reader gives the model `<S> w1 … wn` and asks for `w1 … wn <S>`;
  the opening `<S>` is never a target. One stream in which a single `<S>` both ends a sentence and begins the next one
  has exactly these pairs of input and target.
- `data.targets=tf` (n + 2): their TensorFlow reader joins the sentences with both markers, so every `<S>` that begins a
  sentence is one more target, which costs next to nothing and lowers the perplexity.

Held-out data comes in 50 shards. The authors use shard 0 both to validate and to test; others test on 0 and validate on
1. Training shards are read in the order of their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.layouts import BenchmarkConfig, Origin, base, beside, choose, files_of
from txl_lightning.data.sources import Source, find
from txl_lightning.data.textlines import whole_lines
from txl_lightning.data.vocab import WordVocab
from txl_lightning.data.words import Marking, WordCorpus
from txl_lightning.errors import ConfigError

MARKER, UNKNOWN = "<S>", "<UNK>"
VOCAB_FILE = "1b_word_vocab.txt"
HELD_OUT: dict[str, str] = {"valid": "valid.txt", "test": "test.txt"}
TRAIN = re.compile(r"news\.en-\d{5}-of-\d{5}")

ORIGIN = Origin(
    archive="1-billion-word-language-modeling-benchmark-r13output.tar.gz",
    n_byte=None,
    layouts=(HELD_OUT,),
    beside=VOCAB_FILE,
)

PUBLISHED = {"vocabulary": {"all": 793_471}, "lines": {"train": 30_301_028}}


@dataclass(frozen=True, kw_only=True)
class Lm1bConfig(BenchmarkConfig):
    """How sentences are counted, and which shards are held out."""

    name: str = key("lm1b", "One Billion Word Benchmark, sentences as words between <S>")
    targets: str = key("authors", "targets of an n-word sentence: n+1 (authors) or n+2 (tf)", choices=("authors", "tf"))
    vocab_file: str | None = key(None, f"the published words; null: {VOCAB_FILE} beside data.path")
    valid_shard: int = key(0, "held-out shard to validate on, 0 to 49", minimum=0, maximum=49)
    test_shard: int = key(0, "held-out shard to test on, 0 to 49; the authors use 0 for both", minimum=0, maximum=49)


@registry.corpora.register("lm1b", config=Lm1bConfig)
class Lm1b(WordCorpus):
    """The One Billion Word Benchmark: 30 million sentences; words out of the published list become `<UNK>`."""

    Config = Lm1bConfig

    def __init__(self, config: Lm1bConfig) -> None:
        sources = files_of(config, ORIGIN, known=_is_training)
        train = sorted(filter(_is_training, sources), key=base)
        if not train:
            cure = f"fetch {ORIGIN.archive}, or give its unpacked folder"
            raise ConfigError("data.path", config.path, "holds no training shard news.en-00001-of-00100", cure)
        _refuse_doubles(train)
        held_out = _held_out(config, sources)
        super().__init__(
            config=config,
            parts={"train": train, **{split: [source] for split, source in held_out.items()}},
            rule=f"valid is {base(held_out['valid'])}, test is {base(held_out['test'])}",
            marking=Marking(marker=MARKER, where={"authors": "between", "tf": "around"}[config.targets]),
            vocab=read_vocab(config),
            published=PUBLISHED,
            line_is_document=True,
            details={"targets": config.targets, "train_files": len(train)},
        )


def read_vocab(config: Lm1bConfig) -> WordVocab:
    """The words of the published file, one on each line, ids in its order.

    Raises:
        ConfigError: there is no such file, or it lacks `<S>` or `<UNK>`.
    """
    assert config.path is not None
    name, path = "data.vocab_file", config.vocab_file
    if path is None:
        at = beside(config.path, VOCAB_FILE)
        if not at.exists():
            cure = f"put {VOCAB_FILE} there, or set data.vocab_file to it"
            raise ConfigError(name, "null", f"the published words are not in {at.parent}", cure)
        path = str(at)
    source = Source(Path(os.path.expanduser(path)), os.path.basename(path), name)
    find(path, key=name)
    words: dict[str, None] = {}
    for lines in whole_lines(source):
        words.update((fields[0], None) for line in lines.split("\n") if (fields := line.split()))
    for word in (MARKER, UNKNOWN):
        if word not in words:
            raise source.refuse(f"has no {word}", f"give the published {VOCAB_FILE}")
    rule = f"the words of {VOCAB_FILE} in its order; all others are {UNKNOWN}"
    return WordVocab(list(words), end=MARKER, unknown=UNKNOWN, lower=False, rule=rule)


def _is_training(source: Source) -> bool:
    return TRAIN.fullmatch(base(source)) is not None


def _held_out(config: Lm1bConfig, sources: list[Source]) -> dict[str, Source]:
    """Shards by their numbers; the renamed valid.txt and test.txt where there are none."""
    shards = {base(source): source for source in sources if base(source).startswith("news.en.heldout-")}
    if not shards:
        return choose(sources, ORIGIN)
    found = {}
    for split, number in (("valid", config.valid_shard), ("test", config.test_shard)):
        name = f"news.en.heldout-{number:05}-of-00050"
        if name not in shards:
            near = ", ".join(sorted(shards)[:3])
            raise config.refuse(f"{split}_shard", f"there is no {name} (but {near})", "choose one that is there")
        found[split] = shards[name]
    return found


def _refuse_doubles(train: Iterable[Source]) -> None:
    seen: dict[str, Source] = {}
    for source in train:
        if seen.setdefault(base(source), source) is not source:
            raise source.refuse(f"holds {base(source)} twice", "give the folder of one of them")
