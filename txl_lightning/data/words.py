"""Corpora of words: lines of text, split at white space, with a marker for the end of a line.

Words are what `str.split()` leaves, which also splits at U+00A0 and U+3000. A vocabulary holds the marker first, then
words by falling count, those of equal count in the order they were first seen, as `Counter.most_common` gives them.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from txl_lightning.config import DataConfig
from txl_lightning.data.cache import cache_root
from txl_lightning.data.console import Advance
from txl_lightning.data.corpora import Scan
from txl_lightning.data.counts import Published
from txl_lightning.data.known import known
from txl_lightning.data.layouts import opened
from txl_lightning.data.sources import Source, read, stat_of
from txl_lightning.data.textlines import whole_lines
from txl_lightning.data.vocab import Tokens, WordVocab
from txl_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Marking:
    """Where a line's marker stands.

    Attributes:
        marker: the word.
        where: "after" each line, "around" each line (before and after it), or "between" lines (one serves as the end of
            a line and the beginning of the next; there is one before the first and one after the last line too).
    """

    marker: str
    where: str = "after"

    def mark(self, lines: str, *, first: bool) -> str:
        """Whole lines with the markers in place of newlines; `first`: they begin their split."""
        sign = self.marker
        if self.where == "around":
            return f"{sign} " + lines[:-1].replace("\n", f" {sign} {sign} ") + f" {sign}"
        before = f"{sign} " if first and self.where == "between" else ""
        return before + lines.replace("\n", f" {sign} ")

    def count(self, *, words: int, lines: int) -> int:
        """Tokens of a split."""
        return words + {"after": lines, "around": 2 * lines, "between": lines + 1}[self.where]


@dataclass(kw_only=True)
class _Count:
    """What was counted in one split."""

    words: int = 0
    lines: int = 0
    bytes: int = 0


class WordCorpus:
    """Lines of words in one or more files per split.

    Args:
        config: its keys.
        parts: files of train, valid and test, in this order.
        rule: which files, in words.
        marking: where the markers stand.
        lower: words are lower-cased.
        vocab: the vocabulary, where one was published as a file; None: it is counted.
        counted: splits whose words are the vocabulary.
        vocab_rule: the vocabulary in one sentence.
        published: what was published about it.
        line_is_document: lines are the documents; else each split is one.
        details: what else to record.
    """

    rule_version: ClassVar[int] = 1

    def __init__(
        self,
        *,
        config: DataConfig,
        parts: Mapping[str, Sequence[Source]],
        rule: str,
        marking: Marking,
        lower: bool = False,
        vocab: WordVocab | None = None,
        counted: Collection[str] = ("train", "valid", "test"),
        vocab_rule: str = "",
        published: Published,
        line_is_document: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.rule, self.marking, self.lower = config.name, rule, marking, lower
        self._root = cache_root(config)
        self.parts, self.vocab, self.counted, self.vocab_rule = dict(parts), vocab, counted, vocab_rule
        self.published, self.line_is_document, self.details = published, line_is_document, dict(details or {})

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(dict.fromkeys((str(source.path), *stat_of(source)) for source in self._sources()))

    def scan(self) -> Scan:
        """Counts and vocabulary come from token files where such were built from the same bytes."""
        content, notes = self._content()
        given = None if self.vocab is None else self.vocab.digest
        recipe = [self.name, self.rule_version, content, self.rule, asdict(self.marking), self.details, given]
        made_from = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
        if (found := known(self._root, made_from)) is not None:
            return Scan(vocab=found[0], content=content, rule=self.rule, notes=notes, **found[1])
        counts, vocab = self._count()
        lines = {split: count.lines for split, count in counts.items()}
        return Scan(
            vocab=vocab,
            content=content,
            rule=self.rule,
            documents=lines if self.line_is_document else dict.fromkeys(counts, 1),
            tokens={split: self.marking.count(words=c.words, lines=c.lines) for split, c in counts.items()},
            bytes={split: count.bytes for split, count in counts.items()},
            details={**self.details, "lines": lines, "made_from": made_from},
            notes=notes,
        )

    def stream(self, scan: Scan) -> Iterator[tuple[str, Tokens]]:
        vocab = scan.vocab
        assert isinstance(vocab, WordVocab)
        ids, unknown = vocab.ids, None if vocab.unknown is None else vocab.ids[vocab.unknown]
        started = set()
        for split, _, lines in self._lines("writing tokens"):
            marked = self.marking.mark(lines.lower() if self.lower else lines, first=split not in started)
            started.add(split)
            words = marked.split()
            found = map(ids.__getitem__, words) if unknown is None else (ids.get(word, unknown) for word in words)
            yield split, np.fromiter(found, dtype=vocab.dtype, count=len(words))

    def _content(self) -> tuple[str, tuple[str, ...]]:
        """sha256 over the bytes of all files, and what is odd about them."""
        digests, notes = [], []
        with self._opened("reading") as advance:
            for split, sources in self.parts.items():
                digest = hashlib.sha256()
                for source in sources:
                    marked, returns, at_start = False, False, True
                    for chunk in read(source, advance):
                        digest.update(chunk)
                        marked = marked or (at_start and chunk.startswith(codecs.BOM_UTF8))
                        returns, at_start = returns or b"\r" in chunk, False
                    if marked:
                        notes.append(f"{source.name} begins with a byte order mark, which is left out")
                    if returns:
                        notes.append(f"{source.name} has carriage returns; like newlines they end lines")
                digests.append([split, digest.hexdigest()])
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest(), tuple(dict.fromkeys(notes))

    def _count(self) -> tuple[dict[str, _Count], WordVocab]:
        """What is in each split, and the vocabulary. Raises ConfigError for a word that the vocabulary lacks."""
        counter: Counter[str] = Counter()
        counts = {split: _Count() for split in self.parts}
        for split, source, lines in self._lines("counting words"):
            words = (lines.lower() if self.lower else lines).split()
            if self.vocab is None and split in self.counted:
                counter.update(words)
            elif self.vocab is None and (strange := set(words) - counter.keys() - {self.marking.marker}):
                raise self._out_of_vocabulary(strange, source, lines, before=counts[split].lines)
            counts[split].words += len(words)
            counts[split].lines += lines.count("\n")
            counts[split].bytes += len(lines.encode())
        for split, count in counts.items():
            if not count.words:
                raise self.parts[split][0].refuse("holds no word", "fetch it again")
        return counts, self.vocab or self._vocab(counter)

    def _vocab(self, counter: Counter[str]) -> WordVocab:
        marker = self.marking.marker
        words = [marker, *(word for word, _ in counter.most_common() if word != marker)]
        return WordVocab(words, end=marker, unknown=None, lower=self.lower, rule=self.vocab_rule)

    def _lines(self, label: str) -> Iterator[tuple[str, Source, str]]:
        """(split, file, whole lines of it) from all files."""
        with self._opened(label) as advance:
            for split, sources in self.parts.items():
                for source in sources:
                    for lines in whole_lines(source, advance):
                        yield split, source, lines

    def _opened(self, label: str) -> AbstractContextManager[Advance]:
        return opened(label, list(self._sources()))

    def _sources(self) -> Iterator[Source]:
        return (source for sources in self.parts.values() for source in sources)

    def _out_of_vocabulary(self, strange: Collection[str], source: Source, lines: str, *, before: int) -> ConfigError:
        """The error for a word that the vocabulary lacks; `before`: lines of the split before these."""
        for number, line in enumerate(lines.split("\n"), start=before + 1):
            for word in line.split():
                if word in strange:
                    where = " and ".join(self.counted)
                    rule = f"line {number} has the word {word!r}, which is not in the vocabulary of {where}"
                    return source.refuse(rule, "this copy differs from the published one: fetch it again")
        raise AssertionError("no such word")
