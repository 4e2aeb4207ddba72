"""The Compressive Transformer: what leaves memory is compressed before it is forgotten.

Rae et al. 2019, arXiv:1911.05507. Per layer there are M rows of memory and C compressed rows, one softmax over
[compressed ; memory ; segment]. A segment of n tokens pushes the n oldest rows out of a full memory; every c = `rate`
of them become one compressed row:

    evicted = oldest n rows of m;  new = f_c(evicted), n / c rows
    m'  = last M rows of [m ; x];  compressed' = last C rows of [compressed ; new]

f_c (`function`), one per layer, over rows (B, n, D):
    mean, max   pooling of c rows
    conv        one convolution, kernel and stride c, no activation
    dilated     two convolutions of kernel 3 with dilation 1 and 2, ReLU after each, then `conv`: the paper names
                dilated convolutions without widths; these are ours
    most_used   of the evicted rows the n / c that received most attention per query that could see them, in order

Losses (`loss`), weighted with `loss_weight`; mean square per element of each lane that evicts a whole segment, which
counts by its share of all lanes' tokens:
    attention     a(h, evicted) - a(h, new) with a the layer's own attention, contents only, h this segment's input
    autoencoding  evicted - g(new) with g a transposed convolution that is used for nothing else
All is detached but f_c and g: these losses train exactly them, the language model's loss trains none of them. With a
function that has no weights the error is measured only (metric `reconstruction`; g learns).

Where we differ: the paper takes the norm of the difference, which depends on n and D; its third way to train f_c
(through the next segment) is not offered. Rows that leave in a number c does not divide, after a short segment, lose
the remainder. Compressed rows stand right behind memory, one place each (`positions=slot`, as in public codes), or at
the age of the middle of what they stand for (`time`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from txl_lightning.config import LayerMemoryConfig, ModelConfig, key
from txl_lightning.memory.base import (
    Aux,
    LayerHandle,
    MemoryPlan,
    MemoryStrategy,
    Segment,
    Slots,
    State,
    Tap,
    keep_last,
    plan_per_layer,
    register,
)
from txl_lightning.memory.rows import Rows, empty_bias, falling_ages, form_of, with_prefix

LEARNED = ("conv", "dilated")
"""Functions that have weights."""


@dataclass(frozen=True, kw_only=True)
class CompressiveConfig(LayerMemoryConfig):
    """Keys of `memory=compressive`."""

    size_key: ClassVar[str | None] = "compressed_len"

    name: str = key("compressive", "what leaves memory is compressed before it is forgotten")
    mem_len: int = key(64, "rows of memory, per lane and layer; at least a segment", minimum=1)
    compressed_len: int = key(64, "compressed rows behind them", minimum=1)
    rate: int = key(4, "rows that become one compressed row", minimum=1)
    function: str = key("conv", "how rows are compressed", choices=("mean", "max", "conv", "dilated", "most_used"))
    loss: str = key(
        "attention",
        "what trains the function: attention over the rows must stay as it was, or they must be told from the result",
        choices=("attention", "autoencoding", "none"),
    )
    loss_weight: float = key(1.0, "factor of that loss", above=0)
    positions: str = key(
        "slot", "where compressed rows stand: one place each, or where their tokens were", choices=("slot", "time")
    )

    def check(self) -> None:
        super().check()
        if self.loss == "none" and self.function in LEARNED:
            rule = f"nothing would train memory.function={self.function}: no other loss reaches it"
            raise self.refuse("loss", rule, "take attention or autoencoding, or a function without weights")

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        super().check_fit(model, segment_len=segment_len)
        if segment_len % self.rate:
            rule = f"must divide data.segment_len={segment_len}"
            raise self.refuse("rate", rule, "take a divisor, or another segment length")
        if self.mem_len < segment_len:
            rule = f"must be >= data.segment_len={segment_len}: a segment's rows are compressed when they leave memory"
            raise self.refuse("mem_len", rule, "raise it, or shorten the segment")
        if model.same_length:
            rule = "would hide the compressed rows, which are further away than memory.mem_len"
            raise model.refuse("same_length", rule, "set it to false, or use memory=cache")

    def span(self, model: ModelConfig, *, segment_len: int) -> float | None:
        """M + c C; dilated taps reach three rows further back where those left memory together. most_used: unknown."""
        if self.function == "most_used":
            return None
        seen = self.mem_len + self.rate * self.compressed_len
        older = -self.rate * self.compressed_len % segment_len  # rows that left with the oldest one, before it
        return seen + (min(3, older) if self.function == "dilated" else 0)


class Compressive(MemoryStrategy):
    """Memory and compressed memory of one layer.

    State:
        memory_hidden (B, M, D), in both forms: what is compressed later
        compressed_hidden (B, C, D); in projected form memory_keys, memory_values (B, M, G, K) and
            compressed_keys, compressed_values (B, C, G, K) instead; newest last
        memory_filled, compressed_filled (B,) int64: rows in use
        usage (B, M) float32: attention each row received so far; only for most_used
        compressed_age (B, C) int64: tokens from each row to the next segment; only for positions=time
    """

    gradient = "stop"
    inner_resets = True
    token_by_token = True

    def __init__(self, config: CompressiveConfig, model: ModelConfig) -> None:
        super().__init__()
        self.config, self.rows = config, Rows.of(model)
        self.sizes = {"compressed": config.compressed_len, "memory": config.mem_len}  # in the order of reading
        by_time = config.positions == "time"
        self.ages = "any" if by_time else "contiguous"
        self.max_age = config.mem_len + config.compressed_len
        if by_time:  # most_used may choose the oldest rows of every segment, and a segment is no longer than memory
            self.max_age = 2 * config.mem_len + config.compressed_len * config.rate
        self.needs_usage = config.function == "most_used"
        self.norm_queries = model.norm_queries
        self.compressor = make_compressor(config.function, rate=config.rate, width=model.d_model)
        self.decoder = None
        if config.loss == "autoencoding":
            self.decoder = nn.ConvTranspose1d(model.d_model, model.d_model, config.rate, stride=config.rate)

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        state: State = {}
        for name, size in self.sizes.items():
            rows = self.rows.empty(batch, size, form=form, device=device, dtype=dtype)
            state.update(with_prefix(f"{name}_", rows))
            state[f"{name}_filled"] = torch.zeros(batch, dtype=torch.int64, device=device)
        if form == "projected":
            hidden = self.rows.empty(batch, self.sizes["memory"], form="hidden", device=device, dtype=dtype)
            state.update(with_prefix("memory_", hidden))
        if self.needs_usage:
            state["usage"] = torch.zeros(batch, self.sizes["memory"], dtype=torch.float32, device=device)
        if self.ages == "any":
            state["compressed_age"] = torch.zeros(batch, self.sizes["compressed"], dtype=torch.int64, device=device)
        return state

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        parts = {name: self._read_rows(state, name) for name in self.sizes}
        joined = {kind: torch.cat([rows[kind] for rows in parts.values()], dim=1) for kind in parts["compressed"]}
        hidden, keys_values = self.rows.offered(joined)
        bias = [empty_bias(state[f"{name}_filled"], size) for name, size in self.sizes.items()]
        age = falling_ages(sum(self.sizes.values()), device=x_BTD.device)
        if self.ages == "any":
            compressed = state["compressed_age"].clamp(1, self.max_age)
            age = torch.cat([compressed, age[:, self.sizes["compressed"] :].expand(len(compressed), -1)], dim=1)
        return Slots(hidden=hidden, keys_values=keys_values, age=age, bias=torch.cat(bias, dim=-1))

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        n_token, size = tap.x_BTD.shape[1], self.sizes["memory"]
        if n_token > size:
            raise ValueError(f"a segment of {n_token} tokens is longer than mem_len={size}")
        read = segment.since_start(state["memory_filled"])
        n_gone = (read - size).clamp(min=0)  # (B,) rows that leave memory
        evicted, place, score = self._evicted(state, tap, n_gone, segment)
        count = n_gone // self.config.rate
        fresh, chosen = self._compress(evicted, score, count)
        age = size - place.gather(1, chosen) + segment.length[:, None]
        goes_on = read == state["memory_filled"] + segment.length  # else another document began
        held = torch.where(goes_on, state["compressed_filled"], 0)
        new = {
            **self._kept(state, tap, segment),
            **self._compressed(state, fresh.detach(), age, count, segment, layer),
            "memory_filled": read.clamp(max=size),
            "compressed_filled": (held + count).clamp(max=self.sizes["compressed"]),
        }
        whole = (n_gone == n_token) & (n_token % self.config.rate == 0)
        return new, self._report(evicted, fresh, whole, segment, tap, layer)

    def fill(self, state: State) -> Tensor:
        used = sum(state[f"{name}_filled"] for name in self.sizes)
        return torch.as_tensor(used) / sum(self.sizes.values())

    def _read_rows(self, state: State, name: str) -> State:
        """Rows of one kind in the form the layer reads; memory is there in hidden form too."""
        form = form_of(state, "compressed_")
        kinds = ("hidden",) if form == "hidden" else ("keys", "values")
        return {kind: state[f"{name}_{kind}"] for kind in kinds}

    def _evicted(
        self, state: State, tap: Tap, n_gone_B: Tensor, segment: Segment
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The rows that leave memory (B, N, D), zeros behind them, N the segment's length made a multiple of the rate;
        their places in memory (B, N), and their score (B, N), below 0 where no row leaves."""
        size, rate = self.sizes["memory"], self.config.rate
        step = torch.arange(-(-tap.x_BTD.shape[1] // rate) * rate, device=n_gone_B.device)
        leaves = step < n_gone_B[:, None]
        place = ((size - state["memory_filled"])[:, None] + step).clamp(max=size - 1)
        hidden = state["memory_hidden"].detach()
        rows = hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[2])) * leaves[..., None]
        if not self.needs_usage:
            return rows, place, None
        n_query = size - place + segment.length[:, None]  # every token since the row's own, itself among them
        score = self._usage(state, tap).gather(1, place) / n_query
        return rows, place, torch.where(leaves, score, -1.0)

    def _compress(self, rows_BND: Tensor, score_BN: Tensor | None, count_B: Tensor) -> tuple[Tensor, Tensor]:
        """New rows (B, N / c, D), the first `count` of them real, and which row of N each stands at."""
        rate = self.config.rate
        n_new = rows_BND.shape[1] // rate
        if score_BN is None:
            assert self.compressor is not None
            middle = torch.arange(n_new, device=count_B.device) * rate + rate // 2
            return self._over_time(self.compressor, rows_BND), middle.expand(len(count_B), -1)
        best = score_BN.topk(n_new, dim=1).indices
        kept = torch.arange(n_new, device=count_B.device) < count_B[:, None]
        order = torch.where(kept, best, rows_BND.shape[1]).sort(dim=1).values.clamp(max=rows_BND.shape[1] - 1)
        return rows_BND.gather(1, order[..., None].expand(-1, -1, rows_BND.shape[2])), order

    def _kept(self, state: State, tap: Tap, segment: Segment) -> State:
        """Memory's next rows in every form it has, and their usage."""
        forms = ["hidden"] if form_of(state, "compressed_") == "hidden" else ["hidden", "projected"]
        new = {}
        for form in forms:
            for kind, rows in self.rows.of_segment(tap, form=form).items():
                new[f"memory_{kind}"] = keep_last(state[f"memory_{kind}"], rows.detach(), segment.length)
        if self.needs_usage:
            assert tap.usage_BT is not None
            new["usage"] = keep_last(self._usage(state, tap), tap.usage_BT, segment.length)
        return new

    def _compressed(
        self, state: State, fresh: Tensor, age: Tensor, count_B: Tensor, segment: Segment, layer: LayerHandle
    ) -> State:
        """Next compressed rows in the state's form, and their ages."""
        rows = self.rows.of_hidden(fresh, layer, form=form_of(state, "compressed_"))
        new = {
            f"compressed_{kind}": keep_last(state[f"compressed_{kind}"], row.detach(), count_B)
            for kind, row in rows.items()
        }
        if self.ages == "any":
            old = state["compressed_age"] + segment.length[:, None]
            new["compressed_age"] = keep_last(old, age, count_B).clamp(max=self.max_age)
        return new

    def _usage(self, state: State, tap: Tap) -> Tensor:
        """(B, M) attention that memory's rows received so far, this segment's included."""
        assert tap.usage_BS is not None
        return state["usage"] + tap.usage_BS[:, self.sizes["compressed"] :]

    def _report(
        self, evicted: Tensor, fresh: Tensor, whole_B: Tensor, segment: Segment, tap: Tap, layer: LayerHandle
    ) -> Aux:
        """The loss of this write, in training only: evaluation would pay for a number nobody sees."""
        if not self.training:
            return Aux()
        metrics = {"compressed": whole_B.float().mean()}
        if self.config.loss == "none":
            return Aux(metrics=metrics)
        error_B = self._error(evicted, fresh, tap, layer).float().square().mean(dim=(1, 2)) * whole_B
        metrics["reconstruction"] = error_B.sum() / whole_B.sum().clamp(min=1)
        if self.config.function not in LEARNED and self.decoder is None:
            return Aux(metrics=metrics)
        error = (error_B * segment.length).sum() / segment.length.sum().clamp(min=1)
        return Aux(losses={"compression": self.config.loss_weight * error}, metrics=metrics)

    def _error(self, evicted: Tensor, fresh: Tensor, tap: Tap, layer: LayerHandle) -> Tensor:
        if self.decoder is not None:
            return evicted - self._over_time(self.decoder, fresh)
        h = (tap.h_BTD if self.norm_queries else tap.x_BTD).detach()
        return layer.frozen_attention(h, evicted) - layer.frozen_attention(h, fresh)

    @staticmethod
    def _over_time(module: nn.Module, rows_BND: Tensor) -> Tensor:
        """A module over (B, D, N) applied to rows, in the type of its weights."""
        weight = next(module.parameters(), rows_BND)
        return module(rows_BND.to(weight.dtype).transpose(1, 2)).transpose(1, 2)


def make_compressor(function: str, *, rate: int, width: int) -> nn.Module | None:
    """A module (B, D, N) -> (B, D, N / rate); None for most_used, which chooses rows.

    Args:
        function: as in `CompressiveConfig`.
        rate: rows that become one.
        width: D.
    """
    if function == "mean":
        return nn.AvgPool1d(rate)
    if function == "max":
        return nn.MaxPool1d(rate)
    conv = nn.Conv1d(width, width, rate, stride=rate)
    if function == "conv":
        return conv
    if function == "dilated":
        near, wide = (nn.Conv1d(width, width, 3, dilation=d, padding=d) for d in (1, 2))
        return nn.Sequential(near, nn.ReLU(), wide, nn.ReLU(), conv)
    return None


@register("compressive", config=CompressiveConfig, paper="Rae et al. 2019, arXiv:1911.05507")
def build(config: CompressiveConfig, model: ModelConfig) -> MemoryPlan:
    """Memory and compressed memory in each chosen layer."""
    return plan_per_layer(config, model, lambda: Compressive(config, model))
