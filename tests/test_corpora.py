"""Byte corpora: which files, in which order, where documents end, how splits are cut, and every refusal."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import platform
import re
import sysconfig
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from txl_lightning.config import build_named
from txl_lightning.data import sources
from txl_lightning.data.documents import RULES, with_separators, with_starts
from txl_lightning.data.splits import Piece, cut_at_bytes, cut_at_documents
from txl_lightning.data.stdlib import Stdlib, StdlibConfig, split_of
from txl_lightning.data.text import Text, TextConfig
from txl_lightning.data.vocab import ByteVocab
from txl_lightning.errors import ConfigError

END = ByteVocab.separator


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def streams(config: TextConfig | StdlibConfig) -> dict[str, list[int]]:
    """All tokens of each split."""
    corpus = Text(config) if isinstance(config, TextConfig) else Stdlib(config)
    scan = corpus.scan()
    found: dict[str, list[int]] = {}
    for split, tokens in corpus.stream(scan):
        assert tokens.dtype == np.uint16
        found.setdefault(split, []).extend(tokens.tolist())
    assert {split: len(tokens) for split, tokens in found.items()} == scan.tokens
    assert {split: sum(token != END for token in tokens) for split, tokens in found.items()} == scan.bytes
    return found


def whole(path: Any, **keys: Any) -> list[int]:
    """The one stream of a text that is not split."""
    return streams(TextConfig(path=path, ratios=(1, 0, 0), **keys))["train"]


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Text(TextConfig(**keys)).scan()
    return str(caught.value)


def test_vocabulary_of_bytes() -> None:
    vocab = ByteVocab()
    assert (vocab.name, vocab.size, vocab.unit, vocab.dtype.itemsize) == ("bytes", 257, "byte", 2)
    assert vocab.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert vocab.encode(bytes(range(256))).tolist() == list(range(256))
    assert vocab.decode([97, 0xC3, 0xA9, END, 0xC3]) == "aé\n\ufffd"
    assert vocab.to_bytes([1, END, 2], separator=b"") == b"\x01\x02"


# documents


def tokens_of(content: bytes, *, document: str, chunk: int) -> list[int]:
    chunks = [content[i : i + chunk] for i in range(0, len(content), chunk)]
    arrays = with_separators(with_starts(chunks, document=document), separator=END, dtype=ByteVocab.dtype)
    return [token for array in arrays for token in array.tolist()]


def documents_of(content: bytes, document: str) -> list[bytes]:
    """The documents by slow and obvious means."""
    if document == "file":
        return [content] if content else []
    if document == "line":
        return re.findall(rb"[^\n]*\n|[^\n]+\Z", content)
    breaks = [m.end() for m in re.finditer(rb"(?<=[^\r\n])[\r\n]+(?=[^\r\n])", content) if m[0].count(b"\n") > 1]
    borders = [0, *breaks, len(content)]
    return [content[a:b] for a, b in itertools.pairwise(borders) if b > a]


@pytest.mark.parametrize(
    ("document", "content", "expected"),
    [
        ("file", b"a\n\nb", [b"a\n\nb"]),
        ("line", b"a\n\nb", [b"a\n", b"\n", b"b"]),
        ("line", b"a\nb\n", [b"a\n", b"b\n"]),
        ("line", b"a\r\nb", [b"a\r\n", b"b"]),
        ("blank_line", b"a\nb\n\n\nc\n", [b"a\nb\n\n\n", b"c\n"]),
        ("blank_line", b"\n\na\n\nb", [b"\n\na\n\n", b"b"]),
        ("blank_line", b"a\r\n\r\nb", [b"a\r\n\r\n", b"b"]),
        ("blank_line", b"a\n\n", [b"a\n\n"]),
        ("blank_line", b"\n\n\n", [b"\n\n\n"]),
        ("blank_line", b"a\r\rb", [b"a\r\rb"]),
    ],
)
def test_where_documents_end(document: str, content: bytes, expected: list[bytes]) -> None:
    assert documents_of(content, document) == expected
    joined = [token for part in expected for token in [*part, END]]
    for chunk in (1, 2, 3, 100):
        assert tokens_of(content, document=document, chunk=chunk) == joined


@pytest.mark.parametrize("document", RULES)
def test_documents_do_not_depend_on_chunks(document: str) -> None:
    random = np.random.default_rng(7)
    for size in (1, 2, 5, 40, 200):
        content = bytes(random.choice(list(b"ab\n\n\r"), size=size).tolist())
        expected = [token for part in documents_of(content, document) for token in [*part, END]]
        for chunk in (1, 2, 3, 7, size):
            assert tokens_of(content, document=document, chunk=chunk) == expected, (content, chunk)


def test_bytes_stay_as_they_are(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfbom\r\nlatin \xe9\x00\n"
    path = write(tmp_path / "a.txt", content)
    assert whole(str(path), binary=True) == [*content, END]


def test_a_file_without_final_newline(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.txt", b"one\ntwo"))
    assert whole(path) == [*b"one\ntwo", END]
    assert whole(path, document="line") == [*b"one\n", END, *b"two", END]


# which files


def names(spec: Any) -> list[str]:
    return [source.name for source in sources.find(spec, key="data.path")]


def test_files_of_a_folder_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/b.py", "a-b.py", "Z.txt", "ä.txt", ".hidden", ".git/config", "a/.x", "a/empty/.keep"):
        write(tmp_path / name, b"x")
    assert names(str(tmp_path)) == ["Z.txt", "a-b.py", "a/b.py", "b.txt", "ä.txt"]


def test_globs_and_lists(tmp_path: Path) -> None:
    for name in ("x/2.txt", "x/1.txt", "x/y/3.txt", "x/4.md", "x/[5].txt"):
        write(tmp_path / name, b"x")
    assert names(f"{tmp_path}/x/*.txt") == ["1.txt", "2.txt", "[5].txt"]
    assert names(f"{tmp_path}/*/**/*.txt") == ["x/1.txt", "x/2.txt", "x/[5].txt", "x/y/3.txt"]
    assert names(f"{tmp_path}/x/[5].txt") == ["[5].txt"]  # a file of that name wins over the pattern
    assert names((f"{tmp_path}/x/4.md", f"{tmp_path}/x/y")) == ["4.md", "3.txt"]  # a list keeps its order


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a b=c'.txt", b"x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/a b=c'.txt") == ["a b=c'.txt"]


def test_links_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere/a.txt", b"x")
    write(tmp_path / "corpus/b.txt", b"x")
    (tmp_path / "corpus/far").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus/loop").symlink_to(tmp_path / "corpus")
    assert names(str(tmp_path / "corpus")) == ["b.txt", "far/a.txt"]


def test_gzip_reads_as_the_file_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "a.txt.gz", gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    assert whole(str(tmp_path / "a.txt.gz"), document="line") == [*b"one\n", END, *b"two\n", END]


# splits


def test_the_hash_of_a_path_decides_its_split() -> None:
    for name in ("abc.py", "json/decoder.py", "unittest/mock.py"):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 20
        assert split_of(name) == {0: "test", 1: "valid"}.get(number, "train")
    found = [split_of(f"{i}.py") for i in range(4000)]
    assert 150 < found.count("valid") < 250 and 150 < found.count("test") < 250


def test_splits_between_documents() -> None:
    ends = np.arange(5, 105, 5)  # 20 documents of 5 tokens
    pieces = cut_at_documents([ends], n_document=20, n_token=100, ratios=(0.9, 0.05, 0.05))
    assert pieces == {
        "train": Piece(start=0, end=90, documents=18, separators=18),
        "valid": Piece(start=90, end=95, documents=1, separators=1),
        "test": Piece(start=95, end=100, documents=1, separators=1),
    }
    for size in (1, 3, 19):
        parts = [ends[i : i + size] for i in range(0, 20, size)]
        assert cut_at_documents(parts, n_document=20, n_token=100, ratios=(0.9, 0.05, 0.05)) == pieces


@pytest.mark.parametrize("huge", [0, 10, 19])
def test_no_wanted_split_stays_empty(huge: int) -> None:
    sizes = np.full(20, 2)
    sizes[huge] = 10_000
    ends, n_token = np.cumsum(sizes), int(sizes.sum())
    for parts in ([ends], np.split(ends, 20)):
        pieces = cut_at_documents(parts, n_document=20, n_token=n_token, ratios=(0.9, 0.05, 0.05))
        assert list(pieces) == ["train", "valid", "test"]
        assert [piece.documents > 0 for piece in pieces.values()] == [True] * 3
        assert sum(piece.documents for piece in pieces.values()) == 20
        borders = [piece.start for piece in pieces.values()] + [n_token]
        assert [piece.end for piece in pieces.values()] == borders[1:] and borders[0] == 0
        assert set(borders[1:]) <= set(ends.tolist())


def test_a_share_of_zero_is_no_split() -> None:
    ends = np.arange(1, 31)
    assert list(cut_at_documents([ends], n_document=30, n_token=30, ratios=(0, 0, 1))) == ["test"]
    assert list(cut_at_documents([ends], n_document=30, n_token=30, ratios=(0.5, 0, 0.5))) == ["train", "test"]
    assert list(cut_at_bytes(ends[-1:], n_token=30, ratios=(0.5, 0.5, 0))) == ["train", "valid"]


def test_splits_at_byte_positions() -> None:
    ends = np.array([60, 100])  # 2 documents
    pieces = cut_at_bytes(ends, n_token=100, ratios=(0.5, 0.1, 0.4))
    assert pieces == {
        "train": Piece(start=0, end=50, documents=1, separators=0),
        "valid": Piece(start=50, end=60, documents=1, separators=1),
        "test": Piece(start=60, end=100, documents=1, separators=1),
    }


def test_a_split_of_one_token_goes_to_the_one_before() -> None:
    pieces = cut_at_bytes(np.array([10]), n_token=10, ratios=(0.9, 0.05, 0.05))
    assert {name: (piece.start, piece.end) for name, piece in pieces.items()} == {"train": (0, 10)}


def test_few_documents_are_cut_anywhere_and_it_says_so(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.txt", bytes(range(1, 100))))
    found = streams(TextConfig(path=path))
    assert found == {"train": list(range(1, 91)), "valid": list(range(91, 96)), "test": [96, 97, 98, 99, END]}
    scan = Text(TextConfig(path=path)).scan()
    note = "1 document, fewer than 20: cut into 0.9/0.05/0.05 at byte positions, not between documents"
    assert scan.notes == (note,)
    assert scan.documents == {"train": 1, "valid": 1, "test": 1}
    assert scan.rule == "ratios 0.9/0.05/0.05 at byte positions"


def test_a_text_too_short_for_its_splits_says_so(tmp_path: Path) -> None:
    scan = Text(TextConfig(path=str(write(tmp_path / "a.txt", b"abc")))).scan()
    assert scan.tokens == {"train": 4}
    note = "1 document, fewer than 20: cut into 0.9/0.05/0.05 at byte positions, not between documents"
    assert scan.notes == (f"{note}; 4 tokens fill only train",)


@pytest.mark.parametrize("chunk", [1, 13, 4096])
def test_many_documents_are_cut_between_them(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK", chunk)
    lines = [f"{i}\n".encode() for i in range(10, 50)]  # 40 documents of 4 tokens
    path = str(write(tmp_path / "a.txt", b"".join(lines)))
    found = streams(TextConfig(path=path, document="line"))
    joined = [[token for line in part for token in [*line, END]] for part in (lines[:36], lines[36:38], lines[38:])]
    assert found == dict(zip(("train", "valid", "test"), joined, strict=True))
    scan = Text(TextConfig(path=path, document="line")).scan()
    assert scan.documents == {"train": 36, "valid": 2, "test": 2} and scan.notes == ()


def test_files_are_documents_and_empty_ones_are_none(tmp_path: Path) -> None:
    for i in range(40):
        write(tmp_path / f"{i:02}.txt", b"abc" if i != 7 else b"")
    corpus = Text(TextConfig(path=str(tmp_path)))
    scan = corpus.scan()
    assert sum(scan.documents.values()) == 39 and sum(scan.tokens.values()) == 39 * 4
    assert scan.notes == ("1 empty file holds no document",)
    assert all(tokens[-1] == END for tokens in streams(TextConfig(path=str(tmp_path))).values())


def test_each_split_may_have_its_own_path(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.txt", b"ab"), write(tmp_path / "test.txt", b"cde")
    assert streams(TextConfig(train=str(train), test=[str(test)])) == {"train": [*b"ab", END], "test": [*b"cde", END]}


def test_what_the_content_hash_sees(tmp_path: Path) -> None:
    a, b, c = (str(write(tmp_path / name, b"same")) for name in ("a", "b", "c"))

    def content(**keys: Any) -> str:
        return Text(TextConfig(**keys)).scan().content

    first = content(train=[a, b], valid=c)
    assert content(train=[a, b], valid=c) == first
    assert content(train=a, valid=[b, c]) != first
    assert content(train=[b, a], valid=c) != first
    write(tmp_path / "c", b"samE")
    assert content(train=[a, b], valid=c) != first


# refusals


def test_refusals_of_files(tmp_path: Path) -> None:
    takes = "give a file, a folder, a glob or a list of them"
    missing, empty = tmp_path / "no.txt", write(tmp_path / "empty.txt", b"")
    assert refusal(path=str(missing)) == f"data.path={missing}: no such file or folder; {takes}"
    assert refusal(path=str(empty)) == f"data.path={empty}: the file is empty; give a file with text"
    assert refusal(path=f"{tmp_path}/*.md") == f"data.path={tmp_path}/*.md: this pattern matches no file; {takes}"
    (tmp_path / "bare").mkdir()
    assert refusal(path=f"{tmp_path}/bare") == f"data.path={tmp_path}/bare: there is no file in this folder; {takes}"
    write(tmp_path / "bare/1", b""), write(tmp_path / "bare/2", b"")
    rule = "all 2 files are empty; give files with text"
    assert refusal(path=f"{tmp_path}/bare") == f"data.path={tmp_path}/bare: {rule}"
    binary = write(tmp_path / "data.bin", b"abc\0def")
    rule = "NUL byte at position 3, so this is no text; set data.binary=true to read it all the same"
    assert refusal(path=str(binary)) == f"data.path={binary}: {rule}"
    assert refusal(train=str(missing)) == f"data.train={missing}: no such file or folder; {takes}"
    os.mkfifo(tmp_path / "pipe")
    assert refusal(path=f"{tmp_path}/pipe") == f"data.path={tmp_path}/pipe: is neither a file nor a folder; {takes}"


def test_the_position_of_a_nul_byte_counts_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK", 4)
    path = write(tmp_path / "a", b"abcdef\0")
    assert "NUL byte at position 6," in refusal(path=str(path))


def test_refusals_of_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(1000).replace(b"\0", b"x"))
    cases = {"cut.gz": packed[:-20], "other.gz": b"plain text", "bad.gz": packed[:100] + b"\xff" * 50 + packed[150:]}
    for name, content in cases.items():
        path = write(tmp_path / name, content)
        assert refusal(path=str(path)) == f"data.path={path}: is not a whole gzip file; copy it again, or unpack it"


def test_refusal_of_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "corpus/a.txt", b"x")
    link = tmp_path / "corpus/link"
    link.symlink_to(tmp_path / "gone")
    cure = "check the file and its permissions"
    assert refusal(path=f"{tmp_path}/corpus") == f"data.path={link}: cannot be read: No such file or directory; {cure}"

    def locked(source: sources.Source) -> None:
        raise PermissionError(13, "Permission denied")

    link.unlink()
    monkeypatch.setattr(sources, "_open", locked)  # root may read everything, so modes alone do not show it
    path = tmp_path / "corpus/a.txt"
    assert refusal(path=str(path)) == f"data.path={path}: cannot be read: Permission denied; {cure}"


def test_refusal_of_a_file_named_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x")
    once = "name each file once"
    assert refusal(path=[str(path), str(tmp_path)]) == f"data.path={path}: this file is named twice; {once}"
    rule = "this file is named twice, first in data.train"
    assert refusal(train=str(path), test=str(path)) == f"data.test={path}: {rule}; {once}"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {},
            "data.path=null: no text was given; "
            "set data.path to a file, folder, glob or list of them, or set data.train, data.valid and data.test",
        ),
        (
            {"path": "a", "train": "b"},
            "data.path=a: cannot go with data.train; "
            "give data.path and data.ratios, or data.train, data.valid and data.test",
        ),
        (
            {"train": "a", "ratios": [0.9, 0.05, 0.05]},
            "data.ratios=[0.9,0.05,0.05]: cannot go with data.train; they split data.path; leave them out",
        ),
        (
            {"path": "a", "ratios": [0.9, 0.05]},
            "data.ratios=[0.9,0.05]: must be three numbers that sum to 1; for example data.ratios=[0.9,0.05,0.05]",
        ),
        (
            {"path": "a", "ratios": [0.9, 0.2, 0.05]},
            "data.ratios=[0.9,0.2,0.05]: must be three numbers that sum to 1; for example data.ratios=[0.9,0.05,0.05]",
        ),
        (
            {"path": "a", "ratios": [1.2, -0.2, 0]},
            "data.ratios=[1.2,-0.2,0]: must be <= 1; choose a value >= 0 and <= 1: "
            "shares of train, valid and test in data.path; null: [0.9,0.05,0.05]",
        ),
        (
            {"path": "a", "ratios": "half"},
            "data.ratios=half: must be three numbers that sum to 1; for example data.ratios=[0.9,0.05,0.05]",
        ),
        (
            {"path": "a", "ratios": [True, False, False]},
            "data.ratios=[true,false,false]: must be three numbers that sum to 1; "
            "for example data.ratios=[0.9,0.05,0.05]",
        ),
        (
            {"path": 5},
            "data.path=5: must be a path or a list of paths; give a file, a folder, a glob or a list of them",
        ),
        (
            {"path": []},
            "data.path=[]: must be a path or a list of paths; give a file, a folder, a glob or a list of them",
        ),
        ({"test": " "}, "data.test= : a path is empty; give a file, a folder, a glob or a list of them"),
        ({"path": "a", "document": "lines"}, "data.document=lines: no such choice; did you mean line?"),
    ],
)
def test_refusals_of_settings(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Text(build_named("data", {"name": "text", **keys}, path="data"))
    assert str(caught.value) == said


# the standard library


def test_which_files_of_the_library_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ["a/b.py", "a-b.py", "z.py", "json/decoder.py"]
    left = ["test/x.py", "a/tests/x.py", "encodings/cp1.py", "pydoc_data/topics.py", "site-packages/x.py", "a.txt"]
    left += ["config-3/x.py", "_sysconfigdata_x.py", "sitecustomize.py", "a/__pycache__/x.py", "lib-dynload/x.py"]
    for name in kept + left:
        write(tmp_path / name, b"x = 1\n")
    write(tmp_path / "empty.py", b"")
    (tmp_path / "link.py").symlink_to(tmp_path / "z.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = Stdlib(StdlibConfig())
    found = [source.name for sources in corpus.parts.values() for source in sources]
    assert sorted(found) == ["a-b.py", "a/b.py", "json/decoder.py", "z.py"]
    for split, sources_ in corpus.parts.items():
        assert [source.name for source in sources_] == sorted(name for name in kept if split_of(name) == split)
    details = {"python": platform.python_version(), "files": 4, "bytes": 24, "document": "file"}
    assert corpus.scan().details == details


def test_a_python_without_sources_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        Stdlib(StdlibConfig())
    cure = "read a text of your own: data=text data.path=FILE_OR_FOLDER"
    assert str(caught.value) == f"data=stdlib: this Python keeps no source files in {tmp_path}; {cure}"


def test_the_library_of_this_python() -> None:
    scan = Stdlib(StdlibConfig()).scan()
    assert set(scan.documents) == {"train", "valid", "test"}
    assert scan.tokens == {split: scan.bytes[split] + scan.documents[split] for split in scan.bytes}
    assert 0.8 < scan.bytes["train"] / sum(scan.bytes.values()) < 0.97
    if platform.python_version() == "3.11.7" and sum(scan.documents.values()) == 386:
        assert scan.documents == {"train": 344, "valid": 20, "test": 22}
        assert scan.bytes == {"train": 7068449, "valid": 337655, "test": 412223}


@pytest.mark.parametrize("packed", [False, True])
def test_a_big_file_needs_little_memory(packed: bool, tmp_path: Path) -> None:
    size = 64 * 2**20
    content = (b"x" * 99 + b"\n") * (size // 100)
    path = tmp_path / ("big.txt.gz" if packed else "big.txt")
    path.write_bytes(gzip.compress(content, compresslevel=1) if packed else content)
    del content
    corpus = Text(TextConfig(path=str(path), document="line"))
    tracemalloc.start()
    try:
        scan = corpus.scan()
        total = sum(len(tokens) for _, tokens in corpus.stream(scan))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == sum(scan.tokens.values()) == size // 100 * 101
    assert peak < 10 * sources.CHUNK < size
