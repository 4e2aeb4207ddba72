"""Training: nothing beside it changes one loss, memory is reset only where it should be, checkpoints are plain."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from tests.tiny import tiny_config, train, write_corpus
from txl_lightning import TextDataModule, TransformerXLModule, load_checkpoint
from txl_lightning.commands import fit as fit_command
from txl_lightning.config import Config, ConfigError
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.training.divergence import NonFiniteLoss
from txl_lightning.training.optim import build_optimizer, lr_factor
from txl_lightning.training.stopping import GracefulStop
from txl_lightning.training.trainer import build_trainer

ALL_CALLBACKS = "callbacks=[memory_monitor,text_samples,throughput]"
DROPOUT = "model.dropout=0.1"  # consumes random numbers, so a stray draw anywhere shows


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    (tmp_path / "plain").mkdir()
    config = tiny_config(tmp_path / "plain", DROPOUT, "callbacks=none", "logger=none", "trainer.val_check_interval=1.0")
    return train(config, monkeypatch)[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.val_check_interval=0.1"],
        ["trainer.val_check_interval=7"],
        ["trainer.save_every_steps=2"],
        ["trainer.num_sanity_val_steps=2"],
        ["eval.batch_size=3", "trainer.val_check_interval=7"],
        ["eval.segment_len=5", "trainer.val_check_interval=7"],
        ["data.num_workers=2", "trainer.val_check_interval=7"],
        ["trainer.log_every_n_steps=1"],
        [
            "callbacks=[memory_monitor,text_samples,throughput]",
            "logger=[tensorboard,csv]",
            "trainer.val_check_interval=7",
        ],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_training_losses_do_not_depend_on_what_happens_beside(
    overrides: list[str], undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, DROPOUT, *overrides)
    assert train(config, monkeypatch)[0] == undisturbed


def test_losses_depend_on_the_memory_and_on_the_seed(
    undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, override in enumerate(["memory.mem_len=8", "seed=1"]):
        (tmp_path / str(number)).mkdir()
        assert train(tiny_config(tmp_path / str(number), DROPOUT, override), monkeypatch)[0] != undisturbed


class Watch(L.Callback):
    """Lane ages before and after every step, and which states exist during validation."""

    def __init__(self) -> None:
        self.ages: list[tuple[int, int]] = []  # (segment, tokens of lane 0 since its reset)
        self.stages: set[str] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ages.append((batch.position.segment, int(pl_module.lanes.current("train")["age"][0])))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.stages |= set(pl_module.lanes._committed)


def test_memory_is_reset_at_epoch_borders_only(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "trainer.max_steps=130", "trainer.val_check_interval=7")
    watch, data = Watch(), TextDataModule(config)
    trainer = build_trainer(config, callbacks=[watch])
    trainer.fit(TransformerXLModule(config), data)
    per_epoch = len(data.train_dataloader())
    assert per_epoch < 130  # so the run crosses an epoch
    lane = -(-(len(data.data.splits["train"]) - 1) // 4)
    expected = [min((segment + 1) * 16, lane) for segment in range(per_epoch)]
    assert [age for _, age in watch.ages] == (expected * 3)[:130]
    assert [segment for segment, _ in watch.ages] == (list(range(per_epoch)) * 3)[:130]
    assert watch.stages == {"train", "val/0"}


def test_sanity_check_has_its_own_state(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "trainer.num_sanity_val_steps=2", "trainer.max_steps=1")
    watch, module = Watch(), TransformerXLModule(config)
    build_trainer(config, callbacks=[watch]).fit(module, TextDataModule(config))
    assert watch.stages == {"sanity/0"}
    assert "val" not in module.scores  # two batches are no score
    assert set(module.lanes._committed) == {"train"}


def test_fit_leaves_a_readable_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, "trainer.val_check_interval=10", "logger=[tensorboard,csv]")
    _, fitted = train(config, monkeypatch)
    run = fitted.run_dir
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "run.json", "result.json", "checkpoints", "csv"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt", "manifest.json"}
    assert Config.from_dict(yaml.safe_load((run / "config.yaml").read_text())) == config
    facts = json.loads((run / "run.json").read_text())
    assert facts["seed"] == config.seed and facts["versions"]["torch"] == torch.__version__
    assert len(facts["data_fingerprint"]) == 64
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 20 and result["tokens"] == 20 * 4 * 16
    assert result["val"]["bits_per_byte"] == pytest.approx(result["val"]["loss"] / 0.6931471805599453)
    for name in ("last", "best"):
        saved = torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)
        assert Config.from_dict(saved["txl_lightning"]["config"]) == config
        load_checkpoint(str(run / "checkpoints" / f"{name}.ckpt"))
    assert saved["txl_lightning"]["lanes"]["lanes"]["layers.0.cache.hidden"].shape[0] == 4


def test_a_run_folder_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, "trainer.max_steps=1")
    train(config, monkeypatch)
    with pytest.raises(ConfigError, match="the folder holds a run already; name another folder"):
        fit_command.check(config, object())  # type: ignore[arg-type]


def test_best_is_chosen_by_validation_and_last_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a learning rate that soon ruins the model: the best checkpoint is an early one
    config = tiny_config(
        tmp_path, "optim.lr=0.5", "optim.clip=0", "trainer.val_check_interval=2", "optim.warmup_steps=40"
    )
    _, fitted = train(config, monkeypatch)
    folder = fitted.run_dir / "checkpoints"
    steps = {name: torch.load(folder / f"{name}.ckpt", weights_only=True)["global_step"] for name in ("best", "last")}
    assert steps["last"] == 20 and steps["best"] < 20


def test_non_finite_loss_stops_after_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path)
    original = TransformerXLModule._read

    def poisoned(self: Any, batch: Any, state: Any) -> Any:
        out = original(self, batch, state)
        if self.training and self.trainer.global_step == 3:
            out = out._replace(losses_BT=out.losses_BT.index_fill(0, torch.tensor([2]), float("nan")))
        return out

    monkeypatch.setattr(TransformerXLModule, "_read", poisoned)
    said = r"step 3, lanes \[2\]: the weights before this step are saved; lower optim.lr=0.003, .*lower optim.clip="
    with pytest.raises(NonFiniteLoss, match=said):
        fit_command.fit(config)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


def test_a_non_finite_gradient_stops_before_it_ruins_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TransformerXLModule.on_after_backward

    def poisoned(self: Any) -> None:
        original(self)
        if self.trainer.global_step == 3:
            self.model.softmax.biases[0].grad[0] = float("nan")

    monkeypatch.setattr(TransformerXLModule, "on_after_backward", poisoned)
    with pytest.raises(NonFiniteLoss, match="gradient is not finite at step 3: the weights before this step are saved"):
        fit_command.fit(tiny_config(tmp_path))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


def test_diverging_at_a_step_that_is_saved_already_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when going on diverges at once, again and again."""
    original = TransformerXLModule.on_after_backward

    def poisoned(self: Any) -> None:
        original(self)
        if self.trainer.global_step == 4:
            self.model.softmax.biases[0].grad[0] = float("nan")

    monkeypatch.setattr(TransformerXLModule, "on_after_backward", poisoned)
    config, folder = tiny_config(tmp_path, "trainer.save_every_steps=2"), tmp_path / "run" / "checkpoints"
    for resume in (None, str(folder / "last.ckpt"), str(folder / "last.ckpt")):
        with pytest.raises(NonFiniteLoss, match=r"in a new run, or go on with trainer\.on_divergence=skip"):
            fit_command.fit(config, resume=resume)
        steps = [torch.load(folder / f"{name}.ckpt", weights_only=True)["global_step"] for name in ("last", "previous")]
        assert steps == [4, 2]


