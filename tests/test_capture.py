"""A recorded step against the plain one, on a CPU: `tests/recorded.py` stands in for the CUDA graph, all else is what
runs on a GPU, where the host may not look at values either."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.recorded import HostReads, Refused, StandIn, place, tensors
from tests.tiny import tiny_config
from txl_lightning import TransformerXL, sampling
from txl_lightning.config import Config
from txl_lightning.data.vocab import ByteVocab
from txl_lightning.generation import Session
from txl_lightning.memory import base as memory_base
from txl_lightning.memory.base import MemoryPlan
from txl_lightning.memory.cache import Cache
from txl_lightning.model import capture
from txl_lightning.model.partial import Partial
from txl_lightning.sampling import Choice, SamplingRule
from txl_lightning.types import Segment, State, Tap

T = 4
STEPS = 5 * T + 4
"""Tokens that `read_unevenly` reads one by one."""
CACHE = {"name": "cache", "mem_len": 7}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of memory and of model
    "none": ({"name": "none"}, {}),
    "cache": (CACHE, {}),
    "clamped": ({"name": "cache", "mem_len": 5}, {"clamp_len": 6}),
    "zeros": ({**CACHE, "cold": "zeros"}, {"pre_norm": True}),
    "reuse": ({**CACHE, "reuse_len": 3}, {}),
    "same_length": (CACHE, {"same_length": True}),
    "window": ({"name": "window", "window": 6}, {}),
    "sinks": ({"name": "window", "window": 6, "sinks": 2}, {}),
    "compressive": ({"name": "compressive", "mem_len": 8, "compressed_len": 4, "rate": 2}, {}),
    "most_used": (
        {"name": "compressive", "mem_len": 6, "compressed_len": 4, "rate": 2, "function": "most_used", "loss": "none"},
        {},
    ),
    "tokens": ({"name": "tokens", "n_tokens": 3}, {}),
    "associative": ({"name": "associative", "rule": "delta"}, {}),
    "associative_tokens": ({"name": "associative_tokens", "n_tokens": 3, "d_mem": 4, "nu": 2}, {}),
    "knn": ({"name": "knn", "mem_len": 10, "top_k": 3}, {}),
    "expire": ({"name": "expire", "mem_len": 9, "max_span": 8.0, "ramp": 4.0}, {}),
    "mal": ({"name": "titans", "variant": "mal", "chunk_len": 3}, {}),
    "mix": (
        {
            "name": "mix",
            "parts": [
                {"name": "tokens", "n_tokens": 2, "read_slots": True},
                {"name": "cache", "layers": [0, 1], "mem_len": 9},
                {"name": "expire", "layers": [1], "mem_len": 6, "max_span": 5.0},
                {"name": "knn", "layers": [1], "mem_len": 12, "top_k": 2},
            ],
        },
        {},
    ),
    "shaw": (CACHE, {"position": "shaw", "max_distance": 9}),
    "rotary": ({"name": "window", "window": 6}, {"position": "rotary"}),
    "content": (CACHE, {"position": "none"}),
    "modern": (
        CACHE,
        {"pre_norm": True, "norm": "rmsnorm", "ffn": "swiglu", "qk_norm": True, "n_kv_head": 1, "final_norm": True},
    ),
    "clusters": (CACHE, {"cutoffs": [40, 120], "div_val": 2}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_config(tmp_path_factory.mktemp("base"), f"data.segment_len={T}").to_dict()


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """What was recorded, while this CPU is like a GPU: it has graphs, and nothing looks at values."""
    made: list[StandIn] = []

    def make(device: torch.device) -> StandIn:
        made.append(StandIn(device))
        return made[-1]

    monkeypatch.setitem(capture.RECORDERS, "cpu", make)
    monkeypatch.setattr(memory_base, "on_hand", lambda mask: False)
    return made


def built(base: dict[str, Any], name: str, *, reset: str = "epoch", plan: MemoryPlan | None = None) -> TransformerXL:
    """A model far from uniform predictions, in float64."""
    memory, keys = CASES[name]
    torch.manual_seed(0)
    config = {**base, "memory": {**memory, "reset": reset}, "model": {**base["model"], **keys}}
    made = TransformerXL(Config.from_dict(config), plan=plan).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)
    return made


def plainly(run: Callable[[], Any]) -> Any:
    """What the CPU does when nothing is recorded and values may be looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(capture.RECORDERS, "cpu", raising=False)
        patch.setattr(memory_base, "on_hand", ON_HAND)
        return run()


