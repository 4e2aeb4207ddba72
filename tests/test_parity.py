"""Hidden states and memories equal those of the authors' code (kimiyoung/transformer-xl, commit 44781ed)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from txl_lightning.config import Config, DataConfig, ModelConfig
from txl_lightning.memory.cache import CacheConfig
from txl_lightning.model.transformer import TransformerXL

CASES = ["k01_t0_base", "k02_t0_prelnorm"]
NAMES = {
    "dec_attn.qkv_net": "attention.qkv",
    "dec_attn.r_net": "attention.r",
    "dec_attn.o_net": "attention.out",
    "dec_attn.layer_norm": "attention_norm",
    "pos_ff.CoreNet.0": "feed_forward.0",
    "pos_ff.CoreNet.3": "feed_forward.3",
    "pos_ff.layer_norm": "feed_forward_norm",
}


def authors_model(case: np.lib.npyio.NpzFile, *, attention: str) -> TransformerXL:
    theirs = json.loads(str(case["config_json"]))
    model = ModelConfig(
        n_layer=theirs["n_layer"],
        d_model=theirs["d_model"],
        n_head=theirs["n_head"],
        d_head=theirs["d_head"],
        d_inner=theirs["d_inner"],
        vocab_size=theirs["n_token"],
        pre_norm=theirs["pre_lnorm"],
        attention=attention,
    )
    config = Config(
        model=model, memory=CacheConfig(mem_len=theirs["mem_len"]), data=DataConfig(segment_len=theirs["tgt_len"])
    )
    ours = TransformerXL(config)
    weights = {"u": case["state/r_w_bias"], "v": case["state/r_r_bias"]}
    weights["embedding.table.weight"] = case["state/word_emb.emb_layers.0.weight"]
    for key in case.files:
        if key.startswith("state/layers."):
            _, index, name = key.removeprefix("state/").split(".", 2)
            stem, _, kind = name.rpartition(".")
            weights[f"layers.{index}.{NAMES[stem]}.{kind}"] = case[key]
    missing, unexpected = ours.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    assert not unexpected
    assert set(missing) == {"softmax.weight", "softmax.bias"}  # the case has an adaptive softmax, hidden states do not
    return ours.eval()


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_memories_equal_the_authors(name: str, attention: str) -> None:
    with np.load(Path(__file__).parent / "parity" / f"{name}.npz") as case:
        model = authors_model(case, attention=attention)
        n_token = json.loads(str(case["config_json"]))["tgt_len"]
        stream = torch.from_numpy(case["stream"]).T  # ours is batch first
        state = model.init_state(stream.shape[0])
        for s in range(4):
            with torch.no_grad():
                out = model(stream[:, s * n_token : (s + 1) * n_token], state)
            state = out.state
            torch.testing.assert_close(
                out.hidden_BTD, torch.from_numpy(case[f"hidden/{s}"]).transpose(0, 1), atol=1e-5, rtol=1e-5
            )
            theirs = torch.from_numpy(case[f"mems/{s}"]).transpose(1, 2)  # (L+1, B, filled, D)
            for layer in range(len(model.layers)):
                ours = state[f"layers.{layer}.cache.hidden"][:, -theirs.shape[2] :]
                torch.testing.assert_close(ours, theirs[layer], atol=1e-5, rtol=1e-5)
