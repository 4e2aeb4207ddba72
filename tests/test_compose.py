"""What is typed becomes the configuration it says, letter by letter, whatever Hydra makes of such letters."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import version
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from txl_lightning import registry
from txl_lightning.compose import compose, expand
from txl_lightning.config import Config, ConfigError, MemoryConfig, OptimConfig, build_section, key, load
from txl_lightning.keys import names
from txl_lightning.memory.base import MemoryPlan
from txl_lightning.options import EvalOptions, GenerateOptions
from txl_lightning.overrides import Typed, read, read_hydra, to_hydra

NASTY = [
    "a=b",
    "a b  c",
    " a ",
    "it's",
    'say "hi"',
    "'quoted'",
    '"',
    "~/x",
    "C:\\new\\",
    "\\",
    "\\'",
    "${seed}",
    "\\${seed}",
    "${",
    "$",
    "a,b",
    "[a",
    "{a: b}",
    "(x)",
    "line\nline\ttab",
    "żółw 😀",
    "10e2",
    "695e0514",
    "007",
    "null",
    "true",
    "???",
    "",
    "#",
    "-",
    "choice(1,2)",
    "@",
]


@pytest.mark.parametrize("text", NASTY)
def test_free_text_is_taken_letter_by_letter(text: str) -> None:
    values = compose([f"prompt={text}"], command="generate")
    assert values["prompt"] == text
    own = {name: values.pop(name) for name in names(GenerateOptions)}
    assert build_section(GenerateOptions, own, path="").prompt == text
    values = compose([f"run_dir={text}", "data=text", f"data.train={text}"])
    assert (values["run_dir"], values["data"]["train"]) == (text, text)
    if text:
        assert (values.pop("resume"), values.pop("trust")) == (None, False)
        assert Config.from_dict(values).data.train == text  # type: ignore[attr-defined]


def test_free_text_survives_hydra_and_back() -> None:
    rng = random.Random(0)
    letters = ["\\", "'", '"', "$", "{", "}", "${", "=", ",", "[", "]", "\n", " ", "~", "a", "é", "${a}", ":", "("]
    for _ in range(300):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 8)))
        for item in (Typed(key="prompt", text=text), Typed(key="data.path", text=text)):
            assert read_hydra(to_hydra(item)) == item


def test_a_list_of_paths(tmp_path: Path) -> None:
    def path_of(text: str) -> object:
        return load(["data=text", f"data.path={text}"]).data.path  # type: ignore[attr-defined]

    assert path_of("[a.txt, 'b, c.txt',\"d's\",e=f ]") == ("a.txt", "b, c.txt", "d's", "e=f")
    assert path_of("[10e2,null]") == ("10e2", "null")
    assert path_of("[a") == "[a"
    again = read_hydra(to_hydra(Typed(key="data.path", text="[a, 'b, ${c}\\']")))
    assert path_of(again.text) == path_of("[a, 'b, ${c}\\']")
    folder = tmp_path / "[x,y]"
    folder.mkdir()
    assert path_of(str(folder)) == str(folder)


def test_a_file_may_be_called_like_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("[a,b]").touch()
    assert load(["data=text", "data.path=[a,b]"]).data.path == "[a,b]"  # type: ignore[attr-defined]


def test_numbers_are_numbers_and_names_stay_names() -> None:
    config = load(
        ["optim.lr=1e-4", "++seed=3", "dry_run=true", "trainer.val_check_interval=7", "optim.betas=[0.8,0.9]"]
    )
    assert (config.optim.lr, config.seed, config.dry_run) == (1e-4, 3, True)
    assert type(config.trainer.val_check_interval) is int
    assert config.optim.betas == (0.8, 0.9)
    with pytest.raises(ConfigError, match=r"^trainer\.precision=10e2: no such choice; "):
        load(["trainer.precision=10e2"])
    assert load(["optim.warmup_steps=${trainer.max_steps}"]).optim.warmup_steps == 1700


def test_groups_choose_and_keys_refine() -> None:
    config = load(["memory=none", "optim=adam", "logger=[tensorboard,csv]", "strategy=ddp", "trainer.devices=2"])
    assert (config.memory.name, config.optim.name, config.strategy.name) == ("none", "adam", "ddp")
    assert config.logger.tensorboard and config.logger.csv
    assert not load(["logger=none"]).logger.tensorboard
    assert load(["callbacks=none"]).callbacks == {}
    assert load(["memory.name=none"]) == load(["memory=none"])
    assert load(["memory=none", "memory.name=none"]) == load(["memory=none"])
    assert load(["memory=mix", "memory.parts=[{name: cache, mem_len: 7}]"]).memory.parts[0]["mem_len"] == 7  # type: ignore[attr-defined]


def test_debug_overrides_the_experiment_and_typed_keys_override_both() -> None:
    fast = load(["debug=fast"])
    assert fast.trainer.max_steps == 20 and fast.callbacks == {} and not fast.logger.tensorboard
    typed = load(["debug=fast", "trainer.max_steps=3", "logger=csv"])
    assert typed.trainer.max_steps == 3 and typed.logger.csv and not typed.logger.tensorboard
    assert load(["debug=anomaly"]).trainer.detect_anomaly


def write_option(root: Path, name: str, text: str) -> str:
    path = root / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(root)


EXPERIMENT = """# @package _global_
defaults:
  - override /memory: cache
  - override /callbacks: [throughput]
