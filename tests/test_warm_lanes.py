"""Lanes that first read some of the text before their own: it is not scored, and their memory is that of one lane."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import MODEL, RUN, write_corpus
from txl_lightning import TransformerXL
from txl_lightning.config import ConfigError, load
from txl_lightning.data.lanes import LaneLoader
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.model.lstm import LSTM

T = 8


def loader(n_token: int, *, lanes: int, warm: int, **more: object) -> LaneLoader:
    tokens = np.arange(n_token) % 200
    return LaneLoader(tokens, segment_len=T, lanes=lanes, used_lanes=lanes, warm=warm, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_token", "lanes", "warm"), [(97, 3, 2), (97, 3, 9), (130, 4, 3), (61, 1, 2), (97, 3, 10**9)]
)
def test_each_lane_reads_whole_segments_right_before_its_own(n_token: int, lanes: int, warm: int) -> None:
    made = loader(n_token, lanes=lanes, warm=warm)
    starts, read, scored = made.layout.starts(), [[] for _ in range(lanes)], 0
    resets = [[] for _ in range(lanes)]
    assert len(made) <= -(-n_token // T) + lanes  # no more than there is text: the rest would be empty
    batches = list(made)
    assert len(batches) == len(made)
    for batch in batches:
        scored += batch.n_target
        for lane in range(lanes):
            length = int(batch.segment.length[lane])
            read[lane] += batch.tokens_BT[lane, :length].tolist()
            resets[lane] += [bool(batch.segment.reset[lane])] * (length > 0)
    assert scored == n_token - 1
    for lane, start in enumerate(starts):
        begin = start - min(warm, start // T) * T
        assert read[lane] == [i % 200 for i in range(begin, start + made.layout.sizes()[lane])]
        assert resets[lane] == [True] + [False] * (len(resets[lane]) - 1)


@pytest.mark.parametrize("schedule", ["segments", "layers"])
def test_warmed_lanes_score_as_one_lane_does(schedule: str, tmp_path: Path) -> None:
    """Two lanes of whole segments, the second warmed by more than the memory reaches."""
    (tmp_path / "test.txt").write_text((write_corpus(tmp_path / "all.txt")).read_text()[: 24 * T])
    texts = ["data=text", f"data.train={tmp_path / 'all.txt'}", f"data.test={tmp_path / 'test.txt'}"]
    sizes = [*texts, f"data.segment_len={T}", "memory.mem_len=12", "model.n_layer=2", f"eval.schedule={schedule}"]
    base = [item for item in (*MODEL, *RUN) if item.partition("=")[0] not in ("model.n_layer", "memory.mem_len")]
    base = [item for item in base if not item.startswith(("data.segment_len", "eval."))]
    config = load([*base, *sizes])
    torch.manual_seed(0)
    model = TransformerXL(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    found = {}
    for lanes, warm in ((1, 0), (2, 0), (2, 4 * T)):
        config = load([*base, *sizes, f"eval.batch_size={lanes}", f"eval.warm={warm}"])
        one = evaluate(config, model, split="test")
        found[lanes, warm] = one.scores["loss"] * one.n_target
        assert one.warm == warm
    assert one.n_target == 24 * T  # the text and the end of its document, so that borders of segments fall together
    assert found[2, 4 * T] == pytest.approx(found[1, 0], rel=1e-6)
    assert abs(found[2, 0] - found[1, 0]) > 1e-4 * found[1, 0]


def test_an_lstm_warmed_by_all_the_text_before_scores_as_one_lane_does(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text((write_corpus(tmp_path / "all.txt")).read_text()[: 24 * T])
    texts = ["data=text", f"data.train={tmp_path / 'all.txt'}", f"data.test={tmp_path / 'test.txt'}"]
    base = ["model=lstm", "model.n_layer=1", "model.d_model=16", *texts, f"data.segment_len={T}", "data.batch_size=2"]
    torch.manual_seed(0)
    model = LSTM(load(base))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)
    one, cold, warm = (
        evaluate(load([*base, *keys]), model, split="test").scores["loss"]
        for keys in (["eval.batch_size=1"], [], [f"eval.warm={12 * T}"])
    )
    assert warm == pytest.approx(one, rel=1e-6)
    assert abs(cold - one) > 1e-4 * one


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("memory=none eval.warm=64", "eval.warm=64: memory=none keeps nothing"),
        ("memory.reset=segment eval.warm=64", "eval.warm=64: memory.reset=segment keeps nothing"),
        (
            "data.segment_len=48 eval.warm=64",
            "eval.warm=64: must be a multiple of the 48 tokens of a segment; set it to 96",
        ),
    ],
)
def test_what_cannot_be_warmed_is_refused(typed: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(typed.split())
    assert str(error.value).startswith(message)
