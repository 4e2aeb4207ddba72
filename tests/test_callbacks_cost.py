"""What attention with memory costs, counted by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.points import watched
from tests.test_divergence import poisoned
from tests.tiny import tiny_config, write_corpus
from txl_lightning.callbacks.cost_meter import read_beside, scores_so_far, segment_scores
from txl_lightning.choices import option_files
from txl_lightning.config import load

NAMES = ("scores", "full_scores", "saving_percent", "effective_context", "context_share", "context_per_layer")


def cost_of(tmp_path: Path, *overrides: str, train: int) -> dict[str, dict[int, float]]:
    """Curves of a run over so many targets."""
    write_corpus(tmp_path / "corpus.txt", n_byte=2 * train + 1)  # two halves of train + 1 tokens, with the text's end
    config = tiny_config(
        tmp_path, "data.ratios=[0.5,0.25,0.25]", "callbacks=cost_meter", "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=1000", "data.segment_len=4", *overrides,
    )  # fmt: skip
    points, _ = watched(config)
    return {name: points.curve(f"cost/{name}") for name in NAMES}


def test_the_example_by_hand(tmp_path: Path) -> None:
    """W = 4, M = 8, lanes of 64 tokens: 720 of 4,096 scores; then a new pass begins."""
    cost = cost_of(tmp_path, "memory.mem_len=8", "data.batch_size=2", "trainer.max_steps=17", train=128)
    assert cost["scores"][16] == 720 and cost["full_scores"][16] == 4096
    assert [round(cost["saving_percent"][step], 1) for step in (1, 2, 3, 16, 17)] == [0, 25, 33.3, 82.4, 0]
    saving = [cost["saving_percent"][step] for step in range(1, 17)]
    assert saving == sorted(saving)
    # two layers: 8 tokens of memory in the first, 8 + 8 through both; the segment's own 4 beside them
    assert [cost["effective_context"][step] for step in (1, 2, 5, 16)] == [4, 8, 20, 20]
    assert cost["context_share"][16] == pytest.approx(20 / 64) and cost["context_per_layer"][16] == 20 / 12


def test_lanes_of_unequal_length_count_their_own_tokens(tmp_path: Path) -> None:
    """Three lanes of 22, 21 and 21 tokens, segments of 4: the last one has 2, 1 and 1."""
    cost = cost_of(tmp_path, "memory.mem_len=6", "data.batch_size=3", "trainer.max_steps=6", train=64)
    five = 4 * 4 + 4 * 8 + 3 * (4 * 10)
    scores, full = [five + n * (n + 6) for n in (2, 1, 1)], [22**2, 21**2, 21**2]
    assert cost["scores"][6] == pytest.approx(sum(scores) / 3)
    assert cost["saving_percent"][6] == pytest.approx(100 * (1 - sum(scores) / sum(full)))


def test_documents_begin_their_own_count(tmp_path: Path) -> None:
    """One lane of documents of 5 bytes and their end, read 4 tokens at a time."""
    (tmp_path / "corpus.txt").write_text("abcd\n" * 40)
    config = tiny_config(
        tmp_path, "data.document=line", "memory.reset=document", "memory.mem_len=8", "callbacks=cost_meter",
        "trainer.log_every_n_steps=1", "trainer.val_check_interval=1000", "data.segment_len=4", "data.batch_size=1",
        "trainer.max_steps=6",
    )  # fmt: skip
    points, _ = watched(config)
    tokens = [root**0.5 for root in points.curve("cost/full_scores").values()]
    assert tokens == [4, 2, 6, 4, 2, 6]
    # a document's first tokens in a segment have nothing before them; the ones that follow read those as memory
    assert list(points.curve("cost/scores").values()) == 2 * [4 * 4, 2 * 2, 2 * 2 + 4 * (4 + 2)]


SKIPPING = ["trainer.on_divergence=skip", "memory.mem_len=8", "data.batch_size=2"]


@pytest.mark.parametrize("segments", [1, 2])
def test_a_skipped_step_costs_nothing(segments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures stand still where memory does, and N is what memory has been through: the age of its lanes."""
    poisoned(monkeypatch, {0: float("nan"), 5: float("nan")})
    keys = [f"trainer.accumulate_grad_batches={segments}", "trainer.max_steps=7"]
    cost = cost_of(tmp_path, *SKIPPING, *keys, train=128)
    made, n, want = 5 // segments, 0, []
    for step in range(7):
        n += 0 if step in (0, made) else 4 * segments
        want.append(n)
    assert [cost["full_scores"].get(step, 0) ** 0.5 for step in range(1, 8)] == want
    scores = [4 * (4 + min(8, 4 * index)) for index in range(7 * segments)]
    assert [cost["scores"].get(step, 0) for step in range(1, 8)] == [sum(scores[: n // 4]) for n in want]


def test_a_document_that_began_in_a_skipped_step_has_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lane of documents of 6 tokens, 4 at a time; the second document begins in the segment that is skipped."""
    (tmp_path / "corpus.txt").write_text("abcd\n" * 40)
    poisoned(monkeypatch, {1: float("nan")})
    config = tiny_config(
        tmp_path, "data.document=line", "memory.reset=document", "callbacks=cost_meter", "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=1000", "data.segment_len=4", "trainer.max_steps=6", *SKIPPING[:2],
        "data.batch_size=1",
    )  # fmt: skip
    points, _ = watched(config)
    tokens = {step: value**0.5 for step, value in points.curve("cost/full_scores").items()}
    assert tokens == {1: 4, 3: 4, 4: 4, 5: 2, 6: 6}


@pytest.mark.parametrize("beside", [0, 3, 4, 8, 9])
def test_the_closed_form_is_the_sum_over_segments(beside: int) -> None:
    layers = Counter({beside: 2, 5: 1})
    for tokens in range(60):
        done, total = 0, torch.zeros(1, dtype=torch.int64)
        while done < tokens:
            new = min(4, tokens - done)
            total = total + segment_scores(torch.tensor([new]), torch.tensor([done]), layers)
            done += new
        assert scores_so_far(torch.tensor([tokens]), layers, segment_len=4).tolist() == total.tolist()


@pytest.mark.parametrize("name", option_files("memory"))
def test_every_memory_can_be_asked_what_it_reads(name: str) -> None:
    config = load([f"memory={name}"])
    found = read_beside(config)
    assert found.total() == config.model.n_layer
    if name in ("none", "associative", "associative_tokens"):
        assert set(found) == {0}
    if name == "cache":
        assert set(found) == {config.memory.mem_len}
    if name == "knn":
        assert dict(found) == {0: config.model.n_layer - 1, config.memory.mem_len: 1}
