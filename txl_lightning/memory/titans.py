"""Titans, EXPERIMENTAL: a small network that goes on learning while the text is read, one per lane and layer.

Behrouz et al. 2024, arXiv:2501.00663. There is no official code: this is built from the paper's formulas, and no number
of the paper has been reproduced with it. M is a matrix (depth 1) or a perceptron with silu between its matrices; conv a
causal convolution over the last `conv` tokens, per feature; N a norm. For each token of the stream x the memory is
trained on:

    k = unit(silu(conv(N(x) W_k)))      v = silu(conv(N(x) W_v))      q = unit(silu(conv(N(x) W_q)))
    eta, alpha = sigmoid(N(x) w + b)    theta = lr (1 - eta) sigmoid(N(x) w + b)
    g_t = gradient of |M_c(k_t) - v_t|^2 by the weights, at M_c, the weights at the start of the token's chunk
    S_t = eta_t S_{t-1} - theta_t g_t             surprise, with momentum
    M_t = (1 - alpha_t) M_{t-1} + S_t             memory, with forgetting

and the answer to a token is N(M_c(q)). Only the end of a chunk is needed, where both sums have closed weights: with
f_t the product of (1 - alpha) after t, M_end = f_0 M_c + sum_t f_t S_t, and S_t = sum_{i<=t} (eta_{i+1} ... eta_t)
(-theta_i g_i). All of this stays in the graph, so the outer loss teaches the projections, the rates and the first M
through the inner steps (second order).

    mag   stream: the attention's input. heads <- N(heads) * sigmoid(answer W)
    mal   stream: the layer's input. The layer reads x + answer W instead of x
    mac   stream: the layer's output. The answers to the layer's input stand as extra slots before the segment, and a
          token sees those to itself and to earlier tokens; heads <- N(heads) * sigmoid(answer to the heads W)

`persistent` learned slots, the same for all texts, stand before every segment.

Where we differ. A token reads M as it was at the start of its chunk (mag) or of its segment (mal, mac), never M_t
itself: what stands in one chunk is read from the next one on. In mac the paper gates with the memory that has already
learned the segment, which would show a token what comes after it. In mal q is made without conv. Gates act on the
heads, before the output matrix. Persistent memory is a layer's own slots, not tokens that run through the layers.
Norms, first weights and the biases of the rates are ours.

The paper's theta is a sigmoid alone. Ours lets the gradient of one token move the memory by `lr` at most, however long
momentum carries it. Tokens of a chunk that are alike add up, and nothing but this keeps the outer loss from steps that
overshoot: without it a trial ended in inf after 68 segments. A linear memory is safe below lr = 1 / chunk_len. The
error of a perceptron is no quadratic form of its weights, so no lr is safe: there g_t is shortened to length 1, matrix
by matrix, which the paper does not say, and no token moves a matrix further than lr. Of two trials of mac with depth 2
at lr=0.5 one without this ended in inf after 65 segments; the other learned over 300. Strong forgetting also takes all
its matrices to 0, where none has a gradient any more.

State, all float32 but the tails; W_l the matrices of M, D x D for depth 1, else D x eD, eD x eD ..., eD x D:
    memory<l>, momentum<l> (B, ...) as W_l;  tail (B, conv - 1, D): the last inputs of the stream that is asked;
    for mac tail_written (B, conv - 1, D): those of the stream that is learned
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    full_precision,
    keep_last,
    plan_per_layer,
    register,
)
from txl_lightning.types import MASKED

STARTS = {"theta": 0.0, "eta": 0.0, "alpha": -5.0}
"""Biases of the rates at first: half of the largest step, a momentum of half, and 0.7 % forgotten per token."""


@dataclass(frozen=True, kw_only=True)
class TitansConfig(LayerMemoryConfig):
    """Keys of `memory=titans`."""

    unbounded: ClassVar[bool] = True

    name: str = key("titans", "experimental: a network that learns the text while it is read")
    variant: str = key(
        "mag",
        "mag: it gates attention; mal: it comes before; mac: its answers are slots",
        choices=("mag", "mal", "mac"),
    )
    depth: int = key(1, "matrices of the memory: 1 is linear, more a perceptron", minimum=1)
    expansion: int = key(4, "inner width of a memory with depth >= 2, in multiples of d_model", minimum=1)
    chunk_len: int = key(
        16, "tokens whose gradients are taken at the same weights; a last chunk may be shorter", minimum=1
    )
    lr: float = key(
        0.05, "most that the gradient of one token moves the memory by; safe below 1 / chunk_len for depth 1", above=0
    )
    momentum: bool = key(True, "steps keep part of the steps before them")
    forgetting: bool = key(True, "each token takes a share of the memory away")
    conv: int = key(4, "tokens that queries, keys and values are made from; 1: no convolution", minimum=1)
    persistent: int = key(4, "learned slots before every segment, the same for all texts", minimum=0)
    gradient: str = key(
        "carry",
        "carry: through trainer.bptt_segments segments; stop: through the chunks of one segment, for mag only",
        choices=("carry", "stop"),
    )

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        super().check_fit(model, segment_len=segment_len)
        if self.gradient == "carry":
            return
        if self.variant != "mag":
            rule = f"{self.variant} reads what earlier segments wrote, so no loss would teach it to write"
            raise self.refuse("gradient", rule, "use memory.gradient=carry or memory.variant=mag")
        if self.chunk_len >= segment_len:
            rule = f"needs memory.chunk_len < data.segment_len={segment_len}: no loss would teach the memory to write"
            raise self.refuse("gradient", rule, "lower memory.chunk_len, or use memory.gradient=carry")


class Weights(NamedTuple):
    """The network and its last step, one tensor (B, in, out) per matrix."""

    memory: list[Tensor]
    momentum: list[Tensor]  # empty without momentum


class Lesson(NamedTuple):
    """What tokens teach; float32."""

    k_BTD: Tensor
    v_BTD: Tensor
    theta_BT: Tensor  # 0 on padding
    log_eta_BT: Tensor  # 0 on padding: the momentum stays
    log_kept_BT: Tensor  # log(1 - alpha); 0 on padding: nothing is forgotten
    real_BT: Tensor  # 1 or 0

    def chunks(self, size: int) -> list[Lesson]:
        """The same, cut after every `size` tokens."""
        return [Lesson(*parts) for parts in zip(*(part.split(size, dim=1) for part in self), strict=True)]


class Titans(MemoryStrategy):
    """What the three variants have in common. State: see the module.

    Args:
        config: its keys.
        model: the model it is for.
    """

    ages = "any"
    convolved = "qkv"

    def __init__(self, config: TitansConfig, model: ModelConfig) -> None:
        super().__init__()
        width, inner = model.d_model, config.expansion * model.d_model
        self.config, self.gradient, self.width = config, config.gradient, width
        sizes = [width, *[inner] * (config.depth - 1), width]
        self.start = nn.ParameterList(
            torch.randn(rows, columns) / rows**0.5 for rows, columns in itertools.pairwise(sizes)
        )
        self.norm = nn.RMSNorm(width, eps=model.norm_eps)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        convolved = self.convolved if config.conv > 1 else ""
        self.convs = nn.ModuleDict({name: ShortConv(width, config.conv) for name in convolved})
        wanted = {"theta": True, "eta": config.momentum, "alpha": config.forgetting}
        self.rates = nn.ModuleDict({name: nn.Linear(width, 1) for name, on in wanted.items() if on})
        for name, rate in self.rates.items():
            nn.init.constant_(rate.bias, STARTS[name])  # type: ignore[arg-type]
        self.answer_norm = nn.RMSNorm(width, eps=model.norm_eps)
        self.persistent = nn.Parameter(torch.randn(config.persistent, width)) if config.persistent else None
        self.tails = ["tail"] if config.conv > 1 else []

    def init_state(self, batch: int, *, form: str, device: torch.device, dtype: torch.dtype) -> State:
        names = ["memory", "momentum"] if self.config.momentum else ["memory"]
        state = {
            f"{name}{i}": torch.zeros(batch, *matrix.shape, device=device)
            for name in names
            for i, matrix in enumerate(self.start)
        }
        shape = (batch, self.config.conv - 1, self.width)
        return {**state, **{tail: torch.zeros(shape, device=device, dtype=dtype) for tail in self.tails}}

    def initial(self) -> State:
        return {f"memory{i}": matrix for i, matrix in enumerate(self.start)}

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots | None:
        if self.persistent is None:
            return None
        rows = self.persistent.to(x_BTD.dtype).expand(x_BTD.shape[0], -1, -1)
        return _unplaced(rows, torch.zeros(1, 1, 1, rows.shape[1], device=x_BTD.device))

    def stream(self, tap: Tap) -> Tensor:
        """(B, T, D): the tokens the memory learns."""
        raise NotImplementedError

    def write(self, state: State, tap: Tap, layer: LayerHandle, segment: Segment) -> tuple[State, Aux]:
        x = self.stream(tap)
        tail = self.tails[-1] if self.tails else ""
        lesson = self.lesson(x, state.get(tail), segment)
        weights = self.weights(state)
        errors = []
        for chunk in lesson.chunks(self.config.chunk_len):
            weights, error = learn(weights, chunk)
            errors.append(error.detach())
        new = {f"memory{i}": matrix for i, matrix in enumerate(weights.memory)}
        new.update({f"momentum{i}": matrix for i, matrix in enumerate(weights.momentum)})
        if tail:
            new[tail] = keep_last(state[tail], x, segment.length)
        if len(self.tails) > 1:
            new["tail"] = keep_last(state["tail"], tap.x_BTD, segment.length)
        if self.gradient == "stop":
            new = {name: tensor.detach() for name, tensor in new.items()}
        return new, Aux(metrics=_metrics(lesson, torch.cat(errors, dim=1)))

    def weights(self, state: State) -> Weights:
        """The network as the state holds it."""
        names = range(len(self.start))
        momentum = [state[f"momentum{i}"] for i in names] if self.config.momentum else []
        return Weights([state[f"memory{i}"] for i in names], momentum)

    def ask(self, weights: Weights, q_BTD: Tensor) -> Tensor:
        """(B, T, D) the answers to queries, normalised."""
        with full_precision(q_BTD.device):
            return self.answer_norm(apply(weights.memory, q_BTD.float()).to(self.answer_norm.weight.dtype))

    def queries(self, x_BTD: Tensor, tail: Tensor | None) -> Tensor:
        """(B, T, D) float32 of unit length."""
        return F.normalize(self._made(self.query, "q", self._rows(x_BTD, tail)).float(), dim=-1)

    def lesson(self, x_BTD: Tensor, tail: Tensor | None, segment: Segment) -> Lesson:
        """Keys, values and rates of the tokens the memory learns."""
        rows = self._rows(x_BTD, tail)
        k = F.normalize(self._made(self.key, "k", rows).float(), dim=-1)
        v = self._made(self.value, "v", rows).float()
        x, real = rows[:, rows.shape[1] - x_BTD.shape[1] :], segment.mask(x_BTD.shape[1]).float()
        raw = {name: rate(x).squeeze(-1).float() for name, rate in self.rates.items()}
        nothing = torch.zeros_like(real)
        theta = self.config.lr * raw["theta"].sigmoid()
        if "eta" in raw:
            theta = theta * (-raw["eta"]).sigmoid()
        return Lesson(
            k_BTD=k,
            v_BTD=v,
            theta_BT=theta * real,
            log_eta_BT=F.logsigmoid(raw["eta"]) * real if "eta" in raw else nothing,
            log_kept_BT=F.logsigmoid(-raw["alpha"]) * real if "alpha" in raw else nothing,
            real_BT=real,
        )

    def _rows(self, x_BTD: Tensor, tail: Tensor | None) -> Tensor:
        """The tokens behind the last ones of the segment before, normalised."""
        x = x_BTD.to(self.norm.weight.dtype)
        return self.norm(x if tail is None else torch.cat([tail.to(x.dtype), x], dim=1))

    def _made(self, linear: nn.Linear, name: str, rows_BRD: Tensor) -> Tensor:
        made = linear(rows_BRD)
        return F.silu(self.convs[name](made) if name in self.convs else made)


class MemoryAsGate(Titans):
    """The answers gate the heads; each chunk of the segment is read with what the chunks before it wrote."""

    def __init__(self, config: TitansConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.gated = GatedHeads(model)

    def stream(self, tap: Tap) -> Tensor:
        return tap.h_BTD

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, None]:
        x, tail, size = tap.h_BTD, state.get("tail"), self.config.chunk_len
        weights, answers = self.weights(state), []
        queries = self.queries(x, tail).split(size, dim=1)
        lessons = self.lesson(x, tail, segment).chunks(size)
        for q, lesson in zip(queries, lessons, strict=True):
            answers.append(self.ask(weights, q))
            if len(answers) < len(lessons):
                weights, _ = learn(weights, lesson)
        return self.gated(heads_BHTK, torch.cat(answers, dim=1)), None


class MemoryAsLayer(Titans):
    """The answers are added to the layer's input. Queries are made token by token: the layer may run over memory tokens
    too, which have no neighbours."""

    convolved = "kv"
    token_by_token = True

    def __init__(self, config: TitansConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.out = nn.Linear(model.d_model, model.d_model, bias=False)

    def stream(self, tap: Tap) -> Tensor:
        assert tap.before_BTD is not None
        return tap.before_BTD

    def residual(self, state: State, x_BED: Tensor, segment: Segment) -> Tensor:
        answers = self.ask(self.weights(state), self.queries(x_BED, None))
        return x_BED + self.out(answers).to(x_BED.dtype)


class MemoryAsContext(Titans):
    """The answers are slots of the segment; the memory learns the layer's output."""

    def __init__(self, config: TitansConfig, model: ModelConfig) -> None:
        super().__init__(config, model)
        self.gated = GatedHeads(model)
        self.heads_query = nn.Linear(model.n_head * model.d_head, model.d_model, bias=False)
        self.tails = ["tail", "tail_written"] if config.conv > 1 else []

    def stream(self, tap: Tap) -> Tensor:
        assert tap.y_BTD is not None
        return tap.y_BTD

    def slots(self, state: State, x_BTD: Tensor, segment: Segment) -> Slots:
        answers = self.ask(self.weights(state), self.queries(x_BTD, state.get("tail"))).to(x_BTD.dtype)
        row = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        bias = torch.zeros(1, 1, len(row), len(row), device=x_BTD.device).masked_fill(row > row[:, None], MASKED)
        always = super().slots(state, x_BTD, segment)
        if always is None:
            return _unplaced(answers, bias)
        assert always.hidden is not None
        bias = torch.cat([always.bias.expand(-1, -1, len(row), -1), bias], dim=-1)
        return _unplaced(torch.cat([always.hidden, answers], dim=1), bias)

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, None]:
        queries = F.normalize(self.heads_query(heads_BHTK.transpose(1, 2).flatten(-2)).float(), dim=-1)
        return self.gated(heads_BHTK, self.ask(self.weights(state), queries)), None


