"""Benchmark corpora: every format they come in gives the tokens the authors' code gives, and bad copies are told."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import benchmark_files as files
from tests.benchmark_files import SPLITS, tarred, write, zipped
from txl_lightning import registry
from txl_lightning.commands import data as data_command
from txl_lightning.config import Config, DataConfig
from txl_lightning.data import sources, store
from txl_lightning.data.counts import compare, verdict
from txl_lightning.data.order import units_of
from txl_lightning.data.store import look, prepare
from txl_lightning.data.vocab import WordVocab
from txl_lightning.data.words import WordCorpus
from txl_lightning.errors import ConfigError
from txl_lightning.options import DataOptions


def config(name: str, path: Path | None, **keys: Any) -> DataConfig:
    schema = registry.corpora.get(name).config
    return schema(name=name, path=None if path is None else str(path), batch_size=1, **keys)


def streams(name: str, path: Path, **keys: Any) -> dict[str, list[str]]:
    """All tokens of each split, as the words or bytes they stand for."""
    data = prepare(config(name, path, **keys))
    signs = data.vocab.words if isinstance(data.vocab, WordVocab) else list(getattr(data.vocab, "symbols", range(257)))
    return {split: [signs[token] for token in tokens.tolist()] for split, tokens in data.splits.items()}


def ids(name: str, path: Path, **keys: Any) -> dict[str, list[int]]:
    return {split: tokens.tolist() for split, tokens in prepare(config(name, path, **keys)).splits.items()}


def refusal(name: str, path: Path | None, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        look(config(name, path, **keys))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def encoded(texts: dict[str, str], pattern: str) -> dict[str, bytes]:
    """The files of three splits; `{}` in their names stands for the split."""
    return {pattern.format(split): text.encode() for split, text in texts.items()}


# WikiText


WIKI_FORMS: dict[str, Callable[[Path, dict[str, str]], Path]] = {
    "archive": lambda root, texts: zipped(root / "wikitext-103-v1.zip", encoded(texts, "wikitext-103/wiki.{}.tokens")),
    "folder": lambda root, texts: write(root / "wikitext-103", encoded(texts, "wiki.{}.tokens")),
    "folder above": lambda root, texts: write(root, encoded(texts, "wikitext-103/wiki.{}.tokens")),
    "renamed": lambda root, texts: write(root / "wt", encoded(texts, "{}.txt")),
    "folder of the archive": lambda root, texts: WIKI_FORMS["archive"](root, texts).parent,
}


@pytest.mark.parametrize("form", WIKI_FORMS)
def test_wikitext103_in_every_form(form: str, tmp_path: Path) -> None:
    texts = files.wikitext()
    plain = write(tmp_path / "plain", encoded(texts, "{}.txt"))
    lines = {split: files.tokenize(plain / f"{split}.txt") for split in SPLITS}
    words = files.vocabulary([lines["train"]], special=["<eos>"])
    (tmp_path / "form").mkdir()
    data = prepare(config("wikitext103", WIKI_FORMS[form](tmp_path / "form", texts)))
    assert isinstance(data.vocab, WordVocab) and data.vocab.words == words and words[0] == "<eos>"
    for split in SPLITS:
        expected = [words.index(word) for line in lines[split] for word in [*line, "<eos>"]]
        assert data.splits[split].tolist() == expected
    assert data.meta.tokens == {split: sum(len(line) + 1 for line in lines[split]) for split in SPLITS}
    assert data.meta.details["lines"] == {split: text.count("\n") for split, text in texts.items()}
    assert data.meta.unit == "word" and data.splits["train"].dtype.itemsize == 1
    assert data.meta.fingerprint == look(config("wikitext103", plain)).fingerprint  # whatever form it comes in


def test_wikitext_lines_words_and_case(tmp_path: Path) -> None:
    text = " \n = Title = \n \n the The\u00a0a\u3000b \n"
    path = write(tmp_path, encoded(dict.fromkeys(SPLITS, text), "{}.txt"))
    expected = "<eos> = Title = <eos> <eos> the The a b <eos>".split()
    assert streams("wikitext103", path)["test"] == expected  # blank lines are tokens; U+00A0 and U+3000 set words apart


def test_wikitext2_counts_words_of_all_splits(tmp_path: Path) -> None:
    texts = {"train": "a b a <unk>\n", "valid": "c c c\n", "test": "d\n"}
    path = write(tmp_path / "2", encoded(texts, "wiki.{}.tokens"))
    data = prepare(config("wikitext2", path))
    assert isinstance(data.vocab, WordVocab)
    assert data.vocab.words == ["<eos>", "c", "a", "b", "<unk>", "d"]
    assert data.splits["test"].tolist() == [5, 0]


def test_an_out_of_vocabulary_word_names_word_file_and_line(tmp_path: Path) -> None:
    texts = {"train": "a b <unk>\n" * 3, "valid": "a\n\nb\n", "test": "a\n \nb strange a\n"}
    path = write(tmp_path / "wt", encoded(texts, "{}.txt"))
    rule = "line 3 has the word 'strange', which is not in the vocabulary of train"
    assert refusal("wikitext103", path).startswith(f"data.path={path}/test.txt: {rule}; ")
    packed = zipped(tmp_path / "wikitext-103-v1.zip", encoded(texts, "wikitext-103/wiki.{}.tokens"))
    assert f"data.path={packed}: wikitext-103/wiki.test.tokens: {rule}; " in refusal("wikitext103", packed)


def test_raw_and_other_wikitext_are_told(tmp_path: Path) -> None:
    texts = files.wikitext()
    raw = zipped(tmp_path / "wikitext-103-raw-v1.zip", encoded(texts, "wikitext-103-raw/wiki.{}.raw"))
    assert "is the raw WikiText, which has no <unk> and another vocabulary; fetch wikitext-103-v1" in refusal(
        "wikitext103", raw
    )
    two = zipped(tmp_path / "wikitext-2-v1.zip", encoded(texts, "wikitext-2/wiki.{}.tokens"))
    assert "belongs to wikitext-2; fetch wikitext-103-v1.zip" in refusal("wikitext103", two)
    write(tmp_path / "both", encoded(texts, "wikitext-2/wiki.{}.tokens"))
    write(tmp_path / "both", encoded(texts, "wikitext-103/wiki.{}.tokens"))
    assert "belongs to wikitext-2" in refusal("wikitext103", tmp_path / "both")
    renamed = write(
        tmp_path / "x", encoded({split: text.replace("<unk>", "y") for split, text in texts.items()}, "{}.txt")
    )
    assert look(config("wikitext103", renamed)).notes[0].startswith("no <unk> in this text")


# Penn Treebank


@pytest.mark.parametrize("form", ["archive", "folder", "renamed"])
def test_ptb_in_every_form(form: str, tmp_path: Path) -> None:
    texts = files.ptb()
    content = encoded(texts, "./simple-examples/data/ptb.{}.txt") | encoded(
        texts, "./simple-examples/data/ptb.char.{}.txt"
    )
    plain = write(tmp_path / "penn", encoded(texts, "{}.txt"))
    path = {
        "archive": lambda: tarred(tmp_path / "simple-examples.tgz", content),
        "folder": lambda: write(tmp_path / "unpacked", content),
        "renamed": lambda: plain,
    }[form]()
    lines = {split: files.tokenize(plain / f"{split}.txt", lower=True) for split in SPLITS}
    words = files.vocabulary(lines.values(), special=["<eos>"])
    assert "n" in words and "N" not in words
    found = ids("ptb", path)
    for split in SPLITS:
        assert found[split] == [words.index(word) for line in lines[split] for word in [*line, "<eos>"]]


# enwik8


def enwik8_forms(root: Path, content: bytes) -> dict[str, Path]:
    parts = files.cut(content)
    spelt = {split: files.spelt_enwik8(part) for split, part in parts.items()}
    raw = {f"{split}.txt.raw": part for split, part in parts.items()}
    return {
        "archive": zipped(root / "enwik8.zip", {"enwik8": content}),
        "file": write(root / "f", {"my copy.xml": content}) / "my copy.xml",
        "gzip": write(root, {"enwik8.gz": gzip.compress(content)}) / "enwik8.gz",
        "folder": write(root / "unpacked", {"enwik8": content}),
        "spelt": write(root / "spelt", encoded(spelt, "enwik8/{}.txt") | {f"enwik8/{n}": c for n, c in raw.items()}),
        "spelt with CR LF": write(
            root / "crlf", encoded({s: text.replace("\n", "\r\n") for s, text in spelt.items()}, "{}.txt")
        ),
        "raw": write(root / "raw", raw),
        "raw by the name of spelt": write(root / "named", {f"{split}.txt": part for split, part in parts.items()}),
    }


def test_enwik8_in_every_form_and_both_readings(tmp_path: Path) -> None:
    content = files.enwik8()
    parts = files.cut(content)
    plain = write(tmp_path / "authors", encoded({s: files.spelt_enwik8(p) for s, p in parts.items()}, "{}.txt"))
    lines = {split: files.tokenize(plain / f"{split}.txt") for split in SPLITS}
    symbols = [int(word) for word in files.vocabulary(lines.values(), special=[])]
    assert len(set(content)) == 205 and len(symbols) == 204
    for form, path in enwik8_forms(tmp_path, content).items():
        data = prepare(config("enwik8", path))
        assert data.vocab.size == 204 and list(data.vocab.symbols) == symbols, form  # type: ignore[attr-defined]
        for split in SPLITS:
            expected = [symbols.index(int(word)) for line in lines[split] for word in line]
            assert data.splits[split].tolist() == expected, form
        assert data.meta.unit == "char" and data.meta.bytes == {split: len(part) for split, part in parts.items()}
        whole = prepare(config("enwik8", path, reading="bytes"))
        assert {split: bytes(tokens) for split, tokens in whole.splits.items()} == parts, form
        assert (whole.vocab.size, whole.meta.unit, whole.meta.details["symbols"]) == (256, "byte", 205)
        assert whole.folder != data.folder


def test_enwik8_of_the_real_size_is_cut_at_five_millions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from txl_lightning.data import symbols

    monkeypatch.setattr(symbols, "HELD_OUT", 50)
    monkeypatch.setattr(symbols, "SMALL", 500)
    path = write(tmp_path, {"enwik8": files.enwik8(4000)})
    assert look(config("enwik8", path)).bytes == {"train": 3900, "valid": 50, "test": 50}


def test_bad_copies_of_enwik8(tmp_path: Path) -> None:
    content = files.enwik8()
    marked = write(tmp_path / "bom", {"enwik8": b"\xef\xbb\xbf" + content})
    assert "begins with a byte order mark, so it was changed; fetch it again" in refusal("enwik8", marked)
    spelt = encoded({s: "\ufeff" + files.spelt_enwik8(p) for s, p in files.cut(content).items()}, "{}.txt")
    assert "begins with a byte order mark" in refusal("enwik8", write(tmp_path / "spelt", spelt))
    returns = write(tmp_path / "crlf", {"enwik8": content.replace(b"\n", b"\r\n")})
    assert "its line ends were changed to CR LF" in refusal("enwik8", returns)
    one = write(tmp_path / "one", {"enwik8": files.spelt_enwik8(content).encode()})
    assert "is one part of the prepared files; give the folder of all three" in refusal("enwik8", one)
    wrong = write(tmp_path / "wrong", encoded(dict.fromkeys(SPLITS, "60 109 " * 2000 + "256 1"), "{}.txt"))
    assert "has '256' where a byte as a number should be" in refusal("enwik8", wrong)
    other = look(config("enwik8", write(tmp_path / "other", {"enwik8": content[5:]})))
    assert other.notes == ("this file does not begin with <mediawiki as enwik8 does",)
    assert refusal("enwik8", write(tmp_path / "empty", {"enwik8": b""})).endswith("fetch it again")


# text8


def text8_forms(root: Path, content: bytes) -> dict[str, Path]:
    parts = files.cut(content)
    return {
        "archive": zipped(root / "text8.zip", {"text8": content}),
        "file": write(root, {"text8": content}) / "text8",
        "folder": write(root / "unpacked", {"text8": content}),
        "spelt": write(root / "spelt", encoded({s: files.spelt_text8(p) for s, p in parts.items()}, "text8/{}.txt")),
        "raw": write(root / "raw", {f"{split}.txt.raw": part for split, part in parts.items()}),
    }


@pytest.mark.parametrize("chunk", [7, sources.CHUNK])
def test_text8_in_every_form(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = files.text8()
    parts = files.cut(content)
    assert parts["train"][:1] == parts["train"][-1:] == parts["valid"][:1] == b" "
    plain = write(tmp_path / "authors", encoded({s: files.spelt_text8(p) for s, p in parts.items()}, "{}.txt"))
    lines = {split: files.tokenize(plain / f"{split}.txt") for split in SPLITS}
    symbols = files.vocabulary(lines.values(), special=[])
    assert sorted(symbols) == ["_", *"abcdefghijklmnopqrstuvwxyz"]
    monkeypatch.setattr(sources, "CHUNK", chunk)
    for form, path in text8_forms(tmp_path, content).items():
        data = prepare(config("text8", path))
        assert "".join(map(chr, data.vocab.symbols)).replace(" ", "_") == "".join(symbols), form  # type: ignore[attr-defined]
        for split in SPLITS:
            assert data.splits[split].tolist() == [symbols.index(word) for line in lines[split] for word in line], form
        assert data.vocab.decode(data.splits["test"]) == parts["test"].decode().strip()


@pytest.mark.parametrize("sign", ["\n", "A", "\ufeff", "_", "\r\n", "\x00"])
def test_what_is_no_text8_is_refused(sign: str, tmp_path: Path) -> None:
    content = files.text8()
    path = write(tmp_path, {"text8": content[:500] + sign.encode() + content[500:]})
    assert "at byte 500, and text8 is letters a-z and spaces only" in refusal("text8", path)


# One Billion Word Benchmark


def lm1b_forms(root: Path) -> dict[str, Path]:
    tree = files.lm1b()
    held_out = next(content for name, content in tree.items() if "heldout-00000" in name)
    renamed = {name: content for name, content in tree.items() if "heldout" not in name}
    renamed |= {"valid.txt": held_out, "test.txt": held_out}
    vocab = {"1b_word_vocab.txt": files.LM1B_VOCAB.encode()}
    write(root / "packed", vocab)
    return {
        "archive": tarred(root / "packed" / "benchmark.tar.gz", tree),
        "folder": write(root / "unpacked", tree | vocab),
        "renamed": write(root / "one-billion-words", renamed | vocab),
    }


def authors_pairs(sentences: list[list[str]]) -> list[tuple[str, str]]:
    """(input, target) of one stream, as the authors' PyTorch iterator walks through `<S> w1 … wn <S>`."""
    pairs = []
    for words in sentences:
        stream = ["<S>", *words, "<S>"]
        pairs += list(itertools.pairwise(stream))
    return pairs


