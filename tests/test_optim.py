"""Optimizers, who is decayed, and learning rates computed by hand."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from tests.tiny import StopAt, tiny_config
from txl_lightning import TextDataModule, TransformerXLModule
from txl_lightning.commands import fit as fit_command
from txl_lightning.config import Config, ConfigError, OptimConfig, Options, load
from txl_lightning.optim_config import MORE_OPTIMIZERS, OPTIMIZERS
from txl_lightning.training.optim import KINDS, Plateau, build_optimizer, build_schedule, lr_factor, optimizer_bytes
from txl_lightning.training.trainer import build_trainer


def rates(count: int, *, max_steps: int = 100, **keys: Any) -> list[float]:
    """Learning rates of the first updates, as the optimizer has them."""
    weight = nn.Parameter(torch.zeros(2))
    config = OptimConfig(name="sgd", **keys)
    optimizer = build_optimizer([("weight", weight)], config)
    schedule, seen = build_schedule(optimizer, config, max_steps=max_steps), []
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_constant_stays_after_the_warm_up() -> None:
    assert rates(6, lr=4.0, warmup_steps=4, schedule="constant") == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_the_warm_up_rises_from_its_start() -> None:
    assert rates(5, lr=4.0, lr_start=2.0, warmup_steps=4, schedule="constant") == [2.5, 3.0, 3.5, 4.0, 4.0]
    seen = rates(13, lr=1.0, lr_start=0.5, lr_min=0.1, warmup_steps=4, max_steps=12)
    assert seen[:5] == [0.625, 0.75, 0.875, 1.0, 1.0] and seen[12] == pytest.approx(0.1)


def test_cosine_begins_behind_the_warm_up_and_ends_at_its_floor() -> None:
    seen = rates(13, lr=1.0, lr_min=0.1, warmup_steps=4, schedule="cosine", max_steps=12)
    assert seen[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert seen[6] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + 0.5**0.5))  # a quarter of the way
    assert seen[8] == pytest.approx(0.55)  # half way
    assert seen[12] == pytest.approx(0.1)


def test_inverse_sqrt_falls_with_the_root_of_the_step() -> None:
    seen = rates(401, lr=2.0, warmup_steps=4, schedule="inverse_sqrt", lr_min=0.25)
    assert seen[:5] == [0.5, 1.0, 1.5, 2.0, pytest.approx(2 * (4 / 5) ** 0.5)]
    assert seen[15] == 1.0  # the 16th update: sqrt(4 / 16)
    assert seen[99] == pytest.approx(0.4) and seen[400] == 0.25
    assert rates(4, lr=2.0, schedule="inverse_sqrt")[0::3] == [2.0, 1.0]  # no warm-up: 1 / sqrt(n)


def plateau(**keys: Any) -> tuple[Plateau, Any]:
    config = OptimConfig(name="sgd", lr=8.0, schedule="plateau", **keys)
    optimizer = build_optimizer([("weight", nn.Parameter(torch.zeros(2)))], config)
    schedule = build_schedule(optimizer, config, max_steps=100)
    assert isinstance(schedule, Plateau)

    def after(loss: float) -> float:
        optimizer.step()
        schedule.step()
        schedule.tell(loss)
        return float(optimizer.param_groups[0]["lr"])

    return schedule, after


def test_plateau_lowers_the_rate_when_the_loss_does_not_fall() -> None:
    schedule, after = plateau(patience=2, lr_factor=0.5, lr_min=3.0)
    losses = [5.0, 4.0, 4.0, 4.5, 3.9, 4.0, 3.9, 4.0, 4.0]
    assert [after(loss) for loss in losses] == [8, 8, 8, 4, 4, 4, 3, 3, 3]  # 2 would be below lr_min
    schedule.tell(9.0)  # the same validation again, as after a resume
    assert schedule.waited == 0


def test_plateau_warms_up_and_its_state_is_numbers() -> None:
    schedule, after = plateau(patience=1, warmup_steps=4)
    assert [after(loss) for loss in (5.0, 4.0, 3.0, 2.0)] == [4.0, 6.0, 8.0, 8.0]
    assert after(2.0) == 4.0
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)
    other, after_other = plateau(patience=1, warmup_steps=4)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert after_other(2.0) == after(2.0) == 2.0


class Never(L.Callback):
    """Makes every validation loss the same."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.eval_loss.reset()
        pl_module.eval_loss.update(torch.tensor(7.0), torch.tensor(1))


