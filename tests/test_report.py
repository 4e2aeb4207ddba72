"""`txl report`: one page that holds everything, from whatever logger wrote."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing import event_file_loader

from tests.tiny import MODEL, RUN, write_corpus
from txl_lightning import cli
from txl_lightning.config import load
from txl_lightning.report import page as pages
from txl_lightning.report.panels import (
    EXPLAINED,
    POINTS,
    explained,
    mean_of,
    picture,
    question_of,
    shown,
    thinned,
    title_of,
)
from txl_lightning.report.record import Result, read
from txl_lightning.report.tape import tape


class Page(HTMLParser):
    """Checks that every element is closed, and gathers what would be fetched."""

    VOID = ("meta", "img", "path", "rect", "line")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with TensorBoard's files and one with a table, of other memories."""
    where = tmp_path_factory.mktemp("runs")
    write_corpus(where / "book.txt")
    common = [*MODEL, *[item for item in RUN if "logger" not in item], "data=text", f"data.path={where / 'book.txt'}"]
    common += [
        "trainer.log_every_n_steps=1",
        "callbacks=[memory_monitor,text_samples]",
        "callbacks.text_samples.tokens=5",
    ]
    for name, keys in (("a", ["logger=tensorboard"]), ("b", ["logger=csv", "memory=tokens"])):
        assert cli.main(["fit", *common, *keys, f"run_dir={where / name}"]) == 0
    return where


def report(runs: str, out: Path, *more: str) -> str:
    assert cli.main(["report", f"runs={runs}", f"out={out}", *more]) == 0
    return out.read_text()


def test_a_run_s_page_holds_its_curves_its_memory_and_its_configuration(runs: Path, tmp_path: Path) -> None:
    text = report(str(runs / "a"), tmp_path / "page.html", "title=What <it> did")
    found = Page(text)
    assert found.headings[0] == "What <it> did" and "What does the memory do?" in found.headings
    assert found.sources and all(source.startswith("data:image/") for source in found.sources)
    result = json.loads((runs / "a" / "result.json").read_text())
    for value in (f"{result['parameters']:,}", f"{result['val']['bits_per_byte']:.4f}", "cache, mem_len"):
        assert value in text
    pictures = [base64.b64decode(source.partition(",")[2]) for source in found.sources if "svg" in source]
    titles = [re.findall(r">([a-z_]+/[a-z_/]+)<", picture.decode()) for picture in pictures]
    assert ["val/loss"] in titles and ["memory/cache/fill"] in titles
    assert "samples/text" in text and "segment_len" in text


def test_several_runs_are_put_side_by_side(runs: Path, tmp_path: Path) -> None:
    text = report(f"[{runs / 'a'},{runs / 'b'}]", tmp_path / "page.html")
    assert report(str(runs), tmp_path / "other.html") == text  # a folder of runs stands for them
    found = Page(text)
    assert "In which keys they differ" in found.headings and "memory.name" in text
    assert found.headings.count("a") == found.headings.count("b") == 2  # their tapes and their configurations
    curves = {name: read(runs / name, name=name).curves for name in "ab"}
    assert list(curves["a"]["train/loss"]) == list(curves["b"]["train/loss"])
    assert curves["a"]["val/loss"].keys() == curves["b"]["val/loss"].keys()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("out=x.html", "runs=null: is required; give run folders"),
        ("runs={runs}/a", "out=null: is required; name the page"),
        ("runs={runs}/a/checkpoints out=x.html", "runs={runs}/a/checkpoints: holds no run; give the folder"),
        ("runs=[{runs}/a,{runs}/c] out=x.html", "runs={runs}/c: no such folder; give the folder"),
        ("runs={runs}/a out={runs}", "out={runs}: is a folder"),
    ],
)
def test_what_cannot_be_reported_is_refused(
    typed: str, message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["report", *typed.format(runs=runs).split()]) == 2
    said = capsys.readouterr().err
    key = message.format(runs=runs).partition(": ")
    assert said.startswith("error: ") and key[2] in said


