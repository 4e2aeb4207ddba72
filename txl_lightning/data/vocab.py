"""Vocabularies: how text becomes token ids and ids become text again.

A vocabulary is a value: `to_dict` holds all that decides its ids, in plain containers that a checkpoint and a token
folder can keep, and `from_dict` makes it again.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from txl_lightning.errors import ConfigError, suggest

Tokens = npt.NDArray[Any]
"""Token ids in the smallest unsigned integer type that holds them."""


class Vocab(Protocol):
    """What a corpus, a checkpoint and a sample need of a vocabulary."""

    @property
    def name(self) -> str:
        """Its kind: `from_dict` finds the class by it."""

    @property
    def size(self) -> int:
        """Ids are 0 .. size - 1."""

    @property
    def unit(self) -> str:
        """What one token is: byte, char, word or token. Names the metric, e.g. bits_per_byte."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of token files; byte order fixed, so files travel between machines."""

    @property
    def rule(self) -> str:
        """One sentence for `txl data inspect`."""

    @property
    def digest(self) -> str:
        """sha256 of all that decides ids, hexadecimal."""

    def encode(self, text: str | bytes) -> Tokens:
        """(N,) ids of a user's text. Raises ConfigError if it has what the vocabulary has not."""

    def decode(self, ids: Iterable[int]) -> str:
        """The ids as text a reader can read."""

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """How text goes on, token by token as they come; what is not yet a whole character waits."""

    def to_dict(self) -> dict[str, Any]:
        """All that decides ids in plain containers, with "name"."""


def dtype_for(size: int) -> np.dtype[Any]:
    """The smallest little-endian unsigned type for ids 0 .. size - 1."""
    return np.dtype("<u1" if size <= 2**8 else "<u2" if size <= 2**16 else "<u4")


def digest_of(values: Mapping[str, Any]) -> str:
    """sha256 over the plain containers of a vocabulary, without its rule, which is words about them."""
    deciding = {name: value for name, value in values.items() if name != "rule"}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def _utf8_pieces(pieces: Iterable[bytes]) -> Iterator[str]:
    """Bytes as UTF-8 text as far as whole; bytes that are none become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


class ByteVocab:
    """The one vocabulary of all byte corpora: 256 byte values and a separator that ends each document."""

    name: ClassVar[str] = "bytes"
    size: ClassVar[int] = 257
    unit: ClassVar[str] = "byte"
    dtype: ClassVar[np.dtype[Any]] = np.dtype("<u2")
    rule: ClassVar[str] = "ids 0-255 are the bytes as they are, id 256 ends a document"
    separator: ClassVar[int] = 256

    @property
    def digest(self) -> str:
        return digest_of(self.to_dict())

    def encode(self, text: str | bytes) -> Tokens:
        """(N,) ids of the bytes (UTF-8 of a str), without a separator."""
        return np.frombuffer(as_bytes(text), dtype=np.uint8).astype(self.dtype)

    def to_bytes(self, ids: Iterable[int], *, separator: bytes = b"\n") -> bytes:
        """The bytes behind the ids, with `separator` where a document ends."""
        return b"".join(separator if token == self.separator else bytes((token,)) for token in map(int, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The ids as UTF-8 text; bytes that are none become U+FFFD, the end of a document a newline."""
        return self.to_bytes(ids).decode("utf-8", "replace")

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        return _utf8_pieces(self.to_bytes([token]) for token in ids)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ByteVocab:
        return cls()


class SymbolVocab:
    """Some byte values, each a token, in a given order.

    Args:
        symbols: the byte value of each id.
        unit: what one symbol is called in scores: byte, or char.
        rule: which symbols, in one sentence.
    """

    name: ClassVar[str] = "symbols"

    def __init__(self, symbols: Sequence[int], *, unit: str, rule: str) -> None:
        self.symbols, self.unit, self.rule = bytes(symbols), unit, rule
        self.size = len(self.symbols)
        self.dtype = dtype_for(self.size)

    @property
    def digest(self) -> str:
        return digest_of(self.to_dict())

    @cached_property
    def table(self) -> npt.NDArray[np.int16]:
        """(256,) id of each byte value; -1: not in the vocabulary."""
        table = np.full(256, -1, dtype=np.int16)
        table[np.frombuffer(self.symbols, dtype=np.uint8)] = np.arange(self.size)
        return table

    def encode(self, text: str | bytes) -> Tokens:
        """(N,) ids of the bytes (UTF-8 of a str); newlines are left out if they are no symbols.

        Raises:
            ConfigError: a byte is no symbol.
        """
        raw = np.frombuffer(as_bytes(text), dtype=np.uint8)
        if self.table[10] < 0:
            raw = raw[raw != 10]
        ids = self.table[raw]
        if (ids < 0).any():
            strange = bytes((int(raw[np.flatnonzero(ids < 0)[0]]),))
            shown = "".join(map(chr, sorted(self.symbols))) if self.size < 64 else f"the {self.size} of its corpus"
            raise ConfigError("text", strange, "is no symbol of this vocabulary", f"use only {shown!r}")
        return ids.astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(self.symbols[int(token)] for token in ids).decode("utf-8", "replace")

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        return _utf8_pieces(self.symbols[int(token)].to_bytes(1, "big") for token in ids)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "symbols": list(self.symbols), "unit": self.unit, "rule": self.rule}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SymbolVocab:
        return cls(values["symbols"], unit=values["unit"], rule=values["rule"])


