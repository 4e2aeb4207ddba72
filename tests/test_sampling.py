"""How tokens are chosen, and where a text ends."""

from __future__ import annotations

import pytest
import torch

from txl_lightning.data.vocab import ByteVocab
from txl_lightning.sampling import SamplingRule, cut, has_stopped, until

SCORES = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def test_a_penalty_makes_recent_tokens_less_likely() -> None:
    rule = SamplingRule(temperature=0, repetition_penalty=2.0, repetition_window=3)
    expected = torch.tensor([0.5**2, 0.3, 0.15**2, 0.05]).log()
    torch.testing.assert_close(rule.penalised(SCORES, [1, 0, 2, 0]), expected)  # 1 is too long ago, 0 counts once
    greedy = torch.Generator()
    assert [rule.choose(SCORES, greedy, recent=recent) for recent in ([], [0], [0, 1, 2, 3])] == [0, 1, 0]
    assert SamplingRule().penalised(SCORES, [0, 1]) is SCORES


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
