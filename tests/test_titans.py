"""Titans against the recurrence written down token by token, with gradients of the inner loss from autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import MODEL, STORY, Facts, fresh, moved, random_tap, started, written
from torch import Tensor
from torch.nn import functional as F

from txl_lightning.config import ConfigError, load
from txl_lightning.memory import titans
from txl_lightning.memory.titans import Lesson, Titans, TitansConfig, Weights, learn
from txl_lightning.testing import check_memory
from txl_lightning.types import State, Tap

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # the memory is float32


def make(**keys: Any) -> Titans:
    config = TitansConfig(**{"chunk_len": 3, "lr": 0.3, "expansion": 2, "persistent": 2, **keys})
    part = moved(titans.build(config, MODEL).layers[0]["titans"])
    assert isinstance(part, Titans)
    return part


class ByHand:
    """One lane of one layer. Streams are lists of all rows since the lane started."""

    def __init__(self, part: Titans) -> None:
        self.part = part
        self.memory = [matrix.detach().clone() for matrix in part.start]
        self.momentum = [torch.zeros_like(matrix) for matrix in self.memory]
        self.streams: dict[str, list[Tensor]] = {"asked": [], "learned": []}
        self.tokens_of_chunk: list[Any] = []

    def made(self, stream: str, linear: str, conv: str) -> Tensor:
        """silu(conv(W N(x))) of the newest row; rows before the first are zeros."""
        part = self.part
        if conv not in part.convs:
            return F.silu(getattr(part, linear)(part.norm(self.streams[stream][-1])))
        taps, total = part.convs[conv].taps, torch.zeros(MODEL.d_model, dtype=torch.float64)
        for back in range(len(taps)):
            rows = self.streams[stream]
            row = rows[-1 - back] if back < len(rows) else torch.zeros(MODEL.d_model, dtype=torch.float64)
            total = total + taps[len(taps) - 1 - back] * getattr(part, linear)(part.norm(row))
        return F.silu(total)

    def says(self, memory: list[Tensor], x: Tensor) -> Tensor:
        for index, matrix in enumerate(memory):
            x = matrix.T @ x
            if index < len(memory) - 1:
                x = x * torch.sigmoid(x)
        return x

    def answer(self, query: Tensor) -> Tensor:
        return self.part.answer_norm(self.says(self.memory, query / query.norm()))

    def ask(self, row: Tensor) -> Tensor:
        self.streams["asked"].append(row)
        return self.answer(self.made("asked", "query", "q"))

    def learn(self, rows: list[Tensor]) -> None:
        """One chunk: every gradient at the weights it starts with, then the recurrence, token by token."""
        at_start = [matrix.clone() for matrix in self.memory]
        for row in rows:
            self.streams["learned"].append(row)
            k, v = self.made("learned", "key", "k"), self.made("learned", "value", "v")
            rate = {name: linear(self.part.norm(row)).sigmoid() for name, linear in self.part.rates.items()}
            weights = [matrix.detach().requires_grad_() for matrix in at_start]
            loss = (self.says(weights, (k / k.norm()).detach()) - v.detach()).square().sum()
            for i, gradient in enumerate(torch.autograd.grad(loss, weights)):
                if len(weights) > 1:
                    gradient = gradient / max(1.0, gradient.square().sum().sqrt().item())
                step = -0.3 * rate["theta"] * (1 - rate["eta"] if "eta" in rate else 1) * gradient
                self.momentum[i] = rate["eta"] * self.momentum[i] + step if "eta" in rate else step
                kept = 1 - rate["alpha"] if "alpha" in rate else 1.0
                self.memory[i] = (kept * self.memory[i] + self.momentum[i]).detach()


def gated(part: Any, heads: Tensor, answer: Tensor) -> Tensor:
    """Heads (H, K) of one token behind the gate."""
    joined = part.gated.norm(heads.flatten())
    return (joined * (part.gated.gate.weight @ answer).sigmoid()).view_as(heads)


def check_state(state: State, lane: int, by_hand: ByHand) -> None:
    for i, matrix in enumerate(by_hand.memory):
        torch.testing.assert_close(state[f"memory{i}"][lane].double(), matrix, **CLOSE)
        if by_hand.part.config.momentum:
            torch.testing.assert_close(state[f"momentum{i}"][lane].double(), by_hand.momentum[i], **CLOSE)


def asked(part: Titans, given: State, tap: Tap, facts: Facts, heads: Tensor) -> list[Tensor]:
    """Everything a variant reads in one segment."""
    variant, segment = part.config.variant, facts.segment()
    if variant == "mal":
        assert tap.before_BTD is not None
        return [part.residual(given, tap.before_BTD, segment)]
    mixed, extra = part.side(given, tap, heads, segment)
    assert extra is None
    if variant == "mag":
        return [mixed]
    slots = part.slots(given, tap.x_BTD, segment)
    assert slots is not None and slots.hidden is not None
    return [mixed, slots.hidden]


def asked_by_hand(part: Any, by_hand: ByHand, tap: Tap, lane: int, t: int, heads: Tensor) -> list[Tensor]:
    """The same of one token of one lane."""
    variant = part.config.variant
    if variant == "mal":
        assert tap.before_BTD is not None
        row = tap.before_BTD[lane, t]
        return [row + part.out.weight @ by_hand.ask(row)]
    if variant == "mag":
        return [gated(part, heads[lane, :, t], by_hand.ask(tap.h_BTD[lane, t]))]
    query = part.heads_query.weight @ heads[lane, :, t].flatten()
    return [gated(part, heads[lane, :, t], by_hand.answer(query)), by_hand.ask(tap.x_BTD[lane, t])]


def stream(variant: str, tap: Tap) -> Tensor:
    rows = {"mag": tap.h_BTD, "mal": tap.before_BTD, "mac": tap.y_BTD}[variant]
    assert rows is not None
    return rows


@pytest.mark.parametrize("variant", ["mag", "mal", "mac"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"depth": 2, "conv": 2, "chunk_len": 8, "persistent": 0},
        {"depth": 3, "momentum": False, "chunk_len": 1},
        {"forgetting": False, "conv": 1, "chunk_len": 4},
        {"momentum": False, "forgetting": False, "gradient": "carry"},
    ],
)
def test_the_memory_learns_and_answers_as_the_recurrence_says(variant: str, keys: dict[str, Any]) -> None:
    part = make(variant=variant, **keys)
    state, lanes, size = fresh(part), [ByHand(part) for _ in range(3)], part.config.chunk_len
    n_slot = part.config.persistent
    with torch.no_grad():
        for number, facts in enumerate(STORY):
            tap, heads = random_tap(number), torch.randn(3, 2, 4, 4, dtype=torch.float64)
            found = asked(part, started(part, state, facts), tap, facts, heads)
            state = written(part, state, tap, facts)
            for lane, (reset, length) in enumerate(zip(*facts, strict=True)):
                if reset and length:
                    lanes[lane] = ByHand(part)
                by_hand, rows = lanes[lane], stream(variant, tap)[lane]
                answers = []
                for start in range(0, length, size):
                    end = min(start + size, length)
                    if variant == "mag":  # reads what the chunks before wrote
                        answers += [asked_by_hand(part, by_hand, tap, lane, t, heads) for t in range(start, end)]
                    elif start == 0:  # reads what the segments before wrote
                        answers = [asked_by_hand(part, by_hand, tap, lane, t, heads) for t in range(length)]
                    with torch.enable_grad():
                        by_hand.learn(list(rows[start:end]))
                for t, answer in enumerate(answers):
                    read = [found[0][lane, t] if variant == "mal" else found[0][lane, :, t]]
                    read += [slot[lane, n_slot + t] for slot in found[1:]]
                    for ours, theirs in zip(read, answer, strict=True):
                        torch.testing.assert_close(ours, theirs, **CLOSE)
                check_state(state, lane, by_hand)


def lesson(k: list[float], v: list[float], *, theta: float, eta: float, alpha: float) -> Lesson:
    """Tokens of width 1."""
    ones = torch.ones(1, len(k), dtype=torch.float64)
    return Lesson(
        k_BTD=torch.tensor(k, dtype=torch.float64)[None, :, None],
        v_BTD=torch.tensor(v, dtype=torch.float64)[None, :, None],
        theta_BT=theta * ones,
        log_eta_BT=torch.log(eta * ones),
        log_kept_BT=torch.log((1 - alpha) * ones),
        real_BT=ones,
    )


def test_one_chunk_by_hand() -> None:
    """M = 0, two tokens k = v = 1: gradients -2 and -2. S: 0.2, then 0.1 + 0.2; M: 0.2, then 0.9 0.2 + 0.3."""
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    both = lesson([1, 1], [1, 1], theta=0.1, eta=0.5, alpha=0.1)
    weights, error = learn(Weights([zero], [zero]), both)
    assert weights.momentum[0].item() == pytest.approx(0.3)
    assert weights.memory[0].item() == pytest.approx(0.48)
    assert error.tolist() == [[1.0, 1.0]]
    alone = Weights([zero], [zero])
    for chunk in both.chunks(1):  # token by token the second gradient is -2 (1 - 0.2)
        alone, _ = learn(alone, chunk)
    assert alone.momentum[0].item() == pytest.approx(0.5 * 0.2 + 0.16)
    assert alone.memory[0].item() == pytest.approx(0.9 * 0.2 + 0.26)


def test_without_momentum_a_step_is_its_own_token() -> None:
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    weights, _ = learn(Weights([zero], []), lesson([1, 1], [1, 3], theta=0.1, eta=0.5, alpha=0.5))
    assert weights.memory[0].item() == pytest.approx(0.5 * 0.2 + 0.6)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_outer_loss_sees_through_the_inner_steps(depth: int) -> None:
    """Numerical second order: the end of a chunk by weights, keys, values and rates."""
    torch.manual_seed(0)
    shapes = [(2, 3), (3, 2)] if depth == 2 else [(2, 2)]
    matrices = [torch.randn(1, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    momentum = [torch.randn_like(matrix) for matrix in matrices]
    rows = [torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    logs = [(-torch.rand(1, 3, dtype=torch.float64)).requires_grad_() for _ in range(3)]

    def end(*inputs: Tensor) -> tuple[Tensor, ...]:
        memory, (k, v, theta, eta, kept) = list(inputs[:depth]), inputs[depth:]
        taught = Lesson(k, v, theta.exp(), eta, kept, torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64))
        weights, _ = learn(Weights(memory, momentum), taught)
        return (*weights.memory, *weights.momentum)

    assert torch.autograd.gradcheck(end, (*matrices, *rows, *logs))


def test_learning_brings_the_error_down() -> None:
    """The same eight pairs over and over: the memory knows them in the end."""
    torch.manual_seed(0)
    k, v = F.normalize(torch.randn(1, 8, 16), dim=-1), torch.randn(1, 8, 16)
    rates = [torch.full((1, 8), x) for x in (0.1, -0.7, 0.0, 1.0)]
    weights = Weights([torch.zeros(1, 16, 16)], [torch.zeros(1, 16, 16)])
    errors = []
    for _ in range(60):
        weights, error = learn(weights, Lesson(k, v, *rates))
        errors.append(error.mean().item())
    assert errors[-1] < 0.05 * errors[0]


def test_stop_keeps_no_graph_but_the_chunks_of_a_segment_do() -> None:
    part = make(variant="mag", chunk_len=2, gradient="stop")
    tap, heads = random_tap(0), torch.randn(3, 2, 4, 4, dtype=torch.float64)
    state = written(part, fresh(part), tap, STORY[0])
    assert not any(tensor.requires_grad for tensor in state.values())
    mixed, _ = part.side(state, random_tap(1), heads, Facts([False] * 3, [4, 4, 4]).segment())
    written_by = [part.key.weight, part.value.weight, *(rate.weight for rate in part.rates.values())]
    first, second = (
        torch.autograd.grad(mixed[:, :, half].sum(), written_by, allow_unused=True, retain_graph=True)
        for half in (slice(0, 2), slice(2, 4))
    )
    assert not any(grad is not None and grad.any() for grad in first)
    assert all(grad is not None and grad.any() for grad in second)
    carried = written(make(variant="mag", gradient="carry"), fresh(part), tap, STORY[0])
    assert carried["memory0"].requires_grad and carried["momentum0"].requires_grad


def test_persistent_slots_are_the_same_for_every_text_and_have_no_position() -> None:
    part = make(variant="mag", persistent=3)
    slots = part.slots(fresh(part), random_tap(0).x_BTD, STORY[0].segment())
    assert slots is not None and slots.hidden is not None and slots.positioned is not None
    assert part.persistent is not None
    assert torch.equal(slots.hidden, part.persistent.expand(3, -1, -1))
    assert not slots.positioned.any() and not slots.bias.any()
    assert make(variant="mal", persistent=0).slots(fresh(part), random_tap(0).x_BTD, STORY[0].segment()) is None


@pytest.mark.parametrize("persistent", [0, 2])
def test_a_token_sees_no_answer_to_a_later_one(persistent: int) -> None:
    part = make(variant="mac", persistent=persistent)
    slots = part.slots(fresh(part), random_tap(0).x_BTD, STORY[0].segment())
    assert slots is not None
    visible = [[True] * (persistent + t + 1) + [False] * (3 - t) for t in range(4)]
    assert (slots.bias[0, 0] == 0).tolist() == visible


@pytest.mark.parametrize("variant", ["mag", "mal", "mac"])
def test_absolute_positions_do_not_stand_in_its_way(variant: str) -> None:
    """No slot of its has a position, so none is asked for one."""
    load(["memory=titans", f"memory.variant={variant}", "model.position=absolute"])
    check_memory("titans", variant=variant, chunk_len=4, laws=[1, 2, 6, 7, 11], compiled=False,
                 model={"position": "absolute_per_layer", "max_distance": 9})  # fmt: skip


@pytest.mark.parametrize("momentum", [True, False])
def test_no_token_moves_a_perceptron_further_than_its_rate(momentum: bool) -> None:
    """Values a thousand times too large: without the limit the weights of the second chunk would be."""
    torch.manual_seed(0)
    shapes = [(4, 8), (8, 4)]
    weights = Weights([torch.randn(1, *shape) for shape in shapes], [torch.zeros(1, *shape) for shape in shapes])
    weights = weights if momentum else weights._replace(momentum=[])
    k, v = F.normalize(torch.randn(1, 6, 4), dim=-1), 1000 * torch.randn(1, 6, 4)
    theta, eta = torch.full((1, 6), 0.1), torch.full((1, 6), 0.5)
    theta = theta * (1 - eta) if momentum else theta  # as `lesson` makes it
    taught = Lesson(k, v, theta, eta.log(), torch.zeros(1, 6), torch.ones(1, 6))
    for _ in range(3):
        before, (weights, error) = weights, learn(weights, taught)
        for old, new in zip(before.memory, weights.memory, strict=True):
            assert (new - old).norm() <= 6 * 0.1 * (1 + 1e-5)
    assert error.isfinite().all()


def test_two_side_reads_in_one_layer_collide_but_mal_has_none() -> None:
    two = "memory.parts=[{name: knn, layers: all}, {name: titans, variant: %s}]"
    load(["memory=mix", two % "mal"])
    with pytest.raises(ConfigError, match="both read beside attention in layer 0"):
        load(["memory=mix", two % "mag"])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["memory.gradient=stop", "memory.chunk_len=64"],
            "memory.gradient=stop: needs memory.chunk_len < data.segment_len=64: no loss would teach the memory to "
            "write; lower memory.chunk_len, or use memory.gradient=carry",
        ),
        (
            ["memory.gradient=stop", "memory.variant=mac"],
            "memory.gradient=stop: mac reads what earlier segments wrote, so no loss would teach it to write; use "
            "memory.gradient=carry or memory.variant=mag",
        ),
        (["memory.lr=0"], "memory.lr=0.0: must be > 0; "),
    ],
)
def test_what_cannot_work_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["memory=titans", "data.segment_len=64", *keys])
    assert str(caught.value).startswith(said)
