"""`txl analyze sliding`: cache and window agree where they see the same, and the window is what it says it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_analyze_scores import far_from_uniform, said
from tests.tiny import tiny_config
from txl_lightning.cli import main
from txl_lightning.commands.fit import fit
from txl_lightning.config import Config
from txl_lightning.evaluation.sliding import measure_sliding, tokens_needed
from txl_lightning.model.transformer import TransformerXL

TEXT = np.random.default_rng(0).integers(0, 257, 200).astype(np.uint16)


def loader(model: TransformerXL) -> Any:
    def load(config: Config) -> TransformerXL:
        made = TransformerXL(config).eval()
        made.load_state_dict(model.state_dict())
        return made

    return load


@pytest.mark.parametrize(
    "keys",
    [
        [],
        ["model.n_layer=1"],
        ["model.clamp_len=20"],
        ["model.position=rotary"],
        ["model.same_length=true"],
        ["model.n_layer=1", "eval.segment_len=5"],
    ],
)
def test_losses_agree_where_both_see_the_same(keys: list[str], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *keys)
    found = measure_sliding(config, loader(far_from_uniform(config)), TEXT, lengths=[40, 70], windows=6, split="test")
    one_layer = config.model.n_layer == 1
    for pace in found.paces:
        assert pace.n_same == (12 if one_layer else 6)
        assert pace.difference < 1e-5
        assert pace.speedup == pytest.approx(pace.sliding_seconds / pace.cached_seconds)
        assert abs(pace.cached_loss - pace.sliding_loss) > 1e-4  # elsewhere the cache sees more


def test_the_window_reads_so_many_tokens_and_the_cache_all_of_them(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    model = far_from_uniform(config)
    (pace,) = measure_sliding(config, loader(model), TEXT, lengths=[30], windows=2, split="test").paces
    n_token = tokens_needed(30, segment_len=16)
    assert n_token == 30 + 64 + 1
    losses = []
    for target in (62, 94):  # halves of the timed part
        ids = torch.from_numpy(TEXT[target - 30 : target + 1].astype(np.int64))[None]
        with torch.no_grad():
            out = model(ids[:, :-1], model.init_state(1), None, ids[:, 1:])
        losses.append(out.losses_BT[0, -1].item())
    assert pace.sliding_loss == pytest.approx(np.mean(losses), abs=1e-5)


def test_it_is_shown_beside_the_papers_and_refuses_what_has_no_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(tiny_config(tmp_path, "trainer.max_steps=1", "logger=none"))
    keys = ["ckpt=run", "split=train", "trainer.accelerator=cpu", "lengths=[30,800]", "windows=2"]
    assert main(["analyze", "sliding", *keys, "out=s.json", "plot=s.png"]) == 0
    assert "363x" in capsys.readouterr().out
    found = json.loads((tmp_path / "s.json").read_text())
    assert [pace["published"] for pace in found["paces"]] == [None, 363.0]
    assert max(pace["difference"] for pace in found["paces"]) < 1e-5
    assert (tmp_path / "s.png").read_bytes()[1:4] == b"PNG"

    assert said(capsys, "sliding", "ckpt=run") == (
        "tokens=null: 3865 tokens are needed, and 200 are read; raise it, or give longer text"
    )
    assert said(capsys, "sliding", "ckpt=run", "lengths=[1]").startswith("lengths=[1]: must hold numbers of tokens")
    assert said(capsys, "sliding", "ckpt=run", "memory.reset=segment").startswith(
        "memory.reset=segment: windows do not"
    )
    assert said(capsys, "sliding", "ckpt=run", "memory.reuse_len=4").startswith(
        "memory.reuse_len=4: memory then has gaps"
    )
    fit(tiny_config(tmp_path, "trainer.max_steps=1", "logger=none", "memory=none", "run_dir=none"))
    assert said(capsys, "sliding", "ckpt=none") == (
        "memory=none: a sliding window has no counterpart of what this memory keeps; "
        "give a checkpoint that was trained with memory=cache"
    )
