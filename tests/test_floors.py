"""The floors of the house: a file imports only from lower floors, and some rooms do not know each other."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# the floor of every room; a longer name wins over a shorter one
FLOORS = {
    "_links": 0,
    "errors": 0,
    "types": 0,
    "registry": 0,
    "ranks": 0,
    "exit_codes": 0,
    "signals": 0,
    "published": 0,
    "section": 0,
    "options": 0,
    "analyses": 0,
    "model_config": 0,
    "memory_config": 0,
    "data_config": 0,
    "optim_config": 0,
    "trainer_config": 0,
    "strategy_config": 0,
    "logger_config": 0,
    "eval_config": 0,
    "config": 0,
    "keys": 0,
    "overrides": 0,
    "trust": 0,
    "choices": 0,
    "compose": 0,
    "memory.base": 0,
    "model": 1,
    "memory": 1,
    "data": 1,
    "build": 2,
    "training": 3,
    "evaluation": 3,
    "sampling": 3,
    "generation": 3,
    "checkpoints": 3,
    "testing": 3,
    "__main__": 4,
    "cli": 4,
    "arguments": 4,
    "help": 4,
    "jobs": 4,
    "resume": 4,
    "process": 4,
    "watch": 4,
    "commands": 4,
    "comparison": 4,
    "report": 4,
    "benchmarks": 4,
    "callbacks": 4,
    "configs": 4,
    "": 5,  # the package itself gathers what it offers to the outside
}
STRANGERS = {"model", "memory", "data"}


def module_name(path: Path, package: Path) -> str:
    """Dotted name below the package: `memory.base`, `memory` for memory/__init__.py, "" for the package itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The longest name in FLOORS that the module is or lies in.

    Raises:
        KeyError: a file nobody gave a floor.
    """
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in FLOORS:
            return name
    raise KeyError(f"{module} has no floor: add it to FLOORS")


def imported(tree: ast.AST, module: str, *, is_package: bool, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module below txl_lightning) of every import statement, inside functions and TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = f"txl_lightning.{module}".rstrip(".").split(".")
                up = node.level - 1 if is_package else node.level
                base = ".".join([*parts[: len(parts) - up], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            head, _, below = name.partition(".")
            if head != "txl_lightning":
                continue
            while below and below not in known:  # `from a import name`: name may be a class or a function
                below = below.rpartition(".")[0]
            yield node.lineno, below


def violations(package: Path) -> list[str]:
    """One line for each import that goes up, or from one stranger to another."""
    files = {module_name(path, package): path for path in walk(package) if path.suffix == ".py"}
    found = []
    for module, path in files.items():
        room = room_of(module) if module else ""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, other in imported(tree, module, is_package=path.name == "__init__.py", known=set(files)):
            target = room_of(other) if other else ""
            strangers = {room, target} <= STRANGERS and room != target
            from_above = target == "callbacks" and room not in ("callbacks", "")
            if FLOORS[target] > FLOORS[room] or strangers or from_above:
                found.append(
                    f"{path.relative_to(package)}:{line}: {room or 'the package'} imports {other or 'the package'}"
                )
    return sorted(found)


def walk(folder: Path) -> Iterator[Path]:
    """Every file below, through links, without caches."""
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(where) / name for name in sorted(files))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_files_import_from_lower_floors_only() -> None:
    assert violations(ROOT / "txl_lightning") == []


@pytest.mark.parametrize(
    ("file", "code", "said"),
    [
        (
            "memory/base.py",
            "from txl_lightning.memory import cache",
            "memory/base.py:1: memory.base imports memory.cache",
        ),
        ("model/block.py", "import txl_lightning.data.lanes", "model/block.py:1: model imports data.lanes"),
        (
            "model/block.py",
            "def f():\n    from ..memory.cache import Cache",
            "model/block.py:2: model imports memory.cache",
        ),
        ("config.py", "from txl_lightning import build", "config.py:1: config imports build"),
        ("build.py", "from txl_lightning import TransformerXL", "build.py:1: build imports the package"),
        ("cli.py", "from txl_lightning.callbacks import monitor", "cli.py:1: cli imports callbacks.monitor"),
        ("model/block.py", "from txl_lightning.memory.base import MemoryStrategy", None),
        ("memory/mix.py", "from .cache import Cache\nfrom ..types import State", None),
        ("__init__.py", "from txl_lightning.callbacks.monitor import Monitor", None),
    ],
)
def test_floors_are_read_from_the_code(file: str, code: str, said: str | None, tmp_path: Path) -> None:
    for name in ("__init__", "types", "config", "build", "cli", "memory/__init__", "memory/base", "memory/cache"):
        write(tmp_path / f"{name}.py", "")
    for name in (
        "memory/mix",
        "model/__init__",
        "model/block",
        "data/lanes",
        "callbacks/__init__",
        "callbacks/monitor",
    ):
        write(tmp_path / f"{name}.py", "")
    write(tmp_path / file, code)
    assert violations(tmp_path) == ([said] if said else [])


def test_a_file_without_a_floor_is_named(tmp_path: Path) -> None:
    write(tmp_path / "attic.py", "")
    with pytest.raises(KeyError, match="attic has no floor"):
        violations(tmp_path)


def test_the_design_page_names_every_room() -> None:
    table = [line for line in (ROOT / "docs" / "design.md").read_text().splitlines() if line.startswith("| ")]
    for room, floor in FLOORS.items():
        if room in ("", "__main__", "configs"):
            continue
        names = (f"`{room.replace('.', '/')}`", f"`{room}/`")
        assert any(name in line for name in names for line in table if line.startswith(f"| {floor} |")), room
