"""Corpora, token files and lanes. One file per corpus; the line here makes its name known."""

from txl_lightning.data import enwik8, lm1b, passkey, pg19, ptb, recall, selective_copy, stdlib, text, text8, wikitext
from txl_lightning.data.corpora import ByteCorpus, Corpus
from txl_lightning.data.lanes import LaneLoader, used_lanes
from txl_lightning.data.store import Meta, Survey, TokenData, check_training, look, prepare, survey
from txl_lightning.data.vocab import ByteVocab, Vocab

__all__ = [
    "ByteCorpus",
    "ByteVocab",
    "Corpus",
    "LaneLoader",
    "Meta",
    "Survey",
    "TokenData",
    "Vocab",
    "check_training",
    "enwik8",
    "lm1b",
    "look",
    "passkey",
    "pg19",
    "prepare",
    "ptb",
    "recall",
    "selective_copy",
    "stdlib",
    "survey",
    "text",
    "text8",
    "used_lanes",
    "wikitext",
]
