"""Pictures of attention, pixel by pixel."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from tests.points import Points, observers
from tests.tiny import tiny_config
from txl_lightning import TextDataModule, TransformerXLModule
from txl_lightning.callbacks.attention_maps import picture
from txl_lightning.callbacks.probe import Every
from txl_lightning.training.loggers import build_loggers
from txl_lightning.training.trainer import build_trainer


def test_a_map_has_a_pixel_for_each_pair_and_a_red_line_behind_memory() -> None:
    weights = torch.tensor([[[0.64, 0.0, 0.36, 0.0], [0.0, 0.16, 0.2, 0.64]], [[0.25, 0.0, 0.25, 0.5]] * 2])
    image = picture(weights, n_memory=2, pixels=99)
    assert image.shape == (3, 2, 5 + 2 + 5)
    assert image[:, :, 2].tolist() == image[:, :, 9].tolist() == [[1, 1], [0, 0], [0, 0]]  # red
    assert (image[:, :, 5:7] == 1).all()  # the gap
    gray = image[0]
    assert gray[0, [0, 1, 3, 4]].tolist() == pytest.approx([0, 1, 1 - 0.75, 1])
    assert gray[1, [7, 8, 10, 11]].tolist() == pytest.approx([1 - 0.5**0.5, 1, 1 - 0.5**0.5, 0])
    assert torch.equal(image[1][:, [0, 1, 3, 4]], gray[:, [0, 1, 3, 4]])


def test_large_maps_keep_the_largest_of_neighbours_on_either_side_of_the_line() -> None:
    weights = torch.zeros(1, 4, 7)
    weights[0, 3, 2], weights[0, 0, 3] = 1.0, 0.25
    image = picture(weights, n_memory=3, pixels=4)  # steps of 2: 2 columns of memory, 2 of the segment
    assert image.shape == (3, 2, 2 + 1 + 2)
    assert image[1].tolist() == [[1, 1, 0, 0.5, 1], [1, 0, 0, 1, 1]]
    assert picture(weights, n_memory=0, pixels=7).shape == (3, 4, 7)


class Shown(Points):
    """A logger with a place for images."""

    def __init__(self) -> None:
        super().__init__()
        self.experiment: Any = self
        self.images: list[tuple[str, Tensor, int]] = []

    def add_image(self, tag: str, image: Tensor, step: int) -> None:
        self.images.append((tag, image, step))


def test_maps_come_at_their_steps_and_reach_tensorboard(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, "callbacks=attention_maps", "callbacks.attention_maps.every_n_steps=6", "trainer.log_every_n_steps=4",
        "trainer.accumulate_grad_batches=2", "logger=tensorboard", "memory.mem_len=24",
    )  # fmt: skip
    shown = Shown()
    loggers = [shown, *build_loggers(config, tmp_path / "run")]
    trainer = build_trainer(config, callbacks=observers(config), loggers=loggers)
    trainer.fit(TransformerXLModule(config), TextDataModule(config))
    steps = [(f"attention/L{layer}", step) for step in (8, 12, 20) for layer in (0, 1)]  # 6, 12, 18: the next points
    assert [(tag, step) for tag, _, step in shown.images] == steps
    assert all(image.shape == (3, 16, 2 * (24 + 1 + 16) + 2) for _, image, _ in shown.images)
    assert all(image.dtype == torch.uint8 and len(image.unique()) > 9 for _, image, _ in shown.images)
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0})
    events.Reload()
    assert [(point.step, point.width, point.height) for point in events.Images("attention/L1")] == [
        (step, 84, 16) for step in (8, 12, 20)
    ]


@pytest.mark.parametrize("stop", range(25))
def test_looks_come_at_the_same_steps_whenever_a_run_was_stopped(stop: int) -> None:
    """Points at every 4th step, looks at the first one in each run of 6."""
    taken = []
    for borders in ([0, 40], [0, stop, 40]):
        steps = []
        for begin, end in pairwise(borders):
            every = Every(6)
            every.begin(begin - begin % 4)
            for step in range(begin + 1, end + 1):
                if step % 4 == 0 and every.is_due(step):
                    every.take(step)
                    steps.append(step)
        taken.append(steps)
    assert taken[0] == taken[1] == [8, 12, 20, 24, 32, 36]
    assert not Every(0).is_due(100)
