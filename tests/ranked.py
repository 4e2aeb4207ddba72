"""Several training runs one after the other in the ranks of one launch: imports and engines are slow to start.

    python -m tests.ranked FOLDER        as a rank: reads FOLDER/jobs.json, runs them

`launch` starts the ranks as torchrun or a cluster would, and gives what each job found on each rank.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 1200


def launch(folder: Path, jobs: list[dict[str, Any]], *, world: int) -> dict[str, list[Any]]:
    """Run jobs in `world` processes; by the job's name a list with what each rank found.

    A job has a `name`, `overrides` of `tiny_config` and what to `do`: "fit", "resume", "full", "eval" (of `ckpt`; the
    first rank makes that file of the run `convert` first, if it is named). "full" resumes while the second rank can
    write no file of more than `room` bytes, and finds what is said. A fit finds every training loss of its rank; with
    `ruin` the loss is not finite in the second segment of that step; with `record` it notes what it reads in that
    folder; with `apart` each rank writes its own lanes, however few they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "NODE_RANK": "0"}
    shared = {"OMP_NUM_THREADS": "1", "TXL_CACHE_DIR": str(folder / "cache")}
    ranks = []
    for rank in range(world):
        own = {"LOCAL_RANK": str(rank), **common} if world > 1 else {}
        command = [sys.executable, "-m", "tests.ranked", str(folder)]
        with (folder / f"out.{rank}").open("w") as out:
            ranks.append(subprocess.Popen(command, env={**os.environ, **shared, **own}, stdout=out, stderr=out))
    killer = threading.Timer(TIMEOUT_S, lambda: [rank.kill() for rank in ranks])
    killer.start()
    try:
        codes = [_joined(ranks, number) for number in range(world)]
    finally:
        killer.cancel()
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world, "\n".join((folder / f"out.{rank}").read_text()[-3000:] for rank in range(world))
    return {
        job["name"]: [json.loads((folder / f"{job['name']}.{rank}.json").read_text()) for rank in range(world)]
        for job in jobs
    }


def _joined(ranks: list[subprocess.Popen[bytes]], number: int) -> int:
    code = ranks[number].wait()
    if code:  # the others would wait for it
        for rank in ranks:
            rank.kill()
    return code


def main(folder: Path) -> None:
    """What a rank does."""
    from txl_lightning.process import leave_process_group, quiet_lightning

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    with quiet_lightning():
        for job in json.loads((folder / "jobs.json").read_text()):
            found = {"eval": evaluated, "full": told_full}.get(job["do"], fitted)(folder, job)
            (folder / f"{job['name']}.{rank}.json").write_text(json.dumps(found))
    leave_process_group()  # as `txl` does


def fitted(folder: Path, job: dict[str, Any]) -> list[float]:
    from tests.ranks import Recorder
    from tests.tiny import Losses, tiny_config
    from txl_lightning.checkpoints import lane_files
    from txl_lightning.commands.fit import fit

    lane_files.GATHERED_BYTES = 0 if job.get("apart") else 1 << 30
    seen = Losses()
    observers = [seen, *([Recorder(Path(job["record"]))] if "record" in job else [])]
    config = tiny_config(folder, *job["overrides"])
    last = f"{config.run_dir}/checkpoints/last.ckpt" if job["do"] == "resume" else None
    with ruined(job.get("ruin", -1)):
        fit(config, resume=last, callbacks=observers)
    return seen.values


def told_full(folder: Path, job: dict[str, Any]) -> str:
    from txl_lightning.training.trouble import NotWritten

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ.get("LOCAL_RANK") == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["room"], before[1]))
    try:
        fitted(folder, {**job, "do": "resume"})
    except NotWritten as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    raise AssertionError("all was written")


@contextmanager
def ruined(step: int) -> Iterator[None]:
    from txl_lightning.training.divergence import NonFiniteLoss
    from txl_lightning.training.module import TransformerXLModule

    owner: Any = TransformerXLModule
    original, seen = owner.judge_losses, []

    def refuse(module: Any, losses_BT: Any, chunk: Any) -> None:
        if module.trainer.global_step == step:
            seen.append(losses_BT)
        original(module, losses_BT * (float("nan") if len(seen) == 2 else 1.0), chunk)

    owner.judge_losses = refuse
    try:
        yield
        assert step < 0, "nothing was ruined"
    except NonFiniteLoss:
        assert len(seen) == 2
    finally:
        owner.judge_losses = original


def evaluated(folder: Path, job: dict[str, Any]) -> dict[str, float]:
    import torch

    from tests.tiny import tiny_config
    from txl_lightning.checkpoints import load_checkpoint
    from txl_lightning.commands.convert import convert
    from txl_lightning.evaluation.cached import evaluate

    config = tiny_config(folder, *job["overrides"])
    if "convert" in job:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            torch.save(convert(job["convert"]), job["ckpt"])
        torch.distributed.barrier()
    return evaluate(config, load_checkpoint(job["ckpt"], config), split="valid").scores


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # under DeepSpeed now and then a thread of C++ aborts a process that is taken apart, its work done
