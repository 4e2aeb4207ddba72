"""Small versions of published memories, each a different use of the interface. They exist to try the interface.

Each is a class with `Config` and `build`, so it is found as `throwaway_strategies:Name` without being registered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from txl_lightning.config import LayerMemoryConfig, MemoryConfig, ModelConfig, key
from txl_lightning.memory.base import (
    Aux,
    LayerHandle,
    MemoryPlan,
    MemoryStrategy,
    Segment,
    Slots,
    State,
    Tap,
    TokenMemory,
    keep_last,
    plan_per_layer,
)
from txl_lightning.types import MASKED, lane_where


def empty_bias(filled_B: Tensor, size: int) -> Tensor:
    """(B, 1, 1, size) MASKED on slots that nothing was written to; the newest is last."""
    age = torch.arange(size, 0, -1, device=filled_B.device)
    return torch.where(age > filled_B[:, None], MASKED, 0.0)[:, None, None]


@dataclass(frozen=True, kw_only=True)
class CompressiveConfig(LayerMemoryConfig):
    name: str = key("throwaway_strategies:Compressive", "old memory is compressed before it is forgotten")
    mem_len: int = key(12, "uncompressed slots", minimum=1)
    compressed_len: int = key(6, "compressed slots", minimum=1)
    rate: int = key(2, "tokens that become one slot", minimum=1)
    function: str = key("conv", "how to compress", choices=("conv", "most_used"))

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        super().check_fit(model, segment_len=segment_len)
        if segment_len % self.rate:
            raise self.refuse("rate", f"must divide data.segment_len={segment_len}", "take a divisor")
        if self.mem_len < segment_len:
            raise self.refuse("mem_len", f"must be >= data.segment_len={segment_len}", "raise it")


class Compressive(MemoryStrategy):
    """Rae et al. 2019, arXiv:1911.05507: slots [compressed ; memory]; the T oldest are compressed, then forgotten.

    In projected form memory stays hidden as well, because the compressor reads hidden states.
    """

    Config = CompressiveConfig

    def __init__(self, config: CompressiveConfig, model: ModelConfig) -> None:
        super().__init__()
        self.config, self.model = config, model
        self.needs_usage = config.function == "most_used"
        self.max_age = config.mem_len + config.compressed_len
        if config.function == "conv":
            self.convolution = nn.Conv1d(model.d_model, model.d_model, config.rate, stride=config.rate)

    @staticmethod
    def build(config: CompressiveConfig, model: ModelConfig) -> MemoryPlan:
        return plan_per_layer(config, model, lambda: Compressive(config, model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        sizes = {"memory": self.config.mem_len, "compressed": self.config.compressed_len}
        state = {"memory": torch.zeros(batch, sizes["memory"], self.model.d_model, device=device, dtype=dtype)}
        heads = (self.model.n_head, self.model.d_head)
        for name, size in sizes.items():
            state[f"{name}_filled"] = torch.zeros(batch, dtype=torch.int64, device=device)
            if form == "projected":
                state[f"{name}_keys"] = torch.zeros(batch, size, *heads, device=device, dtype=dtype)
                state[f"{name}_values"] = torch.zeros(batch, size, *heads, device=device, dtype=dtype)
        if form == "hidden":
            size = sizes["compressed"]
            state["compressed"] = torch.zeros(batch, size, self.model.d_model, device=device, dtype=dtype)
        if self.needs_usage:
            state["usage"] = torch.zeros(batch, sizes["memory"], device=device)
        return state

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        parts = {"compressed": self.config.compressed_len, "memory": self.config.mem_len}
        bias = torch.cat([empty_bias(state[f"{name}_filled"], size) for name, size in parts.items()], dim=-1)
        age = torch.arange(self.max_age, 0, -1, device=x_BTD.device)[None]
        if "compressed" in state:
            hidden = torch.cat([state["compressed"], state["memory"]], dim=1)
            return Slots(hidden=hidden, keys_values=None, age=age, bias=bias)
        keys, values = (torch.cat([state[f"{name}_{kind}"] for name in parts], dim=1) for kind in ("keys", "values"))
        return Slots(hidden=None, keys_values=(keys.transpose(1, 2), values.transpose(1, 2)), age=age, bias=bias)

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        n_token, size = tap.x_BTD.shape[1], self.config.mem_len
        full = (state["memory_filled"] == size) & (segment.length == n_token)  # (B,) else nothing leaves, or it is lost
        old = state["memory"][:, :n_token]
        fresh = self.compress(old, state["usage"][:, :n_token] if self.needs_usage else None)
        count = torch.where(full, fresh.shape[1], 0)
        new = {
            "memory": keep_last(state["memory"], tap.x_BTD.detach(), segment.length),
            "memory_filled": (state["memory_filled"] + segment.length).clamp(max=size),
            "compressed_filled": (state["compressed_filled"] + count).clamp(max=self.config.compressed_len),
        }
        if "compressed" in state:
            new["compressed"] = keep_last(state["compressed"], fresh.detach(), count)
        else:
            rows = {"memory": (tap.k_BHTK, tap.v_BHTK), "compressed": layer.project_slots(fresh.detach())}
            for name, keys_values in rows.items():
                n_row = segment.length if name == "memory" else count
                for kind, row in zip(("keys", "values"), keys_values, strict=True):
                    new[f"{name}_{kind}"] = keep_last(state[f"{name}_{kind}"], row.transpose(1, 2).detach(), n_row)
        if self.needs_usage:
            assert tap.usage_BS is not None and tap.usage_BT is not None
            usage = state["usage"] + tap.usage_BS[:, -size:]
            new["usage"] = keep_last(usage, tap.usage_BT, segment.length)
            return new, Aux(metrics={"compressed": count.float().mean()})
        return new, Aux(losses={"reconstruction": self.reconstruction(old, fresh, full, tap, layer)})

    def compress(self, old_BTD: Tensor, usage_BT: Tensor | None) -> Tensor:
        """(B, T / rate, D)."""
        if usage_BT is None:
            weight = self.convolution.weight
            return self.convolution(old_BTD.detach().to(weight.dtype).transpose(1, 2)).transpose(1, 2)
        best = usage_BT.topk(old_BTD.shape[1] // self.config.rate).indices.sort().values
        return old_BTD.gather(1, best[..., None].expand(-1, -1, old_BTD.shape[2]))

    def reconstruction(self, old: Tensor, fresh: Tensor, full_B: Tensor, tap: Tap, layer: LayerHandle) -> Tensor:
        """Mean over full lanes of how much attention over the compressed rows differs from that over the rows."""
        h = tap.h_BTD.detach()
        error = layer.frozen_attention(h, old.detach()) - layer.frozen_attention(h, fresh)
        per_lane = error.float().square().mean(dim=(1, 2))
        return (per_lane * full_B).sum() / full_B.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class TokensConfig(MemoryConfig):
    name: str = key("throwaway_strategies:Tokens", "memory tokens before and after the segment")
    size: int = key(2, "memory tokens", minimum=1)
    read_slots: bool = key(True, "whether memory tokens see the layers' slots")


class Tokens(TokenMemory):
    """Bulatov et al. 2022, arXiv:2207.06881: input [memory ; x ; memory]; the last outputs are the next memory."""

    Config = TokensConfig

    def __init__(self, config: TokensConfig, model: ModelConfig) -> None:
        super().__init__()
        self.n_prefix = self.n_suffix = config.size
        self.prefix_reads_slots = self.suffix_reads_slots = config.read_slots
        self.start = nn.Parameter(torch.randn(config.size, model.d_model))

    @staticmethod
    def build(config: TokensConfig, model: ModelConfig) -> MemoryPlan:
        return MemoryPlan(layers=[{} for _ in range(model.n_layer)], tokens=Tokens(config, model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        return {"memory": torch.zeros(batch, *self.start.shape, device=device, dtype=dtype)}

    def initial(self) -> State:
        return {"memory": self.start}

    def wrap(self, state: State, x_BTD: Tensor, segment: Segment) -> Tensor:
        memory = state["memory"].to(x_BTD.dtype)
        return torch.cat([memory, x_BTD, memory], dim=1)

    def write(self, state: State, hidden: Tensor, segment: Segment) -> State:
        return {"memory": hidden[:, -self.n_suffix :].to(state["memory"].dtype)}


@dataclass(frozen=True, kw_only=True)
class InfiniConfig(LayerMemoryConfig):
    name: str = key("throwaway_strategies:Infini", "associative matrix beside attention")
    delta: bool = key(False, "write only what the memory does not say yet")


class Infini(MemoryStrategy):
    """Munkhdalai et al. 2024, arXiv:2404.07143: read elu(q)+1 against fp32 sums of (elu(k)+1) v, mixed in by a gate."""

    Config = InfiniConfig
    gradient = "carry"

    def __init__(self, config: InfiniConfig, model: ModelConfig) -> None:
        super().__init__()
        self.delta, self.shape = config.delta, (model.n_head, model.d_head)
        self.gate = nn.Parameter(torch.zeros(model.n_head, 1, 1))

    @staticmethod
    def build(config: InfiniConfig, model: ModelConfig) -> MemoryPlan:
        return plan_per_layer(config, model, lambda: Infini(config, model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        n_head, width = self.shape
        return {
            "sum": torch.zeros(batch, n_head, width, width, device=device),
            "norm": torch.zeros(batch, n_head, width, device=device),
            "written": torch.zeros(batch, dtype=torch.int64, device=device),
        }

    def read(self, state: State, x_BHTK: Tensor) -> Tensor:
        feature = F.elu(x_BHTK.float()) + 1
        return feature @ state["sum"] / ((feature @ state["norm"][..., None]) + 1e-6)

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, None]:
        gate = self.gate.sigmoid().float() * (state["written"] > 0).view(-1, 1, 1, 1)
        return gate * self.read(state, tap.q_BHTK) + (1 - gate) * heads_BHTK, None

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        real = segment.mask(tap.x_BTD.shape[1])[:, None, :, None]
        feature = (F.elu(tap.k_BHTK.float()) + 1) * real
        value = tap.v_BHTK.float()
        if self.delta:
            value = value - self.read(state, tap.k_BHTK)
        return {
            "sum": state["sum"] + feature.transpose(-1, -2) @ value,
            "norm": state["norm"] + feature.sum(dim=2),
            "written": state["written"] + segment.length,
        }, Aux()


@dataclass(frozen=True, kw_only=True)
class AssociativeTokensConfig(LayerMemoryConfig):
    name: str = key("throwaway_strategies:AssociativeTokens", "suffix tokens write to a matrix in every layer")
    size: int = key(2, "suffix tokens", minimum=1)


class Suffix(TokenMemory):
    """Learned tokens behind the segment, the same every time: they have no state."""

    def __init__(self, size: int, d_model: int) -> None:
        super().__init__()
        self.n_suffix = size
        self.rows = nn.Parameter(torch.randn(size, d_model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        return {}

    def wrap(self, state: State, x_BTD: Tensor, segment: Segment) -> Tensor:
        return torch.cat([x_BTD, self.rows.to(x_BTD.dtype).expand(x_BTD.shape[0], -1, -1)], dim=1)

    def write(self, state: State, hidden: Tensor, segment: Segment) -> State:
        return state


class AssociativeTokens(MemoryStrategy):
    """Rodkin et al. 2024, arXiv:2407.04841: x += f(Wq x) W / (f(Wq x) . z), written from the suffix tokens' outputs."""

    Config = AssociativeTokensConfig
    gradient = "carry"

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(model.d_model, 4, bias=False) for _ in range(2))
        self.value = nn.Linear(model.d_model, model.d_model, bias=False)
        self.rate = nn.Linear(model.d_model, 1)

    @staticmethod
    def build(config: AssociativeTokensConfig, model: ModelConfig) -> MemoryPlan:
        plan = plan_per_layer(config, model, lambda: AssociativeTokens(model))
        return MemoryPlan(layers=plan.layers, tokens=Suffix(config.size, model.d_model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        width = self.value.in_features
        return {"matrix": torch.zeros(batch, 8, width, device=device), "norm": torch.zeros(batch, 8, device=device)}

    def feature(self, x: Tensor) -> Tensor:
        both = torch.cat([x.relu(), (-x).relu()], dim=-1).float()
        return both * both.roll(1, dims=-1) + 1e-3

    def read(self, state: State, feature: Tensor) -> Tensor:
        return feature @ state["matrix"] / (feature @ state["norm"][..., None] + 1e-5)

    def residual(self, state: State, x_BED: Tensor, segment: Segment) -> Tensor:
        return x_BED + self.read(state, self.feature(self.query(x_BED))).to(x_BED.dtype)

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        assert tap.suffix_BND is not None
        feature = self.feature(self.key(tap.suffix_BND))  # (B, N, 8)
        news = self.value(tap.suffix_BND).float() - self.read(state, feature)
        news = news * self.rate(tap.suffix_BND).float().sigmoid()
        known = feature @ state["norm"][..., None] / feature.square().sum(-1, keepdim=True)
        fresh = (1 - known).clamp(0, 1).detach()
        return {
            "matrix": state["matrix"] + feature.transpose(1, 2) @ news,
            "norm": state["norm"] + (fresh * feature).sum(dim=1),
        }, Aux()


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(LayerMemoryConfig):
    name: str = key("throwaway_strategies:Recurrent", "gated state vectors that read the segment")
    size: int = key(3, "state vectors", minimum=1)


class Recurrent(MemoryStrategy):
    """Hutchins et al. 2022, arXiv:2203.07852, no self-attention: s' = g s + (1 - g) W attention(s, segment)."""

    Config = RecurrentConfig
    gradient = "carry"

    def __init__(self, config: RecurrentConfig, model: ModelConfig) -> None:
        super().__init__()
        width, inner = model.d_model, model.n_head * model.d_head
        self.n_head = model.n_head
        self.start = nn.Parameter(torch.randn(config.size, width))
        self.read_q, self.write_q = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.keys_values = nn.Linear(width, 2 * inner, bias=False)
        self.read_out, self.write_out = (nn.Linear(inner, width, bias=False) for _ in range(2))
        self.gate = nn.Parameter(torch.randn(width))

    @staticmethod
    def build(config: RecurrentConfig, model: ModelConfig) -> MemoryPlan:
        return plan_per_layer(config, model, lambda: Recurrent(config, model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        return {"vectors": torch.zeros(batch, *self.start.shape, device=device, dtype=dtype)}

    def initial(self) -> State:
        return {"vectors": self.start}

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
        keys, values = map(self.heads, self.keys_values(state["vectors"].to(self.gate.dtype)).chunk(2, dim=-1))
        read = F.scaled_dot_product_attention(self.heads(self.read_q(tap.h_BTD)), keys, values)
        return heads_BHTK, self.read_out(read.transpose(1, 2).flatten(-2))

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        old = state["vectors"].to(self.gate.dtype)
        real = segment.mask(tap.x_BTD.shape[1])[:, None, None]
        real = real | (segment.length == 0).view(-1, 1, 1, 1)  # no row without a key
        seen = F.scaled_dot_product_attention(self.heads(self.write_q(old)), tap.k_BHTK, tap.v_BHTK, attn_mask=real)
        gate = self.gate.sigmoid()
        new = gate * old + (1 - gate) * self.write_out(seen.transpose(1, 2).flatten(-2))
        return {"vectors": new.to(state["vectors"].dtype)}, Aux()


@dataclass(frozen=True, kw_only=True)
class SinkWindowConfig(LayerMemoryConfig):
    name: str = key("throwaway_strategies:SinkWindow", "first tokens of the stream, and a sliding window")
    window: int = key(8, "tokens each query sees behind it", minimum=1)
    sinks: int = key(2, "first tokens that are kept", minimum=1)


class SinkWindow(MemoryStrategy):
    """Xiao et al. 2023, arXiv:2309.17453, with unplaced sinks, a band that moves with t, a learned slope per head."""

    Config = SinkWindowConfig
    ages = "any"

    def __init__(self, config: SinkWindowConfig, model: ModelConfig) -> None:
        super().__init__()
        self.sinks, self.window, self.width = config.sinks, config.window, model.d_model
        self.max_age = config.window
        self.slope = nn.Parameter(torch.zeros(model.n_head, 1, 1))

    @staticmethod
    def build(config: SinkWindowConfig, model: ModelConfig) -> MemoryPlan:
        return plan_per_layer(config, model, lambda: SinkWindow(config, model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        return {
            "sinks": torch.zeros(batch, self.sinks, self.width, device=device, dtype=dtype),
            "recent": torch.zeros(batch, self.window, self.width, device=device, dtype=dtype),
            "read": torch.zeros(batch, dtype=torch.int64, device=device),
        }

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        device = x_BTD.device
        recent_age = torch.arange(self.window, 0, -1, device=device)
        age = torch.cat([torch.ones(self.sinks, dtype=torch.int64, device=device), recent_age])[None]
        distance = recent_age + torch.arange(x_BTD.shape[1], device=device)[:, None]  # (T, window)
        band = torch.where(distance > self.window, MASKED, -self.slope.float().exp() * distance)[None]  # (1, H, T, W)
        recent = band + empty_bias(state["read"], self.window)
        index = torch.arange(self.sinks, device=device)
        # a sink that is still in the window is read there
        gone = index < state["read"][:, None] - self.window
        sinks = torch.where(gone, 0.0, MASKED)[:, None, None].expand(-1, *recent.shape[1:3], -1)
        return Slots(
            hidden=torch.cat([state["sinks"], state["recent"]], dim=1),
            keys_values=None,
            age=age,
            bias=torch.cat([sinks, recent], dim=-1),
            positioned=torch.arange(age.shape[1], device=device) >= self.sinks,
        )

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        x = tap.x_BTD.detach()
        place = torch.arange(self.sinks, device=x.device) - state["read"][:, None]  # (B, sinks) in this segment
        here = (place >= 0) & (place < segment.length[:, None])
        index = place.clamp(0, x.shape[1] - 1)[..., None].expand(-1, -1, self.width)
        found = x.gather(1, index).to(state["sinks"].dtype)
        return {
            "sinks": torch.where(here[..., None], found, state["sinks"]),
            "recent": keep_last(state["recent"], x, segment.length),
            "read": state["read"] + segment.length,
        }, Aux()


@dataclass(frozen=True, kw_only=True)
class RecallConfig(LayerMemoryConfig):
    name: str = key("throwaway_strategies:Recall", "what a fast matrix answers to each token, read as slots")


class Recall(MemoryStrategy):
    """Behrouz et al. 2024, arXiv:2501.00663 (MAC), one step per segment: slot j is W's answer to token j."""

    Config = RecallConfig
    gradient = "carry"
    ages = "any"
    max_age = 1

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(model.d_model, model.d_model, bias=False) for _ in range(3))
        self.start = nn.Parameter(torch.zeros(model.d_model, model.d_model))

    @staticmethod
    def build(config: RecallConfig, model: ModelConfig) -> MemoryPlan:
        return plan_per_layer(config, model, lambda: Recall(model))

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        return {"matrix": torch.zeros(batch, *self.start.shape, device=device)}

    def initial(self) -> State:
        return {"matrix": self.start}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        n_token = x_BTD.shape[1]
        row = torch.arange(n_token, device=x_BTD.device)
        later = row > row[:, None]  # (T, T) token t must not see the answer to a later one
        return Slots(
            hidden=(F.normalize(self.query(x_BTD).float(), dim=-1) @ state["matrix"]).to(x_BTD.dtype),
            keys_values=None,
            age=torch.ones(1, n_token, dtype=torch.int64, device=x_BTD.device),
            bias=torch.where(later, MASKED, 0.0)[None, None],
            positioned=torch.zeros(n_token, dtype=torch.bool, device=x_BTD.device),
        )

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        assert tap.y_BTD is not None
        real = segment.mask(tap.y_BTD.shape[1])[..., None]
        keys = F.normalize(self.key(tap.y_BTD).float(), dim=-1) * real
        wrong = keys @ state["matrix"] - self.value(tap.y_BTD).float() * real
        step = (
            keys.transpose(1, 2)
            @ wrong
            / lane_where(segment.length > 0, segment.length, torch.ones_like(segment.length)).view(-1, 1, 1)
        )
        return {"matrix": 0.9 * state["matrix"] - step}, Aux()
