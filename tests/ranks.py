"""Several ranks on this machine as forked processes, which is how they start without the seconds that imports take."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from txl_lightning.commands import fit as fit_command

PATIENCE_S = 240
"""Until a rank that hangs says where, and ends."""


def start(work: Callable[[], int]) -> int:
    """Number of a child process that does the work and exits with what it returns."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.register(signal.SIGALRM, file=2, chain=True)  # its own timer would wait for a lost thread
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
            os._exit(work())
        finally:
            os._exit(99)
    return child


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def on_ranks(
    world: int, work: Callable[[], int], *, environment: Callable[[int], Mapping[str, Any]] | None = None
) -> None:
    """Let so many ranks do the work; each must return 0.

    Args:
        world: ranks.
        work: done by each.
        environment: variables of a rank as a launcher sets them; by default those of lightning's own, on one machine.
    """
    port = free_port()

    def rank(number: int) -> int:
        own = environment(number) if environment is not None else {"LOCAL_RANK": number}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in {**place, **own}.items()})
        return work()

    children = [start(lambda number=number: rank(number)) for number in range(world)]  # type: ignore[misc]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * world


class Recorder(L.Callback):
    """Notes each segment of each lane that a rank trains on: (epoch, segment, global lane, tokens)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        lengths, tokens = batch.segment.length.tolist(), batch.tokens_BT.tolist()
        first = trainer.global_rank * len(lengths)
        with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
            for lane, length in enumerate(lengths):
                if length:
                    file.write(json.dumps([*batch.position, first + lane, tokens[lane][:length]]) + "\n")


def recording(folder: Path) -> Callable[[], None]:
    """Let `txl fit` note in a folder what it trains on; call the result to stop that."""
    folder.mkdir(exist_ok=True)
    build = fit_command.build_trainer
    fit_command.build_trainer = lambda *a, callbacks, **kw: build(*a, callbacks=[*callbacks, Recorder(folder)], **kw)

    def stop() -> None:
        fit_command.build_trainer = build

    return stop


def trained_on(folder: Path) -> Counter[str]:
    """How often each segment of each lane was trained on."""
    return Counter(line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines())