def test_a_batch_of_another_kind_is_refused(tmp_path: Path) -> None:
    config, tokens = tiny_config(tmp_path), torch.zeros(4, 8).long()
    loader = DataLoader(TensorDataset(tokens, tokens))
    with pytest.raises(
        TypeError, match=r"a batch must be a txl_lightning\.types\.Batch, not a Tensor: let TextDataModule"
    ):
        build_trainer(config).fit(TransformerXLModule(config), loader, loader)


def test_ruined_weights_are_not_saved_over_good_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TransformerXLModule.on_train_batch_start

    def ruining(self: Any, batch: Any, batch_idx: int) -> None:
        original(self, batch, batch_idx)
        if self.trainer.global_step == 3:
            self.model.softmax.biases[0].data[0] = float("inf")

    monkeypatch.setattr(TransformerXLModule, "on_train_batch_start", ruining)
    config = tiny_config(tmp_path, "optim.clip=0", "trainer.save_every_steps=2")
    said = r"at step 3, lanes .*: the weights are ruined and not saved; .*set optim.clip=0.25"
    with pytest.raises(NonFiniteLoss, match=said):
        fit_command.fit(config)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


def test_loss_weighs_targets_not_lanes(tmp_path: Path) -> None:
    """In the last, short segment the loss is still the mean over real targets."""
    config = tiny_config(tmp_path)
    data, module = TextDataModule(config), TransformerXLModule(config)
    module.trainer = build_trainer(config)
    module._trainer.strategy.connect(module)
    *_, last = data.train_dataloader()
    assert 0 < int(last.segment.length.min()) < 16
    loss = module.training_step(last, 0)
    out = module.model(last.tokens_BT, module.fresh_state(4, "train"), last.segment, last.targets_BT)
    assert last.n_target == int(last.segment.length.sum())
    torch.testing.assert_close(loss, out.losses_BT.sum() / last.n_target)


