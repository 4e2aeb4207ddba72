"""Files of other codes: every format is read, none runs anything, and `txl import` and `txl export` take them there."""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import pickle
import sys
import tarfile
import tracemalloc
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.test_layouts import losses, make, stream
from tests.theirs import random_state
from tests.tiny import write_corpus
from txl_lightning import TextDataModule, TransformerXLModule, load_checkpoint
from txl_lightning.checkpoints import files, from_reference, read_config, unpickler
from txl_lightning.cli import main
from txl_lightning.commands import export, import_
from txl_lightning.config import Config, ConfigError, load
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.options import ExportOptions, ImportOptions

AUTHORS = make("authors", div_val=2, d_embed=8, tie_projs=[False, True, False])


class Modules:
    """Classes of the names that the authors' code has, for as long as a test writes its pickle."""

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}

    def cls(self, module: str, name: str, base: type = nn.Module) -> type:
        for end in [i for i, sign in enumerate(module) if sign == "."]:
            self.modules.setdefault(module[:end], types.ModuleType(module[:end])).__path__ = []
        home = self.modules.setdefault(module, types.ModuleType(module))
        sys.modules.update(self.modules)
        if not hasattr(home, name):
            setattr(home, name, type(name, (base,), {"__module__": module}))
        return getattr(home, name)

    def forget(self) -> None:
        for name in self.modules:
            sys.modules.pop(name, None)


@pytest.fixture
def theirs() -> Iterator[Modules]:
    modules = Modules()
    yield modules
    modules.forget()


def module_of(state: dict[str, Tensor], config: dict[str, Any], theirs: Modules) -> nn.Module:
    """The authors' model with these weights, as their code would build it."""
    root = theirs.cls("mem_transformer", "MemTransformerLM")()
    known = {
        "word_emb": ("mem_transformer", "AdaptiveEmbedding"),
        "pos_emb": ("mem_transformer", "PositionalEmbedding"),
    }
    known |= {"crit": ("utils.proj_adaptive_softmax", "ProjectedAdaptiveLogSoftmax")}
    known |= {"dec_attn": ("mem_transformer", "RelPartialLearnableMultiHeadAttn")}
    known |= {"pos_ff": ("mem_transformer", "PositionwiseFF")}
    shared: dict[int, nn.Parameter] = {}
    for name, tensor in state.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                plain = nn.ParameterList if part.endswith("projs") else nn.ModuleList if part == "layers" else nn.Module
                at.add_module(part, theirs.cls(*known[part])() if part in known else plain())
            at = at._modules[part]
        if last == "inv_freq":
            at.register_buffer(last, tensor)
        else:
            parameter = shared.setdefault(id(tensor), nn.Parameter(tensor))
            at.register_parameter(last, parameter)
    for name in "n_token n_layer n_head d_model d_head d_embed tgt_len mem_len ext_len attn_type".split():
        setattr(root, name, config[name])
    root.same_length, root.clamp_len, root.sample_softmax = config["same_length"], config["clamp_len"], -1
    root.word_emb.cutoffs, root.word_emb.div_val = [*config["cutoffs"], config["n_token"]], config["div_val"]
    root.layers._modules["0"].dec_attn.pre_lnorm = config["pre_lnorm"]
    root.layers._modules["0"].pos_ff.d_inner = config["d_inner"]
    return root


def save(held: Any, path: Path, *, legacy: bool = False) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch looks for the sources of such modules
        torch.save(held, path, _use_new_zipfile_serialization=not legacy)
    return str(path)


def run(*arguments: str) -> int:
    return main(list(arguments))


@functools.cache
def default() -> Config:
    return load()


def import_file(**options: str) -> None:
    """`txl import` without the command line, which takes longer than the rest."""
    given = ImportOptions(**options)
    import_.check(default(), given)
    import_.run(default(), given)


def export_file(**options: str) -> None:
    """`txl export` without the command line."""
    given, config = ExportOptions(**options), Config.from_dict(read_config(options["ckpt"]))
    export.check(config, given)
    export.run(config, given)


