"""The made-up corpus `recall`, and how many of its answers a model gets."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.tiny import write_corpus
from txl_lightning.build import check_resets
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.fit import check as check_fit
from txl_lightning.commands.fit import fit
from txl_lightning.config import ConfigError, Options, build_named, load
from txl_lightning.data.recall import Recall, RecallConfig, RecallVocab
from txl_lightning.data.store import prepare
from txl_lightning.data.vocab import from_dict
from txl_lightning.evaluation.retrieval import measure_retrieval
from txl_lightning.model.transformer import ModelOutput, TransformerXL
from txl_lightning.training.datamodule import TextDataModule
from txl_lightning.types import Segment, State

SMALL: dict[str, Any] = {
    "distance": 2,
    "segment_len": 9,
    "pairs": 2,
    "shows": 2,
    "keys": 5,
    "values": 3,
    "fillers": 2,
    "batch_size": 4,
    "episodes": 16,
    "test_episodes": 8,
}
VOCAB = RecallVocab(fillers=2, keys=5, values=3)


def episodes(**keys: Any) -> dict[str, np.ndarray]:
    """(episodes, segments, T) of each split."""
    config = RecallConfig(**{**SMALL, **keys})
    data = prepare(config)
    shape = (-1, config.distance + 1, config.segment_len)
    return {split: np.array(tokens[:-1]).reshape(shape) for split, tokens in data.splits.items()}


def pairs_in(segment: np.ndarray) -> list[tuple[int, int]]:
    """Every key with the token behind it."""
    return [(int(a), int(b)) for a, b in pairwise(segment) if a in VOCAB.keys]


def test_what_is_asked_was_shown_and_values_follow_their_keys() -> None:
    for split, count in (("train", 16), ("valid", 8), ("test", 8)):
        found = episodes()[split]
        assert len(found) == count
        for first, between, last in found:
            shown, asked = pairs_in(first), pairs_in(last)
            assert len(shown) == 4 and set(shown[:2]) == set(shown[2:]) == set(asked) and len(asked) == 2
            assert len(dict(asked)) == 2  # keys differ
            assert all(value in VOCAB.values for _, value in shown)
            assert all(token in VOCAB.fillers for token in between)
            assert last[-1] == VOCAB.separator and (last[:-1] != VOCAB.separator).all()
            for segment in (first, last[:-1]):
                assert sum(token in VOCAB.fillers for token in segment) == len(segment) - 2 * len(pairs_in(segment))


def test_places_orders_and_values_are_random() -> None:
    found = episodes(episodes=4000, pairs=1, shows=1)["train"]
    first, last = found[:, 0], found[:, -1]
    for segment, n_place in ((first, 8), (last, 7)):
        place = np.isin(segment, VOCAB.keys).argmax(axis=1)
        assert np.allclose(np.bincount(place, minlength=n_place) / 4000, 1 / n_place, atol=0.03)
    for symbols in (VOCAB.keys, VOCAB.values):
        counts = np.bincount(first.ravel(), minlength=VOCAB.size)[symbols.start : symbols.stop]
        assert np.allclose(counts / 4000, 1 / len(symbols), atol=0.03)
    two = episodes(episodes=4000)["train"]
    same_order = [pairs_in(first[0])[0] == pairs_in(first[-1])[0] for first in two]
    assert abs(np.mean(same_order) - 0.5) < 0.03


def test_texts_differ_by_split_and_draw_only() -> None:
    base = episodes()
    again = episodes(episodes=20, batch_size=2)
    assert len(again["train"]) == 20
    assert (again["test"] == base["test"]).all()
    assert (base["valid"] != base["test"]).any()
    assert (episodes(draw=1)["test"] != base["test"]).any()
    assert prepare(RecallConfig(**SMALL)).meta.fingerprint != prepare(RecallConfig(**SMALL, draw=1)).meta.fingerprint


def test_lanes_begin_with_episodes() -> None:
    config = load(["data=recall", *(f"data.{name}={value}" for name, value in SMALL.items()), "model.vocab_size=11"])
    data = TextDataModule(config)
    found = episodes()["train"].reshape(4, -1, 9)  # (lanes, segments, T)
    for batch in data.train_dataloader():
        assert (batch.tokens_BT.numpy() == found[:, batch.position.segment]).all()
        assert batch.segment.length.tolist() == [9] * 4


def test_memory_can_start_anew_with_each_episode() -> None:
    config = load(["data=recall", "data.segment_len=16", "memory=associative", "memory.reset=document"])
    check_resets(config, Recall(config.data).vocab)  # type: ignore[arg-type]


def test_where_episodes_begin_with_segments_tokens_start_anew_with_them() -> None:
    """Memory tokens cannot start anew inside a segment; here they need not, and no segment has document numbers."""
    typed = ["experiment=recall", "memory=tokens", "memory.reset=document", "data.episodes=64", "data.test_episodes=64"]
    config = load(typed)
    check_fit(config, Options())
    resets = [batch.segment.reset.tolist() for batch in TextDataModule(config).train_dataloader()]
    assert resets == [[segment % 5 == 0] * 32 for segment in range(2 * 5)]
    torch.manual_seed(0)
    model, state = TransformerXL(config), {}
    for batch in TextDataModule(config).train_dataloader():
        assert batch.segment.document is None
        fresh = batch.position.segment % 5 == 0
        out = model(batch.tokens_BT, model.init_state(32) if fresh else state, batch.segment)
        if fresh:  # as if nothing had been read
            assert torch.equal(model(batch.tokens_BT, state or out.state, batch.segment).hidden_BTD, out.hidden_BTD)
        state = out.state


@pytest.mark.parametrize("typed", ["eval.segment_len=16", "eval.batch_size=48", "data=text data.path=x"])
def test_elsewhere_tokens_cannot(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "x")
    base = ["experiment=recall", "data.episodes=64", "data.test_episodes=64"]
    base = ["model.vocab_size=257"] if typed.startswith("data=text") else base
    with pytest.raises(ConfigError, match=r"^memory.reset=document: tokens cannot start anew inside a segment"):
        check_fit(load([*base, "memory=tokens", "memory.reset=document", *typed.split()]), Options())


def test_the_vocabulary_there_and_back() -> None:
    assert VOCAB.words == ["end", "f0", "f1", "k0", "k1", "k2", "k3", "k4", "v0", "v1", "v2"]
    again = from_dict(VOCAB.to_dict())
    assert again.digest == VOCAB.digest != RecallVocab(fillers=2, keys=5, values=4).digest
    assert VOCAB.encode("k4 v2 end\nf0").tolist() == [7, 10, 0, 1]
    assert VOCAB.decode([7, 10, 0, 1]) == "k4 v2 end\nf0" and "".join(VOCAB.stream([7, 0])) == " k4 end"
    with pytest.raises(
        ConfigError, match=r"text=k5: is no symbol of this vocabulary; use end, f0 to f1, k0 to k4 and v"
    ):
        VOCAB.encode("k5")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"segment_len": 7},
            "data.segment_len=7: 2 pairs shown 2 times need a segment of 8 tokens; set it to 8 or more",
        ),
        ({"segment_len": 4, "shows": 1}, "data.segment_len=4: 2 pairs shown 1 times need a segment of 5 tokens"),
        ({"keys": 1}, "data.pairs=2: must be <= data.keys=1: keys of an episode differ; raise that"),
        ({"episodes": 18}, "data.episodes=18: must be a multiple of data.batch_size=4, so that lanes begin with an ep"),
        ({"test_episodes": 6}, "data.test_episodes=6: must be a multiple of data.batch_size=4"),
        ({"shuffle": "document"}, "data.shuffle=document: would move episodes across the borders of segments"),
        ({"segment_len_std": 1.0}, "data.segment_len_std=1.0: would move episodes across the borders of segments"),
    ],
)
def test_refusals(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_named("data", {"name": "recall", **SMALL, **keys}, path="data")
    assert str(caught.value).startswith(said)


class Oracle(nn.Module):
    """Knows the answers of some lanes, and elsewhere always says the same value."""

    device = torch.device("cpu")

    def __init__(self, knows: list[bool]) -> None:
        super().__init__()
        self.knows = torch.tensor(knows)

    def init_state(self, batch: int, *, form: str) -> State:
        return {"age": torch.zeros(batch)}

    def forward(self, tokens_BT: Tensor, state: State, segment: Segment, targets_BT: Tensor) -> ModelOutput:
        said = torch.where(self.knows[:, None], targets_BT, VOCAB.values.start)
        losses = torch.where(segment.mask(targets_BT.shape[1]), 0.5, 0.0)
        return ModelOutput(losses, said[..., None], state, {}, {})

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        return nn.functional.one_hot(hidden_BTD[..., 0], VOCAB.size).float().log()


@pytest.mark.parametrize("segment_len", [9, 5])
def test_answers_are_counted(segment_len: int) -> None:
    """However an evaluation cuts its segments: 8 episodes of 2 answers; half of the lanes are known."""
    keys = [*(f"data.{name}={value}" for name, value in SMALL.items()), "model.vocab_size=11"]
    config = load(["data=recall", f"eval.segment_len={segment_len}", *keys])
    oracle: Any = Oracle([True, True, False, False])
    found = measure_retrieval(config, oracle)
    test = episodes()["test"]
    lucky = sum(value == VOCAB.values.start for episode in test[4:] for _, value in pairs_in(episode[-1]))
    assert found.n_answer == 16 and found.accuracy == (8 + lucky) / 16
    assert found.n_target == 8 * 27 and found.loss == found.answer_loss == 0.5
    assert found.chance == pytest.approx(1 / 3)


def test_an_untrained_model_is_at_chance_and_the_experiment_can_be_trained() -> None:
    config = load(["experiment=recall", "data.episodes=64", "memory=associative"])
    check_fit(config, Options())
    torch.manual_seed(0)
    found = measure_retrieval(config, TransformerXL(config))
    assert abs(found.accuracy - found.chance) < 0.08 and found.n_answer == 512


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "least", "most"),
    [
        ("memory=none", 0.0, 0.2),
        ("memory=cache", 0.9, 1.0),
        ("memory=knn", 0.9, 1.0),
        ("memory=associative trainer.bptt_segments=5", 0.9, 1.0),
        ("memory=tokens memory.n_tokens=2 trainer.bptt_segments=5 trainer.max_steps=400", 0.9, 1.0),
    ],
)
def test_what_was_shown_four_segments_ago_is_learned(memory: str, least: float, most: float, tmp_path: Path) -> None:
    """As in docs/benchmarks.md: 64 lanes, 300 steps or 400, memory starts anew with each episode; chance is 1 in 8."""
    cpu = ["trainer.accelerator=cpu", "trainer.precision=32-true", "callbacks=none", "logger=none"]
    keys = ["memory.reset=document", "data.batch_size=64", "trainer.max_steps=300", f"run_dir={tmp_path / 'run'}"]
    config = load(["experiment=recall", *keys, *memory.split(), *cpu])
    fit(config)
    found = measure_retrieval(config, load_checkpoint(str(tmp_path / "run"), config))
    assert found.details["distance"] == 4 and found.n_answer == 512
    assert least <= found.accuracy <= most
