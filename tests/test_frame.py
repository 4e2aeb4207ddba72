"""The frame around the code: what a built package holds, and clones without symbolic links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CURE = "git config core.symlinks true && git checkout -- txl_lightning"
LINE = f"error: txl_lightning/callbacks=a text file: this clone has no symbolic links; run '{CURE}'"


def walk(folder: Path) -> Iterator[Path]:
    """Every file below, through links, without caches."""
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(where) / name for name in sorted(files))


def copy_project(to: Path) -> Path:
    """The files a build needs, links as links."""
    to.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, to)
    for name in ("txl_lightning", "callbacks", "configs"):
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def call(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; stdout and stderr are kept apart."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    keep |= {"PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=keep, capture_output=True, text=True, timeout=120
    )


def build(kind: str, *, source: Path, to: Path) -> Path:
    """A wheel or an sdist from the build backend itself: no package index, no environment of its own."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = call(sys.executable, "-c", code, to, cwd=source)
    assert done.returncode == 0, done.stderr
    return to / done.stdout.splitlines()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("wheel")
    return build("wheel", source=copy_project(where / "source"), to=where)


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "txl_lightning"
    ours = {f"txl_lightning/{path.relative_to(package).as_posix()}": path.read_bytes() for path in walk(package)}
    held = {name: data for name, data in contents(wheel).items() if ".dist-info/" not in name}
    assert sorted(ours.keys() - held.keys()) == []  # a folder of YAML files needs an __init__.py
    assert held == ours
    assert any(name.startswith("txl_lightning/configs/") and name.endswith(".yaml") for name in held)
    assert "txl_lightning/callbacks/__init__.py" in held


def test_the_wheel_declares_command_types_and_licence(wheel: Path) -> None:
    held = contents(wheel)
    about = next(name for name in held if name.endswith("/METADATA")).rpartition("/")[0]
    assert "txl = txl_lightning.cli:main" in held[f"{about}/entry_points.txt"].decode().splitlines()
    assert {name.split("/")[0] for name in held} == {"txl_lightning", about}  # no bare names in site-packages
    assert "txl_lightning/py.typed" in held
    assert f"{about}/licenses/LICENSE" in held


def test_an_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source=copy_project(tmp_path / "source"), to=tmp_path)
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if not (member.isfile() or member.isdir())]
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    again = contents(build("wheel", source=source, to=tmp_path))
    first = contents(wheel)
    assert again.keys() == first.keys()
    assert [name for name in first if again[name] != first[name] and not name.endswith("/RECORD")] == []


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a clone made with core.symlinks=false, a plain one)."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    where = tmp_path_factory.mktemp("clones")
    origin = copy_project(where / "origin")
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    git("init", "-q", cwd=origin)
    git("add", "-A", cwd=origin)
    git(*who, "commit", "-qm", "all", cwd=origin)
    git("clone", "-q", "-c", "core.symlinks=false", origin, "without", cwd=where)
    git("clone", "-q", origin, "with", cwd=where)
    return where / "without", where / "with"


def git(*arguments: str | Path, cwd: Path) -> None:
    done = call("git", *arguments, cwd=cwd, GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
    assert done.returncode == 0, done.stderr


def test_importing_a_clone_without_links_stops_with_one_line(clones: tuple[Path, Path]) -> None:
    done = call(sys.executable, "-c", "import txl_lightning; print('imported')", cwd=clones[0])
    assert (done.returncode, done.stdout, done.stderr) == (2, "", LINE + "\n")


@pytest.mark.parametrize("target", ["demo", "test", "check", "format"])
def test_make_in_a_clone_without_links_stops_with_one_line(target: str, clones: tuple[Path, Path]) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = call("make", target, cwd=clones[0])
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.partition("*** ")[2] for line in done.stderr.splitlines()] == [f"{LINE}.  Stop."]
    assert not (clones[0] / ".venv").exists()


def test_make_in_a_clone_without_links_still_helps_and_cleans(clones: tuple[Path, Path], tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    clone = tmp_path / "clone"
    shutil.copytree(clones[0], clone)
    for folder in ("build", "tests"):
        (clone / folder).mkdir()
    for target in ([], ["help"], ["clean"]):
        done = call("make", *target, cwd=clone)
        assert (done.returncode, done.stderr) == (0, ""), target
    assert not (clone / "build").exists() and (clone / "txl_lightning/callbacks").is_file()


def test_make_check_runs_every_check_and_fails_at_the_end(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    project = copy_project(tmp_path / "project")
    (project / "requirements").mkdir()
    (project / "requirements/constraints.txt").touch()
    bin_folder = project / ".venv/bin"
    bin_folder.mkdir(parents=True)
    for name, code in (("python", 0), ("ruff", 1), ("mypy", 0)):
        (bin_folder / name).write_text(f"#!/bin/sh\necho {name} $*\nexit {code}\n")
        (bin_folder / name).chmod(0o755)
    (project / ".venv/installed-dev").touch()
    done = call("make", "check", cwd=project)
    assert (done.returncode, done.stdout) == (2, "ruff check .\nruff format --check .\nmypy\n"), done.stderr
    (bin_folder / "ruff").write_text("#!/bin/sh\n")
    assert call("make", "check", cwd=project).returncode == 0


def test_building_a_clone_without_links_stops_with_one_line(clones: tuple[Path, Path], tmp_path: Path) -> None:
    done = call(sys.executable, "-c", "from setuptools import build_meta as b; b.build_wheel('.')", cwd=clones[0])
    assert (done.returncode, done.stderr) == (2, LINE + "\n")


def test_the_cure_that_is_named_cures(clones: tuple[Path, Path], tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(clones[0], clone)
    done = call("sh", "-c", CURE, cwd=clone)
    assert done.returncode == 0, done.stderr
    check = call(sys.executable, "-I", "txl_lightning/_links.py", cwd=clone)
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
    assert (clone / "txl_lightning/configs").resolve() == clone / "configs"


def test_a_plain_clone_passes_the_check(clones: tuple[Path, Path]) -> None:
    check = call(sys.executable, "-I", "txl_lightning/_links.py", cwd=clones[1])
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_a_missing_link_is_named(clones: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(clones[1], tmp_path / "clone", symlinks=True)
    (tmp_path / "clone/txl_lightning/configs").unlink()
    check = call(sys.executable, "-I", "txl_lightning/_links.py", cwd=tmp_path / "clone")
    assert check.stdout.startswith("error: txl_lightning/configs=missing: must be a link to the folder configs/; ")
