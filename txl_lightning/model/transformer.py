"""Transformer-XL with pluggable memory, as a pure function: state in, state out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from txl_lightning import registry
from txl_lightning.config import POSITIONS, Config
from txl_lightning.memory.base import (
    MemoryPlan,
    MemoryStrategy,
    TokenMemory,
    fresh_state,
    giving_up,
    keep_dead,
    reset_lanes,
)
from txl_lightning.model import decoding, layerwise
from txl_lightning.model.block import Block, Layout, substate
from txl_lightning.model.embedding import TokenEmbedding
from txl_lightning.model.hub import HubModel
from txl_lightning.model.partial import Partial
from txl_lightning.model.parts import Dropout, make_dropout, make_norm
from txl_lightning.model.positions import KINDS, Biases, DistanceTable, Position, distance_table
from txl_lightning.model.softmax import OutputSoftmax
from txl_lightning.model.tables import Tables
from txl_lightning.types import Aux, Segment, State


class ModelOutput(NamedTuple):
    """What one segment gives."""

    losses_BT: Tensor | None  # nats per token, aligned with the targets, 0 on padding; None without targets
    hidden_BTD: Tensor  # last layer's output of the real tokens; `log_probs` takes it
    state: State  # memory after this segment
    aux_losses: Mapping[str, Tensor]  # 0-dim, weighted; the training loss adds them
    metrics: Mapping[str, Tensor]  # 0-dim, detached, `<strategy>/<name>/L<layer>`


class TransformerXL(HubModel, nn.Module):
    """Dai et al. 2019, arXiv:1901.02860, with any memory behind the interface of `txl_lightning.memory`.

    Args:
        config: the whole configuration; the `model` and `memory` groups are used.
        plan: memory made by hand, instead of what `config.memory` names.

    The state is one flat dict of tensors (B, ...): `layers.<i>.<strategy>.<key>`, `tokens.<key>`, and `age` (B,), the
    tokens each lane has read since it started anew.
    """

    def __init__(self, config: Config, *, plan: MemoryPlan | None = None) -> None:
        super().__init__()
        self.config = config.model
        self.run_config = config  # the whole of it: what exported weights and model cards tell
        if plan is None:
            plan = registry.memories.get(config.memory.name).build(config.memory, config.model)
        if len(plan.layers) != self.config.n_layer:
            raise ValueError(f"the memory plan has {len(plan.layers)} layers, the model {self.config.n_layer}")
        self.embedding = TokenEmbedding(self.config)
        self.layers = nn.ModuleList(Block(self.config, memories) for memories in plan.layers)
        if not POSITIONS[self.config.position] and any(layer.oldest for layer in self.blocks()):
            raise ValueError(f"position {self.config.position} cannot tell where the slots of a memory stand")
        self.tokens = plan.tokens
        self.final_norm = make_norm(self.config) if self.config.final_norm else None
        self.softmax = OutputSoftmax(self.config, self.embedding)
        self.dropout = make_dropout(self.config)
        self.table_dropout = Dropout(self.config.dropout)
        self.limit = config.distance_limit
        shared = self.config.position == "transformer_xl" and not self.config.untie_r
        pair = (self.config.n_head, self.config.d_head)
        self.u, self.v = (
            nn.Parameter(torch.zeros(pair)) if shared and term in self.config.terms else None for term in ("c", "d")
        )
        initialise(self, std=self.config.init_std, proj_std=self.config.proj_init_std)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.tables[0].weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embedding.tables[0].weight.dtype  # type: ignore[return-value]

    @property
    def shared_biases(self) -> Biases | None:
        """u and v where all layers share them."""
        return None if self.config.untie_r else Biases(self.u, self.v)

    @property
    def needs_whole_segments(self) -> bool:
        """Whether a part of a segment must be padded to a whole one to be read as it will be in the end."""
        return KINDS[self.config.position].needs_whole_segments

    def init_state(
        self,
        batch_size: int,
        *,
        form: str = "hidden",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Memory of `batch_size` lanes that have read nothing.

        Args:
            batch_size: lanes B.
            form: "hidden" for training, "projected" for evaluation and generation.
            device, dtype: of activations; the parameters' by default.
        """
        place, kind = torch.device(device or self.device), dtype or self.dtype
        state: State = {"age": torch.zeros(batch_size, dtype=torch.int64, device=place)}
        for path, part in self.memory_parts():
            fresh = fresh_state(part, batch_size, form=form, device=place, dtype=kind)
            state.update({f"{path}.{name}": tensor for name, tensor in fresh.items()})
        return state

    def forward(
        self,
        tokens_BT: Tensor,
        state: State,
        segment: Segment | None = None,
        targets_BT: Tensor | None = None,
        *,
        tables: Tables | None = None,
        donate: bool = False,
        target_counts: Sequence[int] | None = None,
    ) -> ModelOutput:
        """Read one segment of every lane.

        Args:
            tokens_BT: (B, T) int64.
            state: memory before this segment, from `init_state` or the last output. Not changed unless `donate`.
            segment: resets and lengths; None: no resets and every lane has length T.
            targets_BT: (B, T) int64 next tokens, to get losses.
            tables: where projected distances are kept while weights rest; not in training.
            donate: `state` is given up: its tensors may become those of the new one, so that no two are held at once.
            target_counts: what `softmax.target_counts` says of the targets; then nothing waits for the device.

        Raises:
            ValueError: the segment holds several documents and a strategy cannot keep them apart (`inner_resets`), or
                one offers other slots than it declares.
        """
        segment = segment if segment is not None else Segment.full(tokens_BT)
        x, layout, table = self.entered(tokens_BT, state, segment, tables)
        new_state: State = {}
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            with giving_up() if donate else nullcontext():
                x, part, aux = self._run(layer, x, substate(state, f"layers.{index}"), segment, layout, table, tables)
            new_state.update({f"layers.{index}.{key}": tensor for key, tensor in part.items()})
            losses.update({f"{name}/L{index}": loss for name, loss in aux.losses.items()})
            metrics.update({f"{name}/L{index}": metric for name, metric in aux.metrics.items()})
        new_state = self.completed(new_state, state, x, segment)
        hidden = self.left(layout.real(x, 1))
        # chosen here: a compiler would make a graph of its own of any function between this one and the one left out
        read = self._losses_of_clusters if self.config.cutoffs and targets_BT is not None else self.masked_losses
        of_targets = read(hidden, targets_BT, segment, target_counts)
        return ModelOutput(of_targets, hidden, new_state, losses, metrics)

    def entered(
        self, tokens_BT: Tensor, state: State, segment: Segment, tables: Tables | None
    ) -> tuple[Tensor, Layout, DistanceTable]:
        """What the first layer reads: (B, E, D) embedded tokens, what they see of one another, and their distances.

        Raises:
            ValueError: as `forward`.
        """
        if segment.document is not None:
            self._refuse_inner_resets()
        x = self._embed(tokens_BT, state, segment)
        spread = any(layer.way(x) != "triton" for layer in self.blocks())
        layout = self._layout(segment, tokens_BT.shape[1], device=x.device, spread=spread)
        return x, layout, self._table(layout, device=x.device, tables=tables)

    def left(self, x_BTD: Tensor) -> Tensor:
        """The hidden states that `log_probs` takes, from the last layer's output."""
        return self.dropout(x_BTD if self.final_norm is None else self.final_norm(x_BTD))

    def completed(self, new: State, old: State, x_BED: Tensor, segment: Segment) -> State:
        """The state after a segment.

        Args:
            new: what the layers wrote.
            old: the state before it.
            x_BED: the last layer's output.
        """
        new = {**new, **self._write_tokens(old, x_BED, segment)}
        age = segment.since_start(torch.where(segment.reset, 0, old["age"]))
        new["age"] = torch.where(segment.length > 0, age, old["age"])
        return {key: new[key] for key in old}  # a compiled forward looks at the order of keys too

    def begin(
        self,
        state: State,
        *,
        segment_len: int,
        tables: Tables | None = None,
        reset: str = "epoch",
        capture: bool | None = None,
    ) -> Partial:
        """Buffers to read token by token with, for the lanes of a state.

        Args:
            state: in projected form.
            segment_len: tokens T between two writes of memory.
            tables: where projected distances are kept; its own by default.
            reset: where memory starts anew, as `memory.reset`.
            capture: whether a step is recorded once and replayed, a CUDA graph; None: on CUDA. Weights may get new
                values meanwhile; where they are exchanged it is recorded anew.

        Raises:
            ValueError: token by token is not the same as segment by segment here (`decoding.steppable`), or nothing can
                be captured on this device.
        """
        tables = tables if tables is not None else Tables()
        return decoding.begin(self, state, segment_len=segment_len, tables=tables, reset=reset, capture=capture)

    def step(
        self,
        token_B: Tensor,
        state: State,
        partial: Partial,
        *,
        active: Sequence[bool] | None = None,
        starts: Sequence[bool] | None = None,
        log_probs: bool = False,
    ) -> tuple[Tensor, State]:
        """Read one token of each lane: as `forward` over the segments so far, and memory is written where one is full.

        Args:
            token_B: (B,) int64.
            state: memory before the segments under way. Not changed.
            partial: the segments under way, from `begin`. Changed in place.
            active: lanes that read their token; None: all. The others stand by.
            starts: lanes whose document begins with this token; needed with reset=document.
            log_probs: whether those of the next token are wanted instead of hidden states.

        Returns:
            (B, D) hidden states for `log_probs`, or these themselves (B, V), and the memory that belongs to `partial`
            from now on.
        """
        return decoding.step(self, token_B, state, partial, active=active, starts=starts, log_probs=log_probs)

    def read_by_layers(
        self,
        tokens_BN: Tensor,
        state: State,
        segments: Sequence[Segment],
        targets_BN: Tensor | None = None,
        *,
        tables: Tables | None = None,
    ) -> ModelOutput:
        """Read several segments at once, layer by layer: as `forward` over one after the other (`model.layerwise`).

        Args:
            tokens_BN: (B, N) int64, the tokens of segments of equal length side by side.
            state: memory before them, in projected form. Not changed.
            segments: their facts; only a lane's last segment with tokens may be short.
            targets_BN: (B, N) int64 next tokens, to get losses.
            tables: where projected distances are kept.
        """
        assert all(getattr(part, "layer_parallel", False) for _, part in self.memory_parts())
        chunk = layerwise.Chunk.of(segments, segment_len=tokens_BN.shape[1] // len(segments))
        return layerwise.read(self, tokens_BN, state, chunk, targets_BN, tables=tables or Tables())

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, V) log-probabilities, in nats, of the token after each position."""
        return self.softmax.log_probs(hidden_BTD)

    def memory_parts(self) -> Iterator[tuple[str, MemoryStrategy | TokenMemory]]:
        """Every memory with its path in the state, e.g. `layers.0.cache`."""
        if self.tokens is not None:
            yield "tokens", self.tokens
        for index, layer in enumerate(self.blocks()):
            for name, memory in layer.named_memories():
                yield f"layers.{index}.{name}", memory

    def blocks(self) -> list[Block]:
        """The layers, lowest first."""
        return list(self.layers)  # type: ignore[arg-type]

    def _embed(self, tokens_BT: Tensor, state: State, segment: Segment) -> Tensor:
        """(B, E, D) embedded tokens with the memory tokens around them."""
        x = self._position().at_embedding(self.embedding(tokens_BT))
        if self.tokens is not None:
            x = self.tokens.wrap(reset_lanes(self.tokens, substate(state, "tokens"), segment.reset), x, segment)
        return self.dropout(x)

    def _position(self) -> Position:
        """The first layer's; what is done before it is the same for all."""
        return self.blocks()[0].attention.position

    def _refuse_inner_resets(self) -> None:
        unable = [path for path, part in self.memory_parts() if not part.inner_resets]
        if unable:
            raise ValueError(f"Segment.document is set, but memory {unable[0]} cannot start anew inside a segment")

    def _layout(self, segment: Segment, n_token: int, *, device: torch.device, spread: bool = True) -> Layout:
        """spread: some layer needs the mask of all pairs of tokens; with extra tokens, every layer does."""
        tokens = self.tokens
        n_prefix, n_suffix = (tokens.n_prefix, tokens.n_suffix) if tokens is not None else (0, 0)
        size = {"n_prefix": n_prefix, "n_token": n_token, "n_suffix": n_suffix}
        hide, mask = None, None
        if spread or n_prefix or n_suffix:
            mask = token_mask(segment, **size, limit=self.limit, device=device)
        if tokens is not None and not (tokens.prefix_reads_slots and tokens.suffix_reads_slots):
            row = torch.arange(n_prefix + n_token + n_suffix, device=device)
            hide = (row < n_prefix) & (not tokens.prefix_reads_slots)
            hide = (hide | (row >= n_prefix + n_token) & (not tokens.suffix_reads_slots))[:, None]
        return Layout(**size, mask=mask, hide_slots=hide, limit=self.limit)

    def _table(self, layout: Layout, *, device: torch.device, tables: Tables | None) -> DistanceTable:
        """Distances of all layers, embedded once; the dropout mask is shared by all layers, as in the paper's code."""
        assert tables is None or not self.training, "kept tables are for weights that rest"
        n_token = layout.n_prefix + layout.n_token + layout.n_suffix
        ahead = n_token - 1 if layout.n_prefix or layout.n_suffix else 0
        table = self.distances(n_token=n_token, ahead=ahead, device=device, tables=tables)
        return table._replace(rows_WD=self.table_dropout(table.rows_WD))

    def distances(self, *, n_token: int, ahead: int, device: torch.device, tables: Tables | None) -> DistanceTable:
        """The table that n_token tokens need in whatever layer; kept where there are `tables`."""
        embed = distance_table if tables is None else tables.embedded
        return embed(
            oldest=max(layer.oldest for layer in self.blocks()),
            n_token=n_token,
            ahead=ahead,
            d_model=self.config.d_model,
            clamp_len=self.config.clamp_len,
            device=device,
            dtype=self.dtype,
        )

    def _run(
        self,
        layer: nn.Module,
        x: Tensor,
        state: State,
        segment: Segment,
        layout: Layout,
        table: DistanceTable,
        tables: Tables | None,
    ) -> tuple[Tensor, State, Aux]:
        args = (x, state, segment, layout, table, self.shared_biases, tables)
        if self.config.checkpointing and self.training:
            return checkpoint(layer, *args, use_reentrant=False)
        return layer(*args)

    def _write_tokens(self, state: State, hidden: Tensor, segment: Segment) -> State:
        if self.tokens is None:
            return {}
        given = substate(state, "tokens")
        new = self.tokens.write(reset_lanes(self.tokens, given, segment.reset), hidden, segment)
        new = keep_dead(new, given, segment.length)
        return {f"tokens.{key}": tensor for key, tensor in new.items()}

    def masked_losses(
        self,
        hidden: Tensor,
        targets_BT: Tensor | None,
        segment: Segment,
        target_counts: Sequence[int] | None = None,
    ) -> Tensor | None:
        """(B, T) nats per token, 0 on padding; None without targets."""
        if targets_BT is None:
            return None
        losses = self.softmax.losses(hidden, targets_BT, counts=target_counts)
        return torch.where(segment.mask(losses.shape[1]), losses, 0.0)

    @torch.compiler.disable  # clusters have other sizes in every step, so nothing is compiled for any of them
    def _losses_of_clusters(self, *args: Any) -> Tensor | None:
        return self.masked_losses(*args)


