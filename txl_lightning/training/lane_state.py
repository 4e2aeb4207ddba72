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

A step may read its lanes in chunks, one after the other: each reads and proposes its share, and the commit takes all.
Between steps the state may be kept on the CPU (`offload`); what is read of it goes to the device of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from txl_lightning.checkpoints.lane_files import SavedLanes, saved_lanes
from txl_lightning.errors import ConfigError
from txl_lightning.types import Batch, Chunk, Position, State, detach, lane_where, n_byte, overwrite

ALL_LANES = Chunk()
Mark = tuple[State, SavedLanes | None, Position | None, Tensor | None]
"""Where training stood: memory, lanes of a checkpoint that nobody read yet, the cursor, what `roll_back` owes."""


class LaneState:
    """State of the lanes this rank owns, per stage ("train", "sanity/0", "val/0", "test/0", ...).

    Args:
        model_resets: the model itself puts lanes that start anew back to their start values and keeps lanes without
            tokens, as TransformerXL does; else it is done here.
        offload: keep the state on the CPU between steps, in page-locked memory if it comes from a GPU.
    """

    def __init__(self, *, model_resets: bool = False, offload: bool = False) -> None:
        self.model_resets, self.offload = model_resets, offload
        self.position: Position | None = None  # the next training segment to read; None before the first
        self._committed: dict[str, State] = {}
        self._started: dict[str, State] = {}  # fresh states that were read and not yet proposed upon
        self._proposed: dict[str, tuple[State, Position, Chunk]] = {}  # with the latest chunk
        self._loaded: SavedLanes | None = None  # all ranks' lanes from a checkpoint, until the first read
        self._marked: Mark | None = None
        self._place: State | None = None  # where training lanes stay, if they do: see `stay_in_place`
        self._began: Tensor | None = None  # (B,) bool: lanes that started anew since the last `mark`
        self._owed: Tensor | None = None  # (B,) bool, see `roll_back`

    def read(self, stage: str, batch: Batch, init: Callable[[int], State], *, chunk: Chunk = ALL_LANES) -> State:
        """The state before this batch, on its device.

        Args:
            batch: of the chunk's lanes only.
            init: `init(B)` makes the state of B fresh lanes, on the device of the batch or on the CPU.
            chunk: which of this rank's lanes; by default all.
        """
        lanes, device = batch.tokens_BT.shape[0], batch.tokens_BT.device
        if chunk.index == 0:
            self._started.pop(stage, None)
        whole = self._of_all_lanes(stage, lanes * chunk.count, init)
        state = {key: chunk.of(tensor).to(device, non_blocking=True) for key, tensor in whole.items()}
        if self.model_resets:
            return state
        fresh = {key: tensor.to(device) for key, tensor in init(lanes).items()}
        return {key: lane_where(batch.segment.reset, fresh[key], old) for key, old in state.items()}

    def stay_in_place(self, wanted: bool = True) -> None:
        """Let training lanes keep their addresses from now on, where a captured graph reads them; or let them go.

        A state that waits on the CPU has no such addresses.
        """
        self._place = {} if wanted and not self.offload else None
        if self._place is not None and "train" in self._committed:
            self._committed["train"] = self._settled("train", self._committed["train"])

    def due(self, batch: Batch) -> Batch:
        """A training batch as it is to be read where steps may be rolled back; each one passes here once, in order.

        Lanes start anew in it that had to in a segment that was rolled back.
        """
        segment = batch.segment
        if self._owed is not None:
            owed = self._owed.to(segment.reset.device)
            segment = segment._replace(reset=segment.reset | owed)
            self._owed = owed & (segment.length == 0)
        began = segment.reset
        if segment.document is not None:
            last = (segment.length - 1).clamp(min=0)[:, None]
            began = began | (segment.document.gather(1, last)[:, 0] != segment.document[:, 0])
        began = began & (segment.length > 0)
        self._began = began if self._began is None else self._began | began
        return batch._replace(segment=segment)

    def propose(self, stage: str, state: State, batch: Batch, *, chunk: Chunk = ALL_LANES) -> None:
        """The state after this batch, to become the current one at `commit`; chunks come in their order."""
        state = detach(state)
        old = self._committed.get(stage, self._started.get(stage))
        if old is not None and not self.model_resets:
            alive_B = batch.segment.length > 0
            kept = {key: chunk.of(old[key]).to(new.device) for key, new in state.items()}
            state = {key: lane_where(alive_B, new, kept[key]) for key, new in state.items()}
        self._proposed[stage] = (self._joined(stage, state, chunk), batch.position, chunk)
        if chunk.index == chunk.count - 1:
            self._started.pop(stage, None)

    def is_whole(self, stage: str) -> bool:
        """Whether all chunks have proposed, so that `commit` may come."""
        if stage not in self._proposed:
            return False
        latest = self._proposed[stage][2]
        return latest.index == latest.count - 1

    def commit(self, stage: str) -> None:
        """Make the proposed state the current one."""
        assert self.is_whole(stage), "some chunks have not proposed their state"
        state, position, _ = self._proposed.pop(stage)
        assert not any(tensor.requires_grad for tensor in state.values()), "a state must not carry a graph over steps"
        self._committed[stage] = self._settled(stage, state)
        if stage == "train":
            self.position = Position(position.epoch, position.segment + 1)

    def current(self, stage: str) -> State | None:
        """The committed state, None before the first commit. Not to be changed; the next one may overwrite it."""
        self._await_copies()
        return self._committed.get(stage)

    def drop(self, prefix: str) -> None:
        """Forget the states of all stages that start with prefix."""
        for kept in (self._committed, self._proposed, self._started):
            for stage in [stage for stage in kept if stage.startswith(prefix)]:
                del kept[stage]

    def mark(self) -> None:
        """Remember where training stands: an optimizer step is about to begin, and may read several segments."""
        state = self._committed.get("train", {})
        if self._place is not None:  # which the next commit overwrites
            state = {key: tensor.clone() for key, tensor in state.items()}
        self._marked = (state, self._loaded, self.position, self._owed)
        self._began = None

    @property
    def marked(self) -> Mark | None:
        """What `mark` remembered; None: no step is under way."""
        return self._marked

    def mark_again(self, marked: Mark) -> None:
        """Remember where an earlier step began, as if it were the one under way."""
        self._marked = marked

    def roll_back(self) -> None:
        """Give the training lanes the memory of the last `mark` back; the position stays where it is.

        What was read since then is left out of memory. A lane that began a new stream or document in it must not meet
        the old one's memory again: it starts anew at the next segment that it has tokens in.
        """
        assert self._marked is not None and self._began is not None
        state, self._loaded, _, _ = self._marked
        self._committed.pop("train", None)
        if state:
            self._committed["train"] = self._settled("train", state)
        self._owed = self._began if self._owed is None else self._began | self._owed

    def state_dict(self, *, marked: bool = False, own_only: bool = False) -> dict[str, Any]:
        """Training lanes of ALL ranks in global lane order, on the CPU, and the cursor. Every rank must call it.

        Args:
            marked: as they were at the last `mark`, where the weights of the latest optimizer step belong to.
            own_only: this rank's lanes only, under "own" instead of "lanes": a strategy that writes them must follow.
        """
        state, loaded, position, owed = self._at(marked=marked)
        cursor: dict[str, Any] = {"position": list(position) if position is not None else None}
        if owed is not None:
            cursor |= _gathered({"owed": owed.cpu().clone()})
        if own_only:
            return {"own": self._own(loaded) if loaded is not None else _on_cpu(state), **cursor}
        whole = loaded.part(0, loaded.n_lane) if loaded is not None else _gathered(_on_cpu(state))
        return {"lanes": whole, **cursor}

    def n_byte(self, *, marked: bool = False) -> int:
        """Bytes of the training lanes of all ranks."""
        state, loaded, _, _ = self._at(marked=marked)
        return loaded.n_byte if loaded is not None else n_byte(state) * _world()[1]

    def unmark(self) -> None:
        """Let go of what `mark` remembered: the step is made."""
        self._marked = None

    def place(self, *, marked: bool = False) -> Position:
        """The next training segment to read, or that of the last `mark`."""
        position = self._marked[2] if marked and self._marked is not None else self.position
        return position if position is not None else Position(0, 0)

    def load_state_dict(self, saved: dict[str, Any], *, checkpoint: Any = None) -> None:
        """Take over what `state_dict` gave; each rank picks its lanes at its first read.

        Args:
            saved: lanes and cursor.
            checkpoint: path of the file they come from, beside which the lanes may be.
        """
        self._loaded = saved_lanes(saved, checkpoint=checkpoint)
        owed, (rank, world) = saved.get("owed"), _world()
        self._owed = None if owed is None else owed.chunk(world)[rank]
        self._marked = None
        self._committed.pop("train", None)
        self.position = Position(*saved["position"]) if saved["position"] is not None else None

    def seek(self, loader: Any) -> None:
        """Point a training dataloader at the cursor, if there is one and the loader can move."""
        if self.position is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict({"position": list(self.position)})

    def _of_all_lanes(self, stage: str, lanes: int, init: Callable[[int], State]) -> State:
        """The committed state of this rank, or a loaded or a fresh one."""
        if stage == "train" and self._loaded is not None:
            fresh = init(lanes)
            loaded = self._at_home(_fitting(self._own(self._loaded), fresh, self._loaded))
            self._committed[stage] = self._settled(stage, loaded)
            self._loaded = None
        state = self._committed.get(stage, self._started.get(stage))
        if state is None:
            state = self._started[stage] = self._settled(stage, self._at_home(init(lanes)))
        held = next(iter(state.values())).shape[0] if state else lanes
        assert held == lanes, f"{stage} has a state of {held} lanes and got a batch of {lanes}"
        return state

    def _joined(self, stage: str, state: State, chunk: Chunk) -> State:
        """The proposed state of all chunks so far, in tensors of all lanes."""
        if chunk.count == 1:
            return self._at_home(state)
        if chunk.index == 0:
            whole = {key: self._room(new, lanes=len(new) * chunk.count) for key, new in state.items()}
        else:
            whole, _, before = self._proposed[stage]
            assert before == Chunk(chunk.index - 1, chunk.count), "chunks propose in their order"
        for key, new in state.items():
            chunk.of(whole[key]).copy_(new, non_blocking=True)
        return whole

    def _at_home(self, state: State) -> State:
        """A state where it is kept between steps."""
        if not self.offload:
            return state
        return {key: self._room(new, lanes=len(new)).copy_(new, non_blocking=True) for key, new in state.items()}

    def _settled(self, stage: str, state: State) -> State:
        """A state where it is found from now on: in the place of the one before, if that has to stay."""
        if stage != "train" or self._place is None:
            return state
        self._place = put(state, place=self._place)
        return self._place

    def _room(self, like: Tensor, *, lanes: int) -> Tensor:
        """A tensor for a state of so many lanes, where it is kept between steps."""
        place = {"device": "cpu", "pin_memory": like.is_cuda} if self.offload else {"device": like.device}
        return torch.empty((lanes, *like.shape[1:]), dtype=like.dtype, **place)

    def _await_copies(self) -> None:
        """Let copies from the GPU end before the CPU reads them."""
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _at(self, *, marked: bool) -> Mark:
        self._await_copies()
        if marked and self._marked is not None:
            return self._marked
        return self._committed.get("train", {}), self._loaded, self.position, self._owed

    @staticmethod
    def _own(saved: SavedLanes) -> State:
        rank, world = _world()
        if saved.n_lane % world:
            rule = f"the checkpoint holds {saved.n_lane} lanes, which do not divide into {world} ranks"
            raise ConfigError("trainer.devices", world, rule, f"take a number that divides {saved.n_lane}")
        lanes = saved.n_lane // world
        return saved.part(rank * lanes, (rank + 1) * lanes)


