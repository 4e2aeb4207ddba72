"""Sub-word vocabularies through Hugging Face `tokenizers`: a byte-level BPE trained here, or a tokenizer.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from txl_lightning.config import DataConfig, key
from txl_lightning.data.vocab import Tokens, as_text, digest_of, dtype_for, from_dict, register
from txl_lightning.errors import ConfigError

BYTES, BPE = "bytes", "bpe"
BPE_SIZE = 8192
SEPARATORS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>")
"""Special tokens that end a document where a tokenizer.json has one; the first of them that it has."""

TAKES = "give bytes, bpe, the tokenizer.json of a Hugging Face tokenizer, or a checkpoint that has one"

# the library warns whenever a process forks after it used threads; data workers never use it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


@dataclass(frozen=True, kw_only=True)
class SubwordConfig(DataConfig):
    """What a corpus of text has that can be read in bytes or in sub-words."""

    tokenizer: str = key(
        BYTES, "bytes, bpe (trained on the training split), a tokenizer.json, or a checkpoint to take it from"
    )
    tokenizer_size: int | None = key(
        None,
        f"ids of data.tokenizer=bpe, one of them ends a document; null: {BPE_SIZE}",
        minimum=257,
        maximum=10_000_000,
    )

    def check(self) -> None:
        if not self.tokenizer.strip():
            raise self.refuse("tokenizer", "is empty", TAKES)
        if self.tokenizer_size is not None and self.tokenizer != BPE:
            raise self.refuse("tokenizer_size", f"cannot go with data.tokenizer={self.tokenizer}", "leave it out")


@register
class TokenizerVocab:
    """The ids of a Hugging Face tokenizer, and one that ends each document.

    What looks like a special token in a text is text: it is encoded as any other, and nothing is put around a text.

    Args:
        tokenizer: content of its tokenizer.json.
        separator: the id that ends a document, one of the tokenizer's or the next free one.

    Raises:
        ValueError: the library cannot read it.
    """

    name: ClassVar[str] = "tokenizer"
    unit: ClassVar[str] = "token"

    def __init__(self, tokenizer: str, *, separator: int) -> None:
        self.tokenizer, self.separator = tokenizer, separator
        self._coder = _library().Tokenizer.from_str(tokenizer)  # fails with bare Exceptions
        self._coder.encode_special_tokens = True
        self.size = max(*self._coder.get_vocab().values(), separator) + 1
        self.dtype = dtype_for(self.size)

    @property
    def rule(self) -> str:
        kind = json.loads(self.tokenizer)["model"]["type"]
        return f"{kind} sub-words of Hugging Face tokenizers, id {self.separator} ends a document"

    @cached_property
    def digest(self) -> str:
        return digest_of(self.to_dict())

    @cached_property
    def cuts_at_space(self) -> bool:
        """Whether a text may be cut before any space or newline that follows another ASCII character, and have the
        same ids. True for byte-level pre-tokenization by GPT-2's rule: no piece has white space but at its start.
        """
        content = json.loads(self.tokenizer)
        pieces = content["pre_tokenizer"] or {}
        return (
            content["normalizer"] is None
            and pieces.get("type") == "ByteLevel"
            and pieces.get("use_regex", True)
            and not pieces.get("add_prefix_space", True)
            and not any(
                token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"])
                for token in content["added_tokens"]
            )
        )

    def encode(self, text: str | bytes) -> Tokens:
        return self.encode_all([as_text(text)])[0]

    def encode_all(self, texts: list[str]) -> list[Tokens]:
        """(N,) ids of each text, without separators."""
        found = self._coder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=self.dtype) for one in found]

    def first_end(self, text: str) -> int:
        """Characters of the text that its first token covers."""
        offsets = self._coder.encode(text, add_special_tokens=False).offsets
        return int(offsets[0][1]) if offsets else len(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The ids as text; the end of a document becomes a newline."""
        parts: list[list[int]] = [[]]
        for token in map(int, ids):
            if token == self.separator:
                parts.append([])
            else:
                parts[-1].append(token)
        return "\n".join(self._coder.decode(part, skip_special_tokens=False) for part in parts)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        fresh = _library().decoders.DecodeStream
        text = fresh(skip_special_tokens=False)
        for token in map(int, ids):
            if token == self.separator:
                yield "\n"
                text = fresh(skip_special_tokens=False)
            else:
                yield text.step(self._coder, token) or ""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "tokenizer": self.tokenizer, "separator": self.separator}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TokenizerVocab:
        try:
            return cls(values["tokenizer"], separator=values["separator"])
        except ConfigError:
            raise
        except Exception as error:
            raise ValueError(str(error)) from error


def train_bpe(texts: Iterable[str], *, size: int) -> TokenizerVocab:
    """A byte-level BPE of the texts; they may be cut at spaces. The same texts in the same order give the same ids.

    Args:
        texts: what to learn from.
        size: ids with the separator, which is the last; there are fewer where the texts have no more pairs to join.
    """
    library = _library()
    coder = library.Tokenizer(library.models.BPE())
    coder.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    coder.train_from_iterator(iter(texts), trainer=trainer)
    return TokenizerVocab(coder.to_str(), separator=coder.get_vocab_size())


def read_tokenizer(path: Path) -> TokenizerVocab:
    """The vocabulary in a tokenizer.json, in a checkpoint, or in the vocab.json of a token folder.

    Raises:
        ConfigError: the file cannot be read or is none of them.
    """
    try:
        if path.suffix == ".ckpt":
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["txl_lightning"]["vocab"]
        else:
            content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("name") == TokenizerVocab.name:
            found = from_dict(content)
            assert isinstance(found, TokenizerVocab)
            return found
        # how texts are cut, filled up and blurred is a trainer's setting, not the vocabulary's
        content |= {"truncation": None, "padding": None}
        content["model"] |= {"dropout": None} if content["model"]["type"] == "BPE" else {}
        return TokenizerVocab(json.dumps(content, ensure_ascii=False), separator=_separator(content))
    except ConfigError as error:
        raise error if error.key == "data.tokenizer" else _refuse(path, f"holds no tokenizer: {error.rule}") from error
    except OSError as error:
        raise _refuse(path, f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the library raises bare ones
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise _refuse(path, f"holds no tokenizer: {reason}") from error


def _separator(content: Mapping[str, Any]) -> int:
    special = {token["content"]: token["id"] for token in content["added_tokens"] if token["special"]}
    for name in SEPARATORS:
        if name in special:
            return int(special[name])
    return max(_library().Tokenizer.from_str(json.dumps(content)).get_vocab().values()) + 1


def _refuse(path: Path, rule: str) -> ConfigError:
    return ConfigError("data.tokenizer", str(path), rule, TAKES)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        rule = "sub-words need the package tokenizers"
        raise ConfigError("data.tokenizer", None, rule, "pip install 'tokenizers>=0.21'") from error
    return tokenizers