class GatedHeads(nn.Module):
    """N(heads) * sigmoid(answer W): the norm over all heads at once."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.n_head * model.d_head
        self.norm = nn.RMSNorm(width, eps=model.norm_eps)
        self.gate = nn.Linear(model.d_model, width, bias=False)

    def forward(self, heads_BHTK: Tensor, answers_BTD: Tensor) -> Tensor:
        """(B, H, T, K)."""
        joined = self.norm(heads_BHTK.transpose(1, 2).flatten(-2).to(self.norm.weight.dtype))
        gated = joined * self.gate(answers_BTD).sigmoid()
        return gated.unflatten(-1, (heads_BHTK.shape[1], -1)).transpose(1, 2)


class ShortConv(nn.Module):
    """Each feature of a token from the same feature of the last `size` tokens."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(size, width).uniform_(-(size**-0.5), size**-0.5))

    def forward(self, rows_BRD: Tensor) -> Tensor:
        """(B, R - size + 1, D); the last tap is the token's own."""
        size = self.taps.shape[0]
        count = rows_BRD.shape[1] - size + 1
        return sum(self.taps[i] * rows_BRD[:, i : i + count] for i in range(size))  # type: ignore[return-value]


def apply(memory: Sequence[Tensor], x_BTD: Tensor) -> Tensor:
    """(B, T, D) what the network says to each row."""
    for matrix in memory[:-1]:
        x_BTD = F.silu(x_BTD @ matrix)
    return x_BTD @ memory[-1]