ON_HAND = memory_base.on_hand


def read_unevenly(model: TransformerXL, *, separator: int | None = None) -> list[Tensor]:
    """Three lanes with prompts of other lengths, one of which stands by at times: what each said of its next token."""
    text = torch.randint(1, 257, (3, 5 * T + 9), generator=torch.Generator().manual_seed(1))
    text[torch.tensor([0, 0, 1, 2]), torch.tensor([6, 15, 9, 12])] = 0
    session, read, found = Session(model, lanes=3, separator=separator), [5, 1, 3], []
    session.feed([lane[:n].tolist() for lane, n in zip(text, read, strict=True)])
    for step in range(STEPS - 1):  # one stood behind the first segment
        on = [True, step % 3 != 1, step % 7 != 6]
        session.feed([[int(text[lane, at])] if on[lane] else [] for lane, at in enumerate(read)])
        read = [at + now for at, now in zip(read, on, strict=True)]
        assert session.log_probs_BV is not None
        found.append(session.log_probs_BV.clone())
    return found + list(session.state.values())


def assert_alike(found: list[Tensor], known: list[Tensor]) -> None:
    for one, two in zip(found, known, strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_step_is_the_plain_one(name: str, base: dict[str, Any], recorders: list[StandIn]) -> None:
    model = built(base, name)
    known = plainly(lambda: read_unevenly(model))
    assert_alike(read_unevenly(model), known)
    assert [recorder.replays for recorder in recorders] == [STEPS]


@pytest.mark.parametrize("reset", ["segment", "document"])
@pytest.mark.parametrize("name", ["none", "cache", "window", "expire", "rotary", "content"])
def test_memory_starts_anew_in_a_recorded_step(
    name: str, reset: str, base: dict[str, Any], recorders: list[StandIn]
) -> None:
    model = built(base, name, reset=reset)
    known = plainly(lambda: read_unevenly(model, separator=0))
    assert_alike(read_unevenly(model, separator=0), known)
    assert [recorder.replays for recorder in recorders] == [STEPS]


class Beside(Cache):
    """A cache that is read beside attention too, where it is told of its own slots."""

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, None]:
        assert tap.slot_k_BHSK is not None and tap.slot_v_BHSK is not None
        scores = (tap.q_BHTK @ tap.slot_k_BHSK.mT).tanh()
        return heads_BHTK + scores @ tap.slot_v_BHSK / 8, None


def test_what_is_read_beside_attention_stays_where_it_is(base: dict[str, Any], recorders: list[StandIn]) -> None:
    model = built(base, "cache", plan=MemoryPlan(layers=[{"beside": Beside(**SIZES)}, {"cache": Cache(**SIZES)}]))
    known = plainly(lambda: read_unevenly(model))
    assert_alike(read_unevenly(model), known)
    assert [recorder.replays for recorder in recorders] == [STEPS]