def same_as(model: nn.Module, state: dict[str, Tensor], config: dict[str, Any], layout: str) -> bool:
    wanted = from_reference(state, config, layout).state_dict()
    return all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("legacy", [False, True])
def test_the_authors_whole_module_is_read_without_its_classes(legacy: bool, tmp_path: Path, theirs: Modules) -> None:
    state = random_state(AUTHORS, "authors")
    path = save(module_of(state, AUTHORS, theirs), tmp_path / "model.pt", legacy=legacy)
    theirs.forget()
    held = files.read(path)
    assert held.config is not None
    assert held.state.keys() == state.keys()
    assert all(torch.equal(held.state[name], tensor) for name, tensor in state.items())
    told = set(AUTHORS) - {"dropout", "dropatt"}
    assert {name: held.config[name] for name in told} == {name: AUTHORS[name] for name in told}
    model, wanted = (from_reference(part, config) for part, config in ((held.state, held.config), (state, AUTHORS)))
    tokens = stream(AUTHORS)
    assert torch.equal(losses(model, tokens, n_token=4), losses(wanted, tokens, n_token=4))
    assert "mem_transformer" not in sys.modules


def test_a_module_wrapped_for_several_gpus_and_one_with_little_in_it(tmp_path: Path, theirs: Modules) -> None:
    state = random_state(AUTHORS, "authors")
    whole = nn.Module()
    whole.module = module_of(state, AUTHORS, theirs)
    whole.__class__ = theirs.cls("utils.data_parallel", "BalancedDataParallel")
    assert files.read(save(whole, tmp_path / "wrapped.pt")).state.keys() == state.keys()
    del whole.module.n_token
    assert files.read(save(whole.module, tmp_path / "bare.pt")).config is None


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile(kind: str, bomb: object, folder: Path, theirs: Modules) -> str:
    path = folder / f"{kind}.pt"
    if kind == "plain":
        path.write_bytes(pickle.dumps(bomb))
        return str(path)
    if kind == "module":
        bomb_in = module_of(random_state(AUTHORS, "authors"), AUTHORS, theirs)
        bomb_in.extra = bomb
        bomb = bomb_in
    elif kind == "nvidia":
        bomb = {"model_state": random_state(AUTHORS, "nvidia"), "model_config": AUTHORS, "args": bomb}
    elif kind == "weights":
        bomb = {"r_w_bias": torch.zeros(1), "crit.x": bomb}
    return save(bomb, path, legacy=kind == "legacy")


