"""`txl analyze scores`, and the losses of single targets that the protocols build on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_config
from txl_lightning.cli import main
from txl_lightning.commands.fit import fit
from txl_lightning.data.store import prepare
from txl_lightning.data.vocab import ByteVocab
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.evaluation.losses import context_losses, pieces_of, stretch_losses
from txl_lightning.model.transformer import TransformerXL


def far_from_uniform(config: Any) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.mark.parametrize(
    "keys",
    [
        ["memory.mem_len=24"],
        ["memory.mem_len=24", "memory.reset=segment"],
        ["memory=associative", "eval.segment_len=7"],
        ["memory.mem_len=24", "memory.reset=document", "data.document=line"],
    ],
)
def test_their_mean_is_the_score_of_an_evaluation(keys: list[str], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "eval.batch_size=3", *keys)
    model = far_from_uniform(config)
    data = prepare(config.data, training=False)
    losses = stretch_losses(config, model, data.splits["test"], separator=256)
    assert losses.nats.mean() == pytest.approx(evaluate(config, model, split="test").scores["loss"], abs=1e-5)
    assert losses.n_lane == 3 and (losses.nats > 0).all()
    assert losses.place.max() == config.eval_segment_len and losses.place.min() == 1


def test_each_loss_stands_at_its_token_and_knows_how_long_memory_has_run(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, "memory.mem_len=24", "eval.batch_size=2", "memory.reset=document", "data.document=line"
    )
    model = far_from_uniform(config)
    tokens = prepare(config.data, training=False).splits["test"]
    losses = stretch_losses(config, model, tokens, separator=256)
    half = -(-(len(tokens) - 1) // 2)
    since, first = 0, []
    for index, token in enumerate(tokens[:-1]):  # read as a list: a document begins behind each separator
        since = 1 if index in (0, half) or tokens[index - 1] == 256 else since + 1
        assert losses.age[index] == since
        assert losses.place[index] == (index - (half if index >= half else 0)) % 16 + 1
        first += [index] if since == 1 else []
        assert token >= 0
    alone = torch.from_numpy(np.asarray(tokens)[first].astype(np.int64))[:, None]
    after = torch.from_numpy(np.asarray(tokens)[np.array(first) + 1].astype(np.int64))[:, None]
    with torch.no_grad():
        out = model(alone, model.init_state(len(first)), None, after)
    assert np.allclose(out.losses_BT[:, 0], losses.nats[first], atol=1e-5)


@pytest.mark.parametrize("memory", [["memory=none"], ["memory.mem_len=40"], ["memory=associative"]])
def test_a_context_is_exactly_what_was_read_before_the_target(memory: list[str], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *memory)
    model = far_from_uniform(config)
    text = np.random.default_rng(0).integers(0, 257, 400).astype(np.uint16)
    firsts = np.array([50, 61, 300, 380])
    found = context_losses(model, text, firsts, context=37, block=5, segment_len=16)
    for row, first in enumerate(firsts):
        ids = torch.from_numpy(text[first - 37 : first + 5].astype(np.int64))[None]
        state, losses = model.init_state(1), []
        for start in range(0, 41, 16):
            with torch.no_grad():
                out = model(ids[:, :-1][:, start : start + 16], state, None, ids[:, 1:][:, start : start + 16])
            state, losses = out.state, [*losses, *out.losses_BT[0].tolist()]
        assert np.allclose(found[row], losses[-5:], atol=1e-5)
    other = text.copy()
    other[: 50 - 37] += 1
    assert (context_losses(model, other % 257, firsts[:1], context=37, block=5, segment_len=16) == found[:1]).all()


def test_pieces_of_split_characters_go_to_the_token_that_ends_them() -> None:
    tokens = ByteVocab().encode("aé€b")
    assert list(pieces_of(ByteVocab(), tokens)) == ["a", "", "é", "", "", "€", "b"]
    assert list(pieces_of(ByteVocab(), tokens[:5])) == ["a", "", "é", "", "�"]
    assert list(pieces_of(ByteVocab(), tokens[:0])) == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fit(tiny_config(tmp_path, "trainer.max_steps=2", "logger=none"))
    return tmp_path


def said(capsys: Any, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["analyze", *arguments]) == 2
    return str(capsys.readouterr().err).removeprefix("error: ").strip()


def test_rows_are_aligned_with_text_and_offsets(run: Path, capsys: Any) -> None:
    command = ["analyze", "scores", "ckpt=run", "tokens=150", "trainer.accelerator=cpu"]
    assert main([*command, "to=s.jsonl", "out=s.json", "plot=s.png"]) == 0
    assert "nats per token" in capsys.readouterr().out
    rows = [json.loads(line) for line in (run / "s.jsonl").read_text().splitlines()]
    text = (run / "corpus.txt").read_bytes()
    split = text[-len(text) // 20 :]
    assert [row["index"] for row in rows] == list(range(150))
    whole = "".join(row["text"] for row in rows)
    assert whole.encode() in split + b"\n" or whole.encode() in text
    assert all(whole[row["start"] : row["end"]] == row["text"] for row in rows)
    assert rows[0]["nats"] is None and all(row["nats"] > 0 for row in rows[1:])
    found = json.loads((run / "s.json").read_text())
    assert found["loss"] == pytest.approx(np.mean([row["nats"] for row in rows[1:]]))
    assert found["n_target"] == 149 and (run / "s.png").read_bytes()[1:4] == b"PNG"
    from pyarrow import parquet

    assert main([*command, "to=s.parquet"]) == 0
    table = parquet.read_table(run / "s.parquet").to_pylist()
    assert [(row["text"], row["start"], row["age"]) for row in table] == [
        (row["text"], row["start"], row["age"]) for row in rows
    ]
    assert table[0]["nats"] is None and table[9]["nats"] == pytest.approx(rows[9]["nats"])

    assert said(capsys, "scores", "ckpt=run") == ("to=null: is required; give the file for the losses: to=scores.jsonl")
    assert said(capsys, "scores", "ckpt=run", "to=a.csv").endswith("let it end in .jsonl or .parquet")
    assert said(capsys, "scores", "ckpt=run", "to=a.jsonl", "plot=a.svg") == (
        "plot=a.svg: is no PNG file; let its name end in .png"
    )
    assert said(capsys, "scores", "ckpt=run", "to=a.jsonl", "tokens=9999").startswith("tokens=9999: the split has ")
    assert said(capsys, "scores", "to=a.jsonl").startswith("ckpt=null: scores needs trained weights; give ckpt=PATH")
    assert said(capsys, "scores", "ckpt=run", "to=a.jsonl", "segments=3") == (
        "segments=3: is of txl analyze reach only; leave it out"
    )
    assert not (run / "a.jsonl").exists()


def test_parquet_without_pyarrow_is_refused(run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert said(capsys, "scores", "ckpt=run", "to=a.parquet") == (
        "to=a.parquet: writing Parquet needs pyarrow; pip install 'txl-lightning[parquet]', or let it end in .jsonl"
    )


def test_every_analysis_has_its_file_and_only_keys_that_there_are() -> None:
    import importlib
    from dataclasses import fields

    from txl_lightning.analyses import ANALYSES, COMMON
    from txl_lightning.options import AnalyzeOptions

    known = {item.name: item for item in fields(AnalyzeOptions)}
    assert set(known["action"].metadata["choices"]) == {*ANALYSES, None}  # None: to be named
    for name, analysis in ANALYSES.items():
        module = importlib.import_module(f"txl_lightning.commands.analyses.{name}")
        assert callable(module.check) and callable(module.run) and set(analysis.keys) <= set(known)
    assert {key for analysis in ANALYSES.values() for key in analysis.keys} | set(COMMON) == set(known)