def test_lm1b_in_every_form_and_both_counts(tmp_path: Path) -> None:
    known = [line.split()[0] for line in files.LM1B_VOCAB.splitlines()]
    shards = {i: [line.split() for line in files.lm1b_sentences(i).splitlines()] for i in (1, 2, 3)}
    train = [[word if word in known else "<UNK>" for word in words] for i in (1, 2, 3) for words in shards[i]]
    for form, path in lm1b_forms(tmp_path).items():
        found = streams("lm1b", path)
        stream = found["train"]
        assert list(itertools.pairwise(stream)) == authors_pairs(train), form
        assert len(stream) - 1 == sum(len(words) + 1 for words in train)
        assert found["valid"] == found["test"]
        double = streams("lm1b", path, targets="tf")["train"]
        assert double == [word for words in train for word in ["<S>", *words, "<S>"]], form
        data = prepare(config("lm1b", path))
        assert isinstance(data.vocab, WordVocab) and data.vocab.words == known
        assert data.meta.documents["train"] == len(train)
        assert data.meta.split_rule.startswith("valid is ")


def test_lm1b_shards_can_be_chosen(tmp_path: Path) -> None:
    path = lm1b_forms(tmp_path)["folder"]
    assert look(config("lm1b", path)).split_rule == (
        "valid is news.en.heldout-00000-of-00050, test is news.en.heldout-00000-of-00050"
    )
    found = streams("lm1b", path, valid_shard=1)
    assert found["valid"] != found["test"] and found["test"] == streams("lm1b", path)["test"]
    assert "data.test_shard=7: there is no news.en.heldout-00007-of-00050" in refusal("lm1b", path, test_shard=7)


