"""Steps over several segments: exact means, borders anywhere, and a resumed run that equals one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from tests.tiny import StopAt, tiny_config, train
from txl_lightning import TextDataModule, TransformerXLModule
from txl_lightning.config import Config, ConfigError
from txl_lightning.training.trainer import build_trainer

SCHEDULE = ["trainer.accumulate_grad_batches=4", "trainer.accumulate_from_step=6"]


class Steps(L.Callback):
    """After each segment: its epoch and number, and the optimizer steps made."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self.borders: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((*batch.position, trainer.global_step))
        self.borders.append(pl_module.at_border)


def fit(config: Config, *callbacks: L.Callback, ckpt: Path | None = None) -> tuple[TransformerXLModule, L.Trainer]:
    torch.manual_seed(0)
    module, trainer = TransformerXLModule(config), build_trainer(config, callbacks=callbacks)
    trainer.fit(module, TextDataModule(config), ckpt_path=ckpt, weights_only=True if ckpt else None)
    return module, trainer


def expected_steps(n_segment: int, *, max_steps: int) -> list[tuple[int, int, int]]:
    """Written out anew: one segment a step up to step 6, then four, fewer where the epoch ends."""
    seen, epoch, segment, steps = [], 0, 0, 0
    while steps < max_steps:
        size = min(1 if steps < 6 else 4, n_segment - segment)
        seen += [(epoch, segment + i, steps) for i in range(size - 1)]
        segment, steps = segment + size, steps + 1
        seen.append((epoch, segment - 1, steps))
        if segment == n_segment:
            epoch, segment = epoch + 1, 0
    return seen


def test_accumulation_begins_at_its_step(tmp_path: Path) -> None:
    config, steps = tiny_config(tmp_path, *SCHEDULE), Steps()
    fit(config, steps)
    n_segment = len(TextDataModule(config).train_dataloader())
    assert (n_segment - 6) % 4 and n_segment < len(steps.seen)  # the epoch ends inside a step
    assert steps.seen == expected_steps(n_segment, max_steps=20)
    made = [step for *_, step in steps.seen]
    assert steps.borders == [step > before for before, step in zip([0, *made], made, strict=False)]


def test_gradients_of_scheduled_steps_are_means_over_all_their_targets(tmp_path: Path) -> None:
    config, seen = tiny_config(tmp_path, *SCHEDULE, "memory=none"), []

    class Gradients(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            weights = {name: weight.detach().clone() for name, weight in pl_module.model.named_parameters()}
            seen.append((weights, pl_module.model.layers[0].feed_forward[0].bias.grad.clone()))

    module, _ = fit(config, Gradients())
    segments = list(TextDataModule(config).train_dataloader())
    starts = [*range(6), *range(6, len(segments), 4)]
    for (weights, gradient), start, stop in zip(seen, starts, [*starts[1:], len(segments)], strict=False):
        module.model.load_state_dict(weights, strict=False)
        module.zero_grad()
        batches = segments[start:stop]
        losses = [
            module.model(b.tokens_BT, module.model.init_state(4), b.segment, b.targets_BT).losses_BT for b in batches
        ]
        (sum(loss.sum() for loss in losses) / sum(b.n_target for b in batches)).backward()
        torch.testing.assert_close(gradient, module.model.layers[0].feed_forward[0].bias.grad)


@pytest.mark.parametrize("stop", [6, 8, 17])  # at and after the change, and in the second epoch
def test_a_resumed_run_equals_one_that_never_stopped(stop: int, tmp_path: Path) -> None:
    config, whole, rest = tiny_config(tmp_path, *SCHEDULE), Steps(), Steps()
    module, _ = fit(config, whole)
    _, trainer = fit(config, StopAt(stop))
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    again, _ = fit(config, rest, ckpt=tmp_path / "stopped.ckpt")
    assert rest.seen == whole.seen[-len(rest.seen) :] and rest.seen[0][2] in (stop, stop + 1)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_a_checkpoint_inside_a_step_stands_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, *SCHEDULE)
    original = TransformerXLModule.training_step

    def failing(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 12:  # the third segment of step 7, which begins with segment 10
            raise RuntimeError("something broke")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TransformerXLModule, "training_step", failing)
    with pytest.raises(RuntimeError, match="something broke"):
        train(config, monkeypatch)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert (saved["global_step"], saved["txl_lightning"]["lanes"]["position"]) == (7, [0, 10])


def test_a_second_fit_begins_its_steps_where_the_first_ended(tmp_path: Path) -> None:
    """Nine segments were read: the next step begins with the tenth, though Lightning counts from 0 again."""
    config = tiny_config(tmp_path, "trainer.accumulate_grad_batches=3", "trainer.max_steps=3")
    config_4 = tiny_config(tmp_path, "trainer.accumulate_grad_batches=4", "trainer.max_steps=3")
    module, steps = TransformerXLModule(config), Steps()
    build_trainer(config).fit(module, TextDataModule(config))
    module.config = config_4
    build_trainer(config_4, callbacks=[steps]).fit(module, TextDataModule(config_4))
    assert [(segment, step) for _, segment, step in steps.seen] == [(9 + i, (i + 1) // 4) for i in range(12)]


def test_a_schedule_without_accumulation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"accumulate_from_step=5: trainer\.accumulate_grad_batches=1 accumulates"):
        tiny_config(tmp_path, "trainer.accumulate_from_step=5")


def test_accumulation_that_only_the_trainer_knows_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    trainer = L.Trainer(
        accumulate_grad_batches=4, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_steps=20,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"Trainer\.accumulate_grad_batches=4: is not read"):
        trainer.fit(TransformerXLModule(config), TextDataModule(config))
