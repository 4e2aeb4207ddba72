"""Token files: what is in them, when they are used again, and what happens when they or their folder are of no use."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from txl_lightning.data import cache, console, store
from txl_lightning.data.corpora import ByteCorpus
from txl_lightning.data.stdlib import StdlibConfig
from txl_lightning.data.store import TokenData, look, prepare, sample, survey
from txl_lightning.data.text import TextConfig
from txl_lightning.data.vocab import ByteVocab
from txl_lightning.errors import ConfigError

END = ByteVocab.separator
OTHER_VOCAB = '{"name": "symbols", "symbols": [65, 66], "unit": "char", "rule": "two letters"}'
CURE = "set data.cache_dir or TXL_CACHE_DIR to a folder that can be written"


@pytest.fixture(autouse=True)
def notes_afresh() -> None:
    console.say_once.cache_clear()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """100 bytes."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(1, 101)))
    return path


def config(text: Path, **keys: Any) -> TextConfig:
    return TextConfig(path=str(text), batch_size=2, **keys)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of every file below."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_token_files_hold_the_stream_and_nothing_else(text: Path) -> None:
    data = prepare(config(text))
    assert {split: tokens.tolist() for split, tokens in data.splits.items()} == {
        "train": list(range(1, 92)),
        "valid": [92, 93, 94, 95, 96],
        "test": [97, 98, 99, 100, END],
    }
    assert all(isinstance(tokens, np.memmap) and tokens.dtype == np.uint16 for tokens in data.splits.values())
    assert not data.splits["train"].flags.writeable
    assert (data.folder / "test.bin").read_bytes() == bytes([97, 0, 98, 0, 99, 0, 100, 0, 0, 1])
    names = ["meta.json", "test.bin", "train.bin", "valid.bin", "vocab.json"]
    assert sorted(path.name for path in data.folder.iterdir()) == names
    assert sorted(path.name for path in data.folder.parent.iterdir()) == [data.folder.name]
    assert json.loads((data.folder / "meta.json").read_text()) == dataclasses.asdict(data.meta)


def test_what_is_known_about_the_data(text: Path) -> None:
    meta = prepare(config(text)).meta
    assert (meta.corpus, meta.rule_version, meta.vocab_name, meta.vocab_size, meta.unit) == (
        "text",
        1,
        "bytes",
        257,
        "byte",
    )
    assert meta.split_rule == "ratios 0.9/0.05/0.05 at byte positions"
    assert meta.documents == {"train": 1, "valid": 1, "test": 1}
    assert meta.tokens == {"train": 91, "valid": 5, "test": 5} and meta.bytes == {"train": 91, "valid": 5, "test": 4}
    assert meta.details == {"files": 1, "bytes": 100, "document": "file"}
    assert len(meta.fingerprint) == 64


def test_a_survey_says_the_same_and_writes_nothing(text: Path, own_cache: Path) -> None:
    found = survey(config(text))
    assert not own_cache.exists() and not found.cached
    data = prepare(config(text))
    assert {name: getattr(found, name) for name in dataclasses.asdict(data.meta)} == dataclasses.asdict(data.meta)
    assert found.folder == data.folder and survey(config(text)).cached


def test_files_are_built_once(text: Path) -> None:
    first = prepare(config(text))
    before = files(first.folder)
    again = prepare(config(text, segment_len=3, num_workers=1))
    assert again.folder == first.folder and files(first.folder) == before


