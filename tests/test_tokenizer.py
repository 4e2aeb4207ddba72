"""Sub-word vocabularies: the same ids however a text is read, and scores per word and per byte of the scored text."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.tiny import MODEL, RUN, train, write_corpus
from txl_lightning.checkpoints import read_checkpoint
from txl_lightning.commands import evaluate
from txl_lightning.config import Config, load
from txl_lightning.data import store, subwords
from txl_lightning.data.order import units_of
from txl_lightning.data.store import look, prepare
from txl_lightning.data.subwords import pieces
from txl_lightning.data.text import TextConfig
from txl_lightning.data.tokenizer import TokenizerVocab, read_tokenizer, train_bpe
from txl_lightning.data.vocab import ByteVocab, from_dict
from txl_lightning.errors import ConfigError
from txl_lightning.options import EvalOptions
from txl_lightning.training.metrics import scores

SIGNS = ["the ", "memory", " reads", "  ", "\n", "\n\n", "\t", "\r\n", "'s", "it's ", "é", "🙂", "12", ". "]
SIGNS += ["\u00a0", "\u3000", "\u0085", "\x1c", "\u0301"]


def wild(seed: int, *, n_sign: int = 400) -> str:
    """Text with every kind of white space next to every kind of word."""
    rng = random.Random(seed)
    return "".join(rng.choice(SIGNS) for _ in range(n_sign))


def bpe(*, size: int = 300, seed: int = 0) -> TokenizerVocab:
    return train_bpe([wild(seed)], size=size)


def save(coder: Tokenizer, path: Path) -> str:
    coder.save(str(path))
    return str(path)


def metaspace(*special: str) -> Tokenizer:
    """A tokenizer that puts a sign before each text, so that texts may not be cut."""
    coder = Tokenizer(models.BPE(unk_token="<unk>"))
    coder.normalizer = normalizers.NFKC()
    coder.pre_tokenizer = pre_tokenizers.Metaspace()
    coder.decoder = decoders.Metaspace()
    names = ["<unk>", *special]
    coder.train_from_iterator([wild(3)], trainers.BpeTrainer(vocab_size=200, special_tokens=names, show_progress=False))
    return coder


def text_config(train: Path, /, **keys: Any) -> TextConfig:
    return TextConfig(**{"train": str(train), "batch_size": 1, "tokenizer": "bpe", "tokenizer_size": 300, **keys})


# the vocabulary


def test_a_bpe_is_the_same_each_time_and_however_its_text_is_cut() -> None:
    text = wild(1, n_sign=2000)
    stream = [("train", np.array([*text.encode(), 256], dtype=np.uint16))]
    whole, again = (train_bpe([text], size=400) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subwords, "PIECE", 50)
        cut = [piece.raw.decode() for piece in pieces(stream, cut=True)]
    assert len(cut) > 50 and "".join(cut) == text
    assert whole.to_dict() == again.to_dict() == train_bpe(cut, size=400).to_dict()
    assert whole.digest != train_bpe([text], size=401).digest
    assert (whole.size, whole.separator, whole.dtype) == (400, 399, np.uint16)


def test_every_text_can_be_written_and_read_back() -> None:
    vocab = bpe()
    for seed in range(5):
        text = wild(seed + 10) + "never seen: ß語\0"
        ids = vocab.encode(text)
        assert ids.dtype == vocab.dtype and ids.max() < vocab.separator
        assert vocab.decode(ids) == text == "".join(vocab.stream(ids))
    ends = [*vocab.encode("one"), vocab.separator, *vocab.encode("two é")]
    assert vocab.decode(ends) == "one\ntwo é" == "".join(vocab.stream(ends))


def test_a_character_waits_until_it_is_whole() -> None:
    vocab = train_bpe(["abc"], size=257)
    assert list(vocab.stream(vocab.encode("é🙂"))) == ["", "é", "", "", "", "🙂"]


def test_it_is_made_again_from_plain_containers() -> None:
    vocab = bpe()
    values = json.loads(json.dumps(vocab.to_dict()))
    again = from_dict(values)
    assert again.digest == vocab.digest and again.encode(wild(5)).tolist() == vocab.encode(wild(5)).tolist()
    assert (again.name, again.unit) == ("tokenizer", "token") and "BPE" in again.rule
    for damage in ({"tokenizer": "{}"}, {"tokenizer": None}, {"separator": "x"}):
        with pytest.raises(ConfigError, match="vocab=tokenizer: it is damaged"):
            from_dict({**values, **damage})


@pytest.mark.parametrize(("special", "end"), [(["</s>"], 1), (["<pad>", "<eos>", "</s>"], 2), (["<pad>"], None)])
def test_the_separator_of_a_file(special: list[str], end: int | None, tmp_path: Path) -> None:
    coder = metaspace(*special)
    vocab = read_tokenizer(Path(save(coder, tmp_path / "tokenizer.json")))
    assert vocab.separator == (coder.get_vocab_size() if end is None else end)
    assert vocab.size == coder.get_vocab_size() + (end is None)
    name = special[-1]
    assert coder.token_to_id(name) not in vocab.encode(f"a {name} in a text is no end of it")


def test_settings_of_a_trainer_do_not_come_with_a_file(tmp_path: Path) -> None:
    coder = Tokenizer.from_str(bpe().tokenizer)
    plain = read_tokenizer(Path(save(coder, tmp_path / "a.json")))
    coder.enable_truncation(4)
    coder.enable_padding(length=64)
    coder.model.dropout = 0.9
    vocab = read_tokenizer(Path(save(coder, tmp_path / "b.json")))
    assert vocab.digest == plain.digest and vocab.cuts_at_space
    assert vocab.encode(wild(2)).tolist() == bpe().encode(wild(2)).tolist()


# reading in pieces


def kinds(tmp_path: Path) -> dict[str, TokenizerVocab]:
    spaced = Tokenizer.from_str(bpe().tokenizer)
    spaced.add_tokens([AddedToken("reads  the", lstrip=True)])
    split = Tokenizer.from_str(bpe().tokenizer)
    split.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    plain = Tokenizer.from_str(bpe().tokenizer)
    plain.add_tokens([AddedToken("memory12")])
    coders = {"spaced": spaced, "prefix": split, "plain": plain, "metaspace": metaspace()}
    files = {name: save(coder, tmp_path / f"{name}.json") for name, coder in coders.items()}
    return {"bpe": bpe(), **{name: read_tokenizer(Path(path)) for name, path in files.items()}}


def test_ids_do_not_depend_on_how_a_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [wild(seed, n_sign=300) for seed in range(6)]
    parts = [np.array([*text.encode(), 256], dtype=np.uint16) for text in texts]
    stream = np.concatenate(parts)
    monkeypatch.setattr(subwords, "PIECE", 40)
    monkeypatch.setattr(subwords, "BATCH", 200)
    found = {}
    for name, vocab in kinds(tmp_path).items():
        expected = [token for text in texts for token in [*vocab.encode(text), vocab.separator]]
        for chunk in (1, 7, 1000, len(stream)):
            chunks = [("train", stream[i : i + chunk]) for i in range(0, len(stream), chunk)]
            read = list(pieces(chunks, cut=vocab.cuts_at_space))
            batches = list(subwords._batches(read))
            assert len(batches) > 5
            ids = np.concatenate([subwords._encode(vocab, batch) for batch in batches])
            assert ids.tolist() == expected, name
        found[name] = len(read) > len(texts)  # it was cut
    assert found == {"bpe": True, "plain": True, "spaced": False, "prefix": False, "metaspace": False}


def test_characters_are_not_cut_where_splits_meet(tmp_path: Path) -> None:
    text = "é🙂ä語" * 40
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    for valid in (0.05, 0.051, 0.052, 0.053, 0.054, 0.055, 0.056):
        keys = {"train": None, "path": str(path), "ratios": (0.9, valid, 0.1 - valid), "tokenizer_size": 270}
        data = prepare(text_config(path, **keys))
        assert "".join(data.vocab.decode(tokens) for tokens in data.splits.values()) == text + "\n"
        assert "�" not in data.vocab.decode(data.splits["valid"])
        sizes = {split: len(data.vocab.decode(t).encode()) for split, t in data.splits.items()}
        assert data.meta.bytes == {**sizes, "test": sizes["test"] - 1}  # the newline stands for the end


# the corpus


def test_token_files_of_sub_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    texts = [wild(seed) for seed in range(4)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    config = text_config(folder, valid=str(folder / ".." / "valid.txt"))
    (tmp_path / "valid.txt").write_text("Some words are here , \n  and more")
    found = look(config)
    data = prepare(config)
    vocab = data.vocab
    assert isinstance(vocab, TokenizerVocab) and data.meta.vocab_digest == vocab.digest
    assert data.meta.unit == "token" and data.meta.vocab_size == 300 and data.meta.details["tokenizer"] == "bpe"
    expected = [token for text in texts for token in [*vocab.encode(text), vocab.separator]]
    assert data.splits["train"].tolist() == expected and data.splits["train"].dtype == np.uint16
    assert json.loads((data.folder / "vocab.json").read_text()) == vocab.to_dict()
    assert found.tokens == data.meta.tokens == {split: len(tokens) for split, tokens in data.splits.items()}
    assert data.meta.documents == {"train": 4, "valid": 1}
    borders = units_of(data.splits["train"], vocab, unit="document")
    assert borders.tolist() == [0, *(np.flatnonzero(np.array(expected) == vocab.separator) + 1)]
    with pytest.raises(ConfigError, match="does not tell where a line ends"):
        units_of(data.splits["train"], vocab, unit="line")
    # what was built says so: nothing is trained or encoded again
    monkeypatch.setattr(subwords, "train_bpe", None)
    monkeypatch.setattr(subwords, "_encode", None)
    store._last = None
    again = prepare(config)
    assert again.meta == data.meta and again.vocab.digest == vocab.digest


def test_the_scored_text_is_all_but_the_first_token(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text, words, n_byte in [
        ("one two  three\n", 3, 15),
        ("onetwo three", 2, 12),
        ("  \n", 0, 3),
        ("é two", 2, 6),
        ("one", 1, 3),
    ]:
        path.write_text(text, encoding="utf-8")
        for size in (257, 300):
            coder = tmp_path / "t.json"
            coder.write_text(train_bpe(["one one one two three"] * 9, size=size).tokenizer)
            data = prepare(text_config(path, tokenizer=str(coder), tokenizer_size=None))
            first = text[: data.vocab.first_end(text)]  # type: ignore[attr-defined]
            complete = bool(first.strip()) and (first == text or text[len(first)].isspace())
            assert data.meta.words == {"train": words - complete}
            assert data.meta.scored_bytes == {"train": n_byte - len(first.encode()) + 1}  # with the end of the document
            assert data.meta.scored("train") == {"word": words - complete, "byte": data.meta.scored_bytes["train"]}


def test_other_recipes_are_other_data(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.txt")
    (tmp_path / "t.json").write_text(bpe().tokenizer)
    keys: list[dict[str, Any]] = [
        {},
        {"tokenizer_size": 310},
        {"tokenizer": "bytes", "tokenizer_size": None},
        {"tokenizer": str(tmp_path / "t.json"), "tokenizer_size": None},
    ]
    assert len({look(text_config(path, **key)).fingerprint for key in keys}) == 4


def test_fewer_pairs_than_asked_for_are_told(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.txt", n_byte=100)
    found = look(text_config(path, tokenizer_size=5000))
    assert found.vocab_size < 400
    assert found.notes == (f"the training split has pairs for {found.vocab_size} ids only, not 5000",)


# refusals


def test_what_cannot_serve_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_corpus(tmp_path / "a.txt")
    bad = tmp_path / "bad.json"

    def refusal(key: str = "data.tokenizer", **keys: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            look(text_config(path, **{"tokenizer": str(bad), "tokenizer_size": None, **keys}))
        assert caught.value.key == key
        return caught.value.rule

    assert refusal() == "no such file"
    for content in ("", "{", "[]", "{}", '{"model": {}}', '{"name": "words"}', '{"name": "tokenizer"}'):
        bad.write_text(content)
        assert refusal().startswith("holds no tokenizer: ")
    assert refusal(tokenizer=" ") == "is empty"
    assert refusal("data.tokenizer_size", tokenizer_size=300) == f"cannot go with data.tokenizer={bad}"
    assert refusal("data.tokenizer_size", tokenizer="bpe", tokenizer_size=256) == "must be >= 257"
    assert refusal("data.tokenizer_size", tokenizer="bpe", tokenizer_size=10**11) == "must be <= 10000000"
    assert refusal(tokenizer="bpe", train=None, test=str(path)).startswith("there is no training split")
    path.write_bytes(b"text in \xe4nother encoding")
    assert refusal(tokenizer="bpe") == "the train split is not UTF-8: b'text in \\xe4nother encoding'"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refusal(tokenizer="bpe") == "sub-words need the package tokenizers"


# scores


def test_scores_per_word_and_byte() -> None:
    found = scores(2.0, "token", per_target={"word": 0.5, "byte": 4.0})
    assert found == pytest.approx(
        {
            "loss": 2.0,
            "bits_per_token": 2 / math.log(2),
            "ppl": math.exp(2),
            "word_ppl": math.exp(4),
            "bits_per_byte": 0.5 / math.log(2),
        }
    )
    assert set(scores(2.0, "byte", per_target={"word": 0.2})) == {"loss", "bits_per_byte", "ppl", "word_ppl"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Any]:
    """A few steps on sub-words."""
    tmp_path = tmp_path_factory.mktemp("subwords")
    corpus = write_corpus(tmp_path / "corpus.txt", n_byte=12_000)
    keys = ["data=text", f"data.path={corpus}", "data.tokenizer=bpe", "data.tokenizer_size=290", "model.vocab_size=290"]
    steps = ["trainer.max_steps=4", "data.shuffle=none", f"run_dir={tmp_path / 'run'}"]
    config = load([*keys, *MODEL, *[key for key in RUN if "max_steps" not in key], *steps])
    with pytest.MonkeyPatch.context() as patch:
        return config, train(config, patch)[1]


def test_training_scores_words_and_bytes_of_the_validation_split(run: tuple[Config, Any]) -> None:
    config, fitted = run
    data = prepare(config.data)
    found, n_target = fitted.result["val"], data.meta.tokens["valid"] - 1
    text = data.vocab.decode(data.splits["valid"][1:])
    assert abs(data.meta.words["valid"] - len(text.split())) <= 1
    assert data.meta.scored_bytes["valid"] == len(text.encode())
    nll = found["loss"] * n_target
    assert found["word_ppl"] == pytest.approx(math.exp(min(nll / data.meta.words["valid"], 700)))
    assert found["bits_per_byte"] == pytest.approx(nll / math.log(2) / len(text.encode()))
    assert 0 < found["bits_per_byte"] < 8 and "word_ppl" not in fitted.result["train"]


def test_the_vocabulary_goes_with_the_checkpoint(run: tuple[Config, Any], tmp_path: Path) -> None:
    config, fitted = run
    ckpt = str(fitted.run_dir / "checkpoints" / "last.ckpt")
    vocab = from_dict(read_checkpoint(ckpt)["txl_lightning"]["vocab"])
    assert vocab.digest == prepare(config.data).vocab.digest
    assert read_tokenizer(Path(ckpt)).digest == vocab.digest
    other = write_corpus(tmp_path / "other.txt", n_byte=9000, seed=4)

    def check(tokenizer: str, size: int | None) -> Config:
        values = config.to_dict()
        values["data"] |= {"path": str(other), "tokenizer": tokenizer, "tokenizer_size": size}
        read = Config.from_dict(values)
        evaluate.check(read, EvalOptions(ckpt=ckpt))
        return read

    with pytest.raises(ConfigError, match="do not mean what the checkpoint's do; encode it as that was"):
        check("bpe", 290)
    read = check(ckpt, None)
    found = evaluate.evaluate(read, evaluate.load_checkpoint(ckpt, read), split="test")
    assert found.scored == prepare(read.data).meta.scored("test") and found.scores["word_ppl"] > 1


def test_byte_corpora_score_as_before(tmp_path: Path) -> None:
    found = look(TextConfig(train=str(write_corpus(tmp_path / "a.txt"))))
    assert found.words == found.scored_bytes == {} and found.scored("train") == {}
    assert found.vocab_name == ByteVocab.name