def token_mask(
    segment: Segment, *, n_prefix: int, n_token: int, n_suffix: int, device: torch.device, limit: int | None = None
) -> Tensor:
    """(1|B, 1, E, E) additive mask of the tokens among themselves.

    Real tokens see what came before them, `limit` tokens back at most; padding comes after every real token, so it
    needs no mask. Prefix and suffix tokens see their own kind in both directions; suffix tokens do not see padding.
    """
    row = torch.arange(n_prefix + n_token + n_suffix, device=device)
    seen = row[:, None] >= row
    if limit is not None:
        real = (row >= n_prefix) & (row < n_prefix + n_token)
        seen = seen & ~(real[:, None] & real & (row[:, None] - row > limit))
    if segment.document is not None:  # no extra tokens then: a token memory cannot start anew inside a segment
        seen = seen & (segment.document[:, :, None] == segment.document[:, None])
    if n_prefix:
        seen = seen | (row[:, None] < n_prefix) & (row < n_prefix)
    if n_suffix:
        end = n_prefix + n_token
        seen = seen | (row[:, None] >= end) & (row >= end)
        padding = (row >= n_prefix + segment.length[:, None]) & (row < end)  # (B, E)
        seen = seen[None] & ~((row >= end)[:, None] & padding[:, None])
    seen = seen.view(-1, 1, *seen.shape[-2:])
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))


@torch.no_grad()
def initialise(model: nn.Module, *, std: float, proj_std: float) -> None:
    """The authors' initial weights: N(0, std) for matrices, u and v; N(0, proj_std) for the projections of embedding
    and softmax; 0 for biases; N(1, std) for norms' gains.

    Memory strategies initialise themselves and are left alone.
    """
    for name, parameter in model.named_parameters():
        if ".memories." in name or name.startswith("tokens."):
            continue
        if name.endswith("norm.weight"):
            parameter.normal_(1.0, std)
        elif name.endswith("bias") or name.startswith("softmax.biases."):
            parameter.zero_()
        elif ".projections." in name:
            parameter.normal_(0.0, proj_std)
        else:
            parameter.normal_(0.0, std)
