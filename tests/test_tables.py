"""Columns of JSON Lines and Parquet files as text: each row a document, and what is refused by file and line."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from txl_lightning.data import corpora
from txl_lightning.data.store import look, prepare
from txl_lightning.data.text import TextConfig
from txl_lightning.data.vocab import ByteVocab
from txl_lightning.errors import ConfigError

END = ByteVocab.separator
TEXTS = ["a\nline and another\n", "", "ä🙂", 'quotes " and \\', " "]


def jsonl(path: Path, texts: list[str] = TEXTS, *, column: str = "text") -> Path:
    lines = "\n".join(json.dumps({"id": number, column: text}) for number, text in enumerate(texts)) + "\n"
    opened = gzip.open(path, "wt", encoding="utf-8") if path.name.endswith(".gz") else path.open("w", encoding="utf-8")
    with opened as file:
        file.write(lines)
    return path


def table(path: Path, texts: list[Any] = TEXTS, *, kind: Any = None, group: int = 2, column: str = "text") -> Path:
    values = pyarrow.array(texts, type=kind if kind is not None else pyarrow.string())
    content = pyarrow.table({"id": pyarrow.array(range(len(texts))), column: values})
    parquet.write_table(content, path, row_group_size=group)
    return path


def train_of(*paths: Path, **keys: Any) -> list[int]:
    train = tuple(map(str, paths)) if len(paths) > 1 else str(paths[0])
    return prepare(TextConfig(train=train, column="text", batch_size=1, **keys)).splits["train"].tolist()


def expected(texts: list[str] = TEXTS) -> list[int]:
    return [token for text in texts if text for token in [*text.encode(), END]]


WRITERS: list[tuple[str, Callable[[Path], Path]]] = [
    ("a.jsonl", jsonl),
    ("a.ndjson", jsonl),
    ("A.JSONL", jsonl),
    ("a.jsonl.gz", jsonl),
    ("a.parquet", table),
    ("large.parquet", lambda path: table(path, kind=pyarrow.large_string())),
    ("codes.parquet", lambda path: table(path, kind=pyarrow.dictionary(pyarrow.int8(), pyarrow.string()))),
]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
@pytest.mark.parametrize("chunk", [1, 10, 2**20])
def test_rows_are_documents(
    name: str, write: Callable[[Path], Path], chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "CHUNK", chunk)
    monkeypatch.setattr("txl_lightning.data.sources.CHUNK", chunk)
    monkeypatch.setattr("txl_lightning.data.tables.ROWS", 3)
    assert train_of(write(tmp_path / name)) == expected()


def test_what_is_known_about_a_table(tmp_path: Path) -> None:
    meta = look(TextConfig(train=str(jsonl(tmp_path / "a.jsonl")), column="text")).__dict__
    assert meta["documents"] == {"train": 4} and meta["bytes"] == {"train": len(expected()) - 4}
    assert meta["details"] == {"column": "text", "files": 1, "bytes": len(expected()) - 4, "document": "row"}


def test_the_same_rows_in_another_file_or_cut_are_other_data(tmp_path: Path) -> None:
    def fingerprint(name: str, texts: list[str]) -> str:
        (tmp_path / name).mkdir()
        return look(TextConfig(train=str(jsonl(tmp_path / name / "a.jsonl", texts)), column="text")).fingerprint

    found = [fingerprint(str(number), texts) for number, texts in enumerate([["ab", "c"], ["a", "bc"], ["ab", "c"]])]
    assert found[0] != found[1] and found[0] == found[2]


def test_several_tables_and_splits_by_ratios(tmp_path: Path) -> None:
    texts = [f"document {number} " * (number % 5 + 1) for number in range(60)]
    jsonl(tmp_path / "a.jsonl", texts[:25])
    table(tmp_path / "b.parquet", texts[25:], group=7)
    data = prepare(TextConfig(path=str(tmp_path), column="text", ratios=(0.8, 0.1, 0.1)))
    assert data.meta.split_rule.endswith("between documents") and sum(data.meta.documents.values()) == 60
    assert [token for split in data.splits.values() for token in split.tolist()] == expected(texts)


def test_blank_lines_and_a_byte_order_mark_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b", "text2": 3}')
    assert train_of(path) == expected(["a", "b"])


def test_without_a_column_it_is_a_file_like_any_other(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["x"])
    tokens = prepare(TextConfig(train=str(path), batch_size=1)).splits["train"].tolist()
    assert tokens == [*path.read_bytes(), END]


GOOD = b'{"text": "fine"}\n'
WRONG = [
    (b'{"text": "cut', "line 2 is not JSON: Unterminated string"),
    (b'{"text": "\xff"}', "line 2 is not JSON: 'utf-8' codec can't decode byte 0xff"),
    (b"[" * 100_000, "line 2 is not JSON: "),
    (b"3", "line 2 is a number"),
    (b'["text"]', "line 2 is a list"),
    (b'{"txt": "a"}', "line 2 has no 'text'"),
    (b"{}", "line 2 has no 'text'"),
    (b'{"text": null}', "line 2: 'text' is null and no text"),
    (b'{"text": 3.5}', "line 2: 'text' is a number and no text"),
    (b'{"text": true}', "line 2: 'text' is true or false and no text"),
    (b'{"text": ["a"]}', "line 2: 'text' is a list and no text"),
    (b'{"text": "a\\ud800"}', "line 2: 'text' holds half a surrogate pair at character 1"),
]


@pytest.mark.parametrize(("line", "rule"), WRONG, ids=[rule[:40] for _, rule in WRONG])
def test_a_wrong_line_is_named(line: bytes, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(ConfigError) as caught:
        look(TextConfig(path=str(path), column="text"))
    assert (caught.value.key, caught.value.value) == ("data.path", str(path))
    assert caught.value.rule.startswith(rule) and caught.value.cure


def test_the_nearest_column_is_named(tmp_path: Path) -> None:
    for path in (jsonl(tmp_path / "a.jsonl", column="texts"), table(tmp_path / "a.parquet", column="texts")):
        with pytest.raises(ConfigError, match=r"has no .*'text'; data.column: did you mean texts\?"):
            look(TextConfig(path=str(path), column="text"))


def test_wrong_parquet_files_are_named(tmp_path: Path) -> None:
    null = table(tmp_path / "null.parquet", ["a", "b", None, "d"])
    numbers = table(tmp_path / "numbers.parquet", [1, 2], kind=pyarrow.int64())
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(null.read_bytes()[:-20])
    text = tmp_path / "text.parquet"
    text.write_text("no table at all")
    for path, rule in [
        (null, "row 3: 'text' is null and no text"),
        (numbers, "column 'text' holds int64 and no text"),
        (cut, "is not a whole Parquet file: "),
        (text, "is not a whole Parquet file: "),
    ]:
        with pytest.raises(ConfigError) as caught:
            look(TextConfig(train=str(path), column="text"))
        assert (caught.value.key, caught.value.value) == ("data.train", str(path))
        assert caught.value.rule.startswith(rule)


def test_what_cannot_be_a_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(ConfigError, match=r"a.txt: is no table, and data.column names a column; give files that end"):
        look(TextConfig(path=str(tmp_path / "a.txt"), column="text"))
    with pytest.raises(ConfigError, match=r"data.document=line: cannot go with data.column; each row is a document"):
        TextConfig(path="a.jsonl", column="text", document="line")
    path = jsonl(tmp_path / "nul.jsonl", ["a\0b"])
    with pytest.raises(ConfigError, match="NUL byte at position 1"):
        look(TextConfig(path=str(path), column="text"))
    empty = jsonl(tmp_path / "empty.jsonl", ["", ""])
    with pytest.raises(ConfigError, match="the file is empty"):
        look(TextConfig(path=str(empty), column="text"))
    path = table(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow; pip install 'txl-lightning\[parquet\]'"):
        look(TextConfig(path=str(path), column="text"))
