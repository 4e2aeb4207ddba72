"""Every YAML file in configs/ composes into a configuration, and lists the keys its dataclass has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from txl_lightning import registry
from txl_lightning.choices import option_files
from txl_lightning.config import Config, load
from txl_lightning.keys import GROUPS, PLUGGED, SEVERAL
from txl_lightning.model.transformer import TransformerXL

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
OPTIONS = [(group, name) for group in GROUPS for name in option_files(group)]


def content(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text()) or {}


def test_every_file_is_an_option_of_a_group() -> None:
    found = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert found == {f"{group}/{name}" for group, name in OPTIONS} | {"config", "stored"}
    assert {path.name for path in CONFIGS.iterdir() if path.is_dir()} - {"__pycache__"} == set(GROUPS)


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes(group: str, name: str) -> None:
    needed = {"data=text": ["data.path=book.txt"], "strategy=ddp": ["trainer.devices=2"]}
    config = load([f"{group}={name}", *needed.get(f"{group}={name}", [])])
    assert Config.from_dict(config.to_dict()) == config
    if group == "experiment":
        assert config.experiment == name


@pytest.mark.parametrize(("group", "name"), [(g, n) for g, n in OPTIONS if g in ("memory", "data")])
def test_memory_and_data_options_list_every_key_with_its_default(group: str, name: str) -> None:
    assert content(group, name) == PLUGGED[group].get(name).config().to_dict()


@pytest.mark.parametrize("group", ["memory", "data", "callbacks"])
def test_every_part_of_ours_has_its_option(group: str) -> None:
    ours = {n for n in PLUGGED[group].names() if PLUGGED[group].get(n).build.__module__.startswith("txl_lightning.")}
    extra = {"none"} if group == "callbacks" else set()
    assert set(option_files(group)) == ours | extra


@pytest.mark.parametrize("name", registry.callbacks.names())
def test_callback_options_list_every_key_with_its_default(name: str) -> None:
    assert content("callbacks", name) == {name: registry.callbacks.get(name).config().to_dict()}


@pytest.mark.parametrize("group", ["optim", "strategy"])
def test_options_that_set_a_name_cover_its_choices(group: str) -> None:
    section = type(getattr(load(), group))
    choices = next(item for item in section.__dataclass_fields__.values() if item.name == "name").metadata["choices"]
    assert {content(group, name)["name"] for name in option_files(group)} == set(choices)


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_no_option_repeats_a_key_of_nobody(group: str, name: str) -> None:
    if group in ("model", "trainer", "optim", "strategy"):
        assert set(content(group, name)) <= set(getattr(load(), group).to_dict())
    if group in SEVERAL and name == "none":
        assert content(group, name) == {}


def test_the_default_experiment_builds() -> None:
    with torch.device("meta"):
        model = TransformerXL(load())
    assert 800_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