def test_accumulated_gradients_are_those_of_the_mean_over_all_targets(tmp_path: Path) -> None:
    """Also in the last window of an epoch, which holds fewer segments and a short one."""
    config = tiny_config(tmp_path, "trainer.accumulate_grad_batches=8", "memory=none")
    module, data, seen = TransformerXLModule(config), TextDataModule(config), []

    class Gradients(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            weights = {name: weight.detach().clone() for name, weight in pl_module.model.named_parameters()}
            seen.append((weights, pl_module.model.softmax.biases[0].grad.clone()))

    trainer = build_trainer(config, callbacks=[Gradients()])
    trainer.fit(module, data)
    segments = list(data.train_dataloader())
    assert len(segments) % 8 and len(segments) < 8 * 20  # the epoch's last window is not full, and it was reached
    for window, (weights, gradient) in enumerate(seen[: -(-len(segments) // 8)]):
        module.model.load_state_dict(weights, strict=False)
        module.zero_grad()
        batches = segments[window * 8 : (window + 1) * 8]
        losses = [
            module.model(b.tokens_BT, module.model.init_state(4), b.segment, b.targets_BT).losses_BT for b in batches
        ]
        (sum(loss.sum() for loss in losses) / sum(b.n_target for b in batches)).backward()
        torch.testing.assert_close(gradient, module.model.softmax.biases[0].grad)


def test_an_epoch_border_with_accumulation_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for number, beside in enumerate(
        [["trainer.val_check_interval=1.0"], ["trainer.val_check_interval=7", ALL_CALLBACKS]]
    ):
        (tmp_path / str(number)).mkdir()
        overrides = [DROPOUT, "trainer.accumulate_grad_batches=4", "trainer.max_steps=20", *beside]
        runs.append(train(tiny_config(tmp_path / str(number), *overrides), monkeypatch)[0])
    assert runs[0] == runs[1]
    assert len(runs[0]) > 57  # segments of an epoch


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_every_precision_trains_and_scores(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(
        tmp_path, f"trainer.precision={precision}", "trainer.val_check_interval=10", "eval.segment_len=1"
    )
    losses, fitted = train(config, monkeypatch)
    assert losses[-1] < losses[0] - 1
    exact = evaluate(
        replace(config, trainer=replace(config.trainer, precision="32-true")),
        fitted.module.model.float(),
        split="valid",
    )
    assert fitted.result["val"]["loss"] == pytest.approx(exact.scores["loss"], rel=0.02)


def test_a_stop_inside_an_accumulation_window_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stop = tiny_config(tmp_path, "trainer.accumulate_grad_batches=4"), GracefulStop()

    class Ask(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    build = fit_command.build_trainer
    monkeypatch.setattr(
        fit_command, "build_trainer", lambda *args, callbacks, **kw: build(*args, callbacks=[*callbacks, Ask()], **kw)
    )
    fitted = fit_command.fit(config, stop=stop)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert stop.exit_code == 75 and fitted.result["stopped_by"] == "SIGTERM"
    assert saved["global_step"] == 2
    assert saved["txl_lightning"]["lanes"]["position"] == [0, 8]


def test_a_failure_inside_a_window_saves_what_the_weights_belong_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, "trainer.accumulate_grad_batches=4")
    original, seen = TransformerXLModule.training_step, []

    def failing(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 8:
            seen.append({key: value.clone() for key, value in self.lanes.current("train").items()})
        if batch_idx == 10:
            raise RuntimeError("something broke")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TransformerXLModule, "training_step", failing)
    with pytest.raises(RuntimeError, match="something broke"):
        fit_command.fit(config)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    lanes = saved["txl_lightning"]["lanes"]
    assert (saved["global_step"], lanes["position"]) == (2, [0, 8])
    assert all(torch.equal(lanes["lanes"][key], seen[0][key]) for key in seen[0])


def test_a_failing_observer_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, "trainer.val_check_interval=4")

    class Fails(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == 8:
                raise RuntimeError("no more ink")

    build = fit_command.build_trainer
    monkeypatch.setattr(
        fit_command, "build_trainer", lambda *args, callbacks, **kw: build(*args, callbacks=[*callbacks, Fails()], **kw)
    )
    with pytest.raises(RuntimeError, match="no more ink"):
        fit_command.fit(config)
    assert torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 8


def test_a_second_fit_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    config, positions = tiny_config(tmp_path, "trainer.max_steps=6", "trainer.accumulate_grad_batches=2"), []

    class Positions(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            positions.append((batch.position.segment, pl_module.at_border))

    module = TransformerXLModule(config)
    for _ in range(2):
        build_trainer(config, callbacks=[Positions()]).fit(module, TextDataModule(config))
    assert positions == [(segment, bool(segment % 2)) for segment in range(24)]


def test_other_text_is_not_read_with_the_memory_of_the_first(tmp_path: Path) -> None:
    module = TransformerXLModule(config := tiny_config(tmp_path, "trainer.max_steps=2"))
    build_trainer(config).fit(module, TextDataModule(config))
    (tmp_path / "other").mkdir()
    write_corpus(tmp_path / "other" / "corpus.txt", seed=1)
    other = TextDataModule(tiny_config(tmp_path / "other", "trainer.max_steps=2"))
    with pytest.raises(ConfigError, match="is not what these lanes have read"):
        build_trainer(config).fit(module, other)


def test_lightning_s_own_clipping_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(max_steps=20, gradient_clip_val=0.5, accelerator="cpu", **quiet)
    with pytest.raises(
        ConfigError, match=r"Trainer\.gradient_clip_val=0\.5: is not read; set optim\.clip=0\.5 instead"
    ):
        trainer.fit(TransformerXLModule(config), TextDataModule(config))


def test_learning_rate_warms_up_and_follows_the_cosine(tmp_path: Path) -> None:
    optim = tiny_config(tmp_path, "optim.lr=1.0", "optim.lr_min=0.1", "optim.warmup_steps=4").optim
    factors = [lr_factor(step, config=optim, max_steps=12) for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.55)  # half way: between 1 and 0.1
    assert factors[12] == pytest.approx(0.1)


def test_weight_decay_spares_biases_norms_u_and_v(tmp_path: Path) -> None:
    module = TransformerXLModule(tiny_config(tmp_path, "optim.weight_decay=0.5", "model.untie_r=true"))
    optimizer = build_optimizer(module.named_parameters(), module.config.optim)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, parameter in module.named_parameters() if id(parameter) in decayed}
    assert all(name.endswith("weight") and "norm" not in name for name in names)
    assert "model.layers.0.attention.qkv.weight" in names and "model.embedding.tables.0.weight" in names


def test_schedule_and_trainer_must_agree(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    trainer = L.Trainer(
        max_steps=7, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    with pytest.raises(ConfigError, match=r"trainer\.max_steps=20: the Trainer has max_steps=7"):
        trainer.fit(TransformerXLModule(config), TextDataModule(config))