def test_plateau_is_told_each_validation_and_resumes(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, "optim.schedule=plateau", "optim.patience=2", "trainer.val_check_interval=3",
        "trainer.num_sanity_val_steps=1", "optim.lr=0.016", "optim.warmup_steps=0", "optim.lr_factor=0.5",
    )  # fmt: skip

    def rate_after(stop: int, ckpt: Path | None = None) -> float:
        module, trainer = TransformerXLModule(config), build_trainer(config, callbacks=[Never(), StopAt(stop)])
        trainer.fit(module, TextDataModule(config), ckpt_path=ckpt, weights_only=True if ckpt else None)
        trainer.save_checkpoint(tmp_path / "stopped.ckpt")
        return float(trainer.optimizers[0].param_groups[0]["lr"])

    # validations after 3, 6, 9, 12, 15, 18 steps; the first is the best, the third and the fifth are the second in vain
    assert [rate_after(stop) for stop in (8, 10, 16)] == [0.016, 0.008, 0.004]
    rate_after(8)
    assert rate_after(16, ckpt=tmp_path / "stopped.ckpt") == 0.004


BPTT = ["memory.gradient=carry", "trainer.bptt_segments=3", "trainer.accumulate_grad_batches=3"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.ratios=[0.9,0,0.1]"], r"optim\.schedule=plateau: there is no validation split"),
        (
            ["trainer.val_check_interval=20"],
            r"trainer\.val_check_interval=20: the first validation would come after 20",
        ),
        (
            ["trainer.val_check_interval=1.0"],
            r"trainer\.val_check_interval=1\.0: the first validation would come after 57",
        ),
        (  # batches, each a window of three of the 60 segments
            [*BPTT, "trainer.val_check_interval=25"],
            r"trainer\.val_check_interval=25: the first validation would come after 25 batches",
        ),
    ],
)
def test_a_plateau_that_sees_nothing_is_refused(overrides: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        fit_command.check(tiny_config(tmp_path, "optim.schedule=plateau", *overrides), Options())


def test_a_plateau_in_a_trainer_that_never_validates_is_refused(tmp_path: Path) -> None:
    trainer = L.Trainer(
        limit_val_batches=0, max_steps=20, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    config = tiny_config(tmp_path, "optim.schedule=plateau")
    with pytest.raises(ConfigError, match=r"optim\.schedule=plateau: there is no validation whose loss"):
        trainer.fit(TransformerXLModule(config), TextDataModule(config))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"schedule": "constant", "lr_min": 1e-5}, r"optim\.lr_min=.*: optim\.schedule=constant never falls"),
        ({"name": "adam", "momentum": 0.9}, r"optim\.momentum=0\.9: optim=adam has none"),
        ({"lr_start": 1e-6}, r"optim\.lr_start=1e-06: there is no warm-up to begin with it; set optim\.warmup_steps"),
        ({"lr": 1e-4, "lr_start": 1e-3, "warmup_steps": 9}, r"optim\.lr_start=0\.001: must be <= optim\.lr"),
        ({"lr": 1e-4, "lr_min": 1e-3}, r"optim\.lr_min=0\.001: must be <= optim\.lr"),
        ({"ema": 1.0}, r"optim\.ema=1\.0: must be <="),
    ],
)
def test_keys_that_cannot_work_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OptimConfig(**keys)