@pytest.mark.parametrize("targets", ["authors", "tf"])
def test_lm1b_sentences_are_shuffled_as_wholes_in_both_counts(targets: str, tmp_path: Path) -> None:
    data = prepare(config("lm1b", lm1b_forms(tmp_path)["folder"], shuffle="line", targets=targets))
    borders = units_of(data.splits["train"], data.vocab, unit="line")
    alone = int(targets == "authors")  # the <S> before the first sentence is a unit of its own
    assert len(borders) - 1 == data.meta.documents["train"] + alone
    for start, end in itertools.pairwise(borders[alone:].tolist()):
        unit = data.splits["train"][start:end]
        assert (unit == data.vocab.encode("<S>")[0]).sum() == (1 if alone else 2)


def test_lm1b_needs_its_published_words(tmp_path: Path) -> None:
    path = lm1b_forms(tmp_path)["folder"]
    vocab = path / "1b_word_vocab.txt"
    elsewhere = vocab.rename(tmp_path / "words.txt")
    assert refusal("lm1b", path) == (
        f"data.vocab_file=null: the published words are not in {path}; "
        "put 1b_word_vocab.txt there, or set data.vocab_file to it"
    )
    assert len(streams("lm1b", path, vocab_file=str(elsewhere))["valid"]) > 5
    elsewhere.write_text("<S>\nthe\n")
    assert refusal("lm1b", path, vocab_file=str(elsewhere)).startswith(f"data.vocab_file={elsewhere}: has no <UNK>; ")
    other = write(tmp_path / "other", {"a.txt": b"x"})
    assert "holds no training shard news.en-00001-of-00100" in refusal("lm1b", other)