def put(state: State, *, place: State) -> State:
    """A state moved to where a captured graph reads it.

    Args:
        place: tensors of such a state, overwritten; none of them: places are made.
    """
    if not place:
        place = {key: tensor.clone() for key, tensor in state.items()}
        for tensor in place.values():
            torch._dynamo.mark_static_address(tensor)  # else each replay would copy it once more
        return place
    overwrite(place, new=state)
    return place


def _fitting(own: State, fresh: State, saved: SavedLanes) -> State:
    """Lanes of a checkpoint with the device and dtype of fresh ones. Raises ConfigError: they are of another memory."""
    if own.keys() != fresh.keys():
        cure = "resume with the memory that wrote the checkpoint"
        raise ConfigError("memory", sorted(fresh), f"the checkpoint's memory holds {sorted(own)}", cure)
    for key, like in fresh.items():
        if own[key].shape != like.shape:
            rule = f"{key} of the checkpoint has shape {(saved.n_lane, *own[key].shape[1:])}"
            raise ConfigError("memory", tuple(like.shape), rule, "resume with the same lanes and memory length")
    return {key: own[key].to(device=like.device, dtype=like.dtype) for key, like in fresh.items()}


def _world() -> tuple[int, int]:
    """This rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _on_cpu(state: State) -> State:
    return {key: tensor.detach().cpu().clone() for key, tensor in state.items()}


def _gathered(own: State) -> State:
    """(B_all, ...) tensors from every rank's (B, ...), in rank order."""
    if _world()[1] == 1:
        return own
    whole: State = {}
    for key, tensor in own.items():
        parts: list[Any] = [None] * _world()[1]
        dist.all_gather_object(parts, tensor)
        whole[key] = torch.cat(parts)
    return whole


def stage_of(trainer: Any, dataloader_idx: int = 0) -> str:
    """Which state a step belongs to, from what the trainer is doing."""
    if trainer.sanity_checking:
        return f"sanity/{dataloader_idx}"
    if trainer.validating:
        return f"val/{dataloader_idx}"
    return f"test/{dataloader_idx}" if trainer.testing else "train"