@pytest.mark.parametrize("kind", ["plain", "zip", "legacy", "module", "nvidia", "weights"])
def test_a_hostile_file_runs_nothing_and_its_wish_is_named(
    kind: str, tmp_path: Path, theirs: Modules, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = hostile(kind, Calls(os.system, "touch hostile-code-ran"), tmp_path, theirs)
    theirs.forget()
    with pytest.raises(ConfigError, match=r"wants to call posix\.system, .* nothing of it was run"):
        files.read(path)
    if kind == "module":
        assert run("import", f"src={path}", "to=mine.ckpt", "layout=authors") == 2
        assert "posix.system" in capsys.readouterr().err
    assert not Path("hostile-code-ran").exists() and not Path("mine.ckpt").exists()


@pytest.mark.parametrize(
    "function",
    [eval, exec, getattr, __import__, print, os.remove, pickle.loads, torch.load, torch.hub.load, np.load, io.open],
)
def test_no_function_but_the_known_ones_is_called(function: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bomb.pt").write_bytes(pickle.dumps(Calls(function, "1")))
    with pytest.raises(ConfigError, match=r"wants to call \S*\.(eval|exec|getattr|__import__|print|\w+)"):
        files.read(str(tmp_path / "bomb.pt"))


def test_stubs_do_nothing_whatever_is_done_to_them(tmp_path: Path, theirs: Modules) -> None:
    run_it = theirs.cls("utils.run", "system", object)
    path = save([Calls(run_it, "touch hostile-code-ran"), Calls(run_it)], tmp_path / "stubs.pt")
    theirs.forget()
    with pytest.raises(ConfigError, match="holds neither weights by name nor a model"):
        files.read(path)
    stubs = unpickler.load(Path(path))
    assert [type(stub).__mro__[1] for stub in stubs] == [unpickler.Inert] * 2
    assert not callable(stubs[0])


def test_the_known_functions_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old files show torch a class and its source; where the two differ it may write a file that the class names."""
    monkeypatch.chdir(tmp_path)

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    changes = b"}" + text("dump_patches") + b"\x88s" + b"}" + text("__name__") + text("written") + b"s\x86b0"
    shown = b"(" + text("module") + b"h\x00" + text("file.py") + text("another source") + b"tQ."
    with open("evil.pt", "wb") as file:
        for part in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True}):
            pickle.dump(part, file, protocol=2)
        file.write(b"\x80\x02ctorch._utils\n_rebuild_tensor\nq\x00" + changes + shown)
        pickle.dump([], file, protocol=2)
    with pytest.raises(ConfigError, match=r"wants to call builtins\.setattr, .* nothing of it was run"):
        files.read("evil.pt")
    assert os.listdir() == ["evil.pt"]


@pytest.mark.parametrize("parts", [[1], "itself"])
def test_a_module_with_odd_parts_is_refused(parts: Any, tmp_path: Path, theirs: Modules) -> None:
    odd = theirs.cls("utils.odd", "Odd", object)()
    odd._modules = {"a": odd} if parts == "itself" else parts
    path = save(odd, tmp_path / "odd.pt")
    theirs.forget()
    with pytest.raises(ConfigError, match="holds a module whose parts are not what modules have"):
        files.read(path)


def test_a_file_cannot_take_all_memory(tmp_path: Path) -> None:
    path, far = tmp_path / "far.pt", 2**24  # place to remember a list at; it could be 2^32
    path.write_bytes(b"\x80\x02]r" + far.to_bytes(4, "little") + b"cutils\nX\n.")
    tracemalloc.start()
    with pytest.raises(ConfigError, match="is damaged or no file of torch's"):
        files.read(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


def test_programs_and_old_tars_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(nn.Linear(1, 1)), tmp_path / "script.pt")
    with pytest.raises(ConfigError, match="a TorchScript archive: a program, not weights"):
        files.read(str(tmp_path / "script.pt"))
    with tarfile.open(tmp_path / "old.pt", "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(ConfigError, match=r"PyTorch 0\.1 wrote it"):
        files.read(str(tmp_path / "old.pt"))


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    torch.save({"txl_lightning": {}, "state_dict": {}}, tmp_path / "ours.ckpt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:300])
    for name, message in {
        "text.pt": "is damaged or no file of torch's",
        "cut.pt": "is damaged or no file of torch's",
        "empty.safetensors": "is no whole safetensors file",
        "numbers.pt": "holds neither weights by name nor a model",
        "ours.ckpt": "is a checkpoint of txl_lightning already",
        "nothing.pt": "no such file or folder",
        "": "the folder has none of model.safetensors",
    }.items():
        with pytest.raises(ConfigError, match=f"src=.*{message}"):
            files.read(str(tmp_path / name))


def test_nvidia_s_checkpoint_is_read_with_all_that_is_in_it(tmp_path: Path, theirs: Modules) -> None:
    config = make("nvidia", dtype=None)
    vocab = theirs.cls("utils.vocabulary", "Vocab", object)()
    vocab.idx2sym = ["a", "b"]
    held = {
        "model_state": random_state(config, "nvidia"),
        "model_config": config,
        "args": argparse.Namespace(lr=0.01, dataset="wt103"),
        "vocab": vocab,
        "best": np.float64(3.5),
        "rng": np.arange(3),
    }
    path = save(held, tmp_path / "checkpoint_best.pt")
    theirs.forget()
    found = files.read(str(tmp_path))
    assert same_as(from_reference(found.state, found.config, "nvidia"), held["model_state"], config, "nvidia")  # type: ignore[arg-type]
    import_file(src=path, to=f"{tmp_path}/mine.ckpt", layout="nvidia")
    assert load_checkpoint(f"{tmp_path}/mine.ckpt").config.same_length_rule == "mem_len+1"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_hugging_face_s_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = make("huggingface", model_type="transfo-xl", div_val=2), tmp_path / "hf"
    state = random_state(config, "huggingface")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".bin"):
        save(state, folder / name, legacy=True)
    else:
        names = {tensor.data_ptr(): key for key, tensor in reversed(state.items())}
        save_file({key: state[key] for key in names.values()}, folder / name)
    import_file(src=str(folder), to=str(tmp_path / "mine.ckpt"), layout="huggingface")
    assert "cold memory zeros" in capsys.readouterr().out
    assert same_as(load_checkpoint(str(tmp_path / "mine.ckpt")), state, config, "huggingface")


@pytest.mark.parametrize(
    ("layout", "name"),
    [("authors", "out.safetensors"), ("nvidia", "out.pt"), ("huggingface", "out.bin"), ("huggingface", ".")],
)
def test_there_and_back_by_commands(layout: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make(layout, div_val=2, tie_projs=[False, True, False])
    state = random_state(config, layout)
    (tmp_path / "given.json").write_text(json.dumps(config))
    given, ckpt, back = save(state, tmp_path / "state.pt"), tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    import_file(src=given, to=str(ckpt), layout=layout, config=f"{tmp_path}/given.json")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / name
    export_file(ckpt=str(ckpt), to=str(target), layout=layout)
    written = [
        Path(line) for line in capsys.readouterr().out.splitlines() if line.endswith((".json", *files.IN_FOLDERS))
    ]
    assert written[-1].name == ("config.json" if name == "." else "out.json")
    import_file(src=str(target), to=str(back), layout=layout)
    assert same_as(load_checkpoint(str(back)), state, config, layout)
    if name == "out.safetensors":
        assert len(load_file(target)) < len(state) or layout == "nvidia"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint made of weights that happen to have as many symbols as bytes need."""
    folder = tmp_path_factory.mktemp("imported")
    config = make("huggingface", vocab_size=257, cutoffs=[100, 200])
    save(random_state(config, "huggingface"), folder / "model.bin")
    (folder / "model.json").write_text(json.dumps(config))
    (folder / "vocab.json").write_text('{"name": "bytes"}')
    write_corpus(folder / "corpus.txt", n_byte=1500)
    typed = ["data=text", f"data.path={folder / 'corpus.txt'}", "eval.batch_size=2"]
    assert run("import", f"src={folder}/model.bin", f"to={folder}/mine.ckpt", "layout=huggingface", *typed) == 0
    return folder


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # plain Lightning looks at its loaders
def test_plain_lightning_loads_what_was_imported(imported: Path, tmp_path: Path) -> None:
    file, corpus = str(imported / "mine.ckpt"), write_corpus(tmp_path / "book.txt")
    stored = Config.from_dict(read_config(file))
    own = load(["data=text", f"data.path={corpus}", f"data.segment_len={stored.data.segment_len}"])
    config = replace(stored, data=own.data, trainer=replace(stored.trainer, precision="32-true"))
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    data = TextDataModule(config, test_split="test")
    loaded = TransformerXLModule.load_from_checkpoint(file, config=config)
    trainer.test(loaded, data, verbose=False)
    given = TransformerXLModule(config)
    trainer.test(given, data, ckpt_path=file, weights_only=True, verbose=False)
    expected = evaluate(config, load_checkpoint(file, config), split="test").scores
    assert loaded.scores["test"] == given.scores["test"] == pytest.approx(expected, rel=1e-6)


def test_an_imported_checkpoint_is_scored(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the text that the import named, and on another that is typed; with its zeros before the first token."""
    out = imported / "score.json"
    common = (f"ckpt={imported / 'mine.ckpt'}", f"out={out}", "trainer.accelerator=cpu", "callbacks=none")
    assert run("eval", *common) == 0
    first = json.loads(out.read_text())
    assert (first["segment_len"], first["batch_size"], first["memory"]["cold"]) == (4, 2, "zeros")
    write_corpus(imported / "other.txt", n_byte=1500, seed=3)
    assert run("eval", *common, f"data.path={imported / 'other.txt'}", "memory.cold=absent") == 0
    second = json.loads(out.read_text())
    assert second["data_fingerprint"] != first["data_fingerprint"]
    assert second["memory"]["cold"] == "absent"


def test_generation_needs_a_vocabulary(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("prompt=the", "tokens=3", "trainer.accelerator=cpu")
    assert run("generate", f"ckpt={imported / 'mine.ckpt'}", *common) == 2
    assert "this checkpoint has no vocabulary" in capsys.readouterr().err
    told = {"layout": "huggingface", "vocab": str(imported / "vocab.json")}
    import_file(src=f"{imported}/model.bin", to=f"{imported}/told.ckpt", **told)
    assert run("generate", f"ckpt={imported}/told.ckpt", *common) == 0
    assert "the" in capsys.readouterr().out


def test_imports_are_refused_before_anything_is_written(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.json").write_text("[1]")
    (tmp_path / "words.json").write_text('{"name": "symbols", "symbols": [1, 2], "unit": "byte", "rule": "two"}')
    source = imported / "model.bin"
    alone = tmp_path / "alone.bin"
    alone.write_bytes(source.read_bytes())
    whole = {"src": str(source), "to": "x.ckpt", "layout": "huggingface"}
    for changes, message in [
        ({"src": None}, "src=null: is required"),
        ({"to": None}, "to=null: is required"),
        ({"layout": None}, "layout=null: is required"),
        ({"to": "nowhere/x.ckpt"}, "to=nowhere/x.ckpt: its folder does not exist"),
        ({"to": str(source)}, "is the file that src names"),
        ({"layout": "authors"}, "config."),
        ({"layout": "google"}, "layout=google: no such choice"),
        ({"src": str(alone)}, "the file holds no configuration"),
        ({"config": "odd.json"}, "config=odd.json: odd.json holds no JSON"),
        ({"config": "no.json"}, "config=no.json: cannot be read"),
        ({"vocab": "words.json"}, "has 2 ids, and the weights have 257"),
        ({"vocab": "no.json"}, "vocab=no.json: cannot be read"),
    ]:
        with pytest.raises(ConfigError) as refused:
            import_file(**{**whole, **changes})
        assert message in str(refused.value)
    assert run("import", *(f"{name}={value}" for name, value in whole.items()), "model.n_layer=3") == 2
    assert "txl import does not read it" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"odd.json", "words.json", "alone.bin"}


def test_exports_are_refused_before_anything_is_written(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = f"ckpt={imported / 'mine.ckpt'}"
    for typed, message in {
        (f"to={tmp_path}/x.pt", "layout=authors"): "ckpt=: is missing",
        (ckpt, "layout=authors"): "to=null: is required",
        (ckpt, f"to={tmp_path}/x.pt"): "layout=null: is required",
        (ckpt, f"to={tmp_path}/x.onnx", "layout=authors"): "its suffix says no format",
        (ckpt, f"to={tmp_path}/no/x.pt", "layout=authors"): "its folder does not exist",
    }.items():
        assert run("export", *typed) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_export_says_what_the_other_code_does_otherwise(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = (f"ckpt={imported / 'mine.ckpt'}", f"to={tmp_path}/x.safetensors", "layout=authors", "memory.mem_len=9")
    assert run("export", *typed) == 0
    assert "starts with memory.cold=absent, this model with zeros" in capsys.readouterr().out
    assert json.loads((tmp_path / "x.json").read_text())["mem_len"] == 9
