"""Token files: built once per content and rule in a cache folder, memory-mapped ever after.

A folder holds `train.bin`, `valid.bin`, `test.bin` (ids in the vocabulary's integer type, little-endian, nothing else),
`vocab.json` and `meta.json`. It is written beside its place, synced and renamed, so it is whole or not there, and two
processes that build it at once do no harm. Its name carries the fingerprint of everything the tokens depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_lightning import registry
from txl_lightning.config import DataConfig
from txl_lightning.data.cache import cache_root, check_writable, publish, sync_folder, synced, workspace
from txl_lightning.data.console import say, say_once
from txl_lightning.data.corpora import Corpus, Scan
from txl_lightning.data.counts import compare
from txl_lightning.data.lanes import check_filled
from txl_lightning.data.order import check_unit
from txl_lightning.data.splits import SPLITS
from txl_lightning.data.subwords import in_subwords
from txl_lightning.data.vocab import Tokens, Vocab, from_dict
from txl_lightning.errors import ConfigError

FORMAT = 2  # of the folder; part of the fingerprint


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What is known about prepared data; stands in `meta.json` beside the token files.

    The counts are per split, and a split without tokens is in none of them.
    """

    corpus: str
    rule_version: int
    vocab_name: str
    vocab_size: int
    vocab_digest: str  # sha256 of all that decides ids
    unit: str  # what a token is, e.g. "byte"
    split_rule: str
    fingerprint: str  # sha256 of content, rules and vocabulary, hexadecimal
    documents: dict[str, int]
    tokens: dict[str, int]
    bytes: dict[str, int]
    words: dict[str, int]  # of the scored text; empty: not counted
    scored_bytes: dict[str, int]  # of the scored text and its document ends; empty: follows from the unit
    details: dict[str, Any]

    def require(self, split: str) -> int:
        """Tokens of a split.

        Raises:
            ConfigError: the corpus has no such split.
        """
        if split not in self.tokens:
            cure = f"it has {' and '.join(self.tokens)}"
            raise ConfigError("split", split, f"the corpus {self.corpus} has no such split", cure)
        return self.tokens[split]

    def scored(self, split: str) -> dict[str, int]:
        """Words and bytes of the scored text, where they are counted: keys "word" and "byte"."""
        counts = {"word": self.words, "byte": self.scored_bytes}
        return {unit: count[split] for unit, count in counts.items() if split in count}


@dataclass(frozen=True, kw_only=True)
class Survey(Meta):
    """Data as it would be prepared: counted and checked, nothing written."""

    vocab: Vocab
    published: list[dict[str, Any]]  # counts from the literature beside those found: see `counts.compare`
    notes: tuple[str, ...]  # one-line remarks for the user
    folder: Path  # where its token files are or would be
    cached: bool  # they are there


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """Prepared data: per split one read-only memory-mapped array of token ids."""

    splits: dict[str, Tokens]
    vocab: Vocab
    meta: Meta
    folder: Path

    def require(self, split: str) -> Tokens:
        """The tokens of a split. Raises ConfigError if the corpus has no such split."""
        self.meta.require(split)
        return self.splits[split]


def look(config: DataConfig) -> Survey:
    """Find, read, count and hash the sources. Writes nothing and asks no more of the data than to be readable.

    Raises:
        ConfigError: the sources cannot serve.
    """
    return _survey(config, _scan(config))


def survey(config: DataConfig, *, training: bool = True) -> Survey:
    """All that can be refused about the data before anything is written.

    Args:
        config: the corpus and how it is read.
        training: the data is for training, so there must be a training split that fills `batch_size` lanes.

    Raises:
        ConfigError: the sources cannot serve, the training split is missing or too short, or the cache folder is of
            no use.
    """
    found = look(config)
    if training:
        check_training(found, batch_size=config.batch_size)
        check_order(config, found)
    if not found.cached:
        check_writable(found.folder.parent)
    return found


def prepare(config: DataConfig, *, training: bool = True) -> TokenData:
    """The corpus as token files, built if they are not in the cache.

    Raises:
        ConfigError: as `survey`; or the sources changed while they were read; or the cache folder cannot be written.
    """
    scanned = _scan(config)
    found = _survey(config, scanned)
    if training:
        check_training(found, batch_size=config.batch_size)
    for note in found.notes:
        say_once(f"data: {note}")
    if (damage := _damage(found)) is not None:
        if os.path.exists(found.folder):
            say(f"data: token files are built again, {damage}: {found.folder}")
        _build(scanned, found)
    return _open(found)


def sample(config: DataConfig, *, n_token: int) -> tuple[str, Tokens]:
    """The name and first tokens of the first split, read from the sources."""
    corpus, scan, _ = _scan(config)
    first = next(split for split in SPLITS if split in scan.tokens)
    start: list[Tokens] = []
    for split, tokens in corpus.stream(scan):
        if split == first:
            start.append(tokens[:n_token])
        if sum(map(len, start)) >= min(n_token, scan.tokens[first]):
            break
    return first, np.concatenate(start)[:n_token]


def check_training(data: Meta, *, batch_size: int) -> None:
    """Raise ConfigError unless the training split gives each of `batch_size` lanes a token and its target."""
    if "train" not in data.tokens:
        cure = f"it has {' and '.join(data.tokens)}; give training text, for example data.train=FILE"
        raise ConfigError("data", data.corpus, "this corpus has no training split", cure)
    check_filled(data.tokens["train"], lanes=batch_size, key="data.batch_size", text="training split")


