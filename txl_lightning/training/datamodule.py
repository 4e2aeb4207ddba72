"""Ordered lanes of a corpus as a LightningDataModule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as L

from txl_lightning.build import check_resets, check_schedule, check_vocabulary, document_end, segments_at_once
from txl_lightning.config import Config
from txl_lightning.data.lanes import LaneLoader, used_lanes
from txl_lightning.data.order import units_of
from txl_lightning.data.store import TokenData, check_training, prepare
from txl_lightning.model.softmax import target_counts
from txl_lightning.ranks import check_chunks
from txl_lightning.types import Batch


class TextDataModule(L.LightningDataModule):
    """Training, validation and test lanes of the configured corpus.

    Each rank reads its own lanes. The loaders are no torch DataLoaders, so Lightning leaves their order alone.

    Args:
        config: the whole configuration; the `data` and `eval` groups are used.
        test_split: the split that `trainer.test` reads.
    """

    def __init__(self, config: Config, *, test_split: str = "test") -> None:
        super().__init__()
        self.config = config
        self.test_split = test_split
        self._data: TokenData | None = None

    @property
    def data(self) -> TokenData:
        """Token streams and what is known about them; built on first use."""
        if self._data is None:
            self._data = prepare(self.config.data, training=False)
            check_vocabulary(self.config, self._data.meta)
            check_resets(self.config, self._data.vocab)
        return self._data

    def prepare_data(self) -> None:
        prepare(self.config.data, training=False)  # once per machine, before the other ranks look

    def setup(self, stage: str) -> None:
        _ = self.data

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Count the targets of each cluster of the vocabulary while they are on the CPU: later a GPU is waited for."""
        cutoffs = self.config.model.cutoffs
        return counted(batch, cutoffs=cutoffs) if cutoffs else batch

    def train_dataloader(self) -> LaneLoader:
        keys = self.config.data
        check_training(self.data.meta, batch_size=keys.batch_size)
        lanes, tokens = keys.batch_size, self.data.require("train")
        shuffled = keys.shuffle != "none"
        loader = self._loader(
            "train",
            lanes=lanes,
            used=lanes,
            segment_len=keys.segment_len,
            key="data.batch_size",
            units=units_of(tokens, self.data.vocab, unit=keys.shuffle) if shuffled else None,
            segment_len_std=keys.segment_len_std,
            seed=self.config.seed,
            group=group if (group := self.config.trainer.bptt_segments) > 1 else 0,
        )
        check_chunks(lanes, ranks=self._ranks()[1], chunks=self.config.trainer.lane_chunks)
        return loader

    def val_dataloader(self) -> LaneLoader | list[LaneLoader]:
        return self.eval_dataloader("valid") if "valid" in self.data.splits else []

    def test_dataloader(self) -> LaneLoader:
        """Lists of batches, as many as `eval.schedule` reads at once, or single ones."""
        check_schedule(self.config)
        world = self.trainer.world_size if self.trainer is not None else 1
        lanes, length = self.config.eval_batch_size // world, self.config.eval_segment_len
        at_once = segments_at_once(self.config, lanes=lanes, segment_len=length)
        return self.eval_dataloader(self.test_split, group=at_once if at_once > 1 else 0)

    def eval_dataloader(self, split: str, *, group: int = 0) -> LaneLoader:
        """Lanes of any split with the lengths of evaluation.

        Args:
            split: its name.
            group: segments handed out together, as a list; 0: one by one.

        Raises:
            ConfigError: the corpus has no such split.
        """
        lanes, key = self.config.eval_batch_size, self.config.eval_batch_key
        segment_len, used = self.config.eval_segment_len, self.eval_lanes(split)
        warm = self.config.eval.warm // segment_len
        return self._loader(split, lanes=lanes, used=used, segment_len=segment_len, key=key, group=group, warm=warm)

    def eval_lanes(self, split: str) -> int:
        """Lanes in use when a split is evaluated: fewer than asked for if they would be shorter than one segment."""
        n_token = len(self.data.require(split))
        return used_lanes(n_token, lanes=self.config.eval_batch_size, segment_len=self.config.eval_segment_len)

    def _loader(self, split: str, *, lanes: int, used: int, segment_len: int, key: str, **order: Any) -> LaneLoader:
        tokens = self.data.require(split)
        segment_len = min(segment_len, -(-(len(tokens) - 1) // used))  # longer than the longest lane is only padding
        rank, world = self._ranks()
        return LaneLoader(
            tokens,
            segment_len=segment_len,
            lanes=lanes,
            used_lanes=used,
            rank=rank,
            world_size=world,
            reset=self.config.memory.reset,
            separator=document_end(self.data.vocab),
            inner_documents=not self.config.data.documents_begin_segments(lanes=lanes, segment_len=segment_len),
            num_workers=self.config.data.num_workers,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            key=key,
            **order,
        )

    def _ranks(self) -> tuple[int, int]:
        """This rank and how many there are."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)


def one_by_one(loader: LaneLoader) -> Iterator[Batch]:
    """The batches of a loader, also where it hands out several at a time (`eval.schedule`)."""
    for read in loader:
        yield from read if isinstance(read, list) else [read]


def counted(batch: Batch | list[Batch], *, cutoffs: Sequence[int]) -> Batch | list[Batch]:
    """The same with the targets of each cluster counted."""
    if isinstance(batch, list):
        return [part._replace(target_counts=target_counts(part.targets_BT, cutoffs=cutoffs)) for part in batch]
    return batch._replace(target_counts=target_counts(batch.targets_BT, cutoffs=cutoffs))