def test_the_tape_shows_what_the_formulas_say() -> None:
    """Three layers, segments of 8, memory of 4: 4, 12 and 20 tokens."""
    config = load(["model.n_layer=3", "data.segment_len=8", "memory.mem_len=4"])
    drawn = tape(config)
    root = ET.fromstring(drawn[: drawn.index("</svg>") + 6])
    lines = [item for item in root if item.tag == "line" and item.get("stroke-width")]
    zero = {float(item.get("x2", 0)) for item in lines}
    (border,) = zero
    pixels = sorted(border - float(item.get("x1", 0)) for item in lines)
    assert [round(length / pixels[0] * 4) for length in pixels] == [4, 12, 20]
    assert "the 20 tokens before it: 2.5 segments of 8" in drawn
    assert "no bound" in tape(load(["memory=tokens"]))
    assert "memory<" in drawn and "can matter<" in drawn
    for keys in (["memory=none"], ["memory.reset=segment"], ["model=lstm", "memory.reset=segment"]):
        alone = tape(load(keys))
        assert "stands alone" in alone and "memory<" not in alone and "can matter<" not in alone  # in the legend
    assert "any earlier token can matter" in tape(load(["model=lstm"]))


def test_layers_are_averaged_where_runs_are_compared() -> None:
    assert mean_of([{1: 1.0, 2: 3.0}, {2: 5.0, 3: 1.0}]) == {2: 4.0}
    assert question_of("memory/cache/fill") == "What does the memory do?"
    assert question_of("val/loss") == "How well does it predict?"
    assert question_of("val/loss_by_age") == question_of("memory/benefit") == "Does the memory help?"
    assert question_of("somebody/else") == "Other curves"


def test_buckets_layers_and_parts_are_one_picture_each(runs: Path) -> None:
    record = read(runs / "a", name="a")
    two = {"v/by_age/0": {1: 2.0, 3: 1.0}, "v/by_age/16-31": {3: 0.5}, "v/by_age/2-3": {3: 0.75}, "v/ppl": {3: 1.0}}
    one = replace(
        record, curves={**two, "memory/probe/with": {3: 1.0}, "v/bits_per_byte": {3: 1.0}, "m/L1/x": {3: 2.0}}
    )
    titles = ["v/by_age", "v/by_age", "v/by_age", "memory/probe", "v/bits_per_byte", "m/x"]
    assert [title_of(tag, [one]) for tag in shown(one)] == titles
    assert title_of("memory/probe/with", [one, one]) == "memory/probe/with"  # else lines of runs would mix with parts
    drawn = base64.b64decode(picture("v/by_age", [one]).partition("base64,")[2][:-2]).decode()
    assert re.findall(r">(\d[-0-9]*)</text>", drawn)[:3] == ["0", "2-3", "16-31"]


