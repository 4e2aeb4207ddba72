"""Sampling carries the memory exactly as evaluation does."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from txl_lightning import TransformerXL, registry
from txl_lightning.config import Config
from txl_lightning.data.lanes import LaneLoader
from txl_lightning.data.vocab import ByteVocab
from txl_lightning.generation import Session
from txl_lightning.model.decoding import steppable
from txl_lightning.sampling import SamplingRule

T = 8
CACHE = {"name": "cache", "mem_len": 13}
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of memory and of model
    "none": ({"name": "none"}, {}),
    "cache": (CACHE, {}),
    "short": ({"name": "cache", "mem_len": 5}, {"clamp_len": 7}),
    "zeros": ({"name": "cache", "mem_len": 6, "cold": "zeros"}, {}),
    "reuse": ({**CACHE, "reuse_len": 3}, {}),
    "same_length": ({"name": "cache", "mem_len": 11}, {"same_length": True}),
    "compressive": ({"name": "compressive", "mem_len": 12, "compressed_len": 4, "rate": 4}, {}),
    "most_used": (
        {
            "name": "compressive",
            "mem_len": 10,
            "compressed_len": 6,
            "rate": 2,
            "function": "most_used",
            "loss": "none",
            "positions": "time",
        },
        {},
    ),
    "window": ({"name": "window", "window": 6}, {}),
    "sinks": ({"name": "window", "window": 10, "sinks": 2}, {}),
    "tokens": ({"name": "tokens", "n_tokens": 3}, {}),
    "associative": ({"name": "associative", "rule": "delta"}, {}),
    "associative_tokens": ({"name": "associative_tokens", "n_tokens": 3, "d_mem": 4, "nu": 2}, {}),
    "block_recurrent": ({"name": "block_recurrent", "block_len": 3, "n_states": 4, "window": 5}, {}),
    "knn": ({"name": "knn", "mem_len": 20, "top_k": 3}, {}),
    "mag": ({"name": "titans", "variant": "mag", "chunk_len": 3}, {}),
    "mal": ({"name": "titans", "variant": "mal", "chunk_len": 3}, {}),
    "mac": ({"name": "titans", "variant": "mac", "chunk_len": 3}, {}),
    "expire": ({"name": "expire", "mem_len": 13, "max_span": 10.0, "ramp": 4.0}, {}),
    "mix": (
        {"name": "mix", "parts": [{**CACHE, "layers": [0], "mem_len": 5}, {**CACHE, "layers": [1], "mem_len": 20}]},
        {},
    ),
    "many": (
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
    "plug_in": ({"name": "running_mean", "half_life": 9.0}, {}),
    "shaw": (CACHE, {"position": "shaw", "max_distance": 10}),
    "rotary": ({"name": "window", "window": 12}, {"position": "rotary"}),
    "rotary_sinks": ({"name": "window", "window": 10, "sinks": 2}, {"position": "rotary"}),
    "content": (CACHE, {"position": "none"}),
    "absolute": ({"name": "none"}, {"position": "absolute"}),
    "modern": (
        CACHE,
        {
            "pre_norm": True,
            "norm": "rmsnorm",
            "ffn": "swiglu",
            "qk_norm": True,
            "n_kv_head": 1,
            "untie_r": True,
            "final_norm": True,
        },
    ),
    "reference": (CACHE, {"attention": "reference"}),
}
REREAD = {"plug_in", "block_recurrent", "mag", "mac", "rotary_sinks", "absolute", "reference"}
"""Those that are not the same token by token, or do not say that they are."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A tiny configuration, and the plug-in of the documentation where Python finds it."""
    with pytest.MonkeyPatch.context() as patch:
        registry.memories.names()  # finds entry points, which would otherwise be forgotten with the patch
        patch.setattr(registry.memories, "_entries", {**registry.memories._entries})
        spec = importlib.util.spec_from_file_location("my_memory", Path(__file__).parents[1] / "docs" / "my_memory.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "my_memory", module)
        spec.loader.exec_module(module)  # registers itself
        yield tiny_config(tmp_path_factory.mktemp("base"), f"data.segment_len={T}").to_dict()


def built(base: dict[str, Any], memory: dict[str, Any], model: dict[str, Any]) -> TransformerXL:
    """A model far from uniform predictions, in float64: what differs is not rounding that recurrence blew up."""
    torch.manual_seed(0)
    made = TransformerXL(Config.from_dict({**base, "memory": memory, "model": {**base["model"], **model}}))
    made = made.double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    return made


@pytest.fixture(params=STRATEGIES)
def model(request: pytest.FixtureRequest, base: dict[str, Any]) -> TransformerXL:
    return built(base, *STRATEGIES[request.param])


def teacher_forced(model: TransformerXL, tokens: list[int]) -> torch.Tensor:
    """(N, V) log-probabilities after each token, read in segments of T with hidden memory."""
    state, rows = model.init_state(1), []
    for start in range(0, len(tokens), T):
        part = tokens[start : start + T]
        padding = [0] * (T - len(part)) if model.needs_whole_segments else []
        with torch.no_grad():
            out = model(torch.tensor([part + padding]), state)
        state = out.state
        rows.append(model.log_probs(out.hidden_BTD)[0, : len(part)])
    return torch.cat(rows)


def test_reading_in_any_pieces_equals_evaluation(model: TransformerXL) -> None:
    tokens = torch.randint(0, 257, (34,)).tolist()
    expected = teacher_forced(model, tokens)
    for pieces in ([34], [1] * 34, [3, 5, 8, 1, 9, 8]):
        session, read = Session(model, segment_len=T), 0
        for size in pieces:
            session.feed(tokens[read : read + size])
            read += size
            torch.testing.assert_close(session.log_probs_V, expected[read - 1], atol=1e-5, rtol=1e-5)


def test_lanes_of_different_length_are_as_they_would_be_alone(model: TransformerXL) -> None:
    """Three prompts, then what each lane says itself, so that their segments end at different steps."""
    prompts = [torch.randint(0, 257, (size,)).tolist() for size in (21, 3, 10)]
    together = Session(model, lanes=3)
    together.feed(prompts)
    alone = [Session(model) for _ in prompts]
    for session, prompt in zip(alone, prompts, strict=True):
        session.feed(prompt)
    said = []
    for _ in range(T + 5):
        apart = torch.stack([session.log_probs_BV[0] for session in alone])
        torch.testing.assert_close(together.log_probs_BV, apart, atol=2e-5, rtol=1e-4)
        tokens = apart.argmax(dim=-1).tolist()
        said.append(tokens[1])
        together.feed([[token] for token in tokens])
        for session, token in zip(alone, tokens, strict=True):
            session.feed([token])
    assert said == teacher_forced(model, prompts[1] + said)[2:-1].argmax(dim=-1).tolist()
    for key, tensor in together.state.items():
        torch.testing.assert_close(tensor, torch.cat([session.state[key] for session in alone]), atol=1e-4, rtol=1e-3)


def test_text_is_read_and_written_over_several_calls(base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES["cache"])
    model.vocab = ByteVocab().to_dict()
    pieces, whole = Session(model), Session(model)
    pieces.feed("Once upon")
    pieces.feed(" a time")
    whole.feed("Once upon a time")
    greedy = SamplingRule(temperature=0)
    first = [pieces.generate(n, rule=greedy) for n in (3, 9)]
    assert "".join(first) == whole.generate(12, rule=greedy)
    several = Session(model, lanes=2)
    several.feed(["Once upon a time", "No"])
    texts = several.generate(5, rule=greedy)
    assert texts[0] == "".join(first)[: len(texts[0])] and len(texts) == 2


@pytest.mark.parametrize("name", ["cache", "tokens", "mac", "reference"])
def test_scores_are_those_of_evaluation_in_any_pieces(name: str, base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES[name])
    texts = [torch.randint(0, 257, (size,)).tolist() for size in (30, 11, 1)]
    session, found = Session(model, lanes=3), [[], [], []]
    for start, end in ((0, 1), (1, 5), (5, 21), (21, 22), (22, 30)):
        for own, new in zip(found, session.score([text[start:end] for text in texts]), strict=True):
            own += new
    for own, text in zip(found, texts, strict=True):
        after = teacher_forced(model, text).detach()
        wanted = [float(after[place, token]) for place, token in enumerate(text[1:])]
        assert own == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("name", ["cache", "tokens", "mac", "mix"])
def test_a_session_goes_on_where_another_stood(name: str, base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES[name])
    prompts = [torch.randint(0, 257, (size,)).tolist() for size in (21, 3)]
    session, other = Session(model, lanes=2), Session(model, lanes=2)
    session.feed(prompts)
    stand = session.stand()
    rule, seeds = SamplingRule(repetition_penalty=1.5), lambda: [torch.Generator().manual_seed(lane) for lane in (4, 5)]
    first = session.draw(14, rule=rule, generators=seeds())
    other.feed([[7], [8]])
    other.take_up(stand)
    assert other.n_read == [21, 3]
    again = other.draw(14, rule=rule, generators=seeds())
    for one, two in zip(first, again, strict=True):
        assert [choice.token for choice in one] == [choice.token for choice in two]
        assert [c.log_prob for c in one] == pytest.approx([c.log_prob for c in two], abs=2e-5)


def test_what_another_session_cannot_go_on_from_is_refused(base: dict[str, Any]) -> None:
    stand = Session(built(base, *STRATEGIES["cache"])).stand()
    with pytest.raises(ValueError, match=r"another one: layers\.0\.cache"):
        Session(built(base, *STRATEGIES["short"])).take_up(stand)
    model = built(base, *STRATEGIES["cache"])
    with pytest.raises(ValueError, match="segment_len was 8 there and is 4 here"):
        Session(model, segment_len=4).take_up(stand)
    with pytest.raises(ValueError, match="1 lanes there and are 2 here"):
        Session(model, lanes=2).take_up(stand)


def test_lanes_stop_where_they_would_alone(base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES["cache"])
    vocab, rule = ByteVocab(), SamplingRule(temperature=2.0)
    prompts, stops = [[1, 2], [3], [4, 5, 6]], ["a", "k"]
    together = Session(model, lanes=3, vocab=vocab)
    together.feed(prompts)
    drawn = together.draw(120, rule=rule, generators=[torch.Generator().manual_seed(i) for i in range(3)], stop=stops)
    for lane, prompt in enumerate(prompts):
        session = Session(model, vocab=vocab)
        session.feed(prompt)
        text = session.generate(120, rule=rule, seed=lane, stop=stops)
        whole = vocab.decode([choice.token for choice in drawn[lane]])
        assert not isinstance(text, list) and whole[: len(text)] == text and whole[len(text) :] in ("", "a", "k")
        assert together.n_read[lane] == len(prompt) + len(drawn[lane]) == session.n_read[0]
    assert min(map(len, drawn)) < 120


def test_what_a_session_cannot_read_is_refused(base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES["none"])
    with pytest.raises(ValueError, match="no vocabulary"):
        Session(model).feed("text")
    for text in ([1, 2], [[1], [2]], "ab"):
        with pytest.raises(ValueError, match="3 lanes"):
            Session(model, lanes=3).feed(text if not isinstance(text, list) or isinstance(text[0], list) else [text])


@pytest.mark.parametrize("name", ["most_used", "block_recurrent"])  # token by token, and reading a segment again
def test_lanes_that_stand_by_are_left_alone(name: str, base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES[name])
    session, other = Session(model, lanes=2), Session(model)
    for step in range(19):
        session.feed([[step], [step + 50] if step % 3 == 0 else []])
        if step % 3 == 0:
            other.feed([step + 50])
    torch.testing.assert_close(session.log_probs_BV[1], other.log_probs_BV[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_read_token_by_token_is_said(name: str, base: dict[str, Any]) -> None:
    assert steppable(built(base, *STRATEGIES[name]), documents=False) == (name not in REREAD)


@pytest.mark.parametrize("reset", ["segment", "document"])
@pytest.mark.parametrize("name", ["cache", "window"])
def test_memory_starts_anew_where_it_does_in_evaluation(name: str, reset: str, base: dict[str, Any]) -> None:
    """Documents end behind the tokens 2 (0 where there is one), 7 (at a border of segments) and 12."""
    memory, keys = STRATEGIES[name]
    model = built(base, {**memory, "reset": reset}, keys)
    tokens = torch.randint(1, 257, (21,))
    tokens[[2, 7, 12]] = 0
    starts = {"segment": [0, 8, 16, 21], "document": [0, 3, 8, 13, 21]}[reset]
    expected = torch.cat([teacher_forced(model, tokens[a:b].tolist()) for a, b in itertools.pairwise(starts)])
    for pieces in ([1] * 21, [5, 1, 1, 4, 1, 1, 8]):
        session, read = Session(model, separator=0), 0
        for size in pieces:
            session.feed(tokens[read : read + size].tolist())
            read += size
            torch.testing.assert_close(session.log_probs_V, expected[read - 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["short", "expire", "knn", "associative"])
def test_documents_inside_segments_are_read_as_lanes_read_them(name: str, base: dict[str, Any]) -> None:
    model = built(base, {**STRATEGIES[name][0], "reset": "document"}, STRATEGIES[name][1])
    tokens = torch.randint(1, 257, (37,))
    tokens[[2, 7, 12, 14, 24]] = 0
    loader = LaneLoader(
        tokens.numpy(), segment_len=T, lanes=1, used_lanes=1, reset="document", separator=0, key="data.batch_size"
    )
    state, expected = model.init_state(1, form="projected"), []
    for batch in loader:
        with torch.no_grad():
            out = model(batch.tokens_BT, state, batch.segment)
        state = out.state
        expected.append(model.log_probs(out.hidden_BTD)[0])
    session = Session(model, separator=0)
    for token, after in zip(tokens[:-1].tolist(), torch.cat(expected), strict=False):
        session.feed([token])
        torch.testing.assert_close(session.log_probs_V, after, atol=1e-5, rtol=1e-5)


def test_documents_need_their_separator(tmp_path: Path) -> None:
    model = TransformerXL(tiny_config(tmp_path, "memory.reset=document"))
    with pytest.raises(ValueError, match="needs the separator"):
        Session(model, segment_len=T)


@pytest.mark.parametrize("name", ["none", "cache", "mix", "tokens", "block_recurrent"])
def test_argmax_path_equals_evaluation(name: str, base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES[name])
    prompt = [10, 20, 30]
    session = Session(model, segment_len=T)
    session.feed(prompt)
    sampled = list(session.sample(40, rule=SamplingRule(temperature=0), generator=torch.Generator()))
    expected = teacher_forced(model, prompt + sampled)[len(prompt) - 1 : -1].argmax(-1)
    assert sampled == expected.tolist()


def test_same_seed_same_sample(base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES["cache"])

    def draw(seed: int) -> list[int]:
        session = Session(model, segment_len=T)
        session.feed([1, 2])
        return list(session.sample(30, rule=SamplingRule(), generator=torch.Generator().manual_seed(seed)))

    assert draw(3) == draw(3) != draw(4)


@pytest.mark.parametrize("name", ["none", "mix", "tokens", "mac"])
def test_state_does_not_grow(name: str, base: dict[str, Any]) -> None:
    model = built(base, *STRATEGIES[name])
    session = Session(model, segment_len=T)
    session.feed([1])
    shapes = {key: tensor.shape for key, tensor in session.state.items()}
    for _ in session.sample(60, rule=SamplingRule(), generator=torch.Generator()):
        assert {key: tensor.shape for key, tensor in session.state.items()} == shapes
        assert len(session.pending[0]) < T


SCORES = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (SamplingRule(), [0, 1, 2, 3]),
        (SamplingRule(top_k=2), [0, 1]),
        (SamplingRule(top_k=9), [0, 1, 2, 3]),
        (SamplingRule(top_p=0.4), [0]),
        (SamplingRule(top_p=0.5), [0]),
        (SamplingRule(top_p=0.51), [0, 1]),
        (SamplingRule(top_p=0.9), [0, 1, 2]),
        (SamplingRule(top_k=3, top_p=0.6), [0, 1]),
    ],
)
def test_top_k_and_top_p(rule: SamplingRule, kept: list[int]) -> None:
    assert rule.keep(SCORES.double()).isfinite().nonzero().flatten().tolist() == kept


def test_temperature_sharpens() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in range(2000)]
    many, nothing = SCORES.expand(2000, -1), [()] * 2000
    cold = [c.token for c in SamplingRule(temperature=0.25).choose(many, generators, recent=nothing)]
    expected = (SCORES / 0.25).softmax(-1)[0].item()
    assert cold.count(0) / 2000 == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 2000))
    assert {c.token for c in SamplingRule(temperature=0).choose(many, generators, recent=nothing)} == {0}
