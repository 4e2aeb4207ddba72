"""What the training lanes' memory holds, how it changes, and how much of it is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from txl_lightning import registry
from txl_lightning.callbacks.attention_figures import AttentionFigures
from txl_lightning.callbacks.attention_seen import attention_seen, hits_seen
from txl_lightning.callbacks.probe import Every, at_rest, can_look, first_lanes, say_no_looks
from txl_lightning.config import Section, key
from txl_lightning.memory.base import MemoryStrategy
from txl_lightning.model.block import substate
from txl_lightning.types import Batch, Segment, State


@dataclass(frozen=True, kw_only=True)
class MemoryMonitorConfig(Section):
    """Keys of `callbacks.memory_monitor`."""

    section = "callbacks.memory_monitor"

    attention_every_n_steps: int = key(
        100, "optimizer steps between two looks at attention, each an extra forward pass; 0: never", minimum=0
    )
    lanes: int = key(2, "lanes that such a look is taken at, over all ranks, one of each at least", minimum=1)


@registry.callbacks.register("memory_monitor", config=MemoryMonitorConfig)
class MemoryMonitor(L.Callback):
    """Logs, where there is a memory, at each point of the curves, over the training lanes of all ranks:

    memory/<strategy>/fill/L<layer>     share of the memory that is in use, 0 to 1
    memory/<strategy>/norm/L<layer>     root mean square of everything the state holds in floating point, empty places
                                        counted as the zeros they are
    memory/<strategy>/update/L<layer>   root mean square of what the latest segment changed in it, as a share of `norm`
    memory/resets                       lanes and documents that started anew since the last point

    and at every `attention_every_n_steps`-th step's point, from attention of the `reference` with the weights and the
    memory before that step, without dropout, over the tokens of some lanes (not under ZeRO 3):

    memory/attention/L<layer>           share of attention that goes to memory: slots and memory tokens
    memory/attention_by_age/<bucket>    share that goes to keys so many tokens before their query, mean over layers: 0,
                                        1, 2-3, 4-7, ..., and `no_place` for memory tokens and slots without position;
                                        they add up to 1
    memory/terms/<term>                 mean absolute value of each term of the scores over all pairs, as a share of all
                                        terms: content_content, content_position, u_content, v_position
    memory/knn/hit_age/L<layer>         mean age in tokens of what is found, counted from the segment's first token
    memory/knn/hits_by_age/L<layer>/<bucket>   share of what is found by that age; these add up to 1

    and shows the table memory/attention_by_age: layers by buckets. What strategies report themselves (gates, auxiliary
    losses per layer) the module logs as memory/<strategy>/<name>/L<layer>.
    """

    def __init__(self, config: MemoryMonitorConfig) -> None:
        self.config = config
        self._every = Every(config.attention_every_n_steps)
        self._watches = False  # whether there is a memory
        self._resets: Tensor | None = None  # (): since the last point, of this rank
        self._before: State | None = None  # memory before the latest segment of a step that is a point
        self._seen: AttentionFigures | None = None  # of the step under way

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        say_no_looks(trainer, pl_module, what="memory_monitor, attention")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._every.begin(pl_module.last_point())
        self._watches = any(pl_module.model.memory_parts())
        self._resets = self._before = self._seen = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._watches:
            return
        point = pl_module.next_point()
        if point is None:
            return
        first = batch[0] if isinstance(batch, list) else batch
        self._before = pl_module.state_before(first)
        if pl_module.at_border and self._every.is_due(point) and can_look(pl_module):
            self._every.take(point)
            self._look(pl_module, self._before, first)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._watches:
            return
        for part in batch if isinstance(batch, list) else [batch]:
            begun = started_anew(part.segment)
            self._resets = begun if self._resets is None else self._resets + begun
        if not pl_module.logs_now():
            return
        state = pl_module.lanes.current("train")
        assert state is not None and self._resets is not None
        pl_module.log_curves(self._of_state(pl_module, state))
        pl_module.log_curves(pl_module.over_ranks({"memory/resets": self._resets.float()}, by="sum"))
        if self._seen is not None:
            self._seen.show(pl_module)
        self._resets = self._before = self._seen = None

    def _look(self, module: Any, state: State, first: Batch) -> None:
        """An extra forward pass over a few lanes; what it would write is thrown away."""
        count = min(len(first.tokens_BT), max(1, self.config.lanes // module.trainer.world_size))
        state, first = first_lanes(state, first, count)
        self._seen = AttentionFigures(first.segment, layers=len(module.model.blocks()))
        with (
            at_rest(module),
            attention_seen(module.model, self._seen.add),
            hits_seen(module.model, self._seen.add_hits),
        ):
            module.model(first.tokens_BT, state, first.segment)

    def _of_state(self, module: Any, state: State) -> dict[str, Tensor]:
        fills: dict[str, Tensor] = {}
        squares: dict[str, Tensor] = {}
        for path, memory in module.model.memory_parts():
            where, _, name = path.rpartition(".")
            layer = f"/L{where.removeprefix('layers.')}" if where else ""
            part = substate(state, path)
            fill = memory.fill(part) if isinstance(memory, MemoryStrategy) else None
            if fill is not None:
                fills[f"memory/{name}/fill{layer}"] = fill.float().mean()
            if any(tensor.is_floating_point() for tensor in part.values()):
                squares[f"memory/{name}/norm{layer}"] = mean_square(part)
                assert self._before is not None
                change = changes(part, substate(self._before, path))
                squares[f"memory/{name}/update{layer}"] = mean_square(change)
        found = module.over_ranks({**fills, **squares})
        roots = {name: value if name in fills else value.sqrt() for name, value in found.items()}
        for name in [name for name in roots if "/update" in name]:
            norm = roots[name.replace("/update", "/norm")]
            roots[name] = torch.where(norm > 0, roots[name] / norm, 0.0)
        return roots


def started_anew(segment: Segment) -> Tensor:
    """0-dim number of lanes and documents that start anew in a segment."""
    alive = segment.length > 0
    begun = (segment.reset & alive).sum()
    if segment.document is None:
        return begun
    last = (segment.length - 1).clamp(min=0)[:, None]
    inside = segment.document.gather(1, last)[:, 0] - segment.document[:, 0]
    return begun + torch.where(alive, inside, 0).sum()


def changes(new: State, old: State) -> State:
    """What differs in the floating-point entries."""
    return {name: tensor.float() - old[name].to(tensor.device).float() for name, tensor in floats(new)}


def mean_square(state: State) -> Tensor:
    """0-dim mean square over all floating-point entries of a state that has some."""
    found = [tensor for _, tensor in floats(state)]
    total: Any = sum(tensor.float().square().sum() for tensor in found)
    return total / sum(tensor.numel() for tensor in found)


def floats(state: State) -> Iterator[tuple[str, Tensor]]:
    """The floating-point entries."""
    yield from ((name, tensor) for name, tensor in state.items() if tensor.is_floating_point())