def test_nothing_else_gets_the_same_files(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(**keys: Any) -> Path:
        return look(config(text, **keys)).folder

    places = [
        place(),
        place(ratios=(0.8, 0.1, 0.1)),
        place(document="line"),
        place(ratios=(0.9, 0.05000001, 0.04999999)),
    ]
    text.write_bytes(bytes(range(1, 100)) + b"!")
    places.append(place())
    with monkeypatch.context() as patch:
        patch.setattr(ByteCorpus, "rule_version", 2)
        places.append(place())
    with monkeypatch.context() as patch:
        patch.setattr(ByteVocab, "size", 258)
        places.append(place())
    renamed = text.rename(tmp_path / "renamed.txt")
    places.append(look(config(renamed)).folder)
    assert len(set(places)) == len(places)


def test_another_python_gets_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = look(StdlibConfig()).fingerprint
    assert look(StdlibConfig()).fingerprint == before
    monkeypatch.setattr(store, "_last", None)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert look(StdlibConfig()).fingerprint != before


def test_a_changed_file_is_seen_within_one_process(text: Path) -> None:
    old = time.time() - 100
    os.utime(text, (old, old))
    first = look(config(text)).fingerprint
    assert store._last is not None and look(config(text)).fingerprint == first
    content = text.read_bytes()
    text.write_bytes(content[::-1])  # same size
    assert look(config(text)).fingerprint != first
    assert store._last is None  # too fresh to be trusted again
    text.write_bytes(content)
    assert look(config(text)).fingerprint == first


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: os.truncate(f / "train.bin", 100), "train.bin has 100 bytes instead of 182"),
        (lambda f: (f / "valid.bin").unlink(), "valid.bin has 0 bytes instead of 10"),
        (lambda f: (f / "meta.json").write_text("{"), "meta.json is missing or damaged"),
        (lambda f: (f / "meta.json").write_text("{}"), "meta.json belongs to other data"),
        (lambda f: (f / "vocab.json").write_text("[]"), "vocab.json is missing or damaged"),
        (lambda f: (f / "vocab.json").write_text(OTHER_VOCAB), "vocab.json belongs to other data"),
    ],
)
def test_damaged_files_are_built_again(damage: Any, said: str, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepare(config(text, ratios=(0.9, 0.05, 0.05)))
    expected = {split: tokens.tolist() for split, tokens in data.splits.items()}
    del data
    folder = look(config(text)).folder
    damage(folder)
    assert not look(config(text)).cached
    capsys.readouterr()
    again = prepare(config(text))
    assert capsys.readouterr().err == f"data: token files are built again, {said}: {folder}\n"
    assert {split: tokens.tolist() for split, tokens in again.splits.items()} == expected
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_is_cut_anywhere_is_said_once(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(config(text))
    prepare(config(text))
    line = "data: 1 document, fewer than 20: cut into 0.9/0.05/0.05 at byte positions, not between documents\n"
    assert capsys.readouterr().err == line


def test_other_ranks_are_silent(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    prepare(config(text))
    assert capsys.readouterr().err == ""


def test_big_inputs_get_a_bar(text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "BIG", 50)
    monkeypatch.setenv("FORCE_COLOR", "1")
    prepare(config(text))
    captured = capsys.readouterr()
    assert "reading" in captured.err and "writing tokens" in captured.err and captured.out == ""


def test_many_may_build_at_once(text: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: prepare(config(text)), range(16)))
    assert len({data.folder for data in found}) == 1
    assert all(data.splits["train"].tolist() == list(range(1, 92)) for data in found)
    assert [path.name for path in found[0].folder.parent.iterdir()] == [found[0].folder.name]


def test_who_is_late_takes_what_is_there(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "folder"
    for place in (work, folder):
        place.mkdir()
        (place / "who").write_text(place.name)
    cache.publish(work, folder, is_whole=lambda: True)
    assert (folder / "who").read_text() == "folder"
    cache.publish(work, folder, is_whole=lambda: False)
    assert (folder / "who").read_text() == "work"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_failed_build_leaves_nothing(text: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ByteCorpus, "stream", fail)
        prepare(config(text))
    assert list((own_cache / "tokens").iterdir()) == []


def test_what_a_killed_process_left_is_removed_after_a_day(text: Path) -> None:
    folder = look(config(text)).folder
    old, new = (folder.parent / f".{folder.name}.{name}" for name in ("0000", "1111"))
    for left in (old, new):
        left.mkdir(parents=True)
    os.utime(old, (time.time() - cache.STALE - 9,) * 2)
    prepare(config(text))
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([new.name, folder.name])


def test_sources_that_change_while_they_are_read(text: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    stream = ByteCorpus.stream

    def meanwhile(self: ByteCorpus, scan: Any) -> Iterator[Any]:
        yield from stream(self, scan)
        text.write_bytes(text.read_bytes()[::-1])

    monkeypatch.setattr(ByteCorpus, "stream", meanwhile)
    with pytest.raises(ConfigError) as caught:
        prepare(config(text))
    assert str(caught.value) == "data=text: its files changed while they were read; wait until nothing writes to them"
    assert list((own_cache / "tokens").iterdir()) == []


# the cache folder


def test_where_token_files_are_kept(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def root(**keys: Any) -> Path:
        return look(config(text, **keys)).folder.parent

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert root(cache_dir="~/tokens") == tmp_path / "home/tokens"
    assert root(cache_dir=str(tmp_path / "mine")) == tmp_path / "mine"
    monkeypatch.setenv("TXL_CACHE_DIR", "~/caches")
    assert root() == tmp_path / "home/caches/tokens"
    monkeypatch.delenv("TXL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert root() == tmp_path / "xdg/txl_lightning/tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert root() == tmp_path / "home/.cache/txl_lightning/tokens"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert root() == tmp_path / "home/Library/Caches/txl_lightning/tokens"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert root() == tmp_path / "local/txl_lightning/tokens"


def test_a_cache_folder_that_is_none(text: Path) -> None:
    for refused in (survey, prepare):
        with pytest.raises(ConfigError) as caught:
            refused(config(text, cache_dir=f"{text}/cache"))
        assert str(caught.value).startswith(f"data.cache_dir={text}/cache: ") and str(caught.value).endswith(
            f"; {CURE}"
        )
    with pytest.raises(ConfigError) as caught:
        survey(config(text, cache_dir=f"{text}/cache"))
    assert str(caught.value) == f"data.cache_dir={text}/cache: {text} is not a folder; {CURE}"


def test_a_read_only_cache_folder(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    with monkeypatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(os, "access", lambda path, mode: Path(path) != folder)  # root may write everywhere
        survey(config(text, cache_dir=str(folder)))
    assert str(caught.value) == f"data.cache_dir={folder}: {folder} cannot be written; {CURE}"

    def locked(self: Path, *args: Any, **keys: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(Path, "mkdir", locked)
        prepare(config(text, cache_dir=str(folder)))
    assert str(caught.value) == f"data.cache_dir={folder}: cannot be written: Read-only file system; {CURE}"


def test_files_in_a_read_only_cache_serve(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(config(text, cache_dir=str(tmp_path / "shared")))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert survey(config(text, cache_dir=str(tmp_path / "shared"))).cached


def test_without_a_home_folder(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TXL_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError) as caught:
        look(config(text))
    assert str(caught.value) == f"data.cache_dir=null: this user has no home folder for it; {CURE}"


# splits that are asked for


def test_a_training_split_too_short_for_its_lanes(text: Path) -> None:
    text.write_bytes(b"abcdefghijk")  # 12 tokens with its separator
    ratios = (1.0, 0.0, 0.0)
    assert survey(TextConfig(path=str(text), ratios=ratios, batch_size=11)).tokens == {"train": 12}
    for refused in (survey, prepare):
        with pytest.raises(ConfigError) as caught:
            refused(TextConfig(path=str(text), ratios=ratios, batch_size=12))
        assert str(caught.value) == (
            "data.batch_size=12: the training split has 12 tokens, and 12 lanes need at least 13; "
            "set data.batch_size to 11 or less, or give more text"
        )
        refused(TextConfig(path=str(text), ratios=ratios, batch_size=12), training=False)


def test_data_without_a_training_split(text: Path) -> None:
    only_test = TextConfig(test=str(text))
    with pytest.raises(ConfigError) as caught:
        survey(only_test)
    cure = "it has test; give training text, for example data.train=FILE"
    assert str(caught.value) == f"data=text: this corpus has no training split; {cure}"
    assert survey(only_test, training=False).tokens == {"test": 101}
    assert list(prepare(only_test, training=False).splits) == ["test"]


def test_an_absent_split_is_refused(text: Path) -> None:
    data: TokenData = prepare(TextConfig(train=str(text), valid=str(_copy(text)), batch_size=2))
    assert len(data.require("valid")) == 101 and data.meta.require("train") == 101
    for ask in (data.require, data.meta.require):
        with pytest.raises(ConfigError) as caught:
            ask("test")
        assert str(caught.value) == "split=test: the corpus text has no such split; it has train and valid"


def _copy(text: Path) -> Path:
    return Path(shutil.copy(text, text.with_name("copy.txt")))


def test_the_start_of_a_corpus(text: Path) -> None:
    split, tokens = sample(config(text), n_token=5)
    assert (split, tokens.tolist()) == ("train", [1, 2, 3, 4, 5])
    split, tokens = sample(TextConfig(test=str(text)), n_token=500)
    assert (split, tokens.tolist()) == ("test", [*range(1, 101), END])
