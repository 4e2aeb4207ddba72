"""Segments of an evaluation recorded once and replayed, against the same segments read as they are. `tests/recorded.py`
stands in for the CUDA graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recorded import StandIn, place
from tests.test_capture import CASES, assert_alike, built, plainly
from tests.test_capture import base as base  # a fixture
from tests.test_capture import recorders as recorders  # a fixture
from tests.tiny import tiny_config, train
from txl_lightning import TransformerXL
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.model import inference
from txl_lightning.model.reading import Reader
from txl_lightning.types import Batch, Chunk, Position, Segment

LANES, T = 3, 4


@pytest.fixture(autouse=True)
def no_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only CPUs do."""
    monkeypatch.setattr(inference, "can_fuse", lambda *_: False)
    monkeypatch.setattr(inference, "reads_apart", lambda *_, **__: False)


def segments(*, documents: bool = False) -> list[Batch]:
    """Eight segments: a lane starts anew, one is short, one ends before the others; padding holds other tokens."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, 257, (LANES, 8 * T + 1), generator=generator)
    found = []
    for number in range(8):
        reset = torch.tensor([number == 0, number in (0, 3), number == 0])
        length = torch.tensor([T, T if number < 7 else 2, 0 if number > 5 else T])
        starts = torch.rand(LANES, T, generator=generator) < 0.3
        document = starts.index_fill(1, torch.tensor([0]), False).cumsum(dim=1) if documents else None
        own = slice(number * T, number * T + T)
        tokens, targets = text[:, own], text[:, own.start + 1 : own.stop + 1]
        facts = Segment(reset, length, document)
        found.append(Batch(tokens, targets, facts, int(length.sum()), Position(0, number)))
    return found


@torch.no_grad()
def read(model: TransformerXL, batches: list[Batch], *, capture: bool | None = None) -> list[Tensor]:
    """Losses of every segment and the memory after the last, by a reader."""
    reader, found = Reader(model, capture=capture), []
    state = model.init_state(LANES, form="projected")
    for batch in batches:
        losses, state = reader.read(batch, state)
        found.append(losses)
    return found + [tensor.clone() for tensor in state.values()]


# titans in other variants and block_recurrent are read segment by segment too
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mac": ({"name": "titans", "variant": "mac", "chunk_len": 2}, {}),
    "block_recurrent": ({"name": "block_recurrent", "layers": [1], "n_states": 3}, {}),
}


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_a_recorded_segment_is_the_plain_one(
    name: str,
    base: dict[str, Any],
    recorders: list[StandIn],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for more, keys in MORE.items():
        monkeypatch.setitem(CASES, more, keys)
    model, batches = built(base, name), segments()
    found = read(model, batches)
    assert [recorder.replays for recorder in recorders] == [len(batches)]
    assert_alike(found, plainly(lambda: read(model, batches)))


@pytest.mark.parametrize("name", ["cache", "window", "expire"])
def test_documents_inside_segments_are_recorded_too(
    name: str,
    base: dict[str, Any],
    recorders: list[StandIn],
) -> None:
    model, batches = built(base, name, reset="document"), segments(documents=True)
    found = read(model, batches)
    assert len(recorders) == 1
    assert_alike(found, plainly(lambda: read(model, batches)))


@torch.no_grad()
def test_memory_stays_where_the_graph_reads_it(base: dict[str, Any], recorders: list[StandIn]) -> None:
    model = built(base, "cache")
    reader, state = Reader(model), model.init_state(LANES, form="projected")
    found = set()
    for batch in segments():
        _, state = reader.read(batch, state)
        found.add(tuple(place(tensor) for tensor in state.values()))
    (places,) = found
    assert set(places) <= recorders[0].read


@torch.no_grad()
def test_it_records_anew_where_something_else_is_read(base: dict[str, Any], recorders: list[StandIn]) -> None:
    """Weights that were trained or exchanged in between, segments of another length, another number of lanes."""
    model, batches = built(base, "cache"), segments()
    shorter = [
        batch._replace(tokens_BT=batch.tokens_BT[:, :3], targets_BT=batch.targets_BT[:, :3]) for batch in batches
    ]
    shorter = [b._replace(segment=b.segment._replace(length=b.segment.length.clamp(max=3))) for b in shorter]
    fewer = [batch.share(Chunk(0, LANES)) for batch in batches]

    def everything() -> list[Tensor]:
        weight = model.blocks()[0].attention.position.r.weight
        before, reader, found = weight.clone(), Reader(model), []
        state = model.init_state(LANES, form="projected")
        for number, batch in enumerate([batches[0], shorter[1], batches[2], batches[3], batches[4]]):
            if number == 3:
                weight.mul_(1.5)
            if number == 4:
                model.embedding.tables[0].weight = torch.nn.Parameter(model.embedding.tables[0].weight * 0.5)
                model.softmax.weights[0] = model.embedding.tables[0].weight
            losses, state = reader.read(batch, state)
            found.append(losses)
        state = model.init_state(1, form="projected")
        for batch in fewer[:2]:
            losses, state = reader.read(batch, state)
            found.append(losses)
        weight.copy_(before)
        model.embedding.tables[0].weight = torch.nn.Parameter(model.embedding.tables[0].weight * 2)
        model.softmax.weights[0] = model.embedding.tables[0].weight
        return found

    found = everything()
    assert sum(recorder.replays for recorder in recorders) == 7
    assert_alike(found, plainly(everything))


@pytest.mark.parametrize("keys", [[], ["model.cutoffs=[40,120]"]])
def test_evaluation_and_validation_are_recorded(
    keys: list[str],
    tmp_path: Path,
    recorders: list[StandIn],
) -> None:
    """A whole run with validations, and the evaluation of its model."""

    def run() -> tuple[list[float], dict[str, Any]]:
        folder = tmp_path / str(len(recorders))
        config = tiny_config(
            tmp_path, f"run_dir={folder}", "trainer.max_steps=6", "trainer.val_check_interval=3", *keys,
            "eval.schedule=segments", "memory=cache", "memory.mem_len=24",
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            losses, fitted = train(config, patch)
        scored = evaluate(config, fitted.module.model, split="test")
        return losses, {"fit": fitted.result["val"]["loss"], "eval": scored.scores["loss"]}

    plain = plainly(run)
    assert not recorders
    found = run()
    assert len(recorders) >= 2 and all(recorder.replays > 1 for recorder in recorders)
    assert found[0] == pytest.approx(plain[0], abs=1e-6)
    assert found[1] == pytest.approx(plain[1], abs=1e-6)