def quadratic(name: str, **keys: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A linear map that has made some updates towards zero outputs."""
    torch.manual_seed(0)
    linear, x = nn.Linear(4, 6), torch.randn(32, 4)
    optimizer = build_optimizer(linear.named_parameters(), OptimConfig(name=name, lr=0.02, **keys))
    for _ in range(20):
        optimizer.zero_grad()
        linear(x).square().mean().backward()
        optimizer.step()
    return linear, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_its_state_is_plain(name: str) -> None:
    torch.manual_seed(0)
    start = nn.Linear(4, 6)
    linear, optimizer = quadratic(name, momentum=0.9) if name in ("sgd", "rmsprop") else quadratic(name)
    assert linear.weight.square().sum() < 0.99 * start.weight.square().sum()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    _, fresh = quadratic(name, **({"momentum": 0.9} if name in ("sgd", "rmsprop") else {}))
    fresh.load_state_dict(loaded)
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_an_optimizer_are_those_of_its_large_tensors(name: str) -> None:
    large = nn.Parameter(torch.randn(64, 64))
    config = OptimConfig(name=name, momentum=0.5 if name in ("sgd", "rmsprop") else 0.0)
    optimizer = build_optimizer([("large", large)], config)
    large.grad = torch.randn(64, 64)
    optimizer.step()
    held = sum(value.numel() for value in optimizer.state[large].values() if isinstance(value, torch.Tensor))
    assert optimizer_bytes(64 * 64, config) == pytest.approx(held, rel=0, abs=140)  # row, column and counters


def test_lamb_is_adam_scaled_by_the_trust_ratio() -> None:
    """One update of one matrix, by hand: no bias correction, and the decay inside what the ratio scales."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    before, weight.grad = weight.detach().clone(), torch.randn(3, 5, dtype=torch.float64)
    config = OptimConfig(name="lamb", lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    build_optimizer([("m.weight", weight)], config).step()
    update = 0.1 * weight.grad / ((0.01 * weight.grad**2).sqrt() + 1e-6) + 0.01 * before
    expected = before - 0.1 * update * before.norm() / update.norm()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-9)


def test_an_optimizer_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match=r"optim\.name=lion: .* not installed; pip install 'txl-lightning\[optim"):
        build_optimizer([("weight", nn.Parameter(torch.zeros(2, 2)))], OptimConfig(name="lion"))


def test_lists_of_optimizers_agree() -> None:
    assert tuple(KINDS) == OPTIMIZERS
    assert {name for name, kind in KINDS.items() if kind.module != "torch.optim"} == set(MORE_OPTIMIZERS)


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("model.layers.0.attention.qkv.weight", (8, 8), True),
        ("model.layers.0.feed_forward.gate.weight", (8, 8), True),  # of swiglu: a linear map
        ("model.embedding.tables.0.weight", (8, 8), True),
        ("model.embedding.projections.0", (8, 8), True),
        ("model.softmax.cluster_weight", (3, 8), True),
        ("model.softmax.biases.0", (8,), False),
        ("model.layers.0.attention_norm.weight", (8,), False),
        ("model.u", (2, 4), False),
        ("model.layers.0.attention.position.v", (2, 4), False),
        ("model.layers.0.attention.position.rows", (9, 2, 4), False),
        ("model.layers.0.attention.position.row_bias", (9, 2), False),
        ("model.layers.0.memories.infini.gate", (2, 1), False),
        ("layers.1.memories.block_recurrent.start", (4, 8), False),
        ("layers.1.memories.titans.persistent", (4, 8), False),
        ("layers.1.memories.titans.convs.q.taps", (4, 8), False),
        ("layers.1.memories.titans.rates.theta.weight", (1, 8), False),
        ("layers.1.memories.titans.query.weight", (8, 8), True),
        ("layers.1.memories.associative_tokens.rate.weight", (1, 8), False),
        ("layers.1.memories.expire.span.weight", (1, 8), False),
        ("layers.1.memories.compressive.compressor.weight", (8, 8, 2), True),
    ],
)
def test_who_is_decayed(name: str, shape: tuple[int, ...], decayed: bool) -> None:
    optimizer = build_optimizer([(name, nn.Parameter(torch.zeros(shape)))], OptimConfig(weight_decay=0.5))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5 if decayed else 0.0]


def test_every_parameter_of_a_model_is_in_one_group(tmp_path: Path) -> None:
    module = TransformerXLModule(tiny_config(tmp_path, "optim.weight_decay=0.5", "model.untie_r=true"))
    optimizer = build_optimizer(module.named_parameters(), module.config.optim)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in module.parameters())


def test_lr_factor_is_a_share_of_the_peak() -> None:
    config = OptimConfig(lr=0.5, lr_min=0.05)
    assert lr_factor(10, config=config, max_steps=10) == pytest.approx(0.1)


def average_of(weights: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """The moving average of the weights after each update; the first is taken over as it is."""
    found = {name: value.clone() for name, value in weights[0].items()}
    for later in weights[1:]:
        found = {name: decay * value + (1 - decay) * later[name] for name, value in found.items()}
    return found


class Weights(L.Callback):
    """The weights after every update, and in the validation after step 12."""

    def __init__(self) -> None:
        self.after: list[dict[str, torch.Tensor]] = []
        self.validated: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.after.append(self._copy(pl_module))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 12:
            self.validated = self._copy(pl_module)

    @staticmethod
    def _copy(pl_module: Any) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in pl_module.model.named_parameters()}


