"""How fast text becomes tokens, and how fast tokens become batches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from txl_lightning import registry
from txl_lightning.benchmarks.timing import Task
from txl_lightning.config import Config, DataConfig
from txl_lightning.data.corpora import Corpus
from txl_lightning.data.subwords import in_subwords
from txl_lightning.training.datamodule import TextDataModule


def tasks(config: Config) -> list[Task]:
    """Counting a corpus (which also finds its vocabulary and checks it), writing it as tokens, and loading segments."""
    corpus = _corpus(config.data)
    scan = corpus.scan()
    n_byte = sum(scan.bytes.values())
    facts = {"corpus": config.data.name, "vocabulary": scan.vocab.name, "bytes": n_byte}

    def count() -> None:
        with tempfile.TemporaryDirectory() as empty:  # else what was counted once would be looked up
            _corpus(replace(config.data, cache_dir=empty)).scan()

    def tokenise() -> None:
        for _ in corpus.stream(scan):
            pass

    def task(label: str, run: Any) -> Task:
        return Task(part="data", label=label, run=run, amount=n_byte, unit="bytes", facts=facts)

    return [task("count and check", count), task("tokenise", tokenise), _loading(config)]


def _corpus(keys: DataConfig) -> Corpus:
    return in_subwords(registry.corpora.get(keys.name).build(keys), keys)


def _loading(config: Config) -> Task:
    data = TextDataModule(config)
    loader = data.train_dataloader()

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()
    lanes, n_token = config.data.batch_size, config.data.segment_len
    facts = {"lanes": lanes, "data.segment_len": n_token, "data.num_workers": config.data.num_workers}
    amount = lanes * n_token * config.trainer.bptt_segments
    return Task(part="data", label="load batches", run=lambda: next(source), amount=amount, facts=facts)
