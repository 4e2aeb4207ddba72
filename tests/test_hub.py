"""Models kept in a folder in Hugging Face's way, and pushed to a Hub that stands in for the real one: no network."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import huggingface_hub.hub_mixin
import pytest
import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from safetensors.torch import load_file, save_file

from tests.test_layouts import BASE, losses, make, our_model, stream
from tests.theirs import random_state
from tests.tiny import tiny_config
from txl_lightning import TransformerXL, load_checkpoint
from txl_lightning.checkpoints import from_reference
from txl_lightning.commands import fit as fit_command
from txl_lightning.config import ConfigError
from txl_lightning.data.vocab import from_dict

TOKENS = stream({"vocab_size": 24, "tgt_len": 4, "cutoffs": [8, 15]})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cutoffs": [8, 15], "div_val": 2, "tie_projs": [False, True, True]},
        {"cutoffs": [8], "tie_weights": False},
        {"position": "rotary", "norm": "rmsnorm", "ffn": "swiglu", "bias": False, "qk_norm": True, "pre_norm": True},
    ],
)
def test_a_folder_gives_the_same_model_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = our_model(memory={"name": "cache", "mem_len": 3, "cold": "zeros"}, **changes)
    model.save_pretrained(tmp_path)
    back = TransformerXL.from_pretrained(tmp_path)
    assert not back.training
    assert (back.config, back.run_config.memory) == (model.config, model.run_config.memory)
    assert back.run_config.eval_segment_len == model.run_config.eval_segment_len == 4
    assert torch.equal(losses(back, TOKENS, n_token=4), losses(model, TOKENS, n_token=4))
    names = dict(model.named_parameters())  # every tied parameter once
    assert load_file(tmp_path / "model.safetensors").keys() == names.keys() == dict(back.named_parameters()).keys()


def test_imported_and_wide_models_go_through_too(tmp_path: Path) -> None:
    config = make("huggingface", untie_r=True, d_embed=8)
    model = from_reference(random_state(config, "huggingface"), config, "huggingface").double()
    model.save_pretrained(tmp_path)
    back = TransformerXL.from_pretrained(str(tmp_path))
    assert back.dtype == torch.float64
    assert torch.equal(losses(back, TOKENS, n_token=4), losses(model, TOKENS, n_token=4))


def test_the_mixin_is_hugging_face_s_and_does_not_disturb_the_module(tmp_path: Path) -> None:
    model = our_model()
    assert isinstance(model, PyTorchModelHubMixin)
    again = copy.deepcopy(model)
    assert torch.equal(losses(again, TOKENS, n_token=4), losses(model, TOKENS, n_token=4))
    assert again.embedding.tables[0].weight is again.softmax.weights[0]


def test_a_trained_model_takes_its_vocabulary_along_but_no_path(tmp_path: Path) -> None:
    run = fit_command.fit(tiny_config(tmp_path, "trainer.max_steps=1")).run_dir
    load_checkpoint(str(run)).save_pretrained(tmp_path / "kept")
    assert not any(
        str(tmp_path) in file.read_text() for file in (tmp_path / "kept").glob("*.*") if file.suffix != ".safetensors"
    )
    back = TransformerXL.from_pretrained(tmp_path / "kept")
    assert back.vocab is not None
    assert from_dict(back.vocab).decode([104, 105]) == "hi"
    assert "bytes, 257 ids" in (tmp_path / "kept" / "README.md").read_text()


def test_the_card_has_the_settings_a_score_depends_on(tmp_path: Path) -> None:
    model = our_model(clamp_len=3, same_length=True, same_length_rule="mem_len+1")
    model.save_pretrained(tmp_path, model_card_kwargs={"license": "mit"})
    card = ModelCard.load(tmp_path / "README.md")
    data = card.data.to_dict()
    assert (data["library_name"], data["license"]) == ("txl-lightning", "mit")
    rows = dict(line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| `"))
    assert rows["`eval.segment_len`"] == "4"
    assert rows["`memory.mem_len`"] == str(BASE["mem_len"])
    assert rows["`model.clamp_len`"] == "3"
    assert rows["`model.same_length`"] == "true (mem_len+1 keys)"
    assert rows["`model.position`"] == "transformer_xl"
    assert rows["`vocabulary`"] == "24 ids; their meaning is not kept"
    assert "TransformerXL.from_pretrained(" in card.text


def test_pushing_sends_the_same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: str | None = None) -> None:
            self.token = token

        def create_repo(self, *, repo_id: str, **_: object) -> Any:
            return type("Repo", (), {"repo_id": f"me/{repo_id}"})()

        def upload_folder(self, *, repo_id: str, folder_path: Path, **_: object) -> str:
            sent.update({"repo": repo_id, "files": {file.name for file in Path(folder_path).iterdir()}})
            return "address"

    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", Hub)
    assert our_model().push_to_hub("xl") == "address"
    assert sent == {"repo": "me/xl", "files": {"README.md", "config.json", "model.safetensors"}}


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(change: Any) -> str:
        model.save_pretrained(tmp_path)
        change()
        with pytest.raises(ConfigError) as error:
            TransformerXL.from_pretrained(tmp_path)
        return str(error.value)

    model, config, file = our_model(), tmp_path / "config.json", tmp_path / "model.safetensors"

    def edit(**changes: Any) -> None:
        values = json.loads(config.read_text())
        values["model"] |= changes
        config.write_text(json.dumps(values))

    def without(name: str) -> None:
        weights = load_file(file)
        del weights[name]
        save_file(weights, file)

    start = f"from_pretrained={tmp_path}: "
    assert refused(config.unlink).startswith(f"{start}its config.json is missing; read models of other codes with txl")
    assert "none of ours (transfo-xl)" in refused(lambda: config.write_text('{"model_type": "transfo-xl"}'))
    assert refused(file.unlink).startswith(f"{start}it has no model.safetensors")
    assert refused(lambda: edit(n_layer=3)).startswith(f"{start}the checkpoint has no weight layers.2.")
    assert "feed_forward.0.weight is (16, 12) there and (20, 12)" in refused(lambda: edit(d_inner=20))
    assert refused(lambda: edit(depth=3)).startswith("model.depth=3: no such key")
    assert refused(lambda: without("u")).startswith(f"{start}the checkpoint has no weight u (1 such)")
