"""What observers of a validation log, against losses computed lane by lane in plain loops."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.points import watched
from tests.tiny import tiny_config, write_corpus
from txl_lightning import TextDataModule
from txl_lightning.callbacks.buckets import bucket_name, bucket_of
from txl_lightning.config import Config
from txl_lightning.types import Segment

SHORT = ["trainer.max_steps=4", "trainer.val_check_interval=4", "data.ratios=[0.5,0.4,0.1]"]
LANES = "eval.batch_size=3"


def by_hand(config: Config, module: Any) -> list[list[tuple[int, int, float]]]:
    """Of each lane of the validation split: (position in the segment, tokens since the reset, loss) of every target.

    Each lane alone, each document's memory anew, from log-probabilities.
    """
    data = TextDataModule(config)
    tokens = torch.from_numpy(data.data.require("valid")[:].astype("int64"))
    lanes, size = data.eval_lanes("valid"), config.eval_segment_len
    share, longer = divmod(len(tokens) - 1, lanes)
    found, start = [], 0
    module.model.eval()
    for lane in range(lanes):
        end = start + share + (lane < longer)
        rows, age = [], 0
        state = module.model.init_state(1, form="projected")
        for first in range(start, end, size):
            here = tokens[first : min(first + size, end)]
            if config.memory.reset == "segment":
                state, age = module.model.init_state(1, form="projected"), 0
            out = module.model(here[None], state, Segment.full(here[None]))
            log_probs = module.model.log_probs(out.hidden_BTD)[0]
            for place, target in enumerate(tokens[first + 1 : first + 1 + len(here)].tolist()):
                rows.append((place, age, -float(log_probs[place, target])))
                age += 1
            state = out.state
        found.append(rows)
        start = end
    return found


def bucket_by_hand(count: int) -> str:
    low = 0 if count == 0 else 2 ** int(math.log2(count))
    return str(low) if low < 2 else f"{low}-{2 * low - 1}"


def test_buckets_double() -> None:
    counts = [*range(70), 2**20 - 1, 2**20, 2**31 - 1]
    assert [bucket_name(i) for i in bucket_of(torch.tensor(counts)).tolist()] == [bucket_by_hand(c) for c in counts]


@pytest.mark.parametrize("memory", [["memory.mem_len=24"], ["memory.reset=segment"]])
def test_loss_by_position_and_age_equals_a_direct_computation(memory: list[str], tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt", n_byte=901)
    config = tiny_config(tmp_path, *SHORT, LANES, *memory, "callbacks=loss_by_position")
    points, module = watched(config)
    expected: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        for place, age, loss in [row for lane in by_hand(config, module) for row in lane]:
            expected[f"val/loss_by_position/{bucket_by_hand(place)}"].append(loss)
            expected[f"val/loss_by_age/{bucket_by_hand(age)}"].append(loss)
    row = points.rows[-1][1]
    assert points.rows[-1][0] == 4 and {name for name in row if "_by_" in name} == set(expected)
    for name, losses in expected.items():
        assert row[name] == pytest.approx(sum(losses) / len(losses), rel=1e-5), name
    weighted = sum(row[name] * len(losses) for name, losses in expected.items() if "age" in name)
    n_target = sum(len(losses) for name, losses in expected.items() if "age" in name)
    assert weighted / n_target == pytest.approx(row["val/loss"], rel=1e-6)


def test_documents_that_begin_inside_a_segment_have_ages_of_their_own() -> None:
    from txl_lightning.callbacks.loss_by_position import tokens_before

    document = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    segment = Segment(torch.tensor([False, True]), torch.tensor([6, 6]), document)
    assert tokens_before(segment, torch.tensor([9, 0]), n_token=6).tolist() == [[9, 10, 11, 0, 1, 0], list(range(6))]


def test_memory_benefit_equals_three_readings_by_hand(tmp_path: Path) -> None:
    """Two segments from the middle; their memory, nothing, and the next lane's."""
    write_corpus(tmp_path / "corpus.txt", n_byte=901)
    config = tiny_config(tmp_path, *SHORT, LANES, "memory.mem_len=24", "callbacks=memory_benefit", "optim.lr=0.03")
    points, module = watched(config)
    loader: Any = TextDataModule(config).val_dataloader()
    batches = list(loader)
    first = (len(batches) - 2) // 2
    model = module.model.eval()
    state, sums, count = model.init_state(3, form="projected"), [0.0, 0.0, 0.0], 0
    with torch.no_grad():
        for index, batch in enumerate(batches):
            if index in (first, first + 1):
                other = {name: tensor[[1, 2, 0]] for name, tensor in state.items()}
                for which, given in enumerate((state, model.init_state(3, form="projected"), other)):
                    out = model(batch.tokens_BT, given, batch.segment)
                    picked = model.log_probs(out.hidden_BTD).gather(-1, batch.targets_BT[..., None])
                    sums[which] -= float(picked.sum())
                count += batch.targets_BT.numel()
            state = model(batch.tokens_BT, state, batch.segment).state
    row = points.rows[-1][1]
    own, without, swapped = (total / count for total in sums)
    for name, value in (("with", own), ("without", without), ("swapped", swapped)):
        assert row[f"memory/probe/{name}"] == pytest.approx(value, rel=1e-5)
    assert row["memory/benefit/nats"] == pytest.approx(without - own, abs=1e-5) and abs(without - own) > 1e-4
    assert row["memory/benefit/content"] == pytest.approx(swapped - own, abs=1e-5) and abs(swapped - own) > 1e-4


@pytest.mark.parametrize("memory", ["memory=none", "memory.mem_len=0", "memory.reset=segment"])
def test_the_benefit_is_exactly_0_without_memory(memory: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SHORT, LANES, memory, "callbacks=memory_benefit")
    points, _ = watched(config)
    assert points.rows[-1][1]["memory/benefit/nats"] == points.rows[-1][1]["memory/benefit/content"] == 0.0


def test_a_single_lane_has_no_other_s_memory(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *SHORT, "eval.batch_size=1", "callbacks=memory_benefit")
    points, _ = watched(config)
    assert "memory/benefit/nats" in points.rows[-1][1] and "memory/benefit/content" not in points.rows[-1][1]