# PG-19


BOOKS = {
    "train/10.txt": b"A first book\r\n of \xc2\xa0 words.\n",
    "train/9.txt": b"second\n",
    "validation/7.txt": "naïve book".encode(),
    "test/3.txt": b"last words",
}


@pytest.mark.parametrize("form", ["folder", "zip", "tar", "valid"])
def test_pg19_books_are_documents(form: str, tmp_path: Path) -> None:
    books = {f"deepmind-gutenberg/{name}": content for name, content in BOOKS.items()}
    path = {
        "folder": lambda: write(tmp_path / "pg", books | {"deepmind-gutenberg/metadata.csv": b"9,x,1900,u\n"}),
        "zip": lambda: zipped(tmp_path / "pg.zip", books),
        "tar": lambda: tarred(tmp_path / "pg.tar", books, mode="w"),
        "valid": lambda: write(tmp_path / "pg", {n.replace("validation", "valid"): c for n, c in BOOKS.items()}),
    }[form]()
    data = prepare(config("pg19", path))
    found = {split: tokens.tolist() for split, tokens in data.splits.items()}
    assert found["train"] == [*BOOKS["train/10.txt"], 256, *BOOKS["train/9.txt"], 256]
    assert found["valid"] == [*BOOKS["validation/7.txt"], 256] and found["test"] == [*BOOKS["test/3.txt"], 256]
    assert data.meta.documents == {"train": 2, "valid": 1, "test": 1}
    assert data.meta.details["words"] == {"train": 6, "valid": 2, "test": 2}
    assert data.meta.words == {"train": 5, "valid": 2, "test": 2}  # its first byte, the word A, is never a target
    assert data.meta.unit == "byte"


