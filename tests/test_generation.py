"""Sampling carries the memory exactly as evaluation does."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_config
from txl_lightning import TransformerXL
from txl_lightning.generation import SamplingRule, Session

T = 8
STRATEGIES = {
    "none": ["memory=none"],
    "cache": ["memory=cache", "memory.mem_len=13"],
    "mix": [
        "memory=mix",
        "memory.parts=[{name: cache, layers: [0], mem_len: 5}, {name: cache, layers: [1], mem_len: 20}]",
    ],
}


@pytest.fixture(params=STRATEGIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(tiny_config(tmp_path, *STRATEGIES[request.param])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def teacher_forced(model: TransformerXL, tokens: list[int]) -> torch.Tensor:
    """(N, V) log-probabilities after each token, read in segments of T with hidden memory."""
    state, rows = model.init_state(1), []
    for start in range(0, len(tokens), T):
        with torch.no_grad():
            out = model(torch.tensor([tokens[start : start + T]]), state)
        state = out.state
        rows.append(model.log_probs(out.hidden_BTD)[0])
    return torch.cat(rows)


def test_reading_in_any_pieces_equals_evaluation(model: TransformerXL) -> None:
    tokens = torch.randint(0, 257, (45,)).tolist()
    expected = teacher_forced(model, tokens)
    for pieces in ([45], [1] * 45, [3, 5, 8, 1, 20, 8], [7, 38]):
        session, read = Session(model, segment_len=T), 0
        for size in pieces:
            session.feed(tokens[read : read + size])
            read += size
            torch.testing.assert_close(session.log_probs_V, expected[read - 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reset", ["segment", "document"])
def test_memory_starts_anew_where_it_does_in_evaluation(reset: str, tmp_path: Path) -> None:
    """Documents end behind the tokens 2 (0 where there is one), 7 (at a border of segments) and 12."""
    torch.manual_seed(0)
    model = TransformerXL(tiny_config(tmp_path, *STRATEGIES["cache"], f"memory.reset={reset}")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    tokens = torch.randint(1, 257, (21,))
    tokens[[2, 7, 12]] = 0
    starts = {"segment": [0, 8, 16, 21], "document": [0, 3, 8, 13, 21]}[reset]
    expected = torch.cat([teacher_forced(model, tokens[a:b].tolist()) for a, b in itertools.pairwise(starts)])
    session = Session(model, segment_len=T, separator=0)
    for token, after in zip(tokens.tolist(), expected, strict=True):
        session.feed([token])
        torch.testing.assert_close(session.log_probs_V, after, atol=1e-5, rtol=1e-5)


def test_documents_need_their_separator(tmp_path: Path) -> None:
    model = TransformerXL(tiny_config(tmp_path, "memory.reset=document"))
    with pytest.raises(ValueError, match="needs the separator"):
        Session(model, segment_len=T)


def test_argmax_path_equals_evaluation(model: TransformerXL) -> None:
    prompt = [10, 20, 30]
    session = Session(model, segment_len=T)
    session.feed(prompt)
    sampled = list(session.sample(40, rule=SamplingRule(temperature=0), generator=torch.Generator()))
    expected = teacher_forced(model, prompt + sampled)[len(prompt) - 1 : -1].argmax(-1)
    assert sampled == expected.tolist()


def test_same_seed_same_sample(model: TransformerXL) -> None:
    def draw(seed: int) -> list[int]:
        session = Session(model, segment_len=T)
        session.feed([1, 2])
        return list(session.sample(30, rule=SamplingRule(), generator=torch.Generator().manual_seed(seed)))

    assert draw(3) == draw(3) != draw(4)


def test_state_does_not_grow(model: TransformerXL) -> None:
    session = Session(model, segment_len=T)
    session.feed([1])
    shapes = {key: tensor.shape for key, tensor in session.state.items()}
    for _ in session.sample(60, rule=SamplingRule(), generator=torch.Generator()):
        assert {key: tensor.shape for key, tensor in session.state.items()} == shapes
        assert len(session.partial) < T


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
    generator = torch.Generator().manual_seed(0)
    cold = [SamplingRule(temperature=0.25).choose(SCORES, generator) for _ in range(2000)]
    expected = (SCORES / 0.25).softmax(-1)[0].item()
    assert cold.count(0) / 2000 == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 2000))
    assert {SamplingRule(temperature=0).choose(SCORES, generator) for _ in range(5)} == {0}
