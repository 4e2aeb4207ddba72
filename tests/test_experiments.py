"""The published experiments: sizes to the last parameter, lengths, and what `txl reproduce` says about them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.tiny import tiny_config, train
from txl_lightning import cli
from txl_lightning.choices import option_files
from txl_lightning.commands import dry_run, reproduce
from txl_lightning.commands.fit import check as check_fit
from txl_lightning.config import Config, ConfigError, ModelConfig, Options, load
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import ReproduceOptions
from txl_lightning.published import PUBLISHED
from txl_lightning.registry import memories

PARAMETERS = {
    "enwik8_base": 41_055_436,
    "enwik8_large": 277_231_820,
    "text8_base": 40_964_635,
    "text8_large": 277_050_395,
    "wt103_base": 151_107_538,
    "wt103_large": 285_170_506,
    "lm1b_base": 357_812_082,
    "lm1b_large": 841_295_982,
    "nvidia_wt103_base": 191_950_298,
    "nvidia_wt103_large": 285_167_482,
    "compressive_enwik8": 277_231_820,
    "compressive_wt103": 285_170_506,
    "compressive_pg19": 523_867_392,
}
EXPERIMENTS = option_files("experiment")
CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "experiment"

CLUSTERS: dict[str, Any] = {"vocab_size": 1000, "cutoffs": [100, 400]}
VARIATIONS: list[dict[str, Any]] = [
    {"untie_r": True},
    {"terms": ["a", "b"]},
    {"terms": ["a", "d"]},
    {"terms": ["a", "c"], "untie_r": True},
    {"terms": ["a"]},
    {"position": "shaw", "max_distance": 33},
    {"position": "absolute"},
    {"position": "absolute_per_layer", "max_distance": 200},
    {"position": "rotary", "d_head": 12},
    {"position": "none"},
    {"tie_weights": False},
    {"d_embed": 20},
    {"d_embed": 20, "tie_projs": [True]},
    {"d_embed": 20, "tie_projs": [True], "tie_weights": False},
    CLUSTERS,
    {**CLUSTERS, "tie_weights": False},
    {**CLUSTERS, "d_embed": 20},
    {**CLUSTERS, "d_embed": 20, "tie_projs": [False, True, True]},
    {**CLUSTERS, "d_embed": 20, "tie_projs": [True, True, True], "tie_weights": False},
    {**CLUSTERS, "div_val": 2},
    {**CLUSTERS, "div_val": 2, "tie_projs": [False, True, False]},
    {**CLUSTERS, "div_val": 2, "proj_same_dim": False},
    {**CLUSTERS, "div_val": 2, "proj_same_dim": False, "tie_projs": [True, True, True]},
    {**CLUSTERS, "div_val": 2, "proj_same_dim": False, "d_embed": 64},
    {**CLUSTERS, "div_val": 3, "d_embed": 30, "tie_weights": False, "tie_projs": [True, False, True]},
    {"norm": "rmsnorm"},
    {"norm": "rmsnorm", "final_norm": True, "pre_norm": True},
    {"bias": False, "final_norm": True, "pre_norm": True},
    {"ffn": "gelu"},
    {"ffn": "swiglu"},
    {"ffn": "swiglu", "bias": False},
    {"n_kv_head": 2},
    {"n_kv_head": 1, "qk_norm": True, "position": "rotary"},
    {"qk_norm": True, "d_head": 24, "d_inner": 77},
]
NONE = load(["memory=none"]).memory

experiment = reproduce.experiment


def built(config: Config) -> int:
    """Parameters of the model as it is built, without those of its memory."""
    with torch.device("meta"):
        model = TransformerXL(config)
    return sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if ".memories." not in name and not name.startswith("tokens.")
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_published_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = experiment(name)
    with monkeypatch.context() as nothing_is_built:
        nothing_is_built.setattr(nn.Module, "__init__", None)
        nothing_is_built.setattr(torch, "empty", None)
        assert config.model.num_params() == PARAMETERS[name]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_parameters_of_every_experiment_are_those_of_the_built_model(name: str) -> None:
    config = experiment(name)
    assert config.model.num_params() == built(config)


@pytest.mark.parametrize("keys", VARIATIONS, ids=str)
def test_parameters_of_odd_models_are_those_of_the_built_model(keys: dict[str, Any]) -> None:
    model = ModelConfig(**{"n_layer": 3, "d_model": 40, "n_head": 4, "d_head": 10, **keys})
    assert model.num_params() == built(Config(model=model, memory=NONE))


def test_our_own_sizes_are_as_promised() -> None:
    assert experiment("ptb_24m").model.num_params() == pytest.approx(24e6, rel=0.01)
    modern = experiment("modern_base")
    assert modern.model.num_params() == pytest.approx(PARAMETERS["enwik8_base"], rel=0.01)
    base = experiment("enwik8_base")
    assert (modern.data, modern.memory, modern.trainer) == (base.data, base.memory, base.trainer)


@pytest.mark.parametrize("name", sorted({*PARAMETERS, "ptb_24m", "modern_base"}))
def test_an_experiment_sets_all_that_defines_it(name: str) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()
    for key in ("n_layer", "d_model", "n_head", "d_head", "d_inner", "vocab_size", "dropout", "pre_norm", "init_std"):
        assert re.search(rf"^  {key}: ", text, flags=re.MULTILINE), key
    config = experiment(name)
    assert config.memory.mem_len == config.data.segment_len > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_yaml_names_the_test_lengths_that_reproduce_prints(name: str) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()
    said = re.findall(r"^# Test lengths: (.*)$", text, flags=re.MULTILINE)
    assert said == ([" ".join(PUBLISHED[name].test)] if PUBLISHED[name].test else [])
    values: Any = experiment(name).to_dict()
    for item in PUBLISHED[name].test:
        dotted, _, value = item.partition("=")
        section, _, key = dotted.partition(".")
        assert key in values[section]
        values[section][key] = yaml.safe_load(value)
    tested = Config.from_dict(values)
    lengths = PUBLISHED[name].test and tested.memory.name == "cache"
    assert tested.model.same_length is bool(lengths)  # they go together


def test_the_compressive_experiments_are_the_papers() -> None:
    sizes = {"enwik8": (24, 768, 1152, 3, 4_000), "wt103": (18, 512, 512, 4, 16_000), "pg19": (36, 512, 512, 2, 16_000)}
    for name, (n_layer, length, compressed, rate, warmup) in sizes.items():
        config = experiment(f"compressive_{name}")
        memory: Any = config.memory
        assert (config.model.n_layer, config.data.segment_len) == (n_layer, length)
        assert (memory.mem_len, memory.compressed_len, memory.rate) == (length, compressed, rate)
        assert (memory.function, memory.loss) == ("conv", "attention")
        optim, trainer = config.optim, config.trainer
        assert (optim.name, optim.lr, optim.lr_start, optim.lr_min, optim.clip) == ("adam", 3e-4, 1e-6, 1e-6, 0.1)
        assert trainer.max_steps - optim.warmup_steps == (100_000 if name == "enwik8" else 500_000)
        assert optim.warmup_steps == warmup
        assert [trainer.segments_of_step(step) for step in (59_999, 60_000)] == [1, 4]


def test_every_experiment_but_our_own_has_its_published_result() -> None:
    assert set(PUBLISHED) == {*PARAMETERS, "ptb_24m"}
    assert set(EXPERIMENTS) >= {*PUBLISHED, "modern_base", "default"}


@pytest.mark.parametrize("name", ["enwik8_large", "wt103_base", "lm1b_base", "compressive_wt103"])
def test_printed_commands_are_accepted(name: str, tmp_path: Path) -> None:
    """Up to the files of the benchmark, which are not here."""
    prepare, fit, evaluate = (shlex.split(line)[1:] for line in reproduce.commands(name))
    for command in (prepare, fit):
        assert [item for item in command if item.startswith("experiment=")] == [f"experiment={name}"]
    config = load([item.replace("=PATH", f"={tmp_path}") for item in fit[1:]])
    assert config.experiment == name
    with pytest.raises(ConfigError, match=r"data\.path"):
        check_fit(config, Options())
    assert evaluate[:3] == ["eval", f"ckpt=runs/{name}", "split=test"]
    assert f"run_dir=runs/{name}" in fit


def run(capsys: Any, *arguments: str) -> str:
    assert cli.main(["reproduce", *arguments]) == 0
    return str(capsys.readouterr().out)


def test_reproduce_lists_every_result(capsys: Any, tmp_path: Path) -> None:
    said = run(capsys, f"out={tmp_path / 'all.json'}")
    rows = json.loads((tmp_path / "all.json").read_text())
    assert [row["name"] for row in rows] == list(PUBLISHED)
    assert all(f"{row['parameters']:,}" in said for row in rows)
    assert rows[0]["score"] == 1.06 and rows[0]["parameters"] == PARAMETERS["enwik8_base"]


def test_reproduce_prints_commands_score_and_traps_but_invents_no_speed(capsys: Any, tmp_path: Path) -> None:
    said = run(capsys, "lm1b_large", f"out={tmp_path / 'one.json'}")
    assert "perplexity 21.8" in said and "n+2" in said and "841,295,982" in said
    assert (
        "txl eval ckpt=runs/lm1b_large split=test eval.segment_len=32 memory.mem_len=128 model.same_length=true" in said
    )
    assert "was not measured here" in said and "hours" not in said
    found = json.loads((tmp_path / "one.json").read_text())
    assert found["device_hours"] is None and found["training_tokens"] == 1_200_000 * 512 * 32
    assert "257" in run(capsys, "wt103_large") and "our reconstruction" in run(capsys, "ptb_24m")


def test_reproduce_estimates_from_a_typed_speed(capsys: Any) -> None:
    # 400,000 steps of 22 lanes of 512 tokens at 100,000 tokens per second
    assert "12.5 device-hours" in run(capsys, "enwik8_base", "speed=100000")


def test_reproduce_estimates_from_a_run(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, "trainer.max_steps=2")
    _, fitted = train(config, monkeypatch)
    monkeypatch.setattr(reproduce, "experiment", lambda name: config)
    said = run(capsys, "text8_base", f"speed_from={fitted.run_dir}")
    assert f"At {fitted.result['tokens_per_second']:,.0f} tokens per second" in said
    monkeypatch.undo()
    assert cli.main(["reproduce", "text8_base", f"speed_from={fitted.run_dir}"]) == 2
    assert "did not train the model, memory and segments of text8_base" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "wt103_bse"}, r"name=wt103_bse: nothing was published under this name; did you mean wt103_base"),
        ({"speed": 3.0}, r"speed=3\.0: says how fast one experiment trains"),
        ({"name": "wt103_base", "speed": 3.0, "speed_from": "x"}, r"speed=3\.0: contradicts speed_from"),
        ({"name": "wt103_base", "speed_from": "nowhere"}, r"speed_from=nowhere: is no folder of a finished run"),
    ],
)
def test_reproduce_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reproduce.check(load(), ReproduceOptions(**options))


def test_reproduce_refuses_files_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"tokens_per_second": 3}')
    (tmp_path / "config.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="is no folder of a finished run"):
        reproduce.check(load(), ReproduceOptions(name="wt103_base", speed_from=str(tmp_path)))


@pytest.mark.parametrize("name", memories.names())
def test_every_memory_can_be_measured_on_shapes_alone(name: str, tmp_path: Path) -> None:
    found = dry_run.needs(tiny_config(tmp_path, f"memory={name}", "trainer.precision=bf16-mixed"))
    assert (found.state_bytes > dry_run.needs(tiny_config(tmp_path, "memory=none")).state_bytes) == (name != "none")


def test_dry_run_counts_the_model_the_optimizer_and_the_average(tmp_path: Path) -> None:
    plain = dry_run.needs(tiny_config(tmp_path))
    assert plain.parameters == tiny_config(tmp_path).model.num_params() and plain.memory_parameters == 0
    assert plain.optimizer_bytes == 2 * plain.parameter_bytes
    clustered = dry_run.needs(tiny_config(tmp_path, "model.cutoffs=[130]", "model.div_val=2"))
    assert clustered.activation_bytes == pytest.approx(plain.activation_bytes, rel=0.05)
    carry, window = "memory.gradient=carry", ["trainer.bptt_segments=3", "trainer.accumulate_grad_batches=3"]
    alone, together = (dry_run.needs(tiny_config(tmp_path, carry, *keys)) for keys in ([], window))
    # one graph holds the whole window
    assert together.activation_bytes == pytest.approx(3 * alone.activation_bytes, rel=0.15)
    other = dry_run.needs(tiny_config(tmp_path, "optim=sgd", "optim.ema=0.9"))
    assert other.optimizer_bytes == other.parameter_bytes
    steps = ["trainer.max_steps=20", "trainer.accumulate_grad_batches=4", "trainer.accumulate_from_step=6"]
    scheduled = dry_run.needs(tiny_config(tmp_path, *steps))
    assert scheduled.epochs == pytest.approx(6 / plain.steps_per_epoch + 14 / scheduled.steps_per_epoch)
