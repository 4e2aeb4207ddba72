"""Made-up tasks of retrieval: an oracle gets all answers, random weights get as many as chance."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.test_analyze_scores import said
from tests.tiny import tiny_config
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.cli import main
from txl_lightning.commands.fit import fit
from txl_lightning.config import Config, ConfigError, build_named, load
from txl_lightning.data.passkey import Passkey, PasskeyConfig
from txl_lightning.data.selective_copy import SelectiveCopy, SelectiveCopyConfig
from txl_lightning.data.vocab import ByteVocab, SymbolVocab, WordVocab
from txl_lightning.evaluation.passkey import check_spelling, measure_passkey, prompt
from txl_lightning.evaluation.retrieval import answers_right, measure_grid, measure_retrieval
from txl_lightning.model.transformer import ModelOutput, TransformerXL

SMALL: dict[str, Any] = {"segment_len": 9, "batch_size": 4, "episodes": 8, "test_episodes": 8}
TASKS = {
    "recall": ["data.distance=2", "data.pairs=3", "data.shows=1", "model.vocab_size=21"],
    "passkey": ["data.segments=4", "model.vocab_size=21"],
    "several": ["data.segments=6", "data.needles=5", "data.queries=2", "data.value_len=2", "model.vocab_size=21"],
    "selective_copy": ["data.segments=3", "data.symbols=5", "model.vocab_size=11"],
}
KEY = re.compile(r"The pass key is (\d+)")


class Oracle:
    """Remembers every token of its lane since it started anew, and answers from that."""

    def __init__(self, answer: Any, *, vocab_size: int) -> None:
        self.answer, self.vocab_size, self.device = answer, vocab_size, torch.device("cpu")
        self.said: Tensor | None = None

    def eval(self) -> Oracle:
        return self

    def init_state(self, lanes: int, **_: Any) -> dict[str, Tensor]:
        return {"read": torch.full((lanes, 0), -1)}

    def __call__(self, tokens: Any, state: Any, segment: Any, targets: Any = None, **_: Any) -> ModelOutput:
        read = torch.where(segment.reset[:, None], -1, state["read"])
        read = torch.cat([read, tokens], dim=1)
        said = torch.zeros(*tokens.shape, 1)
        for lane, row in enumerate(read.tolist()):
            for place in range(tokens.shape[1]):
                past = [token for token in row[: len(row) - tokens.shape[1] + place + 1] if token >= 0]
                said[lane, place] = self.answer(past)
        losses = None if targets is None else torch.zeros(tokens.shape)
        return ModelOutput(losses, said, {"read": read}, {}, {})

    def log_probs(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[..., 0].long(), self.vocab_size).float().log()


def after_the_same_key(keys: range) -> Any:
    """The token that stood where this one stands, counted from the key, when the key was there first in the episode."""

    def answer(past: list[int]) -> int:
        episode = past[len(past) - past[::-1].index(0) :] if 0 in past else past
        since = next((back for back, token in enumerate(reversed(episode)) if token in keys), None)
        if since is None:
            return 0
        key = episode[len(episode) - 1 - since]
        follows = episode.index(key) + since + 1
        return episode[follows] if follows < len(episode) else 0

    return answer


def in_order(config: Config) -> Any:
    """The values before the key, one after the other."""
    values, (key,) = config.data.vocab.values, config.data.vocab.keys  # type: ignore[attr-defined]

    def answer(past: list[int]) -> int:
        episode = past[len(past) - past[::-1].index(0) :] if 0 in past else past
        if key not in episode:
            return 0
        border = episode.index(key)
        seen = [token for token in episode[:border] if token in values]
        return seen[min(len(episode) - border - 1, len(seen) - 1)]

    return answer


def config_of(task: str, *keys: str, memory: str = "none") -> Config:
    name = "passkey" if task == "several" else task
    small = [f"data.{key}={value}" for key, value in SMALL.items()]
    model = ["model.n_layer=1", "model.d_model=16", "model.n_head=1", "model.d_head=16", "model.d_inner=16"]
    return load([f"data={name}", *small, *TASKS[task], f"memory={memory}", *model, *keys])


def oracle_of(config: Config) -> Any:
    keys = config.data.vocab.keys  # type: ignore[attr-defined]
    answer = in_order(config) if config.data.name == "selective_copy" else after_the_same_key(keys)
    return Oracle(answer, vocab_size=config.model.vocab_size)


@pytest.mark.parametrize("task", TASKS)
def test_an_oracle_is_always_right(task: str) -> None:
    config = config_of(task)
    found = measure_retrieval(config, oracle_of(config))
    n_answer = {"recall": 3, "passkey": 5, "several": 4, "selective_copy": 5}[task]
    assert (found.accuracy, found.whole, found.n_answer) == (1.0, 1.0, 8 * n_answer)
    assert found.chance == 1 / 8 and found.whole_chance == pytest.approx(8.0**-n_answer)


@pytest.mark.parametrize("task", TASKS)
def test_random_weights_are_right_by_chance(task: str) -> None:
    config = config_of(task, "data.test_episodes=600", "data.batch_size=200", "data.episodes=200", memory="cache")
    torch.manual_seed(0)
    found = measure_retrieval(config, TransformerXL(config).eval())
    spread = (found.chance * (1 - found.chance) / found.n_answer) ** 0.5
    assert abs(found.accuracy - found.chance) < 5 * spread
    assert found.whole < 0.05


def test_warm_lanes_are_none_of_its_settings() -> None:
    found = []
    for warm in (0, 2):
        config = config_of("recall", "data.batch_size=4", memory="cache")
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, warm=warm * config.data.segment_len))
        torch.manual_seed(0)
        found.append(measure_retrieval(config, TransformerXL(config).eval()))
    assert found[0] == found[1]


def test_half_right_is_counted_as_half() -> None:
    """An oracle that gives its first answer of an episode away."""
    config = config_of("selective_copy")
    right = in_order(config)
    key = config.data.vocab.keys[0]  # type: ignore[attr-defined]
    wrong = Oracle(lambda past: 0 if past[-1] == key else right(past), vocab_size=11)
    found = measure_retrieval(config, wrong)  # id 0 is no value, so the first one of all equally unlikely counts
    text = SelectiveCopy(config.data).draw(8, np.random.default_rng([0, 2]))  # type: ignore[arg-type]
    lucky = int((text[:, -6] == config.data.vocab.values[0]).sum())  # type: ignore[attr-defined]
    assert found.n_answer == 40 and found.accuracy == (32 + lucky) / 40 and found.whole == lucky / 8


def test_needles_are_whole_and_where_they_should_be() -> None:
    config = PasskeyConfig(**SMALL, segments=7, needles=3, queries=2, value_len=3)
    for episode in Passkey(config).draw(50, np.random.default_rng(0)):
        body, asked = episode[: config.answer_from], episode[config.answer_from : -1]
        assert episode[-1] == 0 and len(episode) == 63 and len(asked) == 2 * 4
        keys = [int(token) for token in body if token in config.vocab.keys]
        assert len(set(keys)) == len(keys) == 3
        hidden = {key: body[list(body).index(key) :][:4].tolist() for key in keys}
        assert all(token in config.vocab.values for needle in hidden.values() for token in needle[1:])
        assert asked[:4].tolist() == hidden[asked[0]] and asked[4:].tolist() == hidden[asked[4]]
        assert asked[0] != asked[4]
    for depth, first in ((0.0, 0), (0.5, 26), (1.0, 52)):
        config = PasskeyConfig(**SMALL, segments=7, value_len=4, depth=depth)
        for episode in Passkey(config).draw(9, np.random.default_rng(0)):
            assert next(place for place, token in enumerate(episode) if token in config.vocab.keys) == first


def test_symbols_are_repeated_in_their_order() -> None:
    config = SelectiveCopyConfig(**SMALL, segments=3, symbols=4)
    places = []
    for episode in SelectiveCopy(config).draw(200, np.random.default_rng(0)):
        (border,) = [place for place, token in enumerate(episode) if token in config.vocab.keys]
        noise = episode[:border]
        shown = [(place, token) for place, token in enumerate(noise) if token in config.vocab.values]
        assert [token for _, token in shown] == episode[border + 1 : -1].tolist() and episode[-1] == 0
        assert {token for token in noise if token not in config.vocab.values} == {1}
        places += [place for place, _ in shown]
    assert np.bincount(places, minlength=border).min() > 10  # anywhere


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("passkey", {"queries": 2}, "data.queries=2: must be <= data.needles=1"),
        ("passkey", {"needles": 9}, "data.needles=9: must be <= data.keys=8"),
        ("passkey", {"needles": 2, "depth": 0.5}, "data.depth=0.5: data.needles=2 stand at random places"),
        ("passkey", {"segments": 1}, "data.segments=1: needles, queries and end need 13 tokens, and an episode has 9"),
        ("selective_copy", {"segments": 1}, "data.segments=1: 4 symbols twice, a key and end need 10 tokens, and an"),
        ("selective_copy", {"episodes": 9}, "data.episodes=9: must be a multiple of data.batch_size=4"),
    ],
)
def test_refusals(name: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_named("data", {"name": name, **SMALL, **keys}, path="data")
    assert str(caught.value).startswith(said)


def test_the_grid_hides_a_needle_at_every_length_and_depth() -> None:
    config = config_of("passkey")
    found = measure_grid(config, oracle_of(config), segments=[2, 4, 6], depths=3, needles=5)
    assert [(cell.length, cell.depth) for cell in found.cells] == [
        (length, depth) for length in (18, 36, 54) for depth in (0.0, 0.5, 1.0)
    ]
    assert all(cell.whole == cell.accuracy == 1 for cell in found.cells) and found.worst == {18: 1, 36: 1, 54: 1}
    forgets = oracle_of(config)
    answer = forgets.answer
    forgets.answer = lambda past: answer(past[-30:])  # sees what is nearer only
    found = measure_grid(config, forgets, segments=[2, 6], depths=3, needles=20)
    assert found.worst[18] == 1 and found.worst[54] < 0.2
    assert [cell.whole for cell in found.cells][-1] == 1


def test_answers_are_looked_up_in_lanes_of_their_own() -> None:
    """As `measure_retrieval` counts them when each episode is a lane."""
    config = config_of("passkey", "eval.batch_size=8", memory="cache")
    torch.manual_seed(0)
    model = TransformerXL(config).eval()
    text = Passkey(config.data).draw(8, np.random.default_rng([0, 2]))  # type: ignore[arg-type]
    right = answers_right(model, text, config.data, segment_len=9)  # type: ignore[arg-type]
    assert right.shape == (8, 5) and right.mean() == measure_retrieval(config, model).accuracy


def read_number(past: list[int]) -> int:
    """The next byte of the number that the text named first."""
    text = bytes(past).decode()
    named = KEY.search(text)
    spelt = text.rpartition("The pass key is")[2]
    answer = f" {named[1]}." if named is not None else "?"
    return ord(answer[len(spelt)]) if answer.startswith(spelt) and len(spelt) < len(answer) else ord("?")


def test_the_passkey_in_words(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "eval.segment_len=100")
    how: dict[str, Any] = {"lengths": [400, 700], "depths": 2, "needles": 3}
    found = measure_passkey(config, Oracle(read_number, vocab_size=257), ByteVocab(), **how)  # type: ignore[arg-type]
    assert found.worst == {400: 1.0, 700: 1.0} and found.chance == 1 / 50_000 and len(found.cells) == 4
    torch.manual_seed(0)
    assert measure_passkey(config, TransformerXL(config).eval(), ByteVocab(), **how).worst == {400: 0.0, 700: 0.0}
    almost = Oracle(lambda past: ord("1") if past[-1:] == [ord(" ")] else read_number(past), vocab_size=257)
    assert measure_passkey(config, almost, ByteVocab(), **how).worst[400] < 1  # type: ignore[arg-type]
    text = prompt(123, before=50, after=500)
    assert text.index("The pass key is 123.") - 92 in range(48, 53) and text.endswith("The pass key is")


def test_vocabularies_without_digits_are_refused() -> None:
    letters = SymbolVocab([*b"abcdefghijklmnopqrstuvwxyz "], unit="char", rule="")
    words = WordVocab(["<unk>", "the", "\n"], end="\n", unknown="<unk>", lower=False, rule="")
    for vocab in (letters, words):
        with pytest.raises(ConfigError, match="cannot spell the passkey's text; use task=grid"):
            check_spelling(vocab)
    check_spelling(ByteVocab())


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["trainer.max_steps=1", "callbacks=none", "logger=none", "trainer.accelerator=cpu", "data.batch_size=4"]
    fit(load(["experiment=passkey", *short, "data.episodes=8", "data.test_episodes=8", "run_dir=run"]))
    command = ["analyze", "retrieval", "ckpt=run", "task=grid", "grid_segments=[1,2]", "depths=2", "needles=2"]
    assert main([*command, "out=g.json", "plot=g.png", "trainer.accelerator=cpu"]) == 0
    assert "by chance 0.016" in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "g.json").read_text())
    assert [length for length, _ in groupby(cell["length"] for cell in found["cells"])] == [8, 16]
    assert (tmp_path / "g.png").read_bytes()[1:4] == b"PNG"
    assert said(capsys, "retrieval", "ckpt=run", "task=grid", "grid_segments=[0]").startswith(
        "grid_segments=[0]: a nee"
    )
    assert said(capsys, "retrieval", "ckpt=run", "plot=a.png") == (
        "plot=a.png: task=corpus finds one figure; leave it out, or set task=grid"
    )
    assert said(capsys, "retrieval", "ckpt=run", "task=passkey_text") == (
        "task=passkey_text: the vocabulary recall of this checkpoint cannot spell the passkey's text; "
        "use task=grid on a checkpoint of experiment=passkey"
    )
    assert said(capsys, "retrieval", "ckpt=run", "task=grid", "data=recall").startswith("data=recall: task=grid hides")


@pytest.mark.slow
def test_the_passkey_experiment_is_learned(tmp_path: Path) -> None:
    """As in docs/benchmarks.md; chance is 1 in 8 for an answer."""
    config = load(["experiment=passkey", "callbacks=none", "logger=none", "trainer.accelerator=cpu"])
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    fit(config)
    assert measure_retrieval(config, load_checkpoint(str(tmp_path / "run"))).accuracy > 0.9