memory: {mem_len: 33}
callbacks: {text_samples: {tokens: 5}}
trainer: {max_steps: 12}
"""


def test_a_folder_of_ones_own_options(tmp_path: Path) -> None:
    folder = write_option(tmp_path, "experiment/mine", EXPERIMENT)
    config = load(["experiment=mine"], config_dir=folder)
    assert (config.experiment, config.trainer.max_steps, config.memory.mem_len) == ("mine", 12, 33)  # type: ignore[attr-defined]
    assert set(config.callbacks) == {"throughput", "text_samples"}
    folder = write_option(tmp_path, "model/wide", "d_model: 512\n")
    assert load(["model=wide"], config_dir=folder).model.d_model == 512


def test_the_experiment_that_contributing_shows(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parent.parent / "CONTRIBUTING.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    config, plain = load(["experiment=mine"], config_dir=write_option(tmp_path, "experiment/mine", text)), load()
    assert (config.experiment, config.memory.name, config.trainer.max_steps) == ("mine", "mix", 5000)
    assert (config.optim, config.trainer.val_check_interval) == (plain.optim, plain.trainer.val_check_interval)
    assert plain.optim != OptimConfig()


def test_what_an_experiment_sets_for_a_replaced_memory_is_dropped(tmp_path: Path) -> None:
    folder = write_option(tmp_path, "experiment/mine", EXPERIMENT)
    config = load(["experiment=mine", "memory=none", "callbacks=memory_monitor"], config_dir=folder)
    assert config.memory.to_dict() == {"name": "none", "reset": "epoch", "offload": "none"}
    assert set(config.callbacks) == {"memory_monitor"}
    with pytest.raises(ConfigError) as caught:
        load(["experiment=mine", "memory=none", "memory.mem_len=64"], config_dir=folder)
    with pytest.raises(ConfigError, match="the callback text_samples is off"):
        load(["experiment=mine", "callbacks=none", "callbacks.text_samples.tokens=3"], config_dir=folder)
    rule = "memory.mem_len=64: memory=none has no such key; leave it out or choose memory=cache"
    assert str(caught.value).startswith(rule)


@pytest.mark.parametrize(
    ("name", "text", "typed", "said"),
    [
        (
            "experiment/mine",
            "trainer: {max_steps: 5}\n",
            "experiment=mine",
            "experiment=mine: its file sets keys of experiment",
        ),
        (
            "experiment/mine",
            "# @package _global_\ntrainer: {max_step: 5}\n",
            "experiment=mine",
            "trainer.max_step=5: no such key",
        ),
        ("experiment/mine", "# @package _global_\nfoo: 1\n", "experiment=mine", "foo=1: no such key"),
        ("experiment/mine", "a: [\n", "experiment=mine", "experiment=mine: while parsing"),
        (
            "experiment/mine",
            "# @package _global_\ndefaults: [override /memory: nope]\n",
            "experiment=mine",
            "experiment=mine: .*nope",
        ),
        ("memory/mine", "name: none\nmem_le: 3\n", "memory=mine", "memory.mem_le=3: no such key"),
        ("memory/mine", "mem_len: 3\n", "memory=mine", "memory.name=null: a memory needs a name"),
        ("memory/mine", "name: cache\nmem_len: ???\n", "memory=mine", r"memory.mem_len=\?\?\?: has no value"),
    ],
)
def test_files_that_are_wrong(name: str, text: str, typed: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as caught:
        load([typed], config_dir=write_option(tmp_path, name, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_would_never_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"default\.yaml has the name of an option of txl; rename it$"):
        load(config_dir=write_option(tmp_path, "experiment/default", ""))
    with pytest.raises(ConfigError, match="no such folder"):
        load(config_dir=str(tmp_path / "nowhere"))


STORED = [
    "experiment=default",
    "memory.mem_len=48",
    "data=text",
    "data.path=it's ${x} = [y]",
    "eval.segment_len=32",
    "optim.lr=7e-4",
    "run_dir=/a b",
]


def test_a_stored_configuration_changes_only_where_typed() -> None:
    stored = load(STORED).to_dict()

    def resume(*typed: str) -> Config:
        values = compose(typed, command="eval", stored=stored)
        return Config.from_dict({name: value for name, value in values.items() if name not in names(EvalOptions)})

    assert resume().to_dict() == stored
    longer = resume("memory.mem_len=1600", "model.clamp_len=1000", "eval.segment_len=null").to_dict()
    assert longer.pop("memory") == {**stored["memory"], "mem_len": 1600}
    assert longer.pop("model") == {**stored["model"], "clamp_len": 1000}
    assert longer.pop("eval") == {**stored["eval"], "segment_len": None}
    assert longer == {name: stored[name] for name in longer}
    assert resume("memory=none").memory.to_dict() == {"name": "none", "reset": "epoch", "offload": "none"}
    assert resume("data=stdlib").data.to_dict() == load().data.to_dict()
    with pytest.raises(ConfigError, match=r"^memory\.mem_len=3: memory=none has no such key"):
        resume("memory=none", "memory.mem_len=3")
    with pytest.raises(ConfigError, match=r"^experiment=default: the checkpoint's own configuration is used"):
        resume("experiment=default")


def test_keys_younger_than_a_checkpoint_have_their_defaults_and_can_be_typed() -> None:
    stored = load(STORED).to_dict()
    for section, name in (("eval", "warm"), ("optim", "lr_start"), ("model", "attention"), ("memory", "cold")):
        old = {**stored, section: {key: value for key, value in stored[section].items() if key != name}}
        value = {"warm": 64, "lr_start": 1e-5, "attention": "reference", "cold": "zeros"}[name]
        command = "fit" if section == "optim" else "eval"
        found = compose([f"{section}.{name}={value}"], command=command, stored=old)
        assert found[section][name] == value
        assert Config.from_dict({**old}).to_dict()[section] == Config.from_dict(stored).to_dict()[section]


def test_a_key_of_a_part_of_a_stored_mix_names_the_parts() -> None:
    parts = "[{name: cache, layers: [0]}, {name: none}, {name: cache, layers: [1], mem_len: 7}]"
    stored = load(["memory=mix", f"memory.parts={parts}"]).to_dict()
    cure = "[{name: cache, layers: [0], mem_len: 256}, {name: none}, {name: cache, layers: [1], mem_len: 256}]"
    with pytest.raises(ConfigError) as refused:
        compose(["memory.mem_len=256"], command="eval", stored=stored)
    said = f"memory.mem_len=256: memory=mix has no such key; set it in the parts: 'memory.parts={cure}'"
    assert str(refused.value).replace(",1", ", 1").replace(",{", ", {") == said
    compose([f"memory.parts={cure}"], command="eval", stored=stored)


@dataclass(frozen=True, kw_only=True)
class FadeConfig(MemoryConfig):
    name: str = key("fade", "a memory of another package")
    rate: float = key(0.5, "share that stays", above=0)


class Fade:
    """Named as package.module:Class."""

    Config = FadeConfig


@pytest.fixture
def fade() -> Iterator[None]:
    """A memory that another package registered, without any YAML."""
    registry.memories.register("fade", config=FadeConfig)(lambda config, model: MemoryPlan(layers=[]))
    yield
    del registry.memories._entries["fade"]


def test_a_plugged_in_memory_needs_no_file(fade: None) -> None:
    assert load(["memory=fade"]).memory == FadeConfig()
    assert load(["memory=fade", "memory.rate=0.25"]).memory == FadeConfig(rate=0.25)
    with pytest.raises(ConfigError, match=r"choose memory=compressive or memory=fade$"):
        load(["memory.rate=0.25"])
    with pytest.raises(ConfigError, match=r"^memory=fada: no such option; did you mean fade\?$"):
        load(["memory=fada"])


@pytest.mark.parametrize("group", ["memory", "memory.name"])
def test_a_memory_named_by_its_class(group: str) -> None:
    name = f"{__name__}:Fade"
    assert load([f"{group}={name}", "memory.rate=0.25"]).memory == FadeConfig(name=name, rate=0.25)


def test_a_plugged_in_memory_may_list_some_of_its_keys(fade: None, tmp_path: Path) -> None:
    folder = write_option(tmp_path, "memory/fade", "name: fade\n")
    assert load(["memory=fade", "memory.rate=0.75"], config_dir=folder).memory == FadeConfig(rate=0.75)


def test_jobs_of_a_sweep() -> None:
    typed = [
        read(arg, command="fit")
        for arg in ("memory=none,cache", "seed=range(1,3)", "run_dir=a,b", "optim.betas=[0.8,0.9]")
    ]
    jobs = [[str(item) for item in job] for job in expand(typed, config_dir=None)]
    assert jobs == [
        [f"memory={memory}", f"seed={seed}", "run_dir=a,b", "optim.betas=[0.8,0.9]"]
        for memory in ("none", "cache")
        for seed in (1, 2)
    ]
    globbed = expand([read("memory=glob(*)", command="fit")], config_dir=None)
    assert [str(job[0]) for job in globbed] == [f"memory={name}" for name in registry.memories.names()]


def test_nothing_of_hydra_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()  # discovers plug-ins
    base, names = version.getbase(), set(ConfigStore.instance().repo)
    monkeypatch.chdir(tmp_path)
    load(["memory=none"])
    with pytest.raises(ConfigError):
        load(["memory=none", "memory.mem_len=1"])
    assert not GlobalHydra.instance().is_initialized()
    assert (version.getbase(), set(ConfigStore.instance().repo)) == (base, names)
    assert "txl_schema.yaml" not in names
    assert list(tmp_path.iterdir()) == []


def test_threads_compose_side_by_side() -> None:
    found: dict[int, int] = {}

    def work(number: int) -> None:
        found[number] = load([f"seed={number}"]).seed

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number for number in range(6)}