def learn(weights: Weights, lesson: Lesson) -> tuple[Weights, Tensor]:
    """The network after one chunk, and the squared error (B, T) of each token before it. Float32 throughout."""
    with full_precision(lesson.k_BTD.device):
        inputs, deltas = gradients(weights.memory, lesson)
        error = deltas[-1].square().sum(dim=-1) / 4
        if len(weights.memory) > 1:
            deltas = [delta * _shortening(x, delta) for x, delta in zip(inputs, deltas, strict=True)]
        end = chunk_end(lesson, momentum=bool(weights.momentum))
        memory, momentum = [], []
        for i, (matrix, x, delta) in enumerate(zip(weights.memory, inputs, deltas, strict=True)):
            new = end.kept[:, None, None] * matrix - (x * end.memory_BT[..., None]).mT @ delta
            if weights.momentum:
                old = weights.momentum[i]
                new = new + end.carried[:, None, None] * old
                momentum.append(end.eta[:, None, None] * old - (x * end.momentum_BT[..., None]).mT @ delta)
            memory.append(new)
        return Weights(memory, momentum), error


def gradients(memory: Sequence[Tensor], lesson: Lesson) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient of each token's error by matrix i is the outer product of inputs[i] and deltas[i], (B, T, ...)."""
    inputs, raw = [lesson.k_BTD], []
    for matrix in memory:
        raw.append(inputs[-1] @ matrix)
        inputs.append(F.silu(raw[-1]))
    deltas = [2 * (raw[-1] - lesson.v_BTD)]
    for matrix, z in zip(reversed(memory[1:]), reversed(raw[:-1]), strict=True):
        gate = z.sigmoid()
        deltas.append(deltas[-1] @ matrix.mT * gate * (1 + z * (1 - gate)))
    return inputs[:-1], deltas[::-1]


