"""`txl analyze position`, `age`, `frequency` and `sweep` against what is computed independently here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_analyze_scores import far_from_uniform, said
from tests.tiny import tiny_config
from txl_lightning.cli import main
from txl_lightning.commands.fit import fit
from txl_lightning.config import Config
from txl_lightning.data.store import prepare
from txl_lightning.data.vocab import ByteVocab, WordVocab
from txl_lightning.evaluation.age import cohort_losses, cohort_of, measure_by_age
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.evaluation.frequency import by_frequency, count_words, words_of
from txl_lightning.evaluation.losses import Losses
from txl_lightning.evaluation.place import both_ways, measure_by_place
from txl_lightning.evaluation.sweep import combinations, measure_sweep
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment


def one_lane(model: TransformerXL, ids: np.ndarray, *, segment_len: int, anew: bool = False) -> list[float]:
    """Losses of a text read in one lane."""
    text = torch.from_numpy(ids.astype(np.int64))[None]
    state, losses = model.init_state(1), []
    for start in range(0, len(ids) - 1, segment_len):
        read = text[:, :-1][:, start : start + segment_len]
        segment = Segment.full(read)._replace(reset=torch.tensor([anew]))
        with torch.no_grad():
            out = model(read, state, segment, text[:, 1:][:, start : start + segment_len])
        state, losses = out.state, losses + out.losses_BT[0].tolist()
    return losses


def by_place(config: Config, model: TransformerXL) -> Any:
    data = prepare(config.data, training=False)
    tokens = data.splits["test"]
    how = {"separator": 256, "split": "test", "data_fingerprint": ""}
    return measure_by_place(config, model, tokens, **how), np.asarray(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["memory.mem_len=24", "memory=associative"])
def test_loss_by_position_is_the_direct_mean(memory: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, memory, "eval.batch_size=1")
    model = far_from_uniform(config)
    found, tokens = by_place(config, model)
    for ours, anew in ((found.loss, False), (found.loss_without, True)):
        losses = one_lane(model, tokens, segment_len=16, anew=anew)
        assert np.allclose(ours, [np.mean(losses[place::16]) for place in range(16)], atol=1e-5)
    assert found.n_target == [len(losses[place::16]) for place in range(16)]
    assert found.mean == pytest.approx(evaluate(config, model, split="test").scores["loss"], abs=1e-5)


def test_without_a_memory_nothing_is_gained(tmp_path: Path) -> None:
    for keys in (["memory=none"], ["memory.mem_len=0"]):
        config = tiny_config(tmp_path, *keys)
        model = far_from_uniform(config)
        found, tokens = by_place(config, model)
        assert found.loss == found.loss_without
        losses = cohort_losses(model, np.stack([tokens[:64], tokens[64:128]]).astype(np.int64), segment_len=16, lanes=2)
        assert (losses["own"] == losses["anew"]).all() and (losses["own"] == losses["swapped"]).all()


@pytest.mark.parametrize("schedule", ["segments", "layers"])
def test_documents_stay_apart_without_memory_too(schedule: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("abcdefg\nhijk\n" * 60)
    keys = ("data.document=line", "memory.reset=document", "memory.mem_len=24", f"eval.schedule={schedule}")
    config = tiny_config(tmp_path, *keys)
    tokens = prepare(config.data, training=False).splits["test"]
    own, cold = both_ways(config, far_from_uniform(config), tokens, separator=10)
    inside = own.age == cold.age  # the document began in the segment, so memory holds nothing of it
    assert 0.3 < inside.mean() < 0.95
    assert np.allclose(own.nats[inside], cold.nats[inside], atol=1e-5)
    assert not np.allclose(own.nats[~inside], cold.nats[~inside], atol=1e-2)


def test_a_cohort_has_every_long_document_once() -> None:
    documents = [list(range(10, 10 + size)) for size in (7, 3, 8, 12)]
    text = np.array([token for document in documents for token in [*document, 0]])
    found, cut = cohort_of(text, longest=8, separator=0)
    assert not cut and found.tolist() == [[*documents[0], 0], documents[2], documents[3][:8]]
    found, cut = cohort_of(np.arange(1, 30), longest=8, separator=0)
    assert cut and found.tolist() == [list(range(first, first + 8)) for first in (1, 9, 17)]


@pytest.mark.parametrize("memory", ["memory.mem_len=24", "memory=associative"])
def test_loss_by_age_is_the_direct_mean(memory: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, memory, "eval.batch_size=2", "eval.segment_len=8")
    model = far_from_uniform(config)
    text = np.random.default_rng(0).integers(0, 257, (4, 32))
    found = measure_by_age(config, model, text, cut=False, split="test", data_fingerprint="")
    own = np.array([one_lane(model, row, segment_len=8) for row in text])
    anew = np.array([one_lane(model, row, segment_len=8, anew=True) for row in text])
    ranges = [(1, 1), (2, 3), (4, 7), (8, 15), (16, 31)]
    assert [(bucket.first, bucket.last) for bucket in found.buckets] == ranges
    for bucket in found.buckets:
        part = slice(bucket.first - 1, bucket.last)
        gain = (anew[:, part] - own[:, part]).mean(axis=1)
        assert bucket.loss == pytest.approx(own[:, part].mean(), abs=1e-5)
        assert bucket.benefit == pytest.approx(gain.mean(), abs=1e-5)
        assert bucket.benefit_error == pytest.approx(gain.std(ddof=1) / 2, abs=1e-5)
    assert all(bucket.benefit == 0 for bucket in found.buckets[:3])  # nothing was read before the first segment


def test_the_neighbours_memory_is_the_neighbours(tmp_path: Path) -> None:
    """The first lane reads its last segment with what the second lane has read before."""
    config = tiny_config(tmp_path, "memory.mem_len=24")
    model = far_from_uniform(config)
    text = np.random.default_rng(0).integers(0, 257, (2, 33))
    found = cohort_losses(model, text, segment_len=16, lanes=2)
    for lane in (0, 1):
        mixed = np.concatenate([text[1 - lane, :16], text[lane, 16:]])
        assert np.allclose(found["swapped"][lane, 16:], one_lane(model, mixed, segment_len=16)[16:], atol=1e-5)
        assert (found["swapped"][lane, :16] == found["own"][lane, :16]).all()


def test_words_have_their_tokens() -> None:
    text = "the cat\n\n sat  on"
    ids = ByteVocab().encode(text)
    found = list(words_of(ids, ByteVocab()))
    assert [word.text for word in found] == ["the", "cat", "sat", "on"]
    assert [text[word.first : word.end] for word in found] == ["the", " cat", "\n\n sat", "  on"]
    words = WordVocab(["the", "cat", "<eos>"], end="<eos>", unknown=None, lower=False, rule="")
    assert [word.text for word in words_of(words.encode("the cat\nthe"), words)] == ["the", "cat", "\n", "the"]


def test_gain_by_frequency_is_counted_by_hand() -> None:
    vocab = ByteVocab()
    counts = count_words(vocab.encode("a " * 12 + "bb bb bb"), vocab)
    assert counts == {"a": 12, "bb": 3}
    ids = vocab.encode("x a bb new a")
    nats = np.arange(1, 12, dtype=np.float32)  # of " ", "a", " ", "b", "b", " ", "n", "e", "w", " ", "a"
    blank = np.zeros(11, dtype=np.int64)
    own = Losses(nats=nats, place=blank, age=blank, n_lane=1)
    cold = Losses(nats=nats * 2, place=blank, age=blank, n_lane=1)
    never, rare, common = by_frequency(ids, vocab, counts, own=own, cold=cold)
    assert (never.least, never.most, never.words, never.loss) == (0, 0, 1, 6 + 7 + 8 + 9)
    assert (rare.least, rare.most, rare.words, rare.loss) == (1, 9, 1, 3 + 4 + 5)
    assert (common.least, common.most, common.words, common.loss) == (10, 99, 2, (1 + 2 + 10 + 11) / 2)
    assert common.loss_without == 24 and common.ppl_change == pytest.approx(math.exp(-12) - 1)


def test_a_sweep_chooses_on_valid_and_reports_on_test(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "memory.mem_len=8")
    trained = far_from_uniform(config)

    def load(of: Config) -> TransformerXL:
        model = TransformerXL(of).eval()
        model.load_state_dict(trained.state_dict())
        return model

    splits = prepare(config.data, training=False).splits
    tried = combinations(config, mem_lens=[0, 16], segment_lens=[4, 16], clamp_lens=[-1, 5])
    assert len(tried) == 8
    how = {"valid": splits["valid"], "test": splits["test"], "separator": 256, "data_fingerprint": ""}
    found = measure_sweep(config, tried, load, **how)  # type: ignore[arg-type]
    scores = [evaluate(one, load(one), split="valid").scores["loss"] for one in tried]
    assert np.allclose([one.loss for one in found.tries], scores, atol=1e-5)
    best = tried[int(np.argmin(scores))]
    shown = (found.best.mem_len, found.best.segment_len, found.best.clamp_len)
    assert shown == (best.memory.mem_len, best.eval_segment_len, best.model.clamp_len)  # type: ignore[attr-defined]
    assert found.test_loss == pytest.approx(evaluate(best, load(best), split="test").scores["loss"], abs=1e-5)
    assert found.test_loss_as_trained == pytest.approx(evaluate(config, trained, split="test").scores["loss"], abs=1e-5)
    assert len({round(score, 6) for score in scores}) > 4


def test_they_write_and_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    fit(tiny_config(tmp_path, "trainer.max_steps=1", "logger=none"))
    for name, *keys in (
        ("position", "tokens=100"),
        ("age", "split=train", "longest_age=32", "tokens=400"),
        ("frequency", "tokens=100"),
        ("sweep", "mem_lens=[8,16]", "tokens=100"),
    ):
        found = [f"out={name}.json", f"plot={name}.png", "trainer.accelerator=cpu"]
        assert main(["analyze", name, "ckpt=run", *keys, *found]) == 0
        assert json.loads((tmp_path / f"{name}.json").read_text())["memory"]["name"] == "cache"
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"
    assert json.loads((tmp_path / "age.json").read_text())["cut"] is True
    assert said(capsys, "age", "ckpt=run", "longest_age=100") == (
        "longest_age=100: must be a power of two; set it to 64 or 128"
    )
    assert said(capsys, "age", "ckpt=run").startswith("tokens=null: 2048 tokens are needed, and 200 are read")
    assert said(capsys, "sweep", "ckpt=run").startswith("mem_lens=[]: there is nothing to choose from")
    assert said(capsys, "sweep", "ckpt=run", "clamp_lens=[0]").startswith("clamp_lens=[0]: model.clamp_len=0 must be ")
    assert said(capsys, "position", "ckpt=run", "mem_lens=[1]").startswith("mem_lens=[1]: is of txl analyze sweep only")
