"""Checkpoints: found, refused with the reason, never run as code, and true to the model that wrote them."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import StopAt, tiny_config, write_corpus
from txl_lightning import TextDataModule, TransformerXLModule, load_checkpoint
from txl_lightning.checkpoints import manifest, read_config
from txl_lightning.commands import evaluate
from txl_lightning.commands import fit as fit_command
from txl_lightning.config import Config, ConfigError
from txl_lightning.options import EvalOptions
from txl_lightning.training.checkpointing import WholeFiles
from txl_lightning.training.trainer import build_trainer
from txl_lightning.training.trouble import NotWritten


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return fit_command.fit(tiny_config(tmp_path, "trainer.max_steps=3")).run_dir


def test_a_run_folder_means_its_last(run: Path) -> None:
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for path in (run, run / "checkpoints", run / "checkpoints" / "last.ckpt"):
        model = load_checkpoint(str(path))
        assert not model.training
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, saved[f"model.{name}"])
    assert model.softmax.weights[0] is model.embedding.tables[0].weight


def test_stored_configuration_is_the_run_s(run: Path, tmp_path: Path) -> None:
    assert Config.from_dict(read_config(str(run))) == tiny_config(tmp_path, "trainer.max_steps=3")


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile-code-ran",)


def test_what_is_no_checkpoint_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = (run / "checkpoints" / "last.ckpt").read_bytes()
    Path("cut.ckpt").write_bytes(good[: len(good) // 2])
    Path("text.ckpt").write_text("hello")
    Path("empty.ckpt").write_bytes(b"")
    torch.save({"weights": torch.zeros(1)}, "foreign.ckpt")
    Path("hostile.ckpt").write_bytes(pickle.dumps(Hostile()))
    torch.save({"state_dict": Hostile()}, "archive.ckpt")
    Path("folder").mkdir()
    damaged = (
        "is damaged, or holds more than numbers and would run code on loading; give a checkpoint that txl fit wrote"
    )
    refusals = {
        "missing": "no such file or folder; give the run folder that `txl fit` printed",
        "folder": "the folder has no checkpoints/last.ckpt; give a run folder or a .ckpt file",
        **{f"{name}.ckpt": f"{name}.ckpt {damaged}" for name in ("cut", "text", "empty", "hostile", "archive")},
        "foreign.ckpt": "foreign.ckpt is not a txl_lightning checkpoint; give one that txl fit wrote",
    }
    for path, message in refusals.items():
        with pytest.raises(ConfigError) as refused:
            load_checkpoint(path)
        assert str(refused.value) == f"ckpt={path}: {message}"
    assert not Path("hostile-code-ran").exists()


def test_weights_must_fit_the_configuration(run: Path, tmp_path: Path) -> None:
    for override, message in {
        "model.n_layer=3": r"the checkpoint has no weight layers\.2\.",
        "model.n_layer=1": r"the model has no weight layers\.1\.",
        "model.d_inner=32": r"feed_forward\.0\.weight is \(64, 32\) there and \(32, 32\) in the model",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_checkpoint(str(run), tiny_config(tmp_path, override))
    for override in ("memory.mem_len=500", "memory=none", "model.clamp_len=9", "eval.segment_len=3"):
        load_checkpoint(str(run), tiny_config(tmp_path, override))


def test_a_write_that_fails_leaves_the_old_file_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = run / "checkpoints" / "last.ckpt"
    before, names = last.read_bytes(), sorted(path.name for path in last.parent.iterdir())

    def full(checkpoint: object, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(NotWritten, match=r"last\.ckpt cannot be written: No space left"):
        WholeFiles().save_checkpoint({}, last)
    assert last.read_bytes() == before
    assert sorted(path.name for path in last.parent.iterdir()) == names


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved["txl_lightning"].pop("config"),
        lambda saved: saved["txl_lightning"].pop("data_fingerprint"),
        lambda saved: saved.update(txl_lightning="mine"),
        lambda saved: saved.update(state_dict=[1]),
        lambda saved: saved["state_dict"].update({"model.u": 3}),
    ],
)
def test_a_checkpoint_without_its_parts_is_refused(run: Path, tmp_path: Path, change: Any) -> None:
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    change(saved)
    torch.save(saved, tmp_path / "odd.ckpt")
    with pytest.raises(ConfigError, match=r"odd\.ckpt is not a txl_lightning checkpoint"):
        load_checkpoint(str(tmp_path / "odd.ckpt"))


def test_lightning_s_own_loader_works(run: Path, tmp_path: Path) -> None:
    file, other = run / "checkpoints" / "last.ckpt", tiny_config(tmp_path, "trainer.max_steps=3", "memory.mem_len=7")
    own = TransformerXLModule.load_from_checkpoint(file, weights_only=True)
    changed = TransformerXLModule.load_from_checkpoint(file, config=other, weights_only=True)
    assert own.config.to_dict() == read_config(str(run)) and changed.config == other
    for module in (own, changed):
        assert torch.equal(module.model.u, load_checkpoint(str(run)).u)
    with pytest.raises(ConfigError, match="no such"):
        TransformerXLModule.load_from_checkpoint(tmp_path / "nowhere.ckpt")


def test_going_on_with_other_text_is_refused(run: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "trainer.max_steps=9")
    with (tmp_path / "corpus.txt").open("a") as file:
        file.write("one more line\n")
    with pytest.raises(
        ConfigError, match=r"data.fingerprint=\w{64}: is not what the checkpoint was trained on, \w{64};"
    ):
        build_trainer(config).fit(
            TransformerXLModule(config),
            TextDataModule(config),
            ckpt_path=run / "checkpoints" / "last.ckpt",
            weights_only=True,
        )


def test_changed_text_is_not_scored_unasked(run: Path, tmp_path: Path) -> None:
    def check(*overrides: str, **keys: bool) -> None:
        evaluate.check(tiny_config(tmp_path, "trainer.max_steps=3", *overrides), EvalOptions(ckpt=str(run), **keys))

    check()
    check("eval.batch_size=3", "data.segment_len=9")
    with (tmp_path / "corpus.txt").open("a") as file:
        file.write("one more line\n")
    with pytest.raises(ConfigError, match=r"data.fingerprint=\w{64}: the text is not what .*\w{64}; restore the text"):
        check()
    check(other_text=True)
    write_corpus(tmp_path / "other.txt", seed=1)
    check(f"data.path={tmp_path / 'other.txt'}")  # other text was asked for


def test_lightning_goes_on_exactly_where_it_stopped(tmp_path: Path) -> None:
    """Weights, optimizer, memory and place in the text are in the checkpoint: 8 steps equal 5 + 3."""
    config = tiny_config(tmp_path, "trainer.max_steps=8", "trainer.val_check_interval=1000")

    def final(*, stop: int, ckpt: Path | None = None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        module, trainer = TransformerXLModule(config), build_trainer(config, callbacks=[StopAt(stop)])
        trainer.fit(module, TextDataModule(config), ckpt_path=ckpt, weights_only=True)
        assert trainer.global_step == stop
        trainer.save_checkpoint(tmp_path / f"{stop}.ckpt")
        return module.state_dict(), module.lanes.current("train") or {}

    weights, state = final(stop=8)
    final(stop=5)
    again_weights, again_state = final(stop=8, ckpt=tmp_path / "5.ckpt")
    assert state and all(torch.equal(state[key], again_state[key]) for key in state)
    assert all(torch.equal(weights[key], again_weights[key]) for key in weights)


def test_what_was_hashed_is_hashed_again_only_after_a_change(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    file.write_bytes(b"one")
    first = manifest.sha256_of(file)
    hits = manifest._sha256_of.cache_info().hits
    assert manifest.sha256_of(file) == first and manifest._sha256_of.cache_info().hits == hits + 1
    part = tmp_path / "part"
    part.write_bytes(b"two")
    part.replace(file)
    assert manifest.sha256_of(file) == hashlib.sha256(b"two").hexdigest() != first
