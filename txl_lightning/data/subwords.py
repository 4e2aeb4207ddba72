"""A byte corpus read in sub-words: its documents as text, encoded piece by piece.

However a corpus is read in chunks, its ids are those of its whole documents: a document is encoded at once, or, where
the tokenizer allows it, in pieces cut where no token can reach across.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_lightning.data.cache import cache_root
from txl_lightning.data.corpora import Corpus, Scan
from txl_lightning.data.known import known
from txl_lightning.data.tokenizer import (
    BPE,
    BPE_SIZE,
    BYTES,
    TAKES,
    SubwordConfig,
    TokenizerVocab,
    read_tokenizer,
    train_bpe,
)
from txl_lightning.data.vocab import ByteVocab, Tokens
from txl_lightning.errors import ConfigError

PIECE = 2**15  # bytes after which a long document is cut
BATCH = 2**22  # bytes encoded in one go
RULE_VERSION = 1  # raise it when the same bytes would give another BPE or other ids

_BORDER = re.compile(rb"[!-~](?=[ \n])")


def in_subwords(corpus: Corpus, config: Any) -> Corpus:
    """The corpus as its config wants it read: as it is, or in sub-words."""
    wanted = isinstance(config, SubwordConfig) and config.tokenizer != BYTES
    return SubwordCorpus(corpus, config) if wanted else corpus


class Piece(NamedTuple):
    """A stretch of a document."""

    split: str
    raw: bytes  # whole characters of UTF-8
    ends: bool  # the document ends behind it


class SubwordCorpus:
    """A corpus of bytes (vocabulary `bytes`), encoded by the tokenizer that its config names.

    Raises:
        ConfigError: no such tokenizer file.
    """

    def __init__(self, corpus: Corpus, config: SubwordConfig) -> None:
        self.corpus, self.name, self.rule_version = corpus, corpus.name, corpus.rule_version
        self.published = getattr(corpus, "published", {})
        self._root = cache_root(config)
        self._size = config.tokenizer_size or BPE_SIZE
        self._file = None if config.tokenizer == BPE else Path(os.path.expanduser(config.tokenizer))
        if self._file is not None and not self._file.is_file():
            raise ConfigError("data.tokenizer", config.tokenizer, "no such file", TAKES)

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        if self._file is None:
            return self.corpus.signature()
        found = self._file.stat()
        return (*self.corpus.signature(), (str(self._file), found.st_size, found.st_mtime_ns))

    def scan(self) -> Scan:
        """As that of the bytes; a trained BPE and all counts are taken from token files where they have been built."""
        scan = self.corpus.scan()
        assert isinstance(scan.vocab, ByteVocab)
        vocab = None if self._file is None else read_tokenizer(self._file)
        recipe = [RULE_VERSION, scan.content, scan.rule, self._size if vocab is None else vocab.digest]
        made_from = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
        if (found := known(self._root, made_from)) is not None:
            return dataclasses.replace(scan, vocab=found[0], **found[1])
        if vocab is None:
            vocab = self._train(scan)
        kind = {"tokenizer": BPE if self._file is None else "file", "made_from": made_from}
        return self._count(dataclasses.replace(scan, vocab=vocab, details={**scan.details, **kind}))

    def stream(self, scan: Scan) -> Iterator[tuple[str, Tokens]]:
        assert isinstance(scan.vocab, TokenizerVocab)
        for batch in _batches(self._pieces(scan, cut=scan.vocab.cuts_at_space)):
            yield batch[0].split, _encode(scan.vocab, batch)

    def _pieces(self, scan: Scan, *, cut: bool) -> Iterator[Piece]:
        return pieces(self.corpus.stream(scan), cut=cut)

    def _train(self, scan: Scan) -> TokenizerVocab:
        if "train" not in scan.tokens:
            cure = "give training text, or the tokenizer.json of a trained one"
            raise ConfigError("data.tokenizer", BPE, "there is no training split to train it on", cure)
        train = (piece for piece in self._pieces(scan, cut=True) if piece.split == "train")
        return train_bpe((_text(piece) for piece in train), size=self._size)

    def _count(self, scan: Scan) -> Scan:
        """The scan with what there is in sub-words; a split without a token is in none of the counts."""
        assert isinstance(scan.vocab, TokenizerVocab)
        tokens, n_byte, words, scored = ({} for _ in range(4))
        for batch in _batches(self._pieces(scan, cut=scan.vocab.cuts_at_space)):
            split, texts = batch[0].split, [_text(piece) for piece in batch]
            if split not in tokens:
                # the first token is never a target, and no score is of its text
                first = scan.vocab.first_end(texts[0])
                scored[split] = -len(texts[0][:first].encode())
                words[split] = len(texts[0][first:].split()) - len(texts[0].split())
                tokens[split] = n_byte[split] = 0
            size, ends = sum(len(piece.raw) for piece in batch), sum(piece.ends for piece in batch)
            n_byte[split] += size
            scored[split] += size + ends
            words[split] += sum(len(text.split()) for text in texts)
            tokens[split] += len(_encode(scan.vocab, batch))
        documents = {split: scan.documents[split] for split in tokens}
        notes = scan.notes
        if self._file is None and scan.vocab.size < self._size:
            notes += (f"the training split has pairs for {scan.vocab.size} ids only, not {self._size}",)
        return dataclasses.replace(
            scan, documents=documents, tokens=tokens, bytes=n_byte, words=words, scored_bytes=scored, notes=notes
        )


def pieces(stream: Iterable[tuple[str, Tokens]], *, cut: bool) -> Iterator[Piece]:
    """The documents of a stream of bytes and separators as whole characters.

    Where a split begins within a character, the whole of it belongs to that split.

    Args:
        stream: chunks of the corpus in order, each with its split.
        cut: give long documents in pieces, cut before a space or newline.
    """
    split, held, searched = "", bytearray(), 0
    for name, tokens in stream:
        if name != split:
            tail = _unfinished(held)
            if len(held) > len(tail):
                yield Piece(split, bytes(held[: len(held) - len(tail)]), False)
            split, held, searched = name, bytearray(tail), 0
        for raw, ends in _parts(tokens):
            held += raw
            done = 0
            while cut and (border := _BORDER.search(held, max(done + PIECE, searched))) is not None:
                yield Piece(split, bytes(held[done : border.end()]), False)
                done, searched = border.end(), 0
            held = held[done:]
            searched = max(len(held) - 1, 0)  # a border may still come behind the last byte
            if ends:
                yield Piece(split, bytes(held), True)
                held, searched = bytearray(), 0
    if held:
        yield Piece(split, bytes(held), False)


def _parts(tokens: Tokens) -> Iterator[tuple[bytes, bool]]:
    """The bytes between the separators, and whether one follows."""
    start = 0
    for end in np.flatnonzero(tokens == ByteVocab.separator).tolist():
        yield tokens[start:end].astype(np.uint8).tobytes(), True
        start = end + 1
    yield tokens[start:].astype(np.uint8).tobytes(), False


def _unfinished(raw: bytearray) -> bytes:
    """The begin of a character that the bytes end with, if any."""
    for back in range(1, min(4, len(raw) + 1)):
        byte = raw[-back]
        if byte >= 0xC0:
            return bytes(raw[-back:]) if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else b""
        if byte < 0x80:
            return b""
    return b""


def _batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces of one split, at most about BATCH bytes at a time."""
    batch: list[Piece] = []
    size = 0
    for piece in stream:
        if batch and (piece.split != batch[0].split or size + len(piece.raw) > BATCH):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece.raw)
    if batch:
        yield batch


def _encode(vocab: TokenizerVocab, batch: list[Piece]) -> Tokens:
    end, none = np.array([vocab.separator], dtype=vocab.dtype), np.empty(0, dtype=vocab.dtype)
    ids = vocab.encode_all([_text(piece) for piece in batch])
    return np.concatenate(
        [part for one, piece in zip(ids, batch, strict=True) for part in (one, end if piece.ends else none)]
    )


def _text(piece: Piece) -> str:
    try:
        return piece.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        near = piece.raw[max(error.start - 20, 0) : error.start + 20]
        rule = f"the {piece.split} split is not UTF-8: {near!r}"
        raise ConfigError("data.tokenizer", None, rule, "write it in UTF-8, or set data.tokenizer=bytes") from error
