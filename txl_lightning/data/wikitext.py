"""The corpora `wikitext103` and `wikitext2`: Wikipedia articles as words (Merity et al. 2016, arXiv:1609.07843).

Every line ends in `<eos>`, blank lines too; words stay as they are, `<unk>` and `@-@` among them. WikiText-103 takes
its vocabulary from the training split alone, WikiText-2 from all three, as the Transformer-XL code does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass

from txl_lightning import registry
from txl_lightning.config import key
from txl_lightning.data.corpora import Scan
from txl_lightning.data.counts import Published
from txl_lightning.data.layouts import RENAMED, BenchmarkConfig, Layout, Origin, base, choose, files_of
from txl_lightning.data.vocab import WordVocab
from txl_lightning.data.words import Marking, WordCorpus

TOKENS: Layout = {"train": "wiki.train.tokens", "valid": "wiki.valid.tokens", "test": "wiki.test.tokens"}
LAYOUTS = (TOKENS, RENAMED)

SPLITS_OF_BOTH = {"lines": {"valid": 3_760, "test": 4_358}, "tokens": {"valid": 217_646, "test": 245_569}}
"""Their validation and test splits are the same articles."""


@dataclass(frozen=True, kw_only=True)
class WikiText103Config(BenchmarkConfig):
    """Nothing to set beside where the files are."""

    name: str = key("wikitext103", "WikiText-103 as words, with <eos> after every line")


@dataclass(frozen=True, kw_only=True)
class WikiText2Config(BenchmarkConfig):
    """Nothing to set beside where the files are."""

    name: str = key("wikitext2", "WikiText-2 as words, with <eos> after every line")


class WikiText(WordCorpus):
    """What both have in common.

    Args:
        config: where the files are.
        origin: how this set comes.
        not_in: folder of the set that looks alike.
        counted, vocab_rule: the vocabulary.
        published: counts.
    """

    def __init__(
        self,
        config: BenchmarkConfig,
        *,
        origin: Origin,
        not_in: str,
        counted: Collection[str],
        vocab_rule: str,
        published: Published,
    ) -> None:
        sources = files_of(config, origin)
        for source in sources:
            folder = source.path.parent.name if source.archive is None else source.name.rpartition("/")[0]
            if re.fullmatch(r"wiki\.(train|valid|test)\.raw", base(source)):
                raise source.refuse(
                    "is the raw WikiText, which has no <unk> and another vocabulary", f"fetch {origin.archive}"
                )
            if folder == not_in and any(base(source) in layout.values() for layout in LAYOUTS):
                raise source.refuse(f"belongs to {not_in}", f"fetch {origin.archive}, or choose the other data")
        super().__init__(
            config=config,
            parts={split: [source] for split, source in choose(sources, origin).items()},
            rule="as published",
            marking=Marking(marker="<eos>"),
            counted=counted,
            vocab_rule=vocab_rule,
            published=published,
        )

    def scan(self) -> Scan:
        found = super().scan()
        assert isinstance(found.vocab, WordVocab)
        if "<unk>" in found.vocab.ids:
            return found
        note = "no <unk> in this text: if it is the raw WikiText, its scores do not compare with published ones"
        return dataclasses.replace(found, notes=(*found.notes, note))


@registry.corpora.register("wikitext103", config=WikiText103Config)
class WikiText103(WikiText):
    """WikiText-103: 103 million words, vocabulary of the training split."""

    Config = WikiText103Config

    def __init__(self, config: WikiText103Config) -> None:
        super().__init__(
            config,
            origin=Origin(archive="wikitext-103-v1.zip", n_byte=190_229_076, layouts=LAYOUTS),
            not_in="wikitext-2",
            counted=("train",),
            vocab_rule="<eos>, then the words of the training split by falling count, cased",
            published=_published(vocabulary=267_735, lines=1_801_350, tokens=103_227_021),
        )


@registry.corpora.register("wikitext2", config=WikiText2Config)
class WikiText2(WikiText):
    """WikiText-2: 2 million words, vocabulary of all splits."""

    Config = WikiText2Config

    def __init__(self, config: WikiText2Config) -> None:
        super().__init__(
            config,
            origin=Origin(archive="wikitext-2-v1.zip", n_byte=None, layouts=LAYOUTS),
            not_in="wikitext-103",
            counted=("train", "valid", "test"),
            vocab_rule="<eos>, then the words of all three splits by falling count, cased",
            published=_published(vocabulary=33_278, lines=36_718, tokens=2_088_628),
        )


def _published(*, vocabulary: int, lines: int, tokens: int) -> dict[str, dict[str, int]]:
    train = {"lines": lines, "tokens": tokens}
    return {"vocabulary": {"all": vocabulary}} | {
        what: {"train": count, **SPLITS_OF_BOTH[what]} for what, count in train.items()
    }