EMA = ["optim.ema=0.8", "trainer.val_check_interval=12", "trainer.num_sanity_val_steps=1"]


def with_ema(config: Config, *callbacks: L.Callback, ckpt: Path | None = None) -> tuple[Any, L.Trainer]:
    torch.manual_seed(0)
    module, trainer = TransformerXLModule(config), build_trainer(config, callbacks=callbacks)
    trainer.fit(module, TextDataModule(config), ckpt_path=ckpt, weights_only=True if ckpt else None)
    return module, trainer


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_validation_and_the_trained_module_hold_the_moving_average(tmp_path: Path) -> None:
    seen = Weights()
    module, trainer = with_ema(tiny_config(tmp_path, *EMA), seen)
    plain = Weights()
    with_ema(tiny_config(tmp_path, "trainer.val_check_interval=12"), plain)
    assert all(
        torch.equal(seen.after[-1][name], value) for name, value in plain.after[-1].items()
    )  # training is as ever
    close(seen.validated, average_of(seen.after[:12], 0.8))
    close(dict(module.model.named_parameters()), average_of(seen.after, 0.8))
    trainer.validate(module, TextDataModule(module.config), verbose=False)
    close(dict(module.model.named_parameters()), average_of(seen.after, 0.8))  # still


def test_a_run_with_a_moving_average_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *EMA)
    whole, _ = with_ema(config)
    _, trainer = with_ema(config, StopAt(9))
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    again, _ = with_ema(config, ckpt=tmp_path / "stopped.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_checkpoints_hold_the_average_also_when_a_validation_fails(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 12:
                raise RuntimeError("no more ink")

    seen, config = Weights(), tiny_config(tmp_path, *EMA)
    module = TransformerXLModule(config)
    trainer = build_trainer(config, callbacks=[seen, Fails(), *fit_command.checkpoint_callbacks(
        tmp_path / "run", save_every_steps=0, has_valid=True)])  # fmt: skip
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="no more ink"):
        trainer.fit(module, TextDataModule(config))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    close({name.removeprefix("model."): value for name, value in saved["state_dict"].items()},
          average_of(seen.after, 0.8))  # fmt: skip
    raw = {name.removeprefix("model."): value for name, value in saved["current_model_state"].items()}
    assert all(torch.equal(raw[name], value) for name, value in seen.after[-1].items())


def test_last_and_best_and_their_evaluation_use_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny import train
    from txl_lightning import load_checkpoint
    from txl_lightning.evaluation.cached import evaluate

    config = tiny_config(tmp_path, *EMA)
    _, fitted = train(config, monkeypatch)
    for name in ("last", "best"):
        model = load_checkpoint(str(tmp_path / "run" / "checkpoints" / f"{name}.ckpt"))
        found = evaluate(config, model, split="valid")
        assert found.scores["loss"] == pytest.approx(fitted.result["val"]["loss"], rel=1e-5)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    average, raw = saved["state_dict"], saved["current_model_state"]
    assert any(not torch.equal(average[key], raw[key]) for key in raw)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_loaded_state_does_not_say_how_updates_are_computed(fuse: bool) -> None:
    config = load(["optim=adamw"]).optim
    weights = [("a.weight", nn.Parameter(torch.ones(3, 2))), ("a.bias", nn.Parameter(torch.ones(2)))]
    one, other = (build_optimizer(weights, config, fuse=way) for way in (fuse, not fuse))
    one.load_state_dict(other.state_dict())
    assert [bool(group["fused"]) for group in one.param_groups] == [fuse] * 2


def test_a_fused_update_goes_on_from_step_counts_of_any_kind() -> None:
    """One that is not fused counts on the CPU, and other engines in plain numbers."""
    config = load(["optim=adam"]).optim
    weights = [("matrix", torch.nn.Parameter(torch.ones(2, 3)))]
    plain = build_optimizer(weights, config)
    weights[0][1].grad = torch.ones(2, 3)
    plain.step()
    saved = plain.state_dict()
    saved["state"][0]["step"] = 7
    fused = build_optimizer(weights, config, fuse=True)
    fused.load_state_dict(saved)
    fused.step()
    assert fused.state[weights[0][1]]["step"] == torch.tensor(8.0)
