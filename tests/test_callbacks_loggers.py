"""Where figures go: TensorBoard's page of groups and its HParams tab, Weights & Biases offline, MLflow, CSV."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.test_callbacks_ranks import ALL, curves
from tests.tiny import tiny_config
from txl_lightning import registry
from txl_lightning.commands import fit as fit_command
from txl_lightning.config import ConfigError, load
from txl_lightning.training.layout import LAYOUT
from txl_lightning.training.loggers import IDS, check_loggers

SHORT = ["trainer.max_steps=8", "trainer.val_check_interval=4", "trainer.log_every_n_steps=2", "memory.mem_len=24",
         "data.ratios=[0.5,0.4,0.1]"]  # fmt: skip


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> fit_command.Fitted:
    """A run with every observer but the slow ones, whose curves went to TensorBoard and CSV."""
    place = tmp_path_factory.mktemp("fitted")
    return fit_command.fit(tiny_config(place, *SHORT, *ALL, "logger=[tensorboard,csv]"))


@pytest.fixture(scope="module")
def events(fitted: fit_command.Fitted) -> EventAccumulator:
    found = EventAccumulator(str(fitted.run_dir), size_guidance={"tensors": 0, "scalars": 0, "images": 0})
    found.Reload()
    return found


def test_every_chart_of_the_layout_has_curves(events: EventAccumulator) -> None:
    written = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [group.title for group in written.category] == list(LAYOUT)
    assert written.category[0].title.startswith("1. Does the memory help")
    tags = events.Tags()["scalars"]
    # memory=cache has no gates, utilisation needs a known peak, a usual norm five points
    nobody = {"memory/.*/gate", "perf/mfu$", "warn/grad_ratio$"}
    for group in written.category:
        for chart in group.chart:
            for pattern in chart.multiline.tag:
                assert any(re.match(pattern, tag) for tag in tags) != (pattern in nobody), pattern


def test_every_curve_but_a_few_is_on_that_page(events: EventAccumulator) -> None:
    patterns = [pattern for charts in LAYOUT.values() for tags in charts.values() for pattern in tags]
    curves = [tag for tag in events.Tags()["scalars"] if not tag.startswith("final/")]
    left = {tag for tag in curves if not any(re.match(pattern, tag) for pattern in patterns)}
    assert left == {
        *(f"{stage}/{name}" for stage in ("train", "val") for name in ("ppl", "bits_per_byte")),
        "cost/context_share",
        "cost/context_per_layer",
    }


def test_the_hparams_tab_holds_the_configuration_and_the_closing_figures(
    events: EventAccumulator, fitted: fit_command.Fitted
) -> None:
    content = {
        name: plugin_data_pb2.HParamsPluginData.FromString(data)
        for name, data in events.PluginTagToContent("hparams").items()
    }
    started = content["_hparams_/session_start_info"].session_start_info.hparams
    assert started["memory/mem_len"].number_value == 24
    shown = {info.name.tag for info in content["_hparams_/experiment"].experiment.metric_infos}
    wanted = {"loss": fitted.result["val"]["loss"], "train_loss": fitted.result["train"]["loss"],
              "tokens_per_second": fitted.result["tokens_per_second"]}  # fmt: skip
    for tag in ("memory/benefit/nats", "memory/probe/with", "memory/attention/L1", "cost/saving_percent"):
        wanted[tag] = [value for _, value in curves(fitted.run_dir)[tag]][-1]
    for name, value in wanted.items():
        assert f"final/{name}" in shown
        assert events.Scalars(f"final/{name}")[-1].value == pytest.approx(value, rel=1e-5)


def test_csv_holds_every_curve_of_tensorboard(events: EventAccumulator, fitted: fit_command.Fitted) -> None:
    rows = curves(fitted.run_dir)
    tags = {tag for tag in events.Tags()["scalars"] if not tag.startswith("final/")}
    assert set(rows) == tags
    for tag in tags:
        assert [(point.step, point.value) for point in events.Scalars(tag)] == [
            (step, pytest.approx(value, rel=1e-5)) for step, value in rows[tag]
        ]
    texts = [tag for tag in events.Tags()["tensors"] if "memory/attention_by_age" in tag]
    table = events.Tensors(texts[0])[0].tensor_proto.string_val[0].decode().splitlines()
    assert table[0].startswith("| layer | 0 | 1 | 2-3 |") and len(table) == 2 + 2


def test_every_curve_stands_in_a_docstring(events: EventAccumulator) -> None:
    """Of its observer, or it is the module's own."""
    docs = [registry.callbacks.get(name).build.__doc__ for name in registry.callbacks.names()]
    named = [tag for doc in docs for tag in re.findall(r"^ +([a-z]+/\S+)", doc, flags=re.MULTILINE)]
    own = ["train/.+", "val/(loss|ppl|bits_per_byte)", "optim/lr", "optim/grad_norm", "final/.+"]
    patterns = [*own, *(re.sub("<[a-z]+>", ".+", tag) for tag in named)]
    for tag in events.Tags()["scalars"]:
        assert any(re.fullmatch(pattern, tag) for pattern in patterns), tag
    assert len(named) > 25


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_missing_is_refused_with_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda found, *a: None if found == name else real(found, *a))
    config = tiny_config(tmp_path, f"logger=[csv,{name}]")
    with pytest.raises(ConfigError) as error:
        fit_command.check(config, fit_command.Options())
    rule = f"the package {name} is not installed; pip install 'txl-lightning[{name}]'"
    assert str(error.value) == f"logger.{name}=true: {rule}" and not (tmp_path / "run").exists()


