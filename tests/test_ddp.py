"""Two ranks share the lanes and come to the same result as one."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import free_port, trained_on
from tests.tiny import MODEL, RUN, write_corpus

pytestmark = pytest.mark.distributed
TWO = ["trainer.devices=2", "strategy=ddp", "trainer.accelerator=cpu"]


def txl(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "txl_lightning", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def fit(tmp_path: Path, *overrides: str) -> None:
    if not (tmp_path / "book.txt").exists():
        write_corpus(tmp_path / "book.txt", n_byte=3001)
    base = [item for item in RUN if item.partition("=")[0] not in {o.partition("=")[0] for o in overrides}]
    txl(tmp_path, "fit", *MODEL, *base, "data=text", "data.path=book.txt", "logger=csv", *overrides)


def curve(run: Path, name: str) -> list[float]:
    with (run / "csv" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    # 60 steps cross an epoch, whose last segment is short; the validation split has lanes for one rank only
    keys = ["trainer.max_steps=60", "trainer.log_every_n_steps=1"]
    fit(tmp_path, "run_dir=one", *keys)
    fit(tmp_path, "run_dir=two", *keys, *TWO)
    for name in ("train/loss", "val/loss"):
        one, two = curve(tmp_path / "one", name), curve(tmp_path / "two", name)
        assert len(one) == len(two) >= 1
        torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=0)
    assert result(tmp_path / "two")["tokens"] == result(tmp_path / "one")["tokens"]
    lanes = [torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True) for run in ("one", "two")]
    one, two = (saved["txl_lightning"]["lanes"]["lanes"] for saved in lanes)
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=1e-4)  # all lanes, in global order


@pytest.mark.slow
def test_two_ranks_work_in_a_sweep(tmp_path: Path) -> None:
    fit(tmp_path, "-m", "seed=1,2", "trainer.max_steps=3", "run_dir=sweep", *TWO)
    assert [result(tmp_path / "sweep" / number)["steps"] for number in "01"] == [3, 3]
    assert result(tmp_path / "sweep" / "0")["train"] != result(tmp_path / "sweep" / "1")["train"]


def test_free_text_survives_the_relaunch(tmp_path: Path) -> None:
    name = """a b="c" 'd', é"""
    write_corpus(tmp_path / name)
    base = [item for item in RUN if "max_steps" not in item]
    arguments = [
        *MODEL,
        *base,
        "trainer.max_steps=3",
        "data=text",
        f"data.path={name}",
        f"run_dir=run {name}",
        "logger=csv",
    ]
    txl(tmp_path, "fit", *arguments, *TWO)
    run = tmp_path / f"run {name}"
    assert result(run)["steps"] == 3
    assert "bits_per_byte" in txl(tmp_path, "eval", f"ckpt=run {name}", *TWO).stdout
    said = txl(tmp_path, "generate", f"ckpt=run {name}", """prompt=x = "1" # 'y', ~z""", "tokens=5").stdout
    assert said.startswith("""x = "1" # 'y', ~z""")


@pytest.mark.slow
def test_deepspeed_works_in_a_sweep(tmp_path: Path) -> None:
    two = ["trainer.devices=2", "strategy=deepspeed_zero2", "trainer.accelerator=cpu"]
    fit(tmp_path, "-m", "seed=1,2", "trainer.max_steps=3", "run_dir=sweep", *two)
    assert [result(tmp_path / "sweep" / number)["steps"] for number in "01"] == [3, 3]
    assert result(tmp_path / "sweep" / "0")["train"] != result(tmp_path / "sweep" / "1")["train"]


DRIVER = """
import sys
from pathlib import Path
from tests.ranks import recording
from txl_lightning import cli
recording(Path("notes"))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_eight_ranks_on_two_nodes(tmp_path: Path) -> None:
    """Two launches, each of which starts its four ranks, as on two machines: every lane once, metrics of all."""
    write_corpus(tmp_path / "book.txt", n_byte=3001)
    (tmp_path / "driver.py").write_text(DRIVER)
    base = [item for item in RUN if item.partition("=")[0] not in ("data.batch_size", "trainer.max_steps")]
    keys = [*MODEL, *base, "data=text", "data.path=book.txt", "logger=csv", "data.batch_size=8"]
    keys += ["trainer.max_steps=12", "trainer.log_every_n_steps=1", "trainer.val_check_interval=4"]
    nodes = ["trainer.devices=4", "trainer.num_nodes=2", "strategy=ddp", "strategy.timeout_s=200", "run_dir=two"]
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])

    def launch(*arguments: str, **more: str) -> subprocess.Popen[bytes]:
        (tmp_path / "notes").mkdir(exist_ok=True)
        return subprocess.Popen([sys.executable, "driver.py", "fit", *arguments], cwd=tmp_path, env={**place, **more})

    launched = [launch(*keys, *nodes, NODE_RANK=number) for number in "01"]
    assert [process.wait(500) for process in launched] == [0, 0]
    seen = trained_on(tmp_path / "notes")
    (tmp_path / "notes").rename(tmp_path / "all")
    assert launch(*keys, "run_dir=one").wait(300) == 0
    assert set(seen.values()) == {1} and seen == trained_on(tmp_path / "notes")
    for name in ("train/loss", "val/loss"):
        one, two = curve(tmp_path / "one", name), curve(tmp_path / "two", name)
        assert len(one) == len(two) >= 3
        torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=0)
    assert result(tmp_path / "two")["tokens"] == result(tmp_path / "one")["tokens"]
