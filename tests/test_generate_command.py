"""`txl generate`: prompts of any bytes, from wherever they come, on whatever takes the output."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import MODEL
from txl_lightning.checkpoints.manifest import replace_text, replacing
from txl_lightning.cli import main
from txl_lightning.config import load
from txl_lightning.generation import Session
from txl_lightning.model.transformer import TransformerXL

BYTES = b"caf\xe9 = '\xc3\xa9' \xff"
SHOWN = "caf\ufffd = 'é' \ufffd"


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained model of a run that used more devices than there are, and another kind."""
    torch.manual_seed(0)
    config = load([*MODEL, "trainer.devices=8", "strategy=ddp", "trainer.precision=16-mixed"])
    weights = {f"model.{name}": tensor for name, tensor in TransformerXL(config).state_dict().items()}
    path = tmp_path_factory.mktemp("run") / "last.ckpt"
    torch.save({"txl_lightning": {"config": config.to_dict(), "data_fingerprint": None}, "state_dict": weights}, path)
    return str(path)


def sample(ckpt: str, *arguments: str) -> int:
    return main(["generate", f"ckpt={ckpt}", "tokens=40", "trainer.accelerator=cpu", *arguments])


def test_bytes_that_are_no_text_are_continued_alike_from_everywhere(
    ckpt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt").write_bytes(BYTES)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BYTES)))
    said = []
    for prompt in (f"prompt={os.fsdecode(BYTES)}", f"prompt_file={tmp_path / 'prompt'}", "prompt=-"):
        assert sample(ckpt, prompt) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith(SHOWN) and len(said[0]) > len(SHOWN) + 20
    assert said[0] == said[1] == said[2]


def test_output_that_is_not_unicode_gets_what_it_can_take(ckpt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert sample(ckpt, f"prompt={os.fsdecode(BYTES)}", "-m", "seed=1,2") == 0
    out = raw.getvalue()
    assert b"\ncaf? = '?' ?" in out and out.isascii()
    assert out.startswith(b"[0] ckpt=")


def test_a_prompt_called_null_is_a_prompt(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sample(ckpt, "prompt=null") == 0
    assert capsys.readouterr().out.startswith("null")


def test_a_file_that_cannot_be_read_is_refused(
    ckpt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt"
    path.touch()
    assert sample(ckpt, f"prompt_file={path}") == 2
    rule = "the file is empty; give at least one character to continue"
    assert capsys.readouterr().err == f"error: prompt_file={path}: {rule}\n"

    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert sample(ckpt, f"prompt_file={path}") == 2
    rule = "cannot be read: Permission denied; give a text file"
    assert capsys.readouterr().err == f"error: prompt_file={path}: {rule}\n"


def test_nothing_on_standard_input_is_refused(
    ckpt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert sample(ckpt, "prompt=-") == 2
    rule = "standard input is empty; give at least one character to continue"
    assert capsys.readouterr().err == f"error: prompt=-: {rule}\n"


def test_prompts_of_a_file_are_continued_as_each_would_be(ckpt: str, tmp_path: Path) -> None:
    """JSON Lines in and out: other keys stay, and lanes do not change what is drawn."""
    prompts = [{"id": 7, "prompt": "Once"}, {"prompt": "a much longer beginning, of more than one segment" * 3}]
    prompts.append({"prompt": "café"})
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts) + "\n")
    found = []
    for lanes in (1, 3):
        assert sample(ckpt, f"prompts={source}", f"out={tmp_path / 'out.jsonl'}", f"lanes={lanes}") == 0
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [{key: value for key, value in line.items() if key != "text"} for line in lines] == prompts
        found.append([line["text"] for line in lines])
    assert found[0] == found[1] and all(len(text) > 10 for text in found[0])


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("", "has no line"),
        ("once", "line 1 is no JSON"),
        ('{"prompt": 3}', "line 1 has no text"),
        *(
            (
                f'{{"prompt": "a", "n": 1}}\n\n{{"prompt": "b", "{name}": 5}}',
                f'line 3 has "{name}", which is the same for',
            )
            for name in ("tokens", "temperature", "seed", "stop", "samples", "log_probs", "top_k", "repetition_window")
        ),
        ('{"prompt": "a", "text": "b"}', 'line 1 has "text", under which the result is written; give it another name'),
        (None, "no such file"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(
    content: str | None, rule: str, ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "prompts").write_text(content)
    assert sample(ckpt, f"prompts={tmp_path / 'prompts'}", f"out={tmp_path / 'out'}") == 2
    assert rule in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["sample", "prompt_tokens", "prompt_log_probs"])
def test_a_key_is_copied_unless_it_is_written(
    name: str, ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "prompts", tmp_path / "out"
    line = {"prompt": "a\u2028b", name: [1]}  # a line separator that ends no line of JSON
    source.write_text(json.dumps(line, ensure_ascii=False) + "\r\n")
    keys = [f"prompts={source}", f"out={out}", "tokens=1"]
    assert sample(ckpt, *keys) == 0
    copied = json.loads(out.read_text())
    assert list(copied) == ["prompt", name, "text"] and {**copied, **line} == copied
    assert sample(ckpt, *keys, "samples=2", "log_probs=true") == 2
    assert f'line 1 has "{name}", under which the result is written' in capsys.readouterr().err
    assert json.loads(out.read_text()) == copied


def test_the_file_of_prompts_is_not_written_over(ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "prompts"
    source.write_text('{"prompt": "Once"}\n')
    (tmp_path / "link").symlink_to(source)
    for out in ("prompts", "link"):
        assert sample(ckpt, f"prompts={source}", f"out={tmp_path / out}") == 2
        assert "is the file of prompts" in capsys.readouterr().err and source.read_text() == '{"prompt": "Once"}\n'


def test_a_file_lasts_until_the_new_one_is_whole_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "out") as file:
        file.write("half")
        file.flush()
        raise KeyboardInterrupt
    assert (tmp_path / "out").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_text(tmp_path / "pipe", "new")
    assert os.read(end, 9) == b"new" and (tmp_path / "pipe").is_fifo()
    os.close(end)


def test_samples_stop_strings_and_log_probs_of_many_prompts(ckpt: str, tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Once"}\n{"prompt": "No"}\n')
    assert sample(ckpt, f"prompts={source}", f"out={out}", "samples=2", "log_probs=true", "stop=[e,'\xc3']") == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [("Once", 0), ("Once", 1), ("No", 0), ("No", 1)]
    assert lines[0]["text"] != lines[1]["text"] and lines[0]["prompt_log_probs"] == lines[1]["prompt_log_probs"]
    for line in lines:
        assert "e" not in line["text"] and len(line["tokens"]) == len(line["log_probs"]) <= 40
        assert len(line["prompt_tokens"]) == len(line["prompt_log_probs"]) + 1 and max(line["log_probs"]) < 0
    assert sample(ckpt, f"prompts={source}", f"out={out}", "tokens=0", "log_probs=true") == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["text"] for line in scored] == ["", ""]
    assert scored[1]["prompt_log_probs"] == pytest.approx(lines[2]["prompt_log_probs"], abs=1e-5)


def test_one_prompt_several_times(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sample(ckpt, "prompt=Once", "samples=2", "seed=3") == 0
    both = capsys.readouterr().out
    for seed, title in ((3, "--- 1 of 2\n"), (4, "--- 2 of 2\n")):
        assert sample(ckpt, "prompt=Once", f"seed={seed}") == 0
        assert title + capsys.readouterr().out in both


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("prompt=a log_probs=true", "log_probs=true: only prompts=FILE writes them"),
        ("prompt=a tokens=0", "tokens=0: must be >= 1; 0 scores prompts"),
        ("prompt=a stop=", "stop=: an empty text ends everything"),
        ("prompt=a interactive=true", "interactive=true: prompt is given as well"),
        ("interactive=true samples=2", "samples=2: one conversation"),
        ("prompt=a repetition_penalty=0.5", "repetition_penalty=0.5: must be >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    typed: str, message: str, ckpt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample(ckpt, *typed.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def talk(ckpt: str, lines: list[str], *arguments: str) -> int:
    """A conversation in which these lines are typed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return sample(ckpt, "interactive=true", *arguments)


def test_a_conversation_keeps_its_memory_until_it_is_reset(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "here"
    lines = [
        "Once",
        f":save {saved}",
        "more",
        ":memory",
        ":reset",
        ":memory",
        f":load {saved}",
        "more",
        ":nonsense",
        "",
    ]
    assert talk(ckpt, [*lines, ":quit", "never"], "temperature=0") == 0
    said = capsys.readouterr().out.split("\n")
    assert said[2] == f"saved; go on with :load {saved}"
    first, again = said[3], said[said.index("44 tokens are remembered") + 1]
    assert first == again and first
    assert any(line.startswith("88 tokens read") for line in said) and any(line.startswith("0 tokens") for line in said)
    assert any(line.endswith("% full") for line in said)
    assert any(line.startswith("no such command; :reset") for line in said)


def test_what_a_conversation_cannot_load_ends_nothing(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"weights": "others"}, tmp_path / "other")
    (tmp_path / "bad").write_bytes(b"no checkpoint")
    torch.save(torch.zeros(3), tmp_path / "tensor")
    files = ["nowhere", "bad", "other", "tensor"]
    assert talk(ckpt, ["", *(f":load {tmp_path / name}" for name in files), f":save {tmp_path}/no/file", ":help"]) == 0
    said = capsys.readouterr().out.split("\n")
    assert sum(line.startswith("cannot be loaded: ") for line in said) == 4
    assert said.count("cannot be loaded: it holds no session") == 2
    assert "cannot be loaded: it was saved with other weights" in said
    assert sum(line.startswith("cannot be written: ") for line in said) == 1
    assert any(line.startswith(":load FILE") for line in said)


def test_ctrl_c_cuts_what_is_being_said_short_behind_a_whole_token(
    ckpt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal comes in the middle of reading the fifth token; the rest is as if only five had been asked for."""
    assert talk(ckpt, ["Once", ":memory"], "tokens=5") == 0
    undisturbed = capsys.readouterr().out
    take, taken = Session._take, []

    def interrupted(session: Session, new: list[list[int]], log_probs_BV: torch.Tensor) -> None:
        taken.append(new)
        if len(taken) == 6:  # the prompt was the first
            os.kill(os.getpid(), signal.SIGINT)
        take(session, new, log_probs_BV)

    monkeypatch.setattr(Session, "_take", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert talk(ckpt, ["Once", ":memory"], "tokens=50") == 0
    assert capsys.readouterr().out == undisturbed and "9 tokens read" in undisturbed
    assert signal.getsignal(signal.SIGINT) == before
