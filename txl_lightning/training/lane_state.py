"""The one owner of memory state: a value for each stage and dataloader, committed once per step.

Any LightningModule whose model carries a state along ordered lanes can use it, ours or an LSTM:

    state = self.lanes.read("train", batch, init)      resets applied, no graph
    output, new = model(batch.tokens_BT, state)
    self.lanes.propose("train", new, batch)            not visible yet
    ... backward ...
    self.lanes.commit("train")                         in on_after_backward; at once in evaluation

The state is neither buffer nor parameter: DDP would overwrite one rank's lanes with another's, and ZeRO could not
resume. Committing in `on_after_backward` matters: callbacks' `on_train_batch_end`, which write checkpoints, run before
the module's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from txl_lightning.errors import ConfigError
from txl_lightning.types import Batch, Position, State, detach, lane_where


class LaneState:
    """State of the lanes this rank owns, per stage ("train", "sanity/0", "val/0", "test/0", ...).

    Args:
        model_resets: the model itself puts lanes that start anew back to their start values and keeps lanes without
            tokens, as TransformerXL does; else it is done here.
    """

    def __init__(self, *, model_resets: bool = False) -> None:
        self.model_resets = model_resets
        self.position: Position | None = None  # the next training segment to read; None before the first
        self._committed: dict[str, State] = {}
        self._started: dict[str, State] = {}  # fresh states that were read and not yet proposed upon
        self._proposed: dict[str, tuple[State, Position]] = {}
        self._loaded: State | None = None  # all ranks' lanes from a checkpoint, until the first read
        self._marked: tuple[State, State | None, Position | None] | None = None

    def read(self, stage: str, batch: Batch, init: Callable[[int], State]) -> State:
        """The state before this batch; `init(B)` makes that of B fresh lanes."""
        lanes = batch.tokens_BT.shape[0]
        if stage == "train" and self._loaded is not None:
            self._committed[stage] = self._own_lanes(self._loaded, init(lanes))
            self._loaded = None
        state = self._committed.get(stage)
        if state is None:
            state = self._started[stage] = init(lanes)
        held = next(iter(state.values())).shape[0] if state else lanes
        assert held == lanes, f"{stage} has a state of {held} lanes and got a batch of {lanes}"
        if self.model_resets:
            return state
        fresh = init(lanes)
        return {key: lane_where(batch.segment.reset, fresh[key], old) for key, old in state.items()}

    def propose(self, stage: str, state: State, batch: Batch) -> None:
        """The state after this batch, to become the current one at `commit`."""
        state = detach(state)
        old = self._committed.get(stage, self._started.pop(stage, None))
        if old is not None and not self.model_resets:
            state = {key: lane_where(batch.segment.length > 0, new, old[key]) for key, new in state.items()}
        self._proposed[stage] = (state, batch.position)

    def commit(self, stage: str) -> None:
        """Make the proposed state the current one."""
        state, position = self._proposed.pop(stage)
        assert not any(tensor.requires_grad for tensor in state.values()), "a state must not carry a graph over steps"
        self._committed[stage] = state
        if stage == "train":
            self.position = Position(position.epoch, position.segment + 1)

    def current(self, stage: str) -> State | None:
        """The committed state, None before the first commit. Not to be changed."""
        return self._committed.get(stage)

    def drop(self, prefix: str) -> None:
        """Forget the states of all stages that start with prefix."""
        for kept in (self._committed, self._proposed):
            for stage in [stage for stage in kept if stage.startswith(prefix)]:
                del kept[stage]

    def mark(self) -> None:
        """Remember where training stands: an optimizer step is about to begin, and may read several segments."""
        self._marked = (self._committed.get("train", {}), self._loaded, self.position)

    def state_dict(self, *, marked: bool = False) -> dict[str, Any]:
        """Training lanes of ALL ranks in global lane order, on the CPU, and the cursor. Every rank must call it.

        Args:
            marked: as they were at the last `mark`, where the weights of the latest optimizer step belong to.
        """
        state, loaded, position = self._committed.get("train", {}), self._loaded, self.position
        if marked and self._marked is not None:
            state, loaded, position = self._marked
        whole = loaded if loaded is not None else {key: _gather(tensor) for key, tensor in state.items()}
        return {"lanes": whole, "position": list(position) if position is not None else None}

    def unmark(self) -> None:
        """Let go of what `mark` remembered: the step is made."""
        self._marked = None

    def place(self, *, marked: bool = False) -> Position:
        """The next training segment to read, or that of the last `mark`."""
        position = self._marked[2] if marked and self._marked is not None else self.position
        return position if position is not None else Position(0, 0)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; each rank picks its lanes at its first read."""
        self._loaded = saved["lanes"] or None
        self._marked = None
        self._committed.pop("train", None)
        self.position = Position(*saved["position"]) if saved["position"] is not None else None

    def seek(self, loader: Any) -> None:
        """Point a training dataloader at the cursor, if there is one and the loader can move."""
        if self.position is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict({"position": list(self.position)})

    @staticmethod
    def _own_lanes(saved: State, fresh: State) -> State:
        rank, world = (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)
        if saved.keys() != fresh.keys():
            cure = "resume with the memory that wrote the checkpoint"
            raise ConfigError("memory", sorted(fresh), f"the checkpoint's memory holds {sorted(saved)}", cure)
        own = {}
        for key, like in fresh.items():
            lanes = like.shape[0]
            if saved[key].shape != (lanes * world, *like.shape[1:]):
                rule = f"{key} of the checkpoint has shape {tuple(saved[key].shape)}"
                raise ConfigError("memory", tuple(like.shape), rule, "resume with the same lanes and memory length")
            own[key] = saved[key][rank * lanes : (rank + 1) * lanes].to(device=like.device, dtype=like.dtype)
        return own


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gather(tensor: Tensor) -> Tensor:
    """(B_all, ...) on the CPU from every rank's (B, ...), in rank order."""
    own = tensor.detach().cpu()
    if not _distributed() or dist.get_world_size() == 1:
        return own.clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return torch.cat(parts)


def stage_of(trainer: Any, dataloader_idx: int = 0) -> str:
    """Which state a step belongs to, from what the trainer is doing."""
    if trainer.sanity_checking:
        return f"sanity/{dataloader_idx}"
    if trainer.validating:
        return f"val/{dataloader_idx}"
    return f"test/{dataloader_idx}" if trainer.testing else "train"
