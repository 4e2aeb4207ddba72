"""The JSON file `out`: refused in time, written once, and never a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from txl_lightning.commands.output import HTML, JSON, PNG, bytes_in_words, check_out, write_out
from txl_lightning.errors import ConfigError, yaml_text
from txl_lightning.ranks import check_lanes, is_first_rank


def refusal(out: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_out(out)
    return str(caught.value)


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(str(tmp_path)) == f"out={tmp_path}: is a folder; give a file in it"
    assert refusal("") == "out=: is a folder; give a file in it"
    gone = tmp_path / "no" / "x.json"
    assert refusal(str(gone)) == f"out={gone}: its folder does not exist; make the folder first"
    locked = tmp_path / "locked"
    locked.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked)
    assert refusal(str(locked)) == f"out={locked}: cannot be written; give a file elsewhere"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    new = tmp_path / "new.json"
    assert refusal(str(new)) == f"out={new}: cannot be written; give a file elsewhere"
    check_out(str(locked))
    monkeypatch.undo()
    check_out(None)
    check_out(str(tmp_path / "x.json"))


def test_what_no_command_wrote_is_not_written_over(tmp_path: Path) -> None:
    book, other, page = (tmp_path / name for name in ("book.txt", "old.json", "old.html"))
    book.write_text("Once upon a time")
    other.write_text('{"a": 1}')
    page.write_text("<!doctype html>")
    for begins in (JSON, HTML, PNG):
        with pytest.raises(ConfigError, match="holds something else, which would be lost; give another file"):
            check_out(str(book), begins=begins)
    check_out(str(other), begins=JSON)
    check_out(str(page), begins=HTML)
    check_out(str(book))
    (tmp_path / "empty").touch()
    check_out(str(tmp_path / "empty"), begins=JSON)


def test_a_home_folder_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check_out("~/x.json")
    write_out("~/x.json", {"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert refusal("~") == "out=~: is a folder; give a file in it"
    assert refusal("~nobody here/x") == "out=~nobody here/x: its folder does not exist; make the folder first"


def test_bytes_that_are_no_text_survive(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9 \xc3\xa9")
    write_out(str(tmp_path / "x.json"), [name])
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == [name]
    write_out(None, [name])


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK"])
def test_only_the_first_rank_writes(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    write_out(str(tmp_path / "x.json"), [])
    assert not is_first_rank() and not list(tmp_path.iterdir())
    monkeypatch.setenv(variable, "0")
    write_out(str(tmp_path / "x.json"), [])
    assert is_first_rank() and [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("lanes", "ranks", "near"), [(5, 2, "4 or 6"), (2, 4, "4"), (16, 3, "15 or 18"), (6, 3, None), (7, 1, None)]
)
def test_lanes_divide_into_ranks(lanes: int, ranks: int, near: str | None) -> None:
    if near is None:
        check_lanes(lanes, ranks=ranks, key="eval.batch_size")
        return
    with pytest.raises(ConfigError) as caught:
        check_lanes(lanes, ranks=ranks, key="eval.batch_size")
    assert str(caught.value) == f"eval.batch_size={lanes}: must divide into {ranks} ranks; set it to {near}"


def test_sizes_are_said_in_words() -> None:
    sizes = [0, 1023, 1024, 1536, 204_832, 2**20 - 1, 200 * 2**20, 2**30, 150_000_000_000]
    assert list(map(bytes_in_words, sizes)) == [
        *("0 B", "1023 B", "1 KiB", "1.5 KiB", "200 KiB", "1024 KiB", "200 MiB", "1 GiB", "139.7 GiB"),
    ]


def test_values_are_shown_as_they_are_typed() -> None:
    values = [None, True, (9,), [0, "a b"], {"name": "cache", "layers": [1]}, 1e-4, "null", Path("a/b")]
    assert list(map(yaml_text, values)) == [
        *("null", "true", "[9]", "[0,a b]", "{name: cache, layers: [1]}", "0.0001", "null", "a/b"),
    ]
    assert (
        str(ConfigError("memory.layers", (9, 8), "too high", "lower them"))
        == "memory.layers=[9,8]: too high; lower them"
    )
