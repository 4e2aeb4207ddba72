"""Dynamic evaluation beside its formulas written out for single weights, and what it must not touch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import MODEL, RUN, tiny_config, write_corpus
from txl_lightning import TransformerXL, cli
from txl_lightning.config import ConfigError, EvalConfig, load
from txl_lightning.evaluation.dynamic import dynamic_loss
from txl_lightning.training.datamodule import TextDataModule, one_by_one
from txl_lightning.types import Batch


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformerXL, list[Batch], list[Batch]]:
    """A model in float64 and some segments of test and training text."""
    config = tiny_config(tmp_path_factory.mktemp("text"), "eval.batch_size=3", "model.dropout=0.1")
    torch.manual_seed(0)
    model = TransformerXL(config)
    splits = [
        list(one_by_one(TextDataModule(config, test_split=split).test_dataloader())) for split in ("test", "train")
    ]
    return model, splits[0][-6:], splits[1][:4]


def written_out(
    model: TransformerXL, batches: list[Batch], training: list[Batch], *, lr: float, decay: float, eps: float | None
) -> float:
    """The summed loss, with a dictionary of weights instead of a module that changes."""
    trained = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model = copy.deepcopy(model).eval()

    def read(weights: dict[str, Any], batch: Batch, state: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
        weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        out = torch.func.functional_call(model, weights, (batch.tokens_BT, state, batch.segment, batch.targets_BT))
        loss = out.losses_BT.sum() / batch.segment.length.sum()
        loss.backward()
        grads = {
            name: weight.grad if weight.grad is not None else torch.zeros_like(weight)
            for name, weight in weights.items()
        }
        return loss.detach(), grads, {key: tensor.detach() for key, tensor in out.state.items()}

    square = dict.fromkeys(trained, torch.zeros(()))
    state = model.init_state(3)
    for batch in training if eps is not None else ():
        _, grads, state = read(trained, batch, state)
        square = {name: square[name] + grads[name] ** 2 / len(training) for name in trained}
    root = {name: value**0.5 for name, value in square.items()}
    if eps is not None:
        mean = torch.cat([value.flatten() for value in root.values()]).mean()
    weights, state, total = dict(trained), model.init_state(3), 0.0
    for batch in batches:
        loss, grads, state = read(weights, batch, state)
        total += float(loss) * int(batch.segment.length.sum())
        for name, weight in weights.items():
            if eps is None:
                weights[name] = weight - lr * grads[name] + decay * (trained[name] - weight)
            else:
                pull = torch.minimum(torch.ones(()), decay * root[name] / mean)
                weights[name] = weight - lr * grads[name] / (root[name] + eps) + pull * (trained[name] - weight)
    return total


@pytest.mark.parametrize(
    ("name", "lr", "decay", "eps"), [("sgd", 0.3, 0.0, None), ("sgd", 0.3, 0.2, None), ("rms", 3e-4, 0.05, 1e-3)]
)
def test_the_loss_is_that_of_the_formulas(name: str, lr: float, decay: float, eps: float | None, given: Any) -> None:
    model, batches, training = given
    before = copy.deepcopy(model.state_dict())
    more = {} if eps is None else {"dynamic_eps": eps, "dynamic_segments": len(training)}
    keys = EvalConfig(dynamic=name, dynamic_lr=lr, dynamic_decay=decay, **more)
    nll, count = dynamic_loss(model, batches, keys, training=training)
    assert count == sum(int(batch.segment.length.sum()) for batch in batches)
    assert nll == pytest.approx(written_out(model, batches, training, lr=lr, decay=decay, eps=eps), rel=2e-5)
    still = written_out(model, batches, [], lr=0.0, decay=0.0, eps=None)
    assert nll < still  # an untrained model learns from any text
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()) and model.training


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("eval.dynamic=sgd eval.schedule=layers", "eval.schedule=layers: weights that follow the text"),
        ("eval.dynamic=sgd eval.dynamic_lr=0", "eval.dynamic_lr=0.0: must be > 0"),
        ("eval.dynamic_lr=0.1", "eval.dynamic_lr=0.1: eval.dynamic=none learns nothing"),
        ("eval.dynamic=sgd eval.dynamic_eps=0.1", "eval.dynamic_eps=0.1: eval.dynamic=sgd measures no gradients"),
    ],
)
def test_what_makes_no_sense_is_refused(typed: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(typed.split())
    assert str(error.value).startswith(message)


def test_the_command_learns_and_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "book.txt")
    data = ["data=text", f"data.path={tmp_path / 'book.txt'}"]
    assert cli.main(["fit", *MODEL, *RUN, *data, f"run_dir={tmp_path / 'run'}"]) == 0
    losses = {}
    for name, keys in (("none", []), ("sgd", ["eval.dynamic_lr=0.01"]), ("rms", ["eval.dynamic_segments=3"])):
        out = tmp_path / f"{name}.json"
        assert cli.main(["eval", f"ckpt={tmp_path / 'run'}", f"out={out}", f"eval.dynamic={name}", *keys]) == 0
        found = json.loads(out.read_text())
        losses[name] = found["scores"]["loss"]
        assert (found["dynamic"] or {"name": "none"})["name"] == name
    assert "dynamic evaluation" in capsys.readouterr().out
    assert losses["sgd"] < losses["none"] and losses["rms"] < losses["none"]
    both = ["eval.dynamic=sgd", "trainer.devices=2", "strategy=ddp", "trainer.accelerator=cpu"]
    assert cli.main(["eval", f"ckpt={tmp_path / 'run'}", *both]) == 2
    assert "trainer.devices=2: eval.dynamic=sgd runs on one device" in capsys.readouterr().err