def check_order(config: DataConfig, found: Survey) -> None:
    """Raise ConfigError if the training split cannot be shuffled as asked, as far as counts tell."""
    if config.shuffle != "none":
        check_unit(found.vocab, unit=config.shuffle, n_document=found.documents["train"])


class _Scanned(NamedTuple):
    corpus: Corpus
    scan: Scan
    signature: tuple[tuple[str, int, int], ...]  # of the sources when the scan began


_last: tuple[DataConfig, _Scanned] | None = None
"""The last scan and its config: commands check, prepare and open the same big files within one process."""


def _scan(config: DataConfig) -> _Scanned:
    global _last
    corpus = in_subwords(registry.corpora.get(config.name).build(config), config)
    signature = corpus.signature()
    if _last is not None and _last[0] == config and _last[1].signature == signature:
        return _last[1]._replace(corpus=corpus)
    # a file changed this very moment might change again without a newer time stamp, so its scan is not kept
    settled = all(changed < time.time_ns() - 2e9 for _, _, changed in signature)
    found = _Scanned(corpus, corpus.scan(), signature)
    _last = (config, found) if settled else None
    return found


def _survey(config: DataConfig, scanned: _Scanned) -> Survey:
    corpus, scan, _ = scanned
    facts: dict[str, Any] = {
        "corpus": corpus.name,
        "rule_version": corpus.rule_version,
        "vocab_name": scan.vocab.name,
        "vocab_size": scan.vocab.size,
        "vocab_digest": scan.vocab.digest,
        "unit": scan.vocab.unit,
        "split_rule": scan.rule,
        "details": scan.details,
    }
    fingerprint = hashlib.sha256(json.dumps([FORMAT, facts, scan.content], sort_keys=True).encode()).hexdigest()
    counts: dict[str, Any] = {
        name: {split: getattr(scan, name)[split] for split in SPLITS if split in getattr(scan, name)}
        for name in ("documents", "tokens", "bytes", "words", "scored_bytes")
    }
    folder = cache_root(config) / f"{re.sub('[^A-Za-z0-9]', '_', corpus.name)}-{fingerprint[:20]}"
    found = Survey(
        **facts,
        **counts,
        fingerprint=fingerprint,
        vocab=scan.vocab,
        published=compare(getattr(corpus, "published", {}), _quantities(scan)),
        notes=scan.notes,
        folder=folder,
        cached=False,
    )
    return dataclasses.replace(found, cached=_damage(found) is None)


def _quantities(scan: Scan) -> dict[str, dict[str, int]]:
    """What was counted, under the names that published counts have."""
    counted: dict[str, dict[str, int]] = {n: scan.details[n] for n in ("lines", "words") if n in scan.details}
    symbols = {"symbols": {"all": scan.details["symbols"]}} if "symbols" in scan.details else {}
    counted |= {"tokens": scan.tokens, "documents": scan.documents, "bytes": scan.bytes}
    return {"vocabulary": {"all": scan.vocab.size}, **symbols, **counted}


def _meta(found: Survey) -> Meta:
    return Meta(**{item.name: getattr(found, item.name) for item in dataclasses.fields(Meta)})


def _dump(found: Survey) -> str:
    return json.dumps(dataclasses.asdict(_meta(found)), indent=2)


def _damage(found: Survey) -> str | None:
    """What is wrong with the token files in `found.folder`; None: nothing, they are whole and the right ones."""
    try:
        meta = json.loads((found.folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "meta.json is missing or damaged"
    if meta != json.loads(_dump(found)):
        return "meta.json belongs to other data"
    try:
        kept = from_dict(json.loads((found.folder / "vocab.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return "vocab.json is missing or damaged"
    if kept.digest != found.vocab_digest:
        return "vocab.json belongs to other data"
    width = found.vocab.dtype.itemsize
    for split, n_token in found.tokens.items():
        path = found.folder / f"{split}.bin"
        size = path.stat().st_size if path.is_file() else 0
        if size != n_token * width:
            return f"{path.name} has {size} bytes instead of {n_token * width}"
    return None


def _open(found: Survey) -> TokenData:
    dtype = found.vocab.dtype
    splits = {split: np.memmap(found.folder / f"{split}.bin", dtype=dtype, mode="r") for split in found.tokens}
    return TokenData(splits=dict(splits), vocab=found.vocab, meta=_meta(found), folder=found.folder)


def _build(scanned: _Scanned, found: Survey) -> None:
    """Write the token files beside their place and move them there."""
    with workspace(found.folder) as work:
        n_token = _write_tokens(scanned.corpus, scanned.scan, work)
        if n_token != found.tokens or scanned.corpus.signature() != scanned.signature:
            raise ConfigError(
                "data", found.corpus, "its files changed while they were read", "wait until nothing writes to them"
            )
        with synced(work / "vocab.json") as file:
            file.write(json.dumps(found.vocab.to_dict()).encode())
        with synced(work / "meta.json") as file:
            file.write(_dump(found).encode())
        sync_folder(work)
        publish(work, found.folder, is_whole=lambda: _damage(found) is None)
        sync_folder(found.folder.parent)


def _write_tokens(corpus: Corpus, scan: Scan, work: Path) -> dict[str, int]:
    """Tokens written per split."""
    done = dict.fromkeys(scan.tokens, 0)
    with ExitStack() as stack:
        files = {split: stack.enter_context(synced(work / f"{split}.bin")) for split in scan.tokens}
        for split, tokens in corpus.stream(scan):
            files[split].write(np.ascontiguousarray(tokens).data)
            done[split] += len(tokens)
    return {split: done[split] for split in SPLITS if split in done}