SIZES = {"mem_len": 5, "d_model": 32, "n_head": 2, "d_head": 16}


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_reads_never_moves(
    name: str, base: dict[str, Any], recorders: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded anew for every third token, over several segments, writes and (where there can be) resets inside of
    them: always from the same places."""
    read: list[set[int]] = []

    class Watched(capture.Captured):
        def __call__(self, given: Any) -> Tensor:
            assert isinstance(self.recorder, StandIn)
            read.append(self.recorder.read - {place(tensor) for tensor in self.inputs})
            return super().__call__(given)

    def run(graphs: capture.Graphs, *args: Any, **kwargs: Any) -> Tensor | None:
        if len(read) % 3 == 0:
            graphs.drop()
        return record(graphs, *args, **kwargs)

    record = capture.Graphs.run
    monkeypatch.setattr(capture, "Captured", Watched)
    monkeypatch.setattr(capture.Graphs, "run", run)
    read_unevenly(built(base, name, reset="epoch" if name in NO_DOCUMENTS else "document"), separator=0)
    assert len(read) == STEPS and len(recorders) == STEPS // 3
    assert all(places == read[0] for places in read)


NO_DOCUMENTS = {"zeros", "reuse", "most_used", "compressive", "tokens", "associative", "knn"}
NO_DOCUMENTS |= {"associative_tokens", "mal", "mix"}
"""Memories that cannot start anew inside a segment, or are then not read token by token."""


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of the host and of the device together; single numbers are no tensors there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {tensor.device.type for tensor in tensors((args, kwargs)) if tensor.dim()}
        assert len(devices) <= 1, f"{func} on {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_a_token_needs_no_value_and_nothing_of_the_host(name: str, base: dict[str, Any]) -> None:
    """On `meta`, which stands for a GPU and has no values at all: segments, writes and resets too."""
    reset = "epoch" if name in NO_DOCUMENTS else "document"
    model = built(base, name, reset=reset).to("meta")
    state = model.init_state(2, form="projected")
    partial = model.begin(state, segment_len=T, reset=reset, capture=False)
    with torch.no_grad(), OneDevice():
        for step in range(3 * T):
            token_B = torch.zeros(2, dtype=torch.int64, device="meta")
            starts = [reset == "document" and step % 5 == 1, False]
            log_probs, state = model.step(
                token_B, state, partial, active=[True, step % 3 > 0], starts=starts, log_probs=True
            )
    assert log_probs.shape == (2, 257) and partial.count == [0, 0]


# what makes a recording useless


def exchange(model: TransformerXL, how: str) -> None:
    with torch.no_grad():
        weights = [layer.attention.qkv.weight for layer in model.blocks()]
        if how == "in place":
            for weight in weights:
                weight.mul_(1.1)
        if how == "distances in place":
            for layer in model.blocks():
                layer.attention.position.r.weight.mul_(1.1)
        if how == "loaded":
            model.load_state_dict({name: tensor * 1.05 for name, tensor in model.state_dict().items()})
        if how == "assigned":
            new = {name: tensor * 1.05 for name, tensor in model.state_dict().items()}
            model.load_state_dict(new, assign=True)
        if how == "data":
            for weight in weights:
                weight.data = weight.data * 1.1
        if how == "moved":
            model.float().double()
        if how == "module":
            new = copy.deepcopy(model.blocks()[1].feed_forward)
            for weight in new.parameters():
                weight.mul_(1.1)
            model.blocks()[1].feed_forward = new


@pytest.mark.parametrize(
    ("how", "at", "recordings"),
    [
        *(("in place", 2 * T, 1), ("in place", 2 * T + 2, 1)),
        *(("distances in place", 2 * T, 2), ("distances in place", 2 * T + 2, 2)),
        *(("loaded", 2 * T, 2), ("loaded", 2 * T + 2, 2)),  # in place too, distances among them
        *(("assigned", 2 * T, 2), ("assigned", 2 * T + 2, 3)),
        *(("data", 2 * T, 2), ("data", 2 * T + 2, 2)),
        *(("moved", 2 * T, 2), ("moved", 2 * T + 2, 3)),
        ("module", 2 * T, 2),  # inside a segment it is noticed at its end
    ],
)
def test_other_weights_are_read(
    how: str, at: int, recordings: int, base: dict[str, Any], recorders: list[StandIn]
) -> None:
    """From the next token on, and what they make of distances from the next segment on."""

    def read() -> list[Tensor]:
        model, found = built(base, "cache"), []
        session = Session(model, lanes=2)
        for step in range(5 * T):
            if step == at:
                exchange(model, how)
            session.feed([[step], [step + 100]])
            found.append(session.log_probs_BV)
        return found

    known = plainly(read)
    assert_alike(read(), known)
    assert len(recorders) == recordings


def test_no_other_weight_comes_to_lie_where_one_was() -> None:
    module = torch.nn.Linear(3, 3)
    places, before = capture.Places(module), StorageWeakRef(module.weight.untyped_storage())
    module.weight.data = torch.zeros(1)
    assert places.moved() and not before.expired()
    del places
    assert before.expired()


@pytest.mark.parametrize(("name", "turns"), [("cache", T), ("content", 3)])  # a table is of one type for a segment
def test_autocast_training_and_gradients_are_no_part_of_a_recording(
    name: str, turns: int, base: dict[str, Any], recorders: list[StandIn]
) -> None:
    def read(*, recorded: bool) -> list[Tensor]:
        model = built(base, name).float()
        state = model.init_state(2, form="projected")
        partial, found = model.begin(state, segment_len=T, capture=recorded), []
        torch.manual_seed(5)  # of dropout
        for step in range(6 * T):
            half = torch.autocast("cpu", dtype=torch.bfloat16) if step // turns % 2 else nullcontext()
            model.train(step % 8 == 5)
            if step == 3 * T + 1:
                exchange(model, "in place")
            with half, torch.set_grad_enabled(step == 2 * T - 1):
                out, state = model.step(torch.tensor([step, step + 50]), state, partial)
            state = {key: tensor.detach() for key, tensor in state.items()}
            found.append(out.detach())
        return found

    known = read(recorded=False)
    for one, two in zip(read(recorded=True), known, strict=True):
        assert torch.equal(one, two)
    plain = sum(step % 8 == 5 or step == 2 * T - 1 for step in range(6 * T))
    assert sum(recorder.replays for recorder in recorders) == 6 * T - plain


def test_hidden_states_are_recorded_too_and_are_the_callers_to_keep(
    base: dict[str, Any], recorders: list[StandIn]
) -> None:
    model = built(base, "cache")

    def read(**more: Any) -> list[Tensor]:
        state = model.init_state(2, form="projected")
        partial, found = model.begin(state, segment_len=T), []
        with torch.no_grad():
            for step in range(3 * T):
                out, state = model.step(torch.tensor([step, step + 50]), state, partial, **more)
                found.append(out)
        return found

    hidden = plainly(read)
    assert_alike(read(), hidden)
    assert_alike(read(log_probs=True), [model.log_probs(row[:, None])[:, 0].detach() for row in hidden])


# what is not recorded


class Looking(Cache):
    """A memory that lets a value decide what is computed."""

    def side(self, state: State, tap: Tap, heads_BHTK: Tensor, segment: Segment) -> tuple[Tensor, None]:
        return (heads_BHTK * 2 if float(tap.q_BHTK.sum()) > 0 else heads_BHTK), None


def test_what_cannot_be_recorded_is_read_plainly_and_said_once(
    base: dict[str, Any], recorders: list[StandIn], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_said", set())
    model = built(base, "cache", plan=MemoryPlan(layers=[{"looking": Looking(**SIZES)}, {}]))
    known = plainly(lambda: read_unevenly(model))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_alike(read_unevenly(model), known)
    assert len(recorders) == 2 and not any(recorder.replays for recorder in recorders)
    assert [r.message for r in caplog.records if "recorded" in r.message] == [
        "tokens are read without a recorded graph, which takes longer: Tensor.__float__ waits for the device"
    ]


def test_it_is_on_where_there_are_graphs_unless_it_is_turned_off(
    base: dict[str, Any], recorders: list[StandIn]
) -> None:
    model = built(base, "none")
    for keywords, expected in (({}, 1), ({"capture": False}, 1), ({"capture": True}, 2)):
        session = Session(model, **keywords)
        session.feed([1])
        session.feed([2])
        assert len(recorders) == expected
    with pytest.raises(ValueError, match="nothing can be recorded on cpu, only on cuda"):
        plainly(lambda: Session(model, capture=True))


# generation


@pytest.mark.parametrize("name", ["cache", "tokens", "mix"])
@pytest.mark.parametrize(
    "rule",
    [
        SamplingRule(temperature=0),
        SamplingRule(temperature=1.5, top_k=20),
        SamplingRule(top_p=0.9, repetition_penalty=1.3),
    ],
)
def test_what_is_said_is_the_same(
    name: str, rule: SamplingRule, base: dict[str, Any], recorders: list[StandIn]
) -> None:
    model = built(base, name)

    def say() -> list[list[Choice]]:
        session = Session(model, lanes=3, vocab=ByteVocab())
        session.feed(["Once upon", "a", "time"])
        generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
        return session.draw(6 * T, rule=rule, generators=generators, stop=["e", "th"])

    known = plainly(say)
    for one, two in zip(say(), known, strict=True):
        assert [choice.token for choice in one] == [choice.token for choice in two]
        assert [choice.log_prob for choice in one] == pytest.approx([choice.log_prob for choice in two], abs=1e-10)
    assert recorders[0].replays


class Reads(HostReads):
    """Counts them instead, and what is sent to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.sent = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sent += func is torch.tensor
        return super().__torch_function__(func, types, args, kwargs)

    def refuse(self, name: str) -> None:
        self.count += 1


@pytest.mark.parametrize("name", ["cache", "window", "knn", "mal"])
@pytest.mark.parametrize(
    ("rule", "sent"),
    [
        (SamplingRule(temperature=0), 1),  # the tokens
        (SamplingRule(top_k=5, top_p=0.8), 2),  # and what chance drew
        (SamplingRule(repetition_penalty=1.2), 4),  # and what is penalised in each lane
    ],
)
def test_a_token_waits_for_the_device_once(
    name: str,
    rule: SamplingRule,
    sent: int,
    base: dict[str, Any],
    recorders: list[StandIn],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole segments, their writes among them; the numbers that chance draws are the host's own."""
    monkeypatch.setattr(sampling, "stays", lambda log_probs: True)
    monkeypatch.setattr(sampling, "chance", lambda generators: [0.5 for _ in generators])
    session = Session(built(base, name), lanes=2)
    session.feed([[1, 2], [3, 4]])
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    with Reads() as reads:
        said = session.draw(4 * T, rule=rule, generators=generators)
    assert reads.count == len(said[0]) == 4 * T
    assert reads.sent == sent * 4 * T


class Launches(TorchDispatchMode):
    """Counts operations, but those of a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not StandIn.replaying
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["cache", "mix"])
def test_few_operations_of_a_token_are_outside_of_the_recording(
    name: str, base: dict[str, Any], recorders: list[StandIn]
) -> None:
    """As many at every token inside a segment; that is also how many tensors can be made."""
    session, counts = Session(built(base, name), lanes=2), []
    session.feed([[1], [2]])
    for step in range(1, 4 * T):
        with Launches() as launches:
            session.feed([[step], [step]])
        counts.append((step % T, launches.count))
    inside = {count for place, count in counts if 0 < place < T - 1}
    assert len(inside) == 1 and inside.pop() <= 8


# the stand-in itself


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * 2 if (x > 0).any() else x,
        lambda x: x + x.new_tensor(x.tolist()),
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x[x > 0].sum(),
        lambda x: x[(x > 0).nonzero()[:, 0]].sum(),
        lambda x: x.masked_select(x > 0).sum(),
        lambda x: x + int(x.argmax()),
        lambda x: x + x.cpu(),
    ],
)
def test_the_stand_in_refuses_what_a_graph_would(run: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.0, -1.0])
    with pytest.raises(Refused):
        StandIn(x.device).record(lambda: run(x))


def test_the_stand_in_does_what_it_did_and_nothing_else() -> None:
    x, total, weight, host = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.nn.Parameter(torch.ones(2)), [3]

    def run() -> Tensor:
        total[:1].add_(x[:1])
        return (x * weight).view(2, 1) * host[0]

    recorder = StandIn(x.device)
    with torch.no_grad():
        output = recorder.record(run)
        assert total.tolist() == [2, 0] and output.isnan().all()  # warmed up twice
        host[0], weight.data = 5, torch.zeros(2)
        x.copy_(torch.tensor([10.0, 20.0]))
        recorder.replay()
    assert total.tolist() == [12, 0] and output.flatten().tolist() == [30, 60]


# a real one


class Cuda:
    """What the recorder calls of `torch.cuda`, without a device: streams by name, and a capture that fails at its end.

    Attributes:
        stream: the current one.
        waits: which stream waited for which.
        mode: what torch does about waiting for the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
        self.stream, self.mode, self.captures, self.fails = "here", 0, 0, fails
        self.waits: list[tuple[str, str]] = []
        own: dict[str, Any] = {
            "device": lambda _: nullcontext(),
            "current_stream": lambda: self.named(self.stream),
            "Stream": lambda _: self.named("aside"),
            "set_stream": lambda stream: setattr(self, "stream", stream.name),
            "stream": self.on,
            "CUDAGraph": object,
            "graph": self.capture,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
        }
        for name, stand_in in own.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def named(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.waits.append((name, other.name)))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    @contextmanager
    def capture(self, graph: Any, *, stream: Any, **_: Any) -> Iterator[None]:
        self.captures, self.stream = self.captures + 1, stream.name
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.stream = "here"


@pytest.mark.parametrize("how", ["waits", "fails", "works"])
def test_a_failed_recording_leaves_nothing_behind(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, fails=how == "fails")
    capture._side_stream.cache_clear()

    def run() -> Tensor:
        if how == "waits" and cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    refused = nullcontext() if how == "works" else pytest.raises(RuntimeError, match="operation")
    with refused:
        capture.CudaRecorder(torch.device("cuda", 0)).record(run)
    capture._side_stream.cache_clear()
    assert cuda.captures == (how != "waits")  # torch's generator does not get over a capture that fails
    assert (cuda.stream, cuda.mode) == ("here", 0)
    assert cuda.waits == [("aside", "here"), ("here", "aside")]


@pytest.fixture
def on_cuda() -> Iterator[torch.device]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # torch has no deterministic running sum on CUDA
    yield torch.device("cuda")
    torch.use_deterministic_algorithms(before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_graph_gives_what_the_plain_step_gives(
    name: str, base: dict[str, Any], on_cuda: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {**base, "model": {**base["model"], "attention": "shift"}}  # in float64 auto compiles, for each case anew
    model, said = built(plain, name).to(on_cuda), []
    for wanted in (True, False):
        session = Session(model, lanes=3, capture=wanted)
        session.feed([[1, 2, 3, 4, 5], [6], [7, 8]])
        generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
        drawn = session.draw(5 * T, rule=SamplingRule(top_k=30), generators=generators)
        said.append(drawn)
        partial = session.partial
        assert isinstance(partial, Partial) and bool(partial.graphs._kinds) == wanted
    assert not [record for record in caplog.records if "recorded" in record.message]
    for one, two in zip(*said, strict=True):
        assert [choice.token for choice in one] == [choice.token for choice in two]
        assert [choice.log_prob for choice in one] == pytest.approx([choice.log_prob for choice in two], abs=1e-9)


@pytest.mark.gpu
def test_what_waits_is_not_captured_and_dropout_goes_on(on_cuda: torch.device) -> None:
    weight, before = torch.ones(4, 4, device=on_cuda), torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="synchronizing"):
        capture.CudaRecorder(weight.device).record(lambda: weight * float(weight.sum()))
    assert torch.cuda.current_stream() == before and torch.cuda.get_sync_debug_mode() == 0
    assert torch.nn.functional.dropout(weight, 0.5).isfinite().all()
