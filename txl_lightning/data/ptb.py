"""The corpus `ptb`: the Penn Treebank as words, in Mikolov's preparation.

Lines are lower-cased, which changes nothing but the number token: `N` becomes `n`. Every line ends in `<eos>`.
"""

from __future__ import annotations

from dataclasses import dataclass

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.layouts import RENAMED, BenchmarkConfig, Origin, choose, files_of
from txl_lightning.data.words import Marking, WordCorpus

ORIGIN = Origin(
    archive="simple-examples.tgz",
    n_byte=34_869_662,
    layouts=({"train": "ptb.train.txt", "valid": "ptb.valid.txt", "test": "ptb.test.txt"}, RENAMED),
)

PUBLISHED = {
    "vocabulary": {"all": 10_000},
    "lines": {"train": 42_068, "valid": 3_370, "test": 3_761},
    "tokens": {"train": 929_589, "valid": 73_760, "test": 82_430},
}


@dataclass(frozen=True, kw_only=True)
class PtbConfig(BenchmarkConfig):
    """Nothing to set beside where the files are."""

    name: str = key("ptb", "Penn Treebank as words, with <eos> after every line")


@registry.corpora.register("ptb", config=PtbConfig)
class Ptb(WordCorpus):
    """The Penn Treebank: 0.9 million words, 10,000 different ones."""

    Config = PtbConfig

    def __init__(self, config: PtbConfig) -> None:
        super().__init__(
            config=config,
            parts={split: [source] for split, source in choose(files_of(config, ORIGIN), ORIGIN).items()},
            rule="as published",
            marking=Marking(marker="<eos>"),
            lower=True,
            vocab_rule="<eos>, then the words of all three splits by falling count, lower case",
            published=PUBLISHED,
        )
