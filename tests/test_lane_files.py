"""Memory too large to be gathered: each rank writes its own lanes, and any number of ranks finds them again."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranked import launch
from tests.ranks import on_ranks
from tests.test_ranks import STILL, column, fit, of
from tests.test_resume import here, typed, unequal  # noqa: F401  (here is a fixture)
from tests.tiny import write_corpus
from txl_lightning import cli
from txl_lightning.checkpoints import lane_files, read_checkpoint
from txl_lightning.errors import ConfigError

KEYS = [
    *STILL,
    "logger=csv",
    "memory=cache",
    "memory.mem_len=24",
    "trainer.max_steps=9",
    "trainer.val_check_interval=4",
]
LAST = Path("checkpoints", "last.ckpt")


@pytest.fixture
def nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_files, "GATHERED_BYTES", 0)


def saved(run: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """All but the lanes and what was typed, and the lanes of all ranks."""
    found = torch.load(run / LAST, weights_only=True)
    own = found["txl_lightning"]
    own.pop("config"), own["clock"].pop("seconds"), found["loops"].pop("validate_loop")
    lanes = own.pop("lanes")
    held = lane_files.saved_lanes(lanes, checkpoint=run / LAST)
    assert held is not None
    return {**found, "position": lanes["position"]}, held.part(0, held.n_lane)


def listed(run: Path) -> set[str]:
    """Folders that the checkpoints of a run list."""
    files = [torch.load(file, weights_only=True) for file in (run / "checkpoints").glob("*.ckpt")]
    shards = [shard for file in files for shard in file["txl_lightning"]["lanes"]["shards"]]
    return {Path(shard["file"]).parent.name for shard in shards}


@pytest.mark.distributed
def test_ranks_write_their_own_lanes(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped and resumed it equals, bit for bit, a run whose lanes were gathered; other ranks find theirs."""
    fit(*typed("run_dir=whole", *KEYS, *of(2)), ranks=2)
    monkeypatch.setattr(lane_files, "GATHERED_BYTES", 0)
    fit(*typed("run_dir=run", *KEYS, *of(2), "trainer.save_every_steps=2", "trainer.stop_at_step=5"), ranks=2)
    assert sorted(path.name for path in (here / "run" / "checkpoints" / "lanes").iterdir()) == sorted(
        listed(here / "run")
    )
    files = {path.name: len(list(path.iterdir())) for path in (here / "run" / "checkpoints" / "lanes").iterdir()}
    assert len(files) == 3 and set(files.values()) == {2}  # of last, previous and best
    for name in ("one", "four"):
        shutil.copytree("run", name)
    fit("fit", "resume=run", ranks=2)
    (one, own), (other, gathered) = saved(here / "run"), saved(here / "whole")
    assert unequal(one, other) == [] and unequal(own, gathered) == []
    fit("fit", "resume=one", "trainer.devices=1")
    fit("fit", "resume=four", "trainer.devices=4", ranks=4)
    for run in ("one", "four"):
        curves = [torch.tensor(column(here / name, "train/loss")) for name in (run, "whole")]
        torch.testing.assert_close(*curves, rtol=1e-5, atol=0)
        torch.testing.assert_close(saved(here / run)[1], gathered, rtol=1e-4, atol=1e-5)
    assert "lanes" in torch.load(here / "one" / LAST)["txl_lightning"]["lanes"]  # one process gathers nothing
    # weights need no lanes
    shutil.copy(here / "run" / LAST, here / "alone.ckpt")
    assert cli.main(["eval", "ckpt=alone.ckpt", "trainer.devices=1"]) == 0
    # files that are not there or not whole are refused by their names
    shard = sorted((here / "run" / "checkpoints" / "lanes").glob("*/rank_00001.pt"))
    of_last = {entry["file"] for entry in torch.load(here / "run" / LAST)["txl_lightning"]["lanes"]["shards"]}
    broken = next(path for path in shard if path.relative_to(here / "run" / "checkpoints").as_posix() in of_last)
    content = broken.read_bytes()
    capsys.readouterr()
    broken.write_bytes(content[:-9] + b"x" + content[-8:])
    assert cli.main(["fit", "resume=run", "trainer.devices=1"]) == 2
    said = capsys.readouterr().err
    assert f"{broken.parent.name}/rank_00001.pt is damaged" in said and "give the one before it: resume=" in said
    broken.unlink()
    assert cli.main(["fit", "resume=run", "trainer.devices=1"]) == 2
    assert "rank_00001.pt, the memory of lanes 2 to 3, is missing" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.usefixtures("nothing_is_gathered")