def test_pg19_words_do_not_depend_on_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, BOOKS)
    for chunk in (1, 2, 3, 5):
        monkeypatch.setattr(sources, "CHUNK", chunk)
        monkeypatch.setattr(store, "_last", None)
        assert look(config("pg19", path)).details["words"] == {"train": 6, "valid": 2, "test": 2}


def test_lost_books_of_pg19(tmp_path: Path) -> None:
    path = write(tmp_path / "pg", BOOKS | {"metadata.csv": b'10,"A, B",1900,u\n9,b,1901,u\n11,c,1902,u\n'})
    assert look(config("pg19", path)).notes == ("1 book that metadata.csv names is not there",)
    none = write(tmp_path / "none", {name: text for name, text in BOOKS.items() if not name.startswith("test")})
    assert "there is no book in the folder test" in refusal("pg19", none)


# bad copies


def test_an_editor_that_adds_a_mark_and_returns_changes_no_token(tmp_path: Path) -> None:
    texts = files.wikitext()
    clean = write(tmp_path / "clean", encoded(texts, "{}.txt"))
    saved = {split: "\ufeff" + text.replace("\n", "\r\n") for split, text in texts.items()}
    changed = write(tmp_path / "changed", encoded(saved, "{}.txt"))
    assert ids("wikitext103", changed) == ids("wikitext103", clean)
    notes = look(config("wikitext103", changed)).notes  # said again when the token files are there
    assert "train.txt begins with a byte order mark, which is left out" in notes
    assert "test.txt has carriage returns; like newlines they end lines" in notes
    assert look(config("wikitext103", clean)).notes == ()


