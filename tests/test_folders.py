"""Checkpoints that are folders appear whole or not at all, whenever the process dies; nothing in them runs."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from txl_lightning.checkpoints import manifest
from txl_lightning.checkpoints.manifest import is_damaged, remove_parts
from txl_lightning.training import folders

SHARE = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def write(parent: Path, *, step: int, name: str = "last.ckpt") -> None:
    """What three ranks and DeepSpeed do."""
    target = parent / name
    folder = folders.new_place(target, step=step)
    part = folder.with_name(f".{folder.name}.part")
    (part / "checkpoint").mkdir(parents=True)
    for rank in range(3):
        (part / "checkpoint" / SHARE.format(rank)).write_text(f"step {step}, rank {rank}")
    (part / "latest").write_text("checkpoint")
    files = {path: facts for rank in range(3) for path, facts in folders.flushed(part, rank=rank).items()}
    folders.give_name(part, folder, target, files=files)


def steps(parent: Path) -> dict[str, str]:
    """What each link leads to."""
    return {
        link.name: (link / "checkpoint" / SHARE.format(1)).read_text() for link in parent.iterdir() if link.is_symlink()
    }


def test_links_lead_to_whole_folders_and_the_others_go(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        write(tmp_path, step=step)
        if step == 8:
            write(tmp_path, step=step, name="best.ckpt")
    assert steps(tmp_path) == {
        "last.ckpt": "step 12, rank 1", "previous.ckpt": "step 8, rank 1", "best.ckpt": "step 8, rank 1",
    }  # fmt: skip
    real = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert len(real) == 3 and not any(is_damaged(path) for path in tmp_path.iterdir())
    (tmp_path / "best.ckpt").unlink()
    folders.remove_unused(tmp_path)
    assert sorted(steps(tmp_path)) == ["last.ckpt", "previous.ckpt"]
    assert len([path for path in tmp_path.iterdir() if not path.is_symlink()]) == 2


CALLS = [(os, "rename"), (os, "fsync"), (Path, "replace"), (Path, "symlink_to"), (manifest, "replace_text"),
         (manifest, "flush"), (shutil, "rmtree")]  # fmt: skip


class Dead(BaseException):
    """The process is gone."""


def die_at(call: int, patch: pytest.MonkeyPatch) -> list[str]:
    """Let the nth call that touches the disk not happen."""
    made: list[str] = []

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def dying(*args: Any, **keys: Any) -> Any:
            made.append(name)
            if len(made) == call:
                raise Dead
            return original(*args, **keys)

        patch.setattr(owner, name, dying)

    for owner, name in CALLS:
        counted(owner, name)
    return made


def test_whenever_the_process_dies_last_leads_to_a_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it is counted, and slow
    for call in range(1, 100):
        parent = tmp_path / str(call)
        parent.mkdir()
        write(parent, step=4)
        write(parent, step=8)
        with monkeypatch.context() as patch:
            made = die_at(call, patch)
            try:
                write(parent, step=12)
                died = False
            except Dead:
                died = True
        seen |= set(made)
        remove_parts(parent)
        folders.remove_unused(parent)
        found = steps(parent)
        assert found["last.ckpt"] in ("step 8, rank 1", "step 12, rank 1")
        assert not any(is_damaged(path.resolve()) for path in parent.iterdir())
        assert all((path / manifest.MANIFEST).exists() for path in parent.iterdir())
        assert not list(parent.glob(".*"))
        assert len([path for path in parent.iterdir() if not path.is_symlink()]) == len(set(found.values()))
        write(parent, step=16)
        assert steps(parent)["last.ckpt"] == "step 16, rank 1"
        if not died:
            break
    assert not died and call > 15 and seen == {name for _, name in CALLS}


def test_a_changed_missing_or_cut_file_is_damage(tmp_path: Path) -> None:
    for number, harm in enumerate(
        [
            lambda file: file.write_text("step 4, rank 9"),
            lambda file: file.unlink(),
            lambda file: file.write_text("step"),
        ]
    ):
        parent = tmp_path / str(number)
        parent.mkdir()
        write(parent, step=4)
        assert not is_damaged(parent / "last.ckpt")
        harm(parent / "last.ckpt" / "checkpoint" / SHARE.format(1))
        assert is_damaged(parent / "last.ckpt")


def test_a_folder_of_many_files_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"zero_pp_rank_{rank}" for rank in range(100)]
    for file in files:
        file.write_text(file.name)
    manifest.note_folder(tmp_path, {file.name: manifest.flush(file) for file in files})
    monkeypatch.setattr(manifest.hashlib, "sha256", None)  # what hashes now fails
    assert not is_damaged(tmp_path)


def test_other_folders_and_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "zero_notes").mkdir()
    (tmp_path / "last.ckpt").write_text("a file, as one process writes it")
    write(tmp_path, step=4, name="best.ckpt")
    assert (tmp_path / "zero_notes").exists() and stat.S_ISREG((tmp_path / "last.ckpt").lstat().st_mode)
    write(tmp_path, step=8)  # the run goes on under DeepSpeed
    assert (tmp_path / "previous.ckpt").read_text().startswith("a file")
