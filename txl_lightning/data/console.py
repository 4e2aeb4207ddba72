"""What data preparation tells the user while it works: one-line notes and, for big inputs, a bar. All on stderr."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from txl_lightning.ranks import is_first_rank

Advance = Callable[[int], None]
"""Takes the number of bytes just done."""

BIG = 256 * 2**20  # bytes; below this the work is over before a bar is worth showing


def say(line: str) -> None:
    """One line for the user."""
    if is_first_rank():
        print(line, file=sys.stderr, flush=True)


@functools.cache
def say_once(line: str) -> None:
    """As `say`, but not a second time in this process."""
    say(line)


@contextmanager
def progress(label: str, *, n_byte: int) -> Iterator[Advance]:
    """Shows a bar while it is open if there are many bytes to do."""
    if n_byte < BIG or not is_first_rank():
        yield lambda done: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=n_byte)
        yield lambda done: bar.advance(task, done)
