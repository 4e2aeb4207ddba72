"""Vocabularies: how text becomes token ids and ids become text again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from txl_lightning.errors import ConfigError, suggest

Tokens = npt.NDArray[Any]
"""Token ids in the smallest unsigned integer type that holds them."""


class Vocab(Protocol):
    """What a corpus needs of a vocabulary."""

    name: ClassVar[str]
    size: ClassVar[int]  # ids are 0 .. size - 1
    unit: ClassVar[str]  # what one token is: names the metric, e.g. bits_per_byte
    dtype: ClassVar[np.dtype[Any]]  # of token files; byte order fixed, so files travel between machines
    rule: ClassVar[str]  # one sentence for `txl data inspect`

    def encode(self, text: str | bytes) -> Tokens: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteVocab:
    """The one vocabulary of all byte corpora: 256 byte values and a separator that ends each document."""

    name: ClassVar[str] = "bytes"
    size: ClassVar[int] = 257
    unit: ClassVar[str] = "byte"
    dtype: ClassVar[np.dtype[Any]] = np.dtype("<u2")
    rule: ClassVar[str] = "ids 0-255 are the bytes as they are, id 256 ends a document"
    separator: ClassVar[int] = 256

    def encode(self, text: str | bytes) -> Tokens:
        """(N,) ids of the bytes (UTF-8 of a str), without a separator."""
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(self.dtype)

    def to_bytes(self, ids: Iterable[int], *, separator: bytes = b"\n") -> bytes:
        """The bytes behind the ids, with `separator` where a document ends."""
        return b"".join(separator if token == self.separator else bytes((token,)) for token in map(int, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The ids as UTF-8 text; bytes that are none become U+FFFD, the end of a document a newline."""
        return self.to_bytes(ids).decode("utf-8", "replace")


VOCABS: dict[str, type[Vocab]] = {ByteVocab.name: ByteVocab}


def get(name: str) -> Vocab:
    """The vocabulary a checkpoint or token file names.

    Raises:
        ConfigError: no such vocabulary.
    """
    if name not in VOCABS:
        raise ConfigError("vocab", name, "no such vocabulary", suggest(name, VOCABS))
    return VOCABS[name]()
