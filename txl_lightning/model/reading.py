"""Segments read one after the other while the weights rest: on a GPU one recorded graph per segment (`model.capture`).

At a few thousand tokens of memory and one lane a segment's hundreds of kernels take less time than launching them. The
plain twin is `TransformerXL.forward` with a state that is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from txl_lightning.model.capture import Graphs, recorder_for
from txl_lightning.model.tables import Tables, weights_of
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Batch, Segment, State, overwrite


class Reader:
    """Scores segments of the same lanes, one after the other.

    Args:
        model: in evaluation mode; other architectures than the transformer are read as they are.
        capture: whether a segment is recorded once and replayed; None: on CUDA.

    Raises:
        ValueError: nothing can be recorded on this device.
    """

    def __init__(self, model: TransformerXL, *, capture: bool | None = None) -> None:
        self.model, self.tables = model, Tables()
        wanted = capture if model.config.architecture == "transformer" else False
        self._graphs = Graphs(recorder_for(model.device, wanted=wanted))
        self._place: State = {}  # memory where the graphs read and write it
        self._kept: dict[Any, Tables] = {}  # by shape, so that no other shape moves what a graph reads
        self._stamp: Any = None

    def read(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        """Losses and the memory after a segment.

        Args:
            batch: on the model's device.
            state: memory before it, which is given up: only the new one may be used.

        Returns:
            (B, T) nats per token, 0 on padding, and memory that holds until the next segment is read.
        """
        if not self._graphs.records:
            return self._as_it_is(batch, state)
        self._move_in(state)
        self._drop_if_trained()
        facts = [batch.segment.reset, batch.segment.length]
        facts += [] if batch.segment.document is None else [batch.segment.document]
        given = [batch.tokens_BT, batch.targets_BT, *facts]
        # lanes without tokens keep their memory, so nothing comes of running it for the recording
        idle = [batch.tokens_BT, batch.targets_BT, *(fact.new_zeros(fact.shape) for fact in facts)]
        kind = (tuple(batch.tokens_BT.shape), len(facts))
        run = self._recorded(self._kept.setdefault(kind, Tables()))
        found = self._graphs.run(self.model, kind, run, given, idle=idle)
        found = run(*given) if found is None else found
        if self.model.config.cutoffs:
            losses = self.model.masked_losses(found, batch.targets_BT, batch.segment, batch.target_counts)
            assert losses is not None
            return losses, dict(self._place)
        return found, dict(self._place)

    def _as_it_is(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        facts = {"tables": self.tables, "donate": True, "target_counts": batch.target_counts}
        out = self.model(batch.tokens_BT, state, batch.segment, batch.targets_BT, **facts)
        assert out.losses_BT is not None
        return out.losses_BT, out.state

    def _recorded(self, tables: Tables) -> Callable[..., Tensor]:
        """A segment as a function of tensors: memory moves on in its place.

        It gives losses, or hidden states where clusters of the vocabulary have other sizes each time.
        """
        clusters = bool(self.model.config.cutoffs)

        def run(tokens_BT: Tensor, targets_BT: Tensor, *facts: Tensor) -> Tensor:
            reset_B, length_B, document_BT = (*facts, None)[:3]
            assert reset_B is not None and length_B is not None
            segment = Segment(reset_B, length_B, document_BT)
            targets = None if clusters else targets_BT
            out = self.model(tokens_BT, self._place, segment, targets, tables=tables, donate=True)
            overwrite(self._place, new=out.state)
            found = out.hidden_BTD if out.losses_BT is None else out.losses_BT
            assert found is not None
            return found

        return run

    def _move_in(self, state: State) -> None:
        """Bring memory to where the graphs find it, if it is not what they left there."""
        if self._place and all(self._place[key].shape == new.shape for key, new in state.items()):
            overwrite(self._place, new=state)
            return
        self._place = {key: tensor.clone() for key, tensor in state.items()}
        self._graphs.drop()

    def _drop_if_trained(self) -> None:
        """Kept distances are projected by weights: they are others when those have other values."""
        stamp = [weights_of(layer.attention.position) for layer in self.model.blocks()]
        if stamp != self._stamp:
            self._kept.clear()
            self._graphs.drop()
            self._stamp = stamp
