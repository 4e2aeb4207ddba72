"""DeepSpeed's settings and the checkpoints it writes: what is refused, what is read, and that nothing in them runs."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from tests.ranked import launch
from tests.tiny import tiny_config, write_corpus
from txl_lightning import TextDataModule, TransformerXLModule, cli, registry
from txl_lightning.checkpoints import manifest, read_checkpoint, read_stand
from txl_lightning.commands.convert import convert
from txl_lightning.commands.dry_run import needs
from txl_lightning.commands.fit import fit
from txl_lightning.config import ConfigError, load
from txl_lightning.training.strategies import settings

STEADY = ["trainer.max_steps=6", "trainer.val_check_interval=2", "model.dropout=0", "model.dropatt=0",
          "logger.csv=true", "trainer.log_every_n_steps=1"]  # fmt: skip
TWO = ["trainer.devices=2", "trainer.accelerator=cpu"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("strategy=ddp strategy.stage=2", "strategy.stage=2: strategy=ddp has none"),
        ("strategy=ddp strategy.config=x.json", "strategy.config=x.json: strategy=ddp has none"),
        ("strategy.name=deepspeed", "strategy.stage=null: DeepSpeed needs one"),
        ("strategy=deepspeed_zero0 strategy.offload_optimizer=true", "strategy.offload_optimizer=true: ZeRO 0 leaves"),
        ("strategy=deepspeed_zero2 strategy.offload_parameters=true", "strategy.offload_parameters=true: parameters"),
        ("strategy=deepspeed_zero1 optim.ema=0.9", "optim.ema=0.9: strategy=deepspeed_zero1 keeps no average"),
        ("strategy=deepspeed_zero1 trainer.lane_chunks=2", "trainer.lane_chunks=2: strategy=deepspeed_zero1 takes"),
        ("strategy=deepspeed_zero2 trainer.on_divergence=skip", "trainer.on_divergence=skip: strategy=deepspeed_zero2"),
        ("strategy=deepspeed_zero2 trainer.max_loss_rise=1", "trainer.max_loss_rise=1.0: strategy=deepspeed_zero2"),
        ("strategy=deepspeed_zero3 optim=adafactor", "optim.name=adafactor: looks at whole matrices"),
        ("strategy=deepspeed_zero1 optim=adagrad", "optim.name=adagrad: DeepSpeed makes it anew"),
        ("strategy=deepspeed_zero3 optim=adabelief", "optim.name=adabelief: counts the steps of a group"),
        ("strategy=deepspeed_zero0 optim=lamb trainer.precision=bf16-mixed", "optim.name=lamb: looks at whole"),
    ],
)
def test_what_the_engine_cannot_do_is_named(typed: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(typed.split())
    assert str(error.value).startswith(message)


HELD = {
    "gradient_clipping": (1.0, "gradient_clipping is decided by optim.clip"),
    "train_batch_size": (8, "train_batch_size is decided by data.batch_size"),
    "bf16": ({"enabled": True}, "bf16 is decided by trainer.precision"),
    "optimizer": ({"type": "Adam"}, "optimizer is decided by optim.name"),
    "zero_optimisation": ({}, "DeepSpeed has no key zero_optimisation; did you mean zero_optimization?"),
    "zero_optimization": ({"stage": 3}, "zero_optimization.stage is decided by strategy.stage"),
}


@pytest.mark.parametrize("name", HELD)
def test_keys_that_others_decide_and_unknown_ones_are_refused(name: str, tmp_path: Path) -> None:
    value, message = HELD[name]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError) as error:
        settings(load(["strategy=deepspeed_zero2", f"strategy.config={file}"]), device="cpu")
    assert str(error.value).startswith(f"strategy.config={file}: {message}")


def test_a_json_of_one_s_own_lies_on_top_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}, "steps_per_print": 9}))
    config = load(["strategy=deepspeed_zero2", f"strategy.config={file}", "optim.clip=0.5"])
    found = settings(config, device="cpu")
    assert found["steps_per_print"] == 9 and found["gradient_clipping"] == 0.5
    assert found["zero_optimization"]["reduce_bucket_size"] == 7 and found["zero_optimization"]["stage"] == 2
    file.write_text('{"zero_optimization": {"reduce_bucket_siz": 7}}')
    with pytest.raises(ConfigError, match=r"no key zero_optimization\.reduce_bucket_siz; did you mean reduce_bucket"):
        settings(config, device="cpu")
    for text, message in (("{", "is no JSON"), ("[]", "holds no JSON object")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            settings(config, device="cpu")
    with pytest.raises(ConfigError, match=r"strategy\.config=\S+: cannot be read: No such file"):
        settings(load(["strategy=deepspeed_zero2", "strategy.config=nowhere.json"]), device="cpu")


def test_offload_and_gpu_settings() -> None:
    zero = settings(load(["strategy=deepspeed_zero3_offload"]), device="cuda")["zero_optimization"]
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu" and zero["overlap_comm"]
    assert "zero_optimization" not in settings(load(["strategy=deepspeed_zero0"]), device="cpu")


def test_a_dry_run_counts_the_shares_of_a_rank(tmp_path: Path) -> None:
    keys = [*TWO, "optim=adamw"]
    whole = needs(tiny_config(tmp_path, *keys, "strategy=ddp"))
    size = 4 * whole.parameters
    assert (whole.parameter_bytes, whole.gradient_bytes, whole.optimizer_bytes) == (size, size, 2 * size)
    copied = 3 * size  # two averages and the float32 copy
    for stage, expected in enumerate(
        [
            (size, size, 2 * size),
            (size, size, copied / 2),
            (size, size / 2, copied / 2),
            (size / 2, size / 2, copied / 2),
        ]
    ):
        found = needs(tiny_config(tmp_path, *keys, f"strategy=deepspeed_zero{stage}"))
        assert (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes) == pytest.approx(expected, abs=1)
    mixed = needs(tiny_config(tmp_path, *keys, "strategy=deepspeed_zero2", "trainer.precision=bf16-mixed"))
    assert (mixed.parameter_bytes, mixed.gradient_bytes) == pytest.approx((size / 2, size / 4), abs=1)


# with the folder of a run on two ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 6 steps at stages 1, 2 and 3, with checkpoints on the way."""
    place = tmp_path_factory.mktemp("trained")
    write_corpus(place / "corpus.txt", n_byte=3001)
    keys = [*STEADY, *TWO, "trainer.save_every_steps=3"]
    jobs: list[dict[str, Any]] = []
    for stage, more in ((1, []), (2, ["trainer.save_top_k=2"]), (3, ["model.checkpointing=true"])):
        mine = [*keys, *more, f"strategy=deepspeed_zero{stage}", f"run_dir={place / f'zero{stage}'}"]
        jobs.append({"name": f"zero{stage}", "do": "fit", "overrides": mine})
    for do in ("fit", "full"):
        limit = ["trainer.stop_at_step=3"] if do == "fit" else []
        mine = [*STEADY, *TWO, "strategy=deepspeed_zero3", f"run_dir={place / 'full'}", *limit]
        jobs.append({"name": do, "do": do, "overrides": mine, "room": 50_000})
    launch(place, jobs, world=2)
    return place


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil."""
    for name in ("zero2", "zero3"):
        shutil.copytree(trained / name, tmp_path / name, symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.distributed
def test_folders_are_scored_sampled_exported_and_converted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = ["split=valid", "trainer.devices=1"]
    for name in ("zero2", "zero3"):
        live = json.loads((runs / name / "result.json").read_text())["val"]["loss"]
        assert cli.main(["convert", f"ckpt={name}", f"to={name}.ckpt"]) == 0
        for number, ckpt in enumerate((name, f"{name}.ckpt")):
            assert cli.main(["eval", f"ckpt={ckpt}", *alone, f"out={number}.json"]) == 0
        found = [json.loads((runs / f"{number}.json").read_text())["scores"]["loss"] for number in range(2)]
        assert found[0] == found[1] == pytest.approx(live, rel=1e-6)
        capsys.readouterr()
        assert cli.main(["generate", f"ckpt={name}", "prompt=the", "tokens=5"]) == 0
        assert capsys.readouterr().out.startswith("the")
        assert cli.main(["export", f"ckpt={name}", f"to={name}.safetensors", "layout=authors"]) == 0
        held = torch.load(runs / f"{name}.ckpt", weights_only=True)
        weights = held["state_dict"]
        assert all(weight.dtype == torch.float32 for weight in weights.values())
        assert weights["model.embedding.tables.0.weight"].data_ptr() == weights["model.softmax.weights.0"].data_ptr()
    assert torch.load(runs / "zero2.ckpt", weights_only=True)["global_step"] == 6
    assert len(list((runs / "zero2" / "checkpoints").glob("step_*.ckpt"))) == 2
    assert "is the checkpoint itself" in refused(capsys, "convert", "ckpt=zero2.ckpt", "to=zero2.ckpt")


def test_converted_weights_are_a_checkpoint_of_lightning_s(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "trainer.max_steps=4", "logger=none")
    trained = fit(config)
    file, data = str(tmp_path / "weights.ckpt"), TextDataModule(config)
    torch.save(convert(str(tmp_path / "run")), file)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module = TransformerXLModule.load_from_checkpoint(file, config=config)
    trainer.validate(module, data, verbose=False)
    loaded = TransformerXLModule(config)
    trainer.validate(loaded, data, ckpt_path=file, weights_only=True, verbose=False)
    assert module.scores["val"] == loaded.scores["val"] == trained.module.scores["val"]


@pytest.mark.parametrize(("typed", "message"), [("ckpt=x", "to=null: is required"), ("to=x", "ckpt=: is missing")])
def test_convert_needs_both_names(
    typed: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "txl_lightning": {"config": load().to_dict(), "data_fingerprint": None}}, "x")
    assert message in refused(capsys, "convert", typed)


@pytest.mark.distributed
def test_one_rank_without_room_ends_all_with_what_to_do(trained: Path) -> None:
    """The checkpoint before it stays, and nothing of the new one."""
    folder = trained / "full" / "checkpoints"
    last = folder / "last.ckpt"
    for rank in range(2):
        said = json.loads((trained / f"full.{rank}.json").read_text())
        assert said.startswith(f"on rank 1 {folder / 'best.ckpt'} cannot be written: File too large; what was there")
        assert said.endswith(f"go on with txl fit resume={trained / 'full'}")
    assert read_stand(str(last)).step == 3 and not manifest.is_damaged(last)
    assert not list(folder.glob(".*"))


@pytest.mark.distributed
def test_the_best_of_several_is_written_once(trained: Path) -> None:
    folder = trained / "zero2" / "checkpoints"
    kept = {os.readlink(link) for link in folder.glob("step_*.ckpt")}
    assert len(kept) == 2 and os.readlink(folder / "best.ckpt") in kept
    assert len([path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]) == 4  # last, previous


@pytest.mark.distributed
def test_weights_alone_are_not_gone_on_with(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "zero2" / "checkpoints" / "last.ckpt").unlink()
    assert cli.main(["convert", "ckpt=zero3", "to=zero2/checkpoints/last.ckpt"]) == 0
    before = sorted(str(path) for path in runs.rglob("*"))
    assert "holds weights alone, no optimizer state" in refused(capsys, "fit", "resume=zero2")
    assert sorted(str(path) for path in runs.rglob("*")) == before


@pytest.mark.distributed
def test_a_damaged_folder_is_refused_and_the_one_before_offered(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = runs / "zero2" / "checkpoints" / "last.ckpt"
    share = next(last.rglob("zero_pp_rank_1_*_optim_states.pt"))
    held = bytearray(share.read_bytes())
    held[len(held) // 2] ^= 1
    share.write_bytes(held)
    for key, arguments in {"resume": ["fit"], "ckpt": ["eval", "split=valid"]}.items():
        said = refused(capsys, *arguments, f"{key}=zero2")
        assert "last.ckpt is damaged: its size or content is not what the manifest says" in said
        assert f"give the one before it: {key}=" in said and "previous.ckpt" in said
    assert cli.main(["convert", "ckpt=zero2/checkpoints/previous.ckpt", "to=before.ckpt"]) == 0


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile-code-ran",)


@pytest.mark.distributed
def test_a_folder_cannot_run_code_until_it_is_trusted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = (runs / "zero2" / "checkpoints" / "last.ckpt").resolve()
    (folder / "manifest.json").unlink()
    assert cli.main(["convert", f"ckpt={folder}", "to=a.ckpt"]) == 0  # as plain as with it
    file = next(folder.rglob("mp_rank_00_model_states.pt"))
    held = torch.load(file, weights_only=False)
    torch.save({**held, "lr_scheduler": Hostile()}, file)
    for arguments in (["convert", "to=b.ckpt"], ["eval", "split=valid"], ["generate", "prompt=a"]):
        said = refused(capsys, *arguments, f"ckpt={folder}")
        assert "holds more than numbers and would run code on loading" in said and "trust=true" in said
    assert "trust=true" in refused(capsys, "fit", "resume=zero2")
    assert not (runs / "hostile-code-ran").exists()
    assert cli.main(["convert", f"ckpt={folder}", "to=b.ckpt", "trust=true"]) == 0
    assert (runs / "hostile-code-ran").exists()
    assert "trust=true" in refused(capsys, "convert", f"ckpt={folder}", "to=c.ckpt")


@pytest.mark.distributed
def test_losses_and_gradient_norms_are_those_of_one_process(trained: Path, tmp_path: Path) -> None:
    fit(tiny_config(trained, *STEADY, f"run_dir={tmp_path / 'one'}"))
    for stage in (1, 2, 3):
        for name, tolerance in (
            ("train/loss", 1e-5),
            ("optim/grad_norm", 1e-4),
            ("optim/lr", 1e-12),
            ("val/loss", 1e-5),
        ):
            one, here = (curve(run, name) for run in (tmp_path / "one", trained / f"zero{stage}"))
            assert len(one) == (3 if name == "val/loss" else 6)
            assert here == pytest.approx(one, rel=tolerance)


def curve(run: Path, name: str) -> list[float]:
    with (run / "csv" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


# against one process, run by run

OPTIMIZERS = ("adam", "nadam", "radam", "rmsprop", "sgd", "lion", "adabelief")
MIX = "memory.parts=[{name: cache, layers: [0], mem_len: 8}, {name: knn, layers: [1]}]"
VARIANTS = {
    **{name: [f"memory={name}", *([MIX] if name == "mix" else [])] for name in registry.memories.names()},
    "clusters": ["memory=cache", "model.cutoffs=[40,120]", "model.div_val=2"],
    "checkpointing": ["memory=compressive", "model.checkpointing=true"],
    "untied": ["model.tie_weights=false", "model.untie_r=true", "model.pre_norm=true"],
    "later": ["trainer.accumulate_grad_batches=2", "trainer.accumulate_from_step=2"],
    "carried": [
        "memory=tokens",
        "memory.gradient=carry",
        "trainer.bptt_segments=2",
        "trainer.accumulate_grad_batches=4",
    ],
    "plateau": ["optim.schedule=plateau", "optim.patience=1", "trainer.val_check_interval=1"],
    "offload": ["strategy.offload_optimizer=true", "strategy.offload_parameters=true"],
}


def compare(tmp_path: Path, variants: dict[str, list[str]], *, strategy: str, tolerance: float) -> None:
    write_corpus(tmp_path / "corpus.txt", n_byte=3001)
    sharded: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    for name, keys in variants.items():
        mine = [*(key for key in STEADY if key.partition("=")[0] not in {k.partition("=")[0] for k in keys}), *keys]
        plain = [key for key in mine if not key.startswith("strategy.")]
        alone.append({"name": f"{name}_one", "do": "fit", "overrides": [*plain, f"run_dir={tmp_path / name / 'one'}"]})
        two = [*mine, *TWO, f"strategy={strategy}", f"run_dir={tmp_path / name / 'two'}"]
        sharded.append({"name": f"{name}_two", "do": "fit", "overrides": two})
    launch(tmp_path, alone, world=1)
    launch(tmp_path, sharded, world=2)
    for name in variants:
        for figure in ("train/loss", "val/loss", "optim/lr"):
            one, two = (curve(tmp_path / name / run, figure) for run in ("one", "two"))
            assert len(one) >= 3 and two == pytest.approx(one, rel=tolerance), (name, figure)


@pytest.mark.slow
@pytest.mark.distributed
def test_zero_3_with_every_memory_and_every_kind_of_step(tmp_path: Path) -> None:
    """Weights used outside their own layer, tied ones, those of memories, recomputed layers: all are there in time."""
    compare(tmp_path, VARIANTS, strategy="deepspeed_zero3", tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_optimizers_that_work_on_pieces_are_those_of_one_process(tmp_path: Path) -> None:
    keys = {name: [f"optim={name}", "optim.lr=1e-3", "optim.warmup_steps=0"] for name in OPTIMIZERS}
    compare(tmp_path, keys, strategy="deepspeed_zero1", tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_bfloat16_trains_at_every_stage(tmp_path: Path) -> None:
    """Near the float32 run, and the converted weights are float32 masters that score like the live model."""
    write_corpus(tmp_path / "corpus.txt", n_byte=3001)
    jobs: list[dict[str, Any]] = []
    for stage in range(4):
        keys = [*STEADY, *TWO, f"strategy=deepspeed_zero{stage}", f"run_dir={tmp_path / f'zero{stage}'}"]
        jobs.append({"name": f"zero{stage}", "do": "fit", "overrides": [*keys, "trainer.precision=bf16-mixed"]})
    keys = [*STEADY, f"run_dir={tmp_path / 'one'}"]
    launch(tmp_path, jobs, world=2)
    launch(tmp_path, [{"name": "one", "do": "fit", "overrides": keys}], world=1)
    for stage in range(4):
        run = tmp_path / f"zero{stage}"
        assert curve(run, "train/loss") == pytest.approx(curve(tmp_path / "one", "train/loss"), rel=0.02)
        weights = read_checkpoint(str(run))["state_dict"]
        assert all(weight.isfinite().all() for weight in weights.values())
        if stage:
            assert {weight.dtype for weight in weights.values()} == {torch.float32}