def test_keys_of_the_loggers_compose() -> None:
    keys = load(["logger=[wandb,mlflow,csv]", "logger.offline=true", "logger.project=mine"]).logger
    assert (keys.wandb, keys.mlflow, keys.csv, keys.tensorboard, keys.offline) == (True, True, True, False, True)
    assert keys.project == "mine" and load().logger.tensorboard
    odd = load(["logger=mlflow", "logger.project=007", "logger.mlflow_uri=http://host:5000/a?b=c"]).logger
    assert (odd.project, odd.mlflow_uri) == ("007", "http://host:5000/a?b=c")
    check_loggers(load(["logger=csv"]).logger)


@pytest.mark.filterwarnings("default")  # what these packages warn of is their own affair
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed: pip install 'txl-lightning[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    keys = [*SHORT, *ALL, "logger=[wandb,csv]", "logger.offline=true"]
    fit_command.fit(tiny_config(tmp_path, *keys, "trainer.stop_at_step=4"))
    fitted = fit_command.fit(tiny_config(tmp_path, *keys), resume=str(tmp_path / "run" / "checkpoints" / "last.ckpt"))
    files = sorted((fitted.run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    name = json.loads((fitted.run_dir / IDS).read_text())["wandb"]
    assert [file.name for file in files] == 2 * [f"run-{name}.wandb"]  # it went on under its name
    history = [row for file in files for row in wandb_history(file)]
    expected = curves(fitted.run_dir)
    for tag in ("train/loss", "memory/benefit/nats", "val/loss_by_age/0", "cost/scores"):
        assert [(int(row["trainer/global_step"]), row[tag]) for row in history if tag in row] == [
            (step, pytest.approx(value)) for step, value in expected[tag]
        ]
    assert any("final/loss" in row for row in history)
    media = {path.parent.name for path in (fitted.run_dir / "wandb").rglob("*") if path.suffix in (".png", ".json")}
    assert {"attention", "samples", "memory"} <= media


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """The rows of a run's file: records in blocks of 32 kB, each piece behind 7 bytes of checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    data, place, record, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            read = wandb_internal_pb2.Record.FromString(record)
            items = [(item.key or "/".join(item.nested_key), item.value_json) for item in read.history.item]
            found.append({name: json.loads(value) for name, value in items})
            record = b""
    return found


@pytest.mark.filterwarnings("default")
def test_mlflow_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'txl-lightning[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    keys = [*SHORT, *ALL, "logger=[mlflow,csv]"]
    fitted = fit_command.fit(tiny_config(tmp_path, *keys))
    client = mlflow.MlflowClient(f"sqlite:///{fitted.run_dir / 'mlflow.db'}")
    run = json.loads((fitted.run_dir / IDS).read_text())["mlflow"]
    for tag in ("train/loss", "memory/benefit/nats"):
        found = [(point.step, point.value) for point in client.get_metric_history(run, tag)]
        assert sorted(found) == [(step, pytest.approx(value)) for step, value in curves(fitted.run_dir)[tag]]
    held = client.get_run(run)
    assert held.data.params["memory/mem_len"] == "24" and "final/loss" in held.data.metrics
    assert {item.path for item in client.list_artifacts(run)} >= {"images", "memory", "samples"}


def test_only_those_that_can_get_texts_and_images(tmp_path: Path) -> None:
    """A CSV file takes neither, and nobody minds."""
    from txl_lightning.training.curves import show_image, show_table, show_text

    logger = CSVLogger(tmp_path)
    show_text(logger, tag="a", text="b", step=1)
    show_table(logger, tag="a", columns=["b"], rows=[[1.0]], step=1)
    show_image(logger, tag="a", image_3HW=torch.zeros(3, 2, 2), step=1)
    assert not list(tmp_path.rglob("*.png"))