def test_lost_lines_show_in_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = files.wikitext()
    path = write(tmp_path / "a", encoded(texts, "{}.txt"))
    found = look(config("wikitext103", path))
    published = {"tokens": dict(found.tokens), "lines": dict(found.details["lines"])}
    corpus = registry.corpora.get("wikitext103").build
    build = corpus.__init__

    def as_if_published(self: Any, config: Any) -> None:
        build(self, config)
        self.published = published

    monkeypatch.setattr(corpus, "__init__", as_if_published)
    assert verdict(look(config("wikitext103", path)).published) == "all counts are the published ones"
    lost = dict(texts, test=texts["test"].replace(" \n", "", 2))
    found = look(config("wikitext103", write(tmp_path / "b", encoded(lost, "{}.txt"))))
    assert verdict(found.published) == "2 of 6 counts differ from the published ones: tokens of test, lines of test"
    differing = [row for row in found.published if row["differs"]]
    assert [row["ours"] - row["published"] for row in differing] == [-2, -2]


def test_compare_lays_counts_side_by_side() -> None:
    rows = compare({"tokens": {"train": 5, "valid": 2}, "symbols": {"all": 3}}, {"tokens": {"train": 5, "valid": 1}})
    assert [row["differs"] for row in rows] == [False, True, True]
    assert rows[1] == {"what": "tokens", "split": "valid", "ours": 1, "published": 2, "differs": True}


@pytest.mark.parametrize("keep", [0.5, 0.97])
def test_archives_cut_short_are_refused(keep: float, tmp_path: Path) -> None:
    texts = files.wikitext(lines=2000)
    content = encoded(texts, "wikitext-103/wiki.{}.tokens")
    made = {
        "wikitext103": zipped(tmp_path / "wikitext-103-v1.zip", content),
        "ptb": tarred(tmp_path / "simple-examples.tgz", encoded(texts, "simple-examples/data/ptb.{}.txt")),
        "enwik8": write(tmp_path, {"enwik8.gz": gzip.compress(files.enwik8())}) / "enwik8.gz",
        "text8": tarred(tmp_path / "text8.tar", {"text8": files.text8()}, mode="w"),
    }
    for name, path in made.items():
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole.rstrip(b"\0")) * keep)])
        assert re.match(f"data.path={re.escape(str(path))}: .*is not a whole (archive|gzip file)", refusal(name, path))


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "wikitext-103-v1.zip", encoded(files.wikitext(), "wikitext-103/wiki.{}.tokens"))
    content = bytearray(path.read_bytes())
    content[200] ^= 255
    path.write_bytes(content)
    assert "wiki.train.tokens: is not a whole archive; copy it again, or unpack it" in refusal("wikitext103", path)


def test_wrong_and_missing_files(tmp_path: Path) -> None:
    page = write(tmp_path, {"wikitext-103-v1.zip": b"<html>404</html>"}) / "wikitext-103-v1.zip"
    assert "is not a whole archive" in refusal("wikitext103", page)
    wrong = zipped(tmp_path / "text8.zip", {"text8": files.text8()})
    assert refusal("enwik8", wrong) == (
        f"data.path={wrong}: holds no enwik8 or train.txt, valid.txt, test.txt or train.txt.raw, valid.txt.raw, "
        "test.txt.raw (but text8); give enwik8.zip or its unpacked folder"
    )
    lone = write(tmp_path / "lone", {"train.txt": b"ab c"})
    for path in (lone, lone / "train.txt"):
        assert "holds train.txt but no valid.txt; give the whole benchmark" in refusal("text8", path)
    part = write(tmp_path / "part", {"train.txt": b"a\n", "valid.txt": b"a\n"})
    assert refusal("ptb", part) == (
        f"data.path={part}: holds train.txt and valid.txt but no test.txt; give the whole benchmark"
    )
    twice = write(tmp_path / "twice", {f"{folder}/{split}.txt": b"a\n" for folder in "ab" for split in SPLITS})
    assert refusal("ptb", twice) == (
        f"data.path={twice}: holds a/train.txt and b/train.txt; give the folder of one of them"
    )
    assert refusal("ptb", tmp_path / "no").startswith(f"data.path={tmp_path}/no: no such file or folder; ")
    latin = write(tmp_path / "latin", dict.fromkeys(["train.txt", "valid.txt", "test.txt"], b"caf\xe9 \n"))
    assert "train.txt: is not UTF-8 near byte 3; " in refusal("wikitext2", latin)
    blank = write(tmp_path / "blank", {"train.txt": b"a\n", "valid.txt": b" \n", "test.txt": b"a\n"})
    assert refusal("ptb", blank).startswith(f"data.path={blank}/valid.txt: holds no word; ")


