"""Losses, memories and log-probabilities equal those recorded from the authors' code and from Hugging Face's.

Cases: kimiyoung/transformer-xl at commit 44781ed (k..), TransfoXLLMHeadModel of transformers 4.57.6 (hf..).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.theirs import Theirs
from txl_lightning import TransformerXL
from txl_lightning.checkpoints import from_reference

FILES = sorted((Path(__file__).parent / "parity").glob("*.npz"))
N_SEGMENT = 4


class Case(NamedTuple):
    """One recorded model; all tensors batch first."""

    layout: str
    config: dict[str, Any]
    state: dict[str, Tensor]
    stream_BN: Tensor
    recorded: dict[str, Tensor]

    def tokens(self, s: int) -> Tensor:
        n_token = self.config["tgt_len"]
        return self.stream_BN[:, s * n_token : (s + 1) * n_token]

    def targets(self, s: int) -> Tensor:
        n_token = self.config["tgt_len"]
        return self.stream_BN[:, s * n_token + 1 : (s + 1) * n_token + 1]


def read_case(file: Path) -> Case:
    with np.load(file) as case:
        layout = "huggingface" if file.name.startswith("hf") else "authors"
        state = {key[6:]: torch.from_numpy(case[key]) for key in case.files if key.startswith("state/")}
        state |= {key[6:]: state[str(case[key])] for key in case.files if key.startswith("alias/")}
        recorded = {key: torch.from_numpy(case[key]) for key in case.files if key.rpartition("/")[2].isdigit()}
        for key in recorded:
            name = key.partition("/")[0]
            if layout == "authors" and name in ("loss", "loss64", "hidden"):
                recorded[key] = recorded[key].transpose(0, 1)
            if name == "mems":
                recorded[key] = recorded[key].transpose(1, 2)  # (L, B, M, D)
        return Case(layout, json.loads(str(case["config_json"])), state, torch.from_numpy(case["stream"]).T, recorded)


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def case(request: pytest.FixtureRequest) -> Case:
    return read_case(request.param)


def segments(model: TransformerXL, case: Case) -> list[Any]:
    state, outs = model.init_state(len(case.stream_BN)), []
    for s in range(N_SEGMENT):
        with torch.no_grad():
            outs.append(model(case.tokens(s), state, targets_BT=case.targets(s)))
        state = outs[-1].state
    return outs


def test_every_recorded_case_is_here() -> None:
    assert len([file for file in FILES if file.name.startswith("k")]) >= 6
    assert len([file for file in FILES if file.name.startswith("hf")]) >= 5


def test_losses_memories_and_log_probs_are_the_recorded_ones(case: Case) -> None:
    model = from_reference(case.state, case.config, case.layout)
    assert not model.training and model.dtype == torch.float32
    for s, out in enumerate(segments(model, case)):
        torch.testing.assert_close(out.losses_BT, case.recorded[f"loss/{s}"], atol=1e-5, rtol=0)
        if case.layout == "authors":
            torch.testing.assert_close(out.hidden_BTD, case.recorded[f"hidden/{s}"], atol=1e-5, rtol=1e-5)
        else:
            log_probs = model.log_probs(out.hidden_BTD)
            torch.testing.assert_close(log_probs, case.recorded[f"logprob/{s}"], atol=1e-5, rtol=0)
        if case.config["mem_len"]:
            check_memories(out.state, case.recorded[f"mems/{s}"], case)


def check_memories(state: dict[str, Tensor], theirs_LBMD: Tensor, case: Case) -> None:
    """Hugging Face's are always mem_len long, first zeros; the authors' grow, and their last level is never read."""
    for layer in range(case.config["n_layer"]):
        held = state[f"layers.{layer}.cache.hidden"]
        assert held.shape[1] == case.config["mem_len"]
        length = theirs_LBMD.shape[2]
        torch.testing.assert_close(held[:, held.shape[1] - length :], theirs_LBMD[layer], atol=1e-5, rtol=1e-5)
        assert case.layout == "authors" or length == held.shape[1]
        assert not held[:, : held.shape[1] - length].any()
    filled = state["layers.0.cache.filled"]
    assert case.layout != "authors" or bool((filled == theirs_LBMD.shape[2]).all())


def test_float64_losses_are_the_recorded_ones(case: Case) -> None:
    model = from_reference(case.state, case.config, case.layout).double()
    for s, out in enumerate(segments(model, case)):
        torch.testing.assert_close(out.losses_BT, case.recorded[f"loss64/{s}"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_both_score_paths_and_both_forms_of_memory_agree(case: Case, attention: str) -> None:
    model = from_reference(case.state, case.config, case.layout).double()
    config = dataclasses.replace(model.run_config, model=dataclasses.replace(model.config, attention=attention))
    other = TransformerXL(config).double().eval()
    other.load_state_dict(model.state_dict())
    state = other.init_state(len(case.stream_BN), form="projected")
    for s in range(N_SEGMENT):
        with torch.no_grad():
            out = other(case.tokens(s), state, targets_BT=case.targets(s))
        state = out.state
        torch.testing.assert_close(out.losses_BT, case.recorded[f"loss64/{s}"], atol=1e-9, rtol=0)


def test_weights_are_taken_bit_by_bit(case: Case) -> None:
    model = from_reference(case.state, case.config, case.layout)
    held = {tensor.numpy().tobytes() for tensor in model.state_dict().values()}
    whole = [name for name in case.state if not name.endswith(("inv_freq", "r_emb", "r_bias"))]
    for name in whole if case.config["attn_type"] == 0 else []:
        assert case.state[name].numpy().tobytes() in held, name


def test_the_restated_codes_give_the_recorded_losses(case: Case) -> None:
    """So that `tests/theirs.py` may judge configurations that nobody recorded."""
    losses, memories = Theirs(case.state, case.config, case.layout, torch.float64).run(case.stream_BN.T, N_SEGMENT)
    for s in range(N_SEGMENT):
        torch.testing.assert_close(losses[s].T, case.recorded[f"loss64/{s}"], atol=1e-9, rtol=0)
        if case.config["mem_len"]:
            mine = torch.stack(memories[s]).transpose(1, 2).float()
            torch.testing.assert_close(mine, case.recorded[f"mems/{s}"][: len(mine)], atol=1e-5, rtol=1e-5)
