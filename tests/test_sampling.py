"""How tokens are chosen, and where a text ends."""

from __future__ import annotations

import math

import pytest
import torch

from txl_lightning.data.vocab import ByteVocab
from txl_lightning.sampling import SamplingRule, cut, drawn_from, has_stopped, until

SCORES = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def test_a_penalty_makes_recent_tokens_less_likely() -> None:
    rule = SamplingRule(temperature=0, repetition_penalty=2.0, repetition_window=3)
    expected = torch.tensor([0.5**2, 0.3, 0.15**2, 0.05]).log()
    torch.testing.assert_close(rule.penalised(SCORES, [1, 0, 2, 0]), expected)  # 1 is too long ago, 0 counts once
    greedy = torch.Generator()
    recent = [[], [0], [0, 1, 2, 3]]
    chosen = rule.choose(SCORES.expand(3, -1), [greedy] * 3, recent=recent)
    assert [choice.token for choice in chosen] == [0, 1, 0]
    assert SamplingRule().penalised(SCORES, [0, 1]) is SCORES


def by_hand(scores: list[float], number: float, *, top_k: int, top_p: float) -> int:
    """The first token at which the shares of those that are left add up to more than a number from 0 to 1."""
    best = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = [token for token in best if scores[token] >= scores[best[top_k - 1]]]
    whole, before, left = sum(math.exp(scores[token]) for token in kept), 0.0, []
    for token in kept:
        left += [token] if before < top_p else []
        before += math.exp(scores[token]) / whole
    passed, whole = 0.0, sum(math.exp(scores[token]) for token in left)
    for token in sorted(left):
        passed += math.exp(scores[token]) / whole
        if passed > number:
            return token
    raise AssertionError


@pytest.mark.parametrize(("top_k", "top_p"), [(23, 1.0), (5, 1.0), (23, 0.7), (7, 0.6)])
def test_each_lane_chooses_for_itself(top_k: int, top_p: float) -> None:
    scores_BV = torch.randn(40, 23, dtype=torch.float64).mul(2).log_softmax(dim=-1)
    recent = [[lane % 23, (3 * lane) % 23] for lane in range(40)]
    rule = SamplingRule(top_k=top_k, top_p=top_p, temperature=0.8, repetition_penalty=1.5, repetition_window=1)
    seeds = [torch.Generator().manual_seed(lane) for lane in range(40)]
    numbers = [float(torch.rand((), generator=generator, dtype=torch.float64)) for generator in seeds]
    again = [torch.Generator().manual_seed(lane) for lane in range(40)]
    for lane, choice in enumerate(rule.choose(scores_BV, again, recent=recent)):
        scores = scores_BV[lane].tolist()
        assert choice.log_prob == scores[choice.token]
        latest = recent[lane][-1]
        scores[latest] *= 1.5
        scores = [score / 0.8 for score in scores]
        assert choice.token == by_hand(scores, numbers[lane], top_k=top_k, top_p=top_p)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_is_not_chosen_from(temperature: float) -> None:
    with pytest.raises(RuntimeError, match="are not numbers"):
        SamplingRule(temperature=temperature).choose(SCORES[None] * math.nan, [torch.Generator()], recent=[[]])


def test_a_token_that_is_out_is_never_drawn() -> None:
    share_BV = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    below_1 = 1 - 2**-53
    found = [int(drawn_from(share_BV, torch.tensor([[at]], dtype=torch.float64))) for at in (0, 0.2499, 0.25, below_1)]
    assert found == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["ab", "cd"], [], "abcd"),
        (["ab", "cd", "ef"], ["de"], "abc"),
        (["a", "b", "c", "d"], ["bcx", "cd"], "ab"),
        (["one e", "n", "d, two"], ["end"], "one "),
        (["aab", "aac"], ["aaa", "aac"], "aab"),
        (["ends with e"], ["ex"], "ends with e"),
        (["endend"], ["nd", "end"], ""),
    ],
)
def test_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str], shown: str) -> None:
    assert "".join(until(pieces, stops)) == cut("".join(pieces), stops) == shown


def test_what_may_begin_a_stop_string_waits_and_nothing_else_does() -> None:
    assert list(until(["xe", "n", "t", "e"], ["end"])) == ["x", "", "ent", "", "e"]


def test_no_token_is_asked_for_behind_a_stop_string() -> None:
    asked = []

    def pieces() -> object:
        for piece in ("a", ".", "b"):
            asked.append(piece)
            yield piece

    assert "".join(until(pieces(), ["."])) == "a" and asked == ["a", "."]  # type: ignore[arg-type]


def test_tokens_that_end_in_a_stop_string_are_seen_whatever_their_width() -> None:
    vocab = ByteVocab()
    tokens = list("so — ende".encode())
    seen = [has_stopped(tokens[: n + 1], vocab=vocab, stops=["— e"]) for n in range(len(tokens))]
    assert seen.index(True) == len("so — e".encode()) - 1
    assert not has_stopped(tokens, vocab=vocab, stops=[]) and not has_stopped([], vocab=vocab, stops=["x"])