class WordVocab:
    """Words between white space, and a marker between lines.

    Args:
        words: the word of each id.
        end: the word that stands for the end of a line.
        unknown: the word that stands for words that are not in the vocabulary; None: there is none, and no corpus may
            hold such words (a user's prompt may, if the corpus itself writes `<unk>`).
        lower: words are lower-cased first.
        rule: which words, in one sentence.
    """

    name: ClassVar[str] = "words"
    unit: ClassVar[str] = "word"

    def __init__(self, words: Sequence[str], *, end: str, unknown: str | None, lower: bool, rule: str) -> None:
        self.words, self.end, self.unknown, self.lower, self.rule = list(words), end, unknown, lower, rule
        self.size = len(self.words)
        self.dtype = dtype_for(self.size)

    @cached_property
    def digest(self) -> str:
        return digest_of(self.to_dict())

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each word."""
        return {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str | bytes) -> Tokens:
        """(N,) ids of the words and of the ends of lines between them.

        Raises:
            ConfigError: the text is not UTF-8, or a word is not in the vocabulary and nothing stands for such words.
        """
        text = as_text(text)
        words = (text.lower() if self.lower else text).replace("\n", f" {self.end} ").split()
        stand_in = self.ids.get(self.unknown or "<unk>")
        found = [self.ids.get(word, stand_in) for word in words]
        if None in found:
            strange = words[found.index(None)]
            raise ConfigError("text", strange, f"is none of the {self.size} words of this vocabulary", "use others")
        return np.array(found, dtype=self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """The words with spaces between them; the end of a line becomes a newline."""
        return "".join(self._spaced(ids, at_start=True))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        return self._spaced(ids, at_start=False)

    def to_dict(self) -> dict[str, Any]:
        """The words are one text: a list of several hundred thousand would slow down every checkpoint."""
        return {
            "name": self.name,
            "words": "\n".join(self.words),
            "end": self.end,
            "unknown": self.unknown,
            "lower": self.lower,
            "rule": self.rule,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WordVocab:
        rest = {name: values[name] for name in ("end", "unknown", "lower", "rule")}
        return cls(values["words"].split("\n"), **rest)

    def _spaced(self, ids: Iterable[int], *, at_start: bool) -> Iterator[str]:
        for token in ids:
            word = self.words[int(token)]
            is_end = word == self.end
            yield "\n" if is_end else word if at_start else f" {word}"
            at_start = is_end


def as_bytes(text: str | bytes) -> bytes:
    """UTF-8 of a text; bytes that the command line could not read as text come back as they were."""
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def as_text(text: str | bytes) -> str:
    """Text of UTF-8 bytes.

    Raises:
        ConfigError: they are none.
    """
    try:
        return as_bytes(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("text", f"byte {error.start}", "is not UTF-8", "give text in UTF-8") from error


class _VocabClass(Protocol):
    name: ClassVar[str]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Vocab: ...


Kind = TypeVar("Kind", bound=type[_VocabClass])

VOCABS: dict[str, Callable[[Mapping[str, Any]], Vocab]] = {}
"""A vocabulary's kind to what makes it again from its plain containers."""


def register(kind: Kind) -> Kind:
    """Class decorator: let `from_dict` know this kind of vocabulary."""
    VOCABS[kind.name] = kind.from_dict
    return kind


for _kind in (ByteVocab, SymbolVocab, WordVocab):
    register(_kind)


def from_dict(values: Mapping[str, Any]) -> Vocab:
    """The vocabulary that a checkpoint or token folder holds, made again from `to_dict`.

    Raises:
        ConfigError: no such kind of vocabulary, or something is missing in it.
    """
    name = values.get("name") if isinstance(values, Mapping) else None
    if name not in VOCABS:
        raise ConfigError("vocab", name, "no such vocabulary", suggest(str(name), VOCABS))
    try:
        return VOCABS[name](values)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("vocab", name, f"it is damaged: {error!r}", "use a whole file") from error
