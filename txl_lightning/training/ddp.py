"""DDP whose ranks write their own lanes where these are too large to be gathered."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from txl_lightning.checkpoints import lane_files
from txl_lightning.training.trouble import NotWritten
from txl_lightning.types import State


class LanesDDP(DDPStrategy):
    """A module that finds such a strategy in its trainer may leave its lanes under `own` in a checkpoint's `lanes`."""

    ranks_write_lanes = True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        lanes = checkpoint.get("txl_lightning", {}).get("lanes", {})
        if "own" in lanes:
            lanes["shards"] = self._write_lanes(lanes.pop("own"), Path(filepath).parent)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _write_lanes(self, own: State, folder: Path) -> list[dict[str, Any]]:
        """The list of all ranks' files, when all are on disk. Raises NotWritten on all ranks: one could not write."""
        name = self.broadcast(uuid.uuid4().hex[:12])
        try:
            written: Any = lane_files.write(own, folder, name=name, rank=self.global_rank)
        except (OSError, RuntimeError) as error:  # torch's writer raises the second
            written = f"rank {self.global_rank} could not write its lanes: {str(error).splitlines()[0]}"
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, written)
        unseen = [f"{each['file']} is not seen by rank 0" for each in found if not _is_seen(each, folder)]
        faults = [each for each in found if isinstance(each, str)] + self.broadcast(unseen)
        if faults:
            if self.is_global_zero:  # what the others wrote takes room that may be short
                shutil.rmtree(folder / lane_files.LANES / name, ignore_errors=True)
            rule = f"the lanes' memory cannot be kept in {folder}: {faults[0]}; what was there before is whole"
            raise NotWritten(f"{rule}; checkpoints need a folder that all ranks share and room for them")
        return found


def _is_seen(written: Any, folder: Path) -> bool:
    return isinstance(written, str) or (folder / written["file"]).is_file()
