"""What every test gets: uninitialised memory made visible, and a closing word on the tests that were left out."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from txl_lightning import help, registry

# tests that pyproject.toml deselects unless -m says otherwise: mark and reason, the harder need first
LEFT_OUT = {"gpu": "need a CUDA device", "slow": "take long"}

if not torch.cuda.is_available():  # read when kernels are defined
    os.environ["TRITON_INTERPRET"] = "1"

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms ask of cuBLAS

registry.entry_points = help.entry_points = lambda **_: ()  # plug-ins that happen to be installed are not tested here

_deselected = pytest.StashKey[Counter[str]]()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN (integers: the largest), so reading what nobody wrote cannot pass by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch fills uninitialised memory only under this switch
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def no_ranks_left() -> Iterator[None]:
    """No test finds itself one of several ranks because another one was: what it forks would wait for them."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cache folders of all tests are."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def own_cache(caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test, and every process it starts, keeps token files in a folder of its own, never in the user's."""
    folder = caches / uuid.uuid4().hex
    monkeypatch.setenv("TXL_CACHE_DIR", str(folder))
    return folder


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what is left out, by the mark that did it."""
    for item in items:
        counts = item.config.stash.setdefault(_deselected, Counter())
        counts[next((mark for mark in LEFT_OUT if item.get_closest_marker(mark)), "")] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Every parallel process (pytest-xdist) leaves out the same tests; one's count is that of all."""
    node.config.stash[_deselected] = Counter(node.workeroutput.get("deselected", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A parallel process hands its count to the one that writes the closing words."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = dict(session.config.stash.get(_deselected, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what did not run and how to run it, right above pytest's closing line."""
    counts = config.stash.get(_deselected, Counter())
    for mark, why in LEFT_OUT.items():
        if counts[mark]:
            terminalreporter.write_line(f"not run: {counts[mark]} {mark} ({why}; run them with: pytest -m {mark})")
    if counts[""]:
        terminalreporter.write_line(f"not run: {counts['']} that the -k or -m given leaves out")
