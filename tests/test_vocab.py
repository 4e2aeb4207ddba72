"""Vocabularies: values that a checkpoint and a token folder hold, and that speak for the model afterwards."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import benchmark_files as files
from tests.tiny import MODEL, tiny_config
from txl_lightning.cli import main
from txl_lightning.commands import fit as fit_command
from txl_lightning.config import Config, load
from txl_lightning.data.store import prepare
from txl_lightning.data.vocab import ByteVocab, SymbolVocab, Vocab, WordVocab, from_dict
from txl_lightning.errors import ConfigError
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.model.transformer import TransformerXL

WORDS = WordVocab(["<eos>", "the", "cat", "<unk>", "n"], end="<eos>", unknown=None, lower=True, rule="five words")
SYMBOLS = SymbolVocab(b" abc\xc3\xa9", unit="char", rule="six symbols")
ALL: list[Vocab] = [ByteVocab(), SYMBOLS, WORDS]


@pytest.mark.parametrize("vocab", ALL, ids=lambda vocab: vocab.name)
def test_a_vocabulary_comes_back_from_plain_containers(vocab: Vocab) -> None:
    held = json.loads(json.dumps(vocab.to_dict()))
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    again = from_dict(torch.load(file, weights_only=True))
    assert type(again) is type(vocab) and again.digest == vocab.digest
    for fact in ("name", "size", "unit", "dtype", "rule"):
        assert getattr(again, fact) == getattr(vocab, fact)
    tokens = list(range(min(vocab.size, 6)))
    assert again.decode(tokens) == vocab.decode(tokens)


def test_digests_tell_what_decides_ids() -> None:
    others = [
        SymbolVocab(b" bac\xc3\xa9", unit="char", rule="six symbols"),
        WordVocab(["<eos>", "cat", "the", "<unk>", "n"], end="<eos>", unknown=None, lower=True, rule="five words"),
        WordVocab(WORDS.words, end="<eos>", unknown="<unk>", lower=True, rule="five words"),
        WordVocab(WORDS.words, end="<eos>", unknown=None, lower=False, rule="five words"),
    ]
    reworded = WordVocab(WORDS.words, end="<eos>", unknown=None, lower=True, rule="the same in other words")
    assert reworded.digest == WORDS.digest
    assert len({vocab.digest for vocab in [*ALL, *others]}) == len(ALL) + len(others)


@pytest.mark.parametrize(("size", "width"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_ids_are_as_narrow_as_can_be(size: int, width: int) -> None:
    vocab = WordVocab([str(i) for i in range(size)], end="0", unknown=None, lower=False, rule="")
    assert vocab.dtype.itemsize == width and vocab.encode(str(size - 1)).tolist() == [size - 1]


def test_words_are_written_and_read() -> None:
    assert WORDS.encode("The  cat\nN dog").tolist() == [1, 2, 0, 4, 3]  # <unk> stands for what a user brings
    assert WORDS.decode([1, 2, 0, 4, 1]) == "the cat\nn the"
    assert list(WORDS.stream([2, 0, 1, 2])) == [" cat", "\n", "the", " cat"]
    bare = WordVocab(["<S>", "a"], end="<S>", unknown=None, lower=False, rule="")
    with pytest.raises(ConfigError, match="text=b: is none of the 2 words of this vocabulary"):
        bare.encode("a b")
    with pytest.raises(ConfigError, match="text=byte 1: is not UTF-8"):
        bare.encode(b"a\xff")


def test_symbols_are_written_and_read() -> None:
    assert SYMBOLS.encode("ab\nc").tolist() == [1, 2, 3]  # no newlines in this vocabulary
    assert SYMBOLS.decode([1, 4, 5, 0]) == "aé "
    assert list(SYMBOLS.stream([4, 5, 1])) == ["", "é", "a", ""]
    with pytest.raises(ConfigError, match="is no symbol of this vocabulary"):
        SYMBOLS.encode("ad")


@pytest.mark.parametrize("held", [{"name": "letters"}, {"name": "words"}, {"name": "symbols", "symbols": "x"}, [], {}])
def test_what_is_no_vocabulary_is_refused(held: Any) -> None:
    with pytest.raises(ConfigError, match="vocab="):
        from_dict(held)


# in a checkpoint


@pytest.fixture
def trained(tmp_path: Path) -> Config:
    """A run on words; its folder is `tmp_path/run`."""
    texts = {f"{split}.txt": text.encode() for split, text in files.ptb().items()}
    path = files.write(tmp_path / "penn", texts)
    keys = [f"data.path={path}", "model.vocab_size=35", "trainer.max_steps=3", "callbacks=[text_samples]", "logger=csv"]
    return tiny_config(tmp_path, "data=ptb", *keys)


def test_a_run_on_words_keeps_them(
    trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = fit_command.fit(trained)
    assert {"loss", "bits_per_word", "ppl"} <= set(fitted.result["val"])
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["txl_lightning"]
    vocab = prepare(trained.data).vocab
    assert from_dict(saved["vocab"]).digest == vocab.digest
    capsys.readouterr()
    said = ["generate", f"ckpt={tmp_path / 'run'}", "tokens=20", "trainer.accelerator=cpu", "prompt=word1 N\nword2 xyz"]
    assert main(said) == 0
    out = capsys.readouterr().out
    assert out.startswith("word1 n\nword2 <unk>")
    assert len(out.split()) > 15 and set(out.split()) <= set(vocab.to_dict()["words"].split("\n"))


def test_a_run_on_symbols_scores_and_samples_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files.write(tmp_path, {"text8": files.text8()})
    config = tiny_config(
        tmp_path, "data=text8", f"data.path={path / 'text8'}", "model.vocab_size=27", "trainer.max_steps=2"
    )
    fit_command.fit(config)
    assert "bits_per_char" in evaluate(config, TransformerXL(config), split="test").scores
    capsys.readouterr()
    command = ["generate", f"ckpt={tmp_path / 'run'}", "tokens=9", "trainer.accelerator=cpu"]
    assert main([*command, "prompt=the end"]) == 0
    assert capsys.readouterr().out.startswith("the end") and main([*command, "prompt=The"]) == 2
    shown = "use only ' abcdefghijklmnopqrstuvwxyz'"
    assert capsys.readouterr().err == f"error: prompt=The: b'T' is no symbol of this vocabulary; {shown}\n"


def test_a_model_of_another_size_is_told_the_right_one(trained: Config, tmp_path: Path) -> None:
    wrong = tiny_config(tmp_path, "data=ptb", f"data.path={trained.data.to_dict()['path']}")
    with pytest.raises(ConfigError) as caught:
        fit_command.fit(wrong)
    assert str(caught.value) == "model.vocab_size=257: the data has 35 symbols (words); set model.vocab_size=35"


def test_weights_without_a_vocabulary_are_not_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load([*MODEL, "model.vocab_size=29"])
    weights = {f"model.{name}": tensor for name, tensor in TransformerXL(config).state_dict().items()}
    path = tmp_path / "imported.ckpt"
    own = {"config": config.to_dict(), "data_fingerprint": None, "vocab": None}
    torch.save({"txl_lightning": own, "state_dict": weights}, path)
    assert main(["generate", f"ckpt={path}", "prompt=a", "trainer.accelerator=cpu"]) == 2
    rule = "this checkpoint has no vocabulary, as is so with imported weights: nothing says which text its ids are"
    cure = "txl eval scores it; to sample, import it again with vocab=FILE"
    assert capsys.readouterr().err == f"error: ckpt={path}: {rule}; {cure}\n"
