"""Corpora, token files and lanes. One file per corpus; the line here makes its name known."""

from txl_lightning.data import stdlib, text
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
    "look",
    "prepare",
    "stdlib",
    "survey",
    "text",
    "used_lanes",
]