FETCH = {
    "enwik8": "enwik8.zip (36,445,475 bytes)",
    "text8": "text8.zip (31,344,016 bytes)",
    "wikitext103": "wikitext-103-v1.zip (190,229,076 bytes)",
    "wikitext2": "wikitext-2-v1.zip",
    "ptb": "simple-examples.tgz (34,869,662 bytes)",
    "lm1b": "1-billion-word-language-modeling-benchmark-r13output.tar.gz and, to lie beside it, 1b_word_vocab.txt",
    "pg19": "the PG-19 folders train, validation and test",
}


@pytest.mark.parametrize("name", FETCH)
def test_without_a_path_it_says_what_to_fetch(name: str) -> None:
    cure = f"fetch {FETCH[name]}, nothing is downloaded here, and set data.path to it or its unpacked folder"
    assert refusal(name, None) == f"data.path=null: {name} needs its files; {cure}"
    with pytest.raises(ConfigError, match=r"data.path= : is empty"):
        config(name, Path(" "))


# how they are read


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_words_do_not_depend_on_chunks(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {split: "\ufeff" + text.replace("\n", "\r\n") for split, text in files.wikitext(lines=90).items()}
    path = write(tmp_path, encoded(saved, "{}.txt"))
    expected = ids("wikitext103", path)
    monkeypatch.setattr(sources, "CHUNK", chunk)
    corpus = registry.corpora.get("wikitext103").build(config("wikitext103", path))
    monkeypatch.setattr(corpus, "_root", tmp_path / "nothing known")
    scan, found = corpus.scan(), {split: [] for split in SPLITS}
    for split, tokens in corpus.stream(scan):
        found[split] += tokens.tolist()
    assert found == expected and {split: len(tokens) for split, tokens in found.items()} == scan.tokens


def test_a_last_line_without_newline_is_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, encoded(dict.fromkeys(SPLITS, "a b\nc"), "{}.txt"))
    assert streams("ptb", path)["test"] == ["a", "b", "<eos>", "c", "<eos>"]


def test_counts_are_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, encoded(files.ptb(), "{}.txt"))
    first = prepare(config("ptb", path))
    monkeypatch.setattr(store, "_last", None)

    def fail(self: WordCorpus) -> None:
        raise AssertionError("counted again")

    monkeypatch.setattr(WordCorpus, "_count", fail)
    again = prepare(config("ptb", path))
    assert again.meta == first.meta and again.vocab.digest == first.vocab.digest and again.folder == first.folder
    (path / "test.txt").write_text("other\n")
    with pytest.raises(AssertionError, match="counted again"):
        prepare(config("ptb", path))


def test_memory_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = files.wikitext(lines=400)
    path = write(tmp_path, encoded(dict(text, train=text["train"] * 250), "{}.txt"))
    assert (path / "train.txt").stat().st_size > 4e6
    monkeypatch.setattr(sources, "CHUNK", 2**16)
    tracemalloc.start()
    prepare(config("wikitext103", path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5e6


def test_inspect_shows_published_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = write(tmp_path / "wt", encoded(files.wikitext(), "{}.txt"))
    whole = Config(data=config("wikitext103", path))
    options = DataOptions(out=str(tmp_path / "facts.json"))
    data_command.check(whole, options)
    data_command.run(whole, options)
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert ["vocabulary", "all", str(look(whole.data).vocab_size), "267,735", "differs"] in rows
    assert ["lines", "test", "23", "4,358", "differs"] in rows
    assert "7 of 7 counts differ from the published ones: vocabulary of all, lines of train" in shown
    assert "details      lines 300 / 23 / 23\n" in shown
    facts = json.loads((tmp_path / "facts.json").read_text())
    row = next(row for row in facts["published"] if row["what"] == "tokens" and row["split"] == "test")
    assert row == {
        "what": "tokens",
        "split": "test",
        "ours": facts["tokens"]["test"],
        "published": 245569,
        "differs": True,
    }