def test_cells_and_keys_are_written_as_they_are() -> None:
    assert "&lt;b&gt;" in pages.table(["<b>"], [["1"]]) and "class=number" in pages.table(["a"], [["1"]])
    assert pages.flattened({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_a_run_given_twice_is_shown_once(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runs / "a")
    text = report(f"[{runs / 'a'},{tmp_path / 'link'}]", tmp_path / "page.html")
    assert text.count("the whole configuration") == 1


def test_names_are_no_formulas_and_commands_can_be_pasted(runs: Path, tmp_path: Path) -> None:
    names = ["_first", "cost $x_$ <b>&"]
    for name in names:
        shutil.copytree(runs / "a", tmp_path / name)
        facts = {"command": ["txl", "fit", f"run_dir={name}"]}
        (tmp_path / name / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    text = report(str(tmp_path), tmp_path / "page.html")
    pictures = [base64.b64decode(data).decode() for data in re.findall(r"svg\+xml;base64,([^\"]+)", text)]
    assert any(all(html.escape(name, quote=False) in drawn for name in names) for drawn in pictures)
    assert html.escape("txl fit 'run_dir=cost $x_$ <b>&'") in text


@pytest.mark.parametrize("damage", [b"", b"foo: 1\n", b"\xac\xff", b"- a\n", b"model: {n_layer: x}\n"])
def test_a_damaged_configuration_is_refused_with_its_run(
    damage: bytes, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "a", tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_bytes(damage)
    assert cli.main(["report", f"runs=[{tmp_path}]", f"out={tmp_path / 'page.html'}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f": {tmp_path / 'run' / 'config.yaml'} " in said
    assert not (tmp_path / "page.html").exists()


def test_damaged_tables_and_results_are_passed_over(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "run")
    for file in (tmp_path / "run").glob("events.*"):
        file.unlink()
    (tmp_path / "run" / "csv").mkdir(exist_ok=True)
    table = b"epoch,step,train/loss\n0,5,3.5\n0,x,3\n0,10,foo\n0,15\x00,nan\n0,20,3.25,7\n0,25,inf\n\xff\n0,3"
    (tmp_path / "run" / "csv" / "metrics.csv").write_bytes(table)
    (tmp_path / "run" / "result.json").write_text("[1]")
    record = read(tmp_path / "run", name="run")
    assert record.curves == {"train/loss": {5: 3.5, 20: 3.25}} and record.result == Result()


@pytest.mark.parametrize("val", [None, [1], "x", {}, {"loss": None, "bits_per_byte": "x", "ppl": 3.5}])
def test_figures_that_a_result_lacks_are_left_out(val: object, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "run")
    result = json.loads((runs / "a" / "result.json").read_text())
    lacking = {**result, "val": val, "steps": None, "tokens_per_second": float("nan"), "stopped_by": "SIGTERM"}
    (tmp_path / "run" / "result.json").write_text(json.dumps(lacking))
    (tmp_path / "run" / "run.json").write_text('{"command": null, "versions": null, "python": null, "platform": 3}')
    text = report(f"[{tmp_path / 'run'},{runs / 'b'}]", tmp_path / "page.html")
    cells = re.search(r"<tr><td[^>]*>run</td>(.*?)</tr>", text)
    assert cells is not None
    said = re.findall(r"<td[^>]*>([^<]*)</td>", cells[1])
    ppl = "3.5000" if val and isinstance(val, dict) else "—"
    assert said[2:] == [
        f"{result['parameters']:,}",
        "—",
        f"{result['tokens']:,}",
        "—",
        "—",
        ppl,
        "—",
        "stopped by SIGTERM",
    ]


def test_each_event_file_is_read_once(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_file, opened = event_file_loader.RawEventFileLoader.__init__, []

    def counting(self: Any, path: str, *rest: Any, **keys: Any) -> None:
        opened.append(path)
        read_file(self, path, *rest, **keys)

    monkeypatch.setattr(event_file_loader.RawEventFileLoader, "__init__", counting)
    report(str(runs / "a"), tmp_path / "page.html")
    assert sorted(opened) == sorted(map(str, (runs / "a").glob("events.out.tfevents.*"))) and opened


def test_only_what_is_shown_is_explained(runs: Path) -> None:
    """Every word with a colon in a note is part of a curve of that run, and no sentence is for none."""
    record = read(runs / "a", name="a")
    training = replace(record, curves={tag: curve for tag, curve in record.curves.items() if tag.startswith("train/")})
    assert explained("How well does it predict?", [training]) == "Loss is in nats per token."
    assert explained("Does the memory help?", [training]) == explained("What does it cost?", [training]) == ""
    assert "Validation reads" in explained("How well does it predict?", [training, record])
    for question, sentences in EXPLAINED.items():
        told = explained(question, [record])
        for name in re.findall(r"(?:^|\. )([a-z_/]+): ", told):
            assert any(name in tag for tag in record.curves)
        for pattern, words in sentences.items():
            own = [tag for tag in shown(record) if re.search(pattern, tag)]
            assert bool(own) == (words in told), (question, words)


@pytest.mark.parametrize("n_step", [1, 600, 601, 1199, 100_001])
def test_a_long_curve_is_thinned_with_its_ends(n_step: int) -> None:
    kept = thinned(range(1, n_step + 1))
    assert kept[0] == 1 and kept[-1] == n_step and len(kept) <= POINTS + 1
    assert kept == sorted(set(kept))