def test_ranks_that_are_killed_or_cannot_write(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Killed when their lanes are written and the checkpoint is not; and one alone finds no room: no rank waits."""
    keys = [*KEYS, *of(2), "trainer.save_every_steps=2"]
    fit(*typed("run_dir=whole", *keys), ranks=2)
    original, seen = lane_files.write, []

    def dying(*args: Any, **known: Any) -> Any:
        found = original(*args, **known)
        seen.append(1)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def full(*args: Any, rank: int, **known: Any) -> Any:
        if rank == 1:
            raise OSError("No space left on device")
        return original(*args, rank=rank, **known)

    monkeypatch.setattr(lane_files, "write", dying)
    with pytest.raises(AssertionError):  # on_ranks: killed
        fit(*typed("run_dir=run", *keys, "resume=auto"), ranks=2)
    folder = here / "run" / "checkpoints"
    assert len(list((folder / "lanes").iterdir())) > len(listed(here / "run")) > 0
    monkeypatch.setattr(lane_files, "write", full)
    capfd.readouterr()
    on_ranks(2, lambda: 0 if cli.main(typed("run_dir=run", *keys, "resume=auto")) == 1 else 1)
    assert torch.load(folder / "last.ckpt")["global_step"] == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said and "rank 1 could not write its lanes: No space left on device" in said
    assert {path.name for path in (folder / "lanes").iterdir()} == listed(here / "run")  # what rank 0 wrote is gone
    monkeypatch.setattr(lane_files, "write", original)
    fit(*typed("run_dir=run", *keys, "resume=auto"), ranks=2)
    assert [unequal(*pair) for pair in zip(saved(here / "run"), saved(here / "whole"), strict=True)] == [[], []]
    assert {path.name for path in (folder / "lanes").iterdir()} == listed(here / "run")


def test_only_files_with_lanes_that_are_needed_are_read(tmp_path: Path) -> None:
    state = {"h": torch.arange(24.0).view(8, 3), "age": torch.arange(8)}
    own = [{key: tensor[2 * rank : 2 * rank + 2] for key, tensor in state.items()} for rank in range(4)]
    shards = [lane_files.write(part, tmp_path, name="abc", rank=rank) for rank, part in enumerate(own)]
    held = lane_files.saved_lanes({"shards": shards}, checkpoint=tmp_path / "last.ckpt")
    assert held is not None and held.n_lane == 8 and held.n_byte == 8 * (3 * 4 + 8)
    for first, stop in ((0, 8), (0, 2), (1, 3), (3, 8), (5, 6)):
        assert unequal(held.part(first, stop), {key: tensor[first:stop] for key, tensor in state.items()}) == []
    (tmp_path / shards[3]["file"]).unlink()
    assert held.part(0, 6)["age"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match=r"abc/rank_00003\.pt, the memory of lanes 6 to 7, is missing"):
        held.part(5, 7)


def test_nothing_is_deleted_where_a_checkpoint_cannot_be_read(tmp_path: Path) -> None:
    shard = lane_files.write({"h": torch.zeros(2, 3)}, tmp_path, name="abc", rank=0)
    (tmp_path / "last.ckpt").write_bytes(b"damaged")
    lane_files.remove_unused(tmp_path)
    assert (tmp_path / shard["file"]).is_file()
    torch.save({"txl_lightning": {"lanes": {"shards": [shard]}}}, tmp_path / "last.ckpt")
    (tmp_path / "lanes" / "other").mkdir()
    lane_files.remove_unused(tmp_path)
    assert [path.name for path in (tmp_path / "lanes").iterdir()] == ["abc"]
    torch.save({"txl_lightning": {"lanes": {"lanes": {}}}}, tmp_path / "last.ckpt")
    lane_files.remove_unused(tmp_path)
    assert not (tmp_path / "lanes").exists()


@pytest.mark.distributed
def test_ranks_of_deepspeed_write_their_own_lanes(tmp_path: Path) -> None:
    """In the checkpoint's folder; stopped and resumed equals gathered, and one process finds all of them."""
    write_corpus(tmp_path / "corpus.txt", n_byte=3001)
    keys = ["trainer.max_steps=9", "trainer.val_check_interval=4", "model.dropout=0", "model.dropatt=0"]
    two = [*keys, "strategy=deepspeed_zero2", "trainer.devices=2", "trainer.accelerator=cpu"]
    apart = {"apart": True, "overrides": [*two, f"run_dir={tmp_path / 'apart'}"]}
    jobs = [
        {"name": "whole", "do": "fit", "overrides": [*two, f"run_dir={tmp_path / 'whole'}"]},
        {"name": "first", "do": "fit", **apart, "overrides": [*apart["overrides"], "trainer.stop_at_step=5"]},
    ]
    found = launch(tmp_path, jobs, world=2)
    shutil.copytree(tmp_path / "apart", tmp_path / "alone", symlinks=True)
    folder = (tmp_path / "apart" / LAST).resolve()
    assert sorted(path.name for path in folder.rglob("rank_*.pt")) == ["rank_00000.pt", "rank_00001.pt"]
    assert not (folder.parent / "lanes").exists()
    found |= launch(tmp_path, [{"name": "second", "do": "resume", **apart}], world=2)
    assert [first + second for first, second in zip(found["first"], found["second"], strict=True)] == found["whole"]
    lanes = []
    for run in ("apart", "whole"):
        held = read_checkpoint(str(tmp_path / run), weights=False)["txl_lightning"]["lanes"]
        kept = lane_files.saved_lanes(held, checkpoint=tmp_path / run / LAST)
        assert kept is not None and ("shards" in held) == (run == "apart")
        lanes.append(kept.part(0, kept.n_lane))
    assert unequal(*lanes) == []
    alone = {"name": "alone", "do": "resume", "overrides": [*keys, f"run_dir={tmp_path / 'alone'}"]}
    losses = launch(tmp_path, [alone], world=1)["alone"][0]
    means = [sum(pair) / 2 for pair in zip(*found["second"], strict=True)]
    assert losses == pytest.approx(means, rel=1e-4)