def _shortening(x_BTI: Tensor, delta_BTO: Tensor) -> Tensor:
    """(B, T, 1) what makes the gradient x delta^T of each token no longer than 1."""
    length = x_BTI.norm(dim=-1, keepdim=True) * delta_BTO.norm(dim=-1, keepdim=True)
    return 1 / length.clamp(min=1)


class ChunkEnd(NamedTuple):
    """The weights with which everything enters the state at the end of a chunk."""

    kept: Tensor  # (B,) of the memory before, in the memory
    carried: Tensor  # (B,) of the momentum before, in the memory
    eta: Tensor  # (B,) of the momentum before, in the momentum
    memory_BT: Tensor  # of minus each token's gradient, in the memory
    momentum_BT: Tensor  # the same, in the momentum


def chunk_end(lesson: Lesson, *, momentum: bool) -> ChunkEnd:
    """The recurrence of momentum and memory over a chunk, unrolled into sums of logarithms: no power can overflow.

    Args:
        momentum: False: a step holds its own token only, as if all eta were 0.
    """
    eta, kept = lesson.log_eta_BT.cumsum(dim=1), lesson.log_kept_BT.cumsum(dim=1)
    size = eta.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=eta.device).tril()  # [t, i]: the step at t holds token i
    if not momentum:
        later = torch.eye(size, dtype=torch.bool, device=eta.device)
    passed = (eta[:, :, None] - eta[:, None, :]).masked_fill(~later, -torch.inf).exp()  # eta_{i+1} ... eta_t
    forward = (kept[:, -1:] - kept).exp() * lesson.real_BT  # of the step at t, in the memory at the end
    return ChunkEnd(
        kept=kept[:, -1].exp(),
        carried=(forward * eta.exp()).sum(dim=1),
        eta=eta[:, -1].exp(),
        memory_BT=(forward[:, None] @ passed)[:, 0] * lesson.theta_BT,
        momentum_BT=passed[:, -1] * lesson.theta_BT,
    )


