"""What a run folder says about its run besides checkpoints and curves."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from txl_lightning.checkpoints import FOLDER
from txl_lightning.checkpoints.manifest import replace_text
from txl_lightning.config import RUNS, Config, ConfigError
from txl_lightning.data.store import Meta

CONFIG, FACTS, RESULT = "config.yaml", "run.json", "result.json"
PACKAGES = ("txl-lightning", "torch", "lightning", "torchmetrics", "hydra-core", "omegaconf", "numpy")


def refuse_used_folder(run_dir: str | None) -> None:
    """A run never overwrites another. Raises ConfigError."""
    if run_dir is not None and not run_dir.strip():
        raise ConfigError("run_dir", run_dir, "names no folder", "leave it out or name one")
    if run_dir is not None and os.path.exists(os.path.join(os.path.expanduser(run_dir), CONFIG)):
        raise ConfigError("run_dir", run_dir, "the folder holds a run already", "name another folder")


def check_writable(run_dir: str) -> None:
    """Raises ConfigError: the folder, or the first one above it that is there, may not be written to."""
    path = Path(os.path.abspath(os.path.expanduser(run_dir)))
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    for folder in (there, path / FOLDER):
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            rule = f"{folder} is read-only or belongs to somebody else"
            raise ConfigError("run_dir", run_dir, rule, "get the right to write there, or name another folder")


def read_facts(run_dir: Path) -> dict[str, Any]:
    """What `write_facts` wrote as JSON; empty if it cannot be read."""
    try:
        held = json.loads((run_dir / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def go_on(run_dir: Path) -> str:
    """The command that goes on with a run, as a shell reads it."""
    return shlex.join(["txl", "fit", f"resume={run_dir}"])


def runs_under(folder: str) -> list[Path]:
    """Run folders up to three levels below a folder."""
    return [path.parent for depth in ("*", "*/*", "*/*/*") for path in Path(folder).glob(f"{depth}/{FACTS}")]


def order_of(run_dir: Path) -> int:
    """Place of a run among those under `runs/`, by when it was last started; unlike times, clocks cannot mix it up."""
    order = read_facts(run_dir).get("order")
    return order if isinstance(order, int) else 0


def write_facts(run_dir: Path, config: Config, meta: Meta, *, resumed_at: int | None = None) -> None:
    """Write the resolved configuration as plain YAML, and versions, git state, seed and data fingerprint as JSON.

    A run that goes on from step `resumed_at` keeps the facts of its start and notes from where and how it went on.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
    replace_text(run_dir / CONFIG, text)
    before = read_facts(run_dir) if resumed_at is not None else {}
    order = 1 + max(map(order_of, runs_under(RUNS)), default=0)
    if before:
        resumed = [*before.get("resumed", []), {"step": resumed_at, "command": sys.argv, "git": git_state()}]
        write_json(run_dir / FACTS, {**before, "order": order, "resumed": resumed})
        return
    facts = {
        "order": order,
        "command": sys.argv,
        "seed": config.seed,
        "data_fingerprint": meta.fingerprint,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": git_state(),
    }
    write_json(run_dir / FACTS, facts)


def forget_facts(run_dir: Path) -> None:
    """Take back `write_facts`."""
    for name in (CONFIG, FACTS):
        (run_dir / name).unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final newline."""
    # a path may hold bytes that are no text: the escape of such a surrogate is the one that JSON has
    text = json.dumps(value, indent=2, ensure_ascii=False)
    replace_text(path, f"{text}\n", errors="backslashreplace")


def git_state() -> dict[str, Any] | None:
    """Commit and whether files differ from it, of the repository around the working directory; None without one."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
