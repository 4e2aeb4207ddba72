"""`txl data prepare|inspect`: what it shows, what it writes, what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from txl_lightning import registry
from txl_lightning.commands import data as command
from txl_lightning.config import Config, build_named
from txl_lightning.data.store import look
from txl_lightning.data.text import TextConfig
from txl_lightning.errors import ConfigError
from txl_lightning.options import DataOptions

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "data"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """30 documents of 12 bytes."""
    path = tmp_path / "my text.txt"
    path.write_text("".join(f"[red]{i:02}\x1b[0m\n" for i in range(30)))
    return Config(data=TextConfig(path=str(path), document="line"))


def show(config: Config, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    chosen = DataOptions(**options)
    command.check(config, chosen)
    capsys.readouterr()
    command.run(config, chosen)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["stdlib", "text"])
def test_the_yaml_lists_every_key_with_its_default(name: str) -> None:
    schema = registry.corpora.get(name).config
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert set(values) == {item.name for item in dataclasses.fields(schema)}
    assert build_named("data", values, path="data") == schema()


def test_inspect_shows_what_is_in_the_corpus(
    config: Config, capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    shown = show(config, capsys)
    found = look(config.data)
    for line in (
        "corpus       text, rule version 1",
        "vocabulary   bytes, 257 ids: ids 0-255 are the bytes as they are, id 256 ends a document",
        "splits       ratios 0.9/0.05/0.05 between documents",
        "details      files 1, bytes 360, document line",
        f"fingerprint  {found.fingerprint}",
        f"token files  {found.folder} (not built yet)",
    ):
        assert line in shown.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert rows == [["train", "27", "351", "324"], ["valid", "2", "26", "24"], ["test", "1", "13", "12"]]
    assert "train begins:\n[red]00\\x1b[0m\n\n[red]01\\x1b[0m\n" in shown  # no colours, nothing that steers a terminal
    assert "\x1b" not in shown
    assert not own_cache.exists()


def test_inspect_writes_its_facts(config: Config, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show(config, capsys, out=str(tmp_path / "facts.json"))
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["tokens"] == {"train": 351, "valid": 26, "test": 13} and facts["corpus"] == "text"
    assert facts["documents"] == {"train": 27, "valid": 2, "test": 1} and facts["cached"] is False
    assert facts["vocab_rule"].startswith("ids 0-255") and facts["files"] == {}
    assert facts["sample"]["split"] == "train" and facts["sample"]["text"].startswith("[red]00\x1b[0m\n\n[red]01")


def test_prepare_says_where_the_files_are(config: Config, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = show(config, capsys, action="prepare", out=str(tmp_path / "facts.json"))
    found = look(config.data)
    assert shown.splitlines() == [
        f"train              351 tokens  {found.folder / 'train.bin'}",
        f"valid               26 tokens  {found.folder / 'valid.bin'}",
        f"test                13 tokens  {found.folder / 'test.bin'}",
        f"fingerprint {found.fingerprint}",
    ]
    files = json.loads((tmp_path / "facts.json").read_text())["files"]
    assert [len(np.fromfile(path, dtype="<u2")) for path in files.values()] == [351, 26, 13]
    assert f"token files  {found.folder}\n" in show(config, capsys)


def test_a_corpus_too_small_to_train_on_can_be_shown(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    small = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=5000))
    assert "351" in show(small, capsys) and "351" in show(small, capsys, action="prepare")


def test_refusals(config: Config, tmp_path: Path, own_cache: Path) -> None:
    def refusal(config: Config, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            command.check(config, DataOptions(**options))
        return str(caught.value)

    gone, folder = tmp_path / "no/facts.json", tmp_path
    assert refusal(config, out=str(gone)) == f"out={gone}: its folder does not exist; make the folder first"
    assert refusal(config, out=str(folder)) == f"out={folder}: is a folder; give a file in it"
    no_text = dataclasses.replace(config, data=TextConfig(path=str(tmp_path / "no.txt")))
    cure = "give a file, a folder, a glob or a list of them"
    assert refusal(no_text) == f"data.path={tmp_path}/no.txt: no such file or folder; {cure}"
    no_folder = f"{tmp_path}/my text.txt/x"
    no_cache = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=no_folder))
    command.check(no_cache, DataOptions())  # to look needs no cache
    assert refusal(no_cache, action="prepare").startswith(f"data.cache_dir={no_folder}: ")
    assert not own_cache.exists()


def test_the_default_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(Config(), capsys)
    assert "corpus       stdlib, rule version 1" in shown and "details      python " in shown