def _unplaced(hidden_BSD: Tensor, bias: Tensor) -> Slots:
    """Slots without position."""
    count = hidden_BSD.shape[1]
    age = torch.ones(1, count, dtype=torch.int64, device=hidden_BSD.device)
    return Slots(hidden=hidden_BSD, keys_values=None, age=age, bias=bias, positioned=torch.zeros_like(age[0]).bool())


def _metrics(lesson: Lesson, error_BT: Tensor) -> dict[str, Tensor]:
    """Means over real tokens."""
    real = lesson.real_BT
    values = {
        "error": error_BT,
        "step": lesson.theta_BT,
        "momentum": lesson.log_eta_BT.exp(),
        "forgotten": 1 - lesson.log_kept_BT.exp(),
    }
    return {name: (value.detach() * real).sum() / real.sum().clamp(min=1) for name, value in values.items()}


VARIANTS: dict[str, type[Titans]] = {"mag": MemoryAsGate, "mal": MemoryAsLayer, "mac": MemoryAsContext}


@register(
    "titans",
    config=TitansConfig,
    paper="Behrouz et al. 2024, arXiv:2501.00663 (experimental: no official code exists)",
)
def build(config: TitansConfig, model: ModelConfig) -> MemoryPlan:
    """The chosen variant in each chosen layer."""
    return plan_per_layer(config, model, lambda: VARIANTS[config.variant](config, model))
