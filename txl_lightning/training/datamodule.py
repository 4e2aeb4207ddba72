"""Ordered lanes of a corpus as a LightningDataModule."""

from __future__ import annotations

import lightning.pytorch as L

from txl_lightning.build import check_vocabulary
from txl_lightning.config import Config, ConfigError
from txl_lightning.data.lanes import LaneLoader, used_lanes
from txl_lightning.data.store import TokenData, check_training, prepare


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
        return self._data

    def prepare_data(self) -> None:
        prepare(self.config.data, training=False)  # once per machine, before the other ranks look

    def setup(self, stage: str) -> None:
        _ = self.data

    def train_dataloader(self) -> LaneLoader:
        keys = self.config.data
        check_training(self.data.meta, batch_size=keys.batch_size)
        return self._loader("train", lanes=keys.batch_size, used=keys.batch_size, segment_len=keys.segment_len)

    def val_dataloader(self) -> LaneLoader | list[LaneLoader]:
        return self.eval_dataloader("valid") if "valid" in self.data.splits else []

    def test_dataloader(self) -> LaneLoader:
        return self.eval_dataloader(self.test_split)

    def eval_dataloader(self, split: str) -> LaneLoader:
        """Lanes of any split with the lengths of evaluation.

        Raises:
            ConfigError: the corpus has no such split.
        """
        lanes, segment_len = self.config.eval_batch_size, self.config.eval_segment_len
        return self._loader(split, lanes=lanes, used=self.eval_lanes(split), segment_len=segment_len)

    def eval_lanes(self, split: str) -> int:
        """Lanes in use when a split is evaluated: fewer than asked for if they would be shorter than one segment."""
        n_token = len(self.data.require(split))
        return used_lanes(n_token, lanes=self.config.eval_batch_size, segment_len=self.config.eval_segment_len)

    def _loader(self, split: str, *, lanes: int, used: int, segment_len: int) -> LaneLoader:
        tokens = self.data.require(split)
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        if lanes % world:
            near = " or ".join(str(n) for n in (lanes // world * world, (lanes // world + 1) * world) if n)
            raise ConfigError("data.batch_size", lanes, f"must divide into {world} ranks", f"set it to {near}")
        return LaneLoader(
            tokens,
            segment_len=segment_len,
            lanes=lanes,
            used_lanes=used,
            rank=rank,
            world_size=world,
            num_workers=self.config.data.num_workers,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )
