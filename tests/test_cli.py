"""`txl` itself: help, flags, run folders, exit codes, sweeps, and the command line that ranks are relaunched with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from txl_lightning import exit_codes, jobs, registry
from txl_lightning.arguments import FLAGS
from txl_lightning.cli import main
from txl_lightning.config import SECTIONS, Config, ConfigError, load
from txl_lightning.errors import yaml_text
from txl_lightning.keys import names
from txl_lightning.options import COMMANDS
from txl_lightning.process import leave_process_group

ROOT = Path(__file__).resolve().parent.parent


class Fake:
    """A command that notes what it was given, and then does `act`."""

    def __init__(self) -> None:
        self.checked: list[Config] = []
        self.ran: list[Config] = []
        self.options: list[Any] = []
        self.argv: list[list[str]] = []
        self.act: Callable[[Config], object] = lambda config: None

    def check(self, config: Config, options: object) -> None:
        self.checked.append(config)

    def run(self, config: Config, options: object) -> None:
        assert not HydraConfig.initialized(), "lightning would relaunch with Hydra's arguments"
        self.ran.append(config)
        self.options.append(options)
        self.argv.append(list(sys.argv))
        os.environ["LOCAL_RANK"] = "0"  # as lightning leaves it behind
        self.act(config)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """Every command is the fake; the working directory is empty."""
    command = Fake()
    monkeypatch.setattr(jobs, "command_module", lambda name: command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["/bin/txl", "of", "the", "caller"])
    return command


def tree() -> list[str]:
    return sorted(path.as_posix() for path in Path().rglob("*"))


def test_help_names_commands_groups_and_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n")
    assert main(["--help", "--config-dir", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    memories, experiments = ", ".join(registry.memories.names()), "lm1b_large, mine, modern_base"
    for word in (*COMMANDS, *FLAGS, *map(str, exit_codes.MEANINGS), memories, experiments):
        assert word in out


def test_alone_it_prints_the_help_and_counts_as_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    helped = capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr() == ("", helped)


LISTED = {
    "top_k=0": {"generate"},
    "ckpt=null": {"eval", "generate", "export", "analyze", "convert"},
    "dry_run=false": {"fit"},
    "prepare|inspect": {"data"},
    "analyze ANALYSIS KEY": {"analyze"},
    "segments=null": {"analyze"},
    "seed=1111": {"fit", "demo", "analyze", "compare", "bench"},
    "seed=": {"fit", "generate", "demo", "analyze", "compare", "bench"},
    "experiment=...": {"fit", "data", "strategies", "demo", "analyze", "compare", "bench"},
    "debug=...": {"fit", "demo", "compare"},
    "logger=[...]": {"fit", "demo", "compare"},
    "number of layers": set(COMMANDS) - {"data", "export", "import", "convert", "reproduce", "report"},
    "model.n_layer=": set(COMMANDS) - {"data", "export", "import", "convert", "reproduce", "report"},
    "model.n_layer=4": {"fit", "demo", "strategies", "analyze", "compare", "bench"},
    "model.pre_norm=true": {"fit", "demo", "strategies", "analyze", "compare", "bench"},
    "model.dropout=0.0": {"fit", "demo", "compare", "bench"},
    "memory.mem_len=": set(COMMANDS) - {"data", "import", "convert", "reproduce", "report"},
    "memory.mem_len=64": {"fit", "demo", "strategies", "analyze", "compare", "bench"},
    "data.path=": {"fit", "eval", "data", "import", "demo", "analyze", "compare", "bench"},
    "data.path=null": {"fit", "data", "import", "demo", "analyze", "compare", "bench"},
    "{file, line, blank_line}": {"fit", "eval", "data", "import", "demo", "analyze", "compare", "bench"},
    "data.segment_len=": {"fit", "eval", "generate", "export", "demo", "analyze", "compare", "bench"},
    "data.segment_len=64": {"fit", "demo", "analyze", "compare", "bench"},
    "data.batch_size=": {"fit", "eval", "demo", "analyze", "compare", "bench"},
    "eval.segment_len=": {"fit", "eval", "import", "demo", "analyze", "compare", "bench"},
    "optim.lr=0.002": {"fit", "demo", "compare", "bench"},
    "optim.clip=1.0": {"fit", "demo", "compare", "bench"},
    "optim.warmup_steps=50": {"fit", "demo", "compare", "bench"},
    "{cosine, inverse_sqrt, plateau, constant}": {"fit", "demo", "compare", "bench"},
    "speed_from=null": {"reproduce"},
    "trainer.max_steps=1700": {"fit", "demo", "compare"},
    "logger.tensorboard=true": {"fit", "demo", "compare"},
    "{train, valid, test}": {"eval", "analyze"},
    "trainer.precision=": {"fit", "eval", "demo", "compare", "bench"},
    "trainer.accelerator=": {"fit", "eval", "generate", "demo", "analyze", "compare", "bench"},
    "{auto, cpu, cuda, gpu, mps}": {"fit", "eval", "generate", "demo", "analyze", "compare", "bench"},
    "callbacks.progress_bar.refresh_per_second=": {"fit", "eval", "demo"},
    "callbacks.progress_bar.refresh_per_second=4.0": {"fit", "demo"},
    "keys without a value stay as the checkpoint has them": {"eval", "generate", "export", "convert"},
    "trust=": {"fit", "eval", "generate", "analyze", "export", "convert"},
    "callbacks.text_samples.tokens=128": {"fit", "demo"},
}
"""What the help says, and of which commands."""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_lists_every_key_it_reads(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "-h"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith(f"Values shown: those of a plain txl {command}")
    words = " ".join(out.split())  # choices may go on in the next line
    assert {word for word in LISTED if word in words} == {
        word for word, commands in LISTED.items() if command in commands
    }


def test_help_shows_what_a_plain_fit_runs_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["fit", "--help"]) == 0
    shown = dict(re.findall(r"^  ([\w.]+)=(\S*) ", capsys.readouterr().out, flags=re.MULTILINE))
    for section, schema in SECTIONS.items():
        values = getattr(load(), section).to_dict()
        wanted = {f"{section}.{name}": yaml_text(values[name]) for name in names(schema)}
        assert {key: value for key, value in shown.items() if key.startswith(f"{section}.")} == wanted


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "txl-lightning",
        "torch",
        "lightning",
        "python",
    ]


def test_help_and_refusals_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from txl_lightning.cli import main; main(['--help']); main(['--version']); main(['fti']); "
        "main(['fit', 'model.n_layr=1']); main(['fit', 'model=smal']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 3


def test_cfg_job_prints_what_would_run(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--cfg", "job", "memory=none", "run_dir=it's ${x}"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values == {**load(["memory=none", "run_dir=it's ${x}"]).to_dict(), "resume": None, "trust": False}
    assert main(["fit", "-c", "job", "-p", "optim.lr", "optim.lr=0.125"]) == 0
    assert capsys.readouterr().out == "0.125\n"
    assert main(["fit", "--cfg=hydra", "--package", "hydra.job.name"]) == 0
    assert capsys.readouterr().out == "fit\n"
    assert main(["fit", "--info", "searchpath"]) == 0
    assert "pkg://txl_lightning.configs" in capsys.readouterr().out
    assert (fake.checked, fake.ran, tree()) == ([], [], [])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("txl ", set(COMMANDS)),
        ("txl ge", {"generate"}),
        ("txl fit memory=", {f"memory={name}" for name in registry.memories.names()}),
        ("txl generate temp", {"temperature="}),
        ("txl fit -m memory=none trainer.max_s", {"trainer.max_steps=", "trainer.max_skipped_steps="}),
        ("txl nope x", set()),
    ],
)
def test_completion(
    line: str, words: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert set(capsys.readouterr().out.split()) == words
    assert os.environ["COMP_LINE"] == line


def test_a_run_gets_a_folder_of_its_own(fake: Fake, tmp_path: Path) -> None:
    fake.act = lambda config: Path(config.run_dir or "", "config.yaml").touch()
    assert [main(["fit", "memory=none"]) for _ in range(3)] == [0, 0, 0]
    folders = [Path(config.run_dir or "") for config in fake.ran]
    assert len(set(folders)) == 3 and {folder.parent for folder in folders} == {tmp_path / "runs" / "default"}
    assert len(tree()) == 2 + 3 + 3  # nothing of Hydra's beside them
    assert [config.run_dir for config in fake.checked] == [None] * 3


def test_a_typed_folder_is_taken_letter_by_letter(fake: Fake, tmp_path: Path) -> None:
    name = "a b='c' ${x}, \\"
    assert main(["fit", f"run_dir={name}"]) == 0
    assert fake.ran[0].run_dir == str(tmp_path / name)
    assert tree() == []  # nothing was written into it, so it does not stay
    (tmp_path / "there").mkdir()
    assert main(["fit", "run_dir=there"]) == 0
    assert tree() == ["there"]


@pytest.mark.parametrize(
    "args", [["fit", "dry_run=true"], ["strategies"], ["data", "prepare"], ["strategies", "-m", "memory=none,cache"]]
)
def test_other_commands_make_no_folder(args: list[str], fake: Fake) -> None:
    assert main(args) == 0
    assert tree() == []
    assert {config.run_dir for config in fake.ran} == {None}


def test_positional_action_of_data(fake: Fake) -> None:
    assert main(["data", "prepare", "data=text", "data.path=x"]) == main(["data", "data=text", "data.path=x"]) == 0
    assert [options.action for options in fake.options] == ["prepare", "inspect"]


def relaunched(fake: Fake, number: int, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The configuration that rank 1 of a job gets from the command line it is started with."""
    program, *args = fake.argv[number]
    assert program == "/bin/txl"
    fake.act, before = lambda config: None, tree()
    monkeypatch.setenv("LOCAL_RANK", "1")
    checked = len(fake.checked)
    assert main(args) == 0
    assert len(fake.checked) == checked and tree() == before
    monkeypatch.delenv("LOCAL_RANK")
    return fake.ran[-1]


NASTY = ["data=text", "data.path=a b='c' ${x}, \\", "data.cache_dir=10e2"]


def test_ranks_are_relaunched_with_the_same_configuration(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [*NASTY, "trainer.devices=2", "strategy=ddp", "callbacks=[throughput]", "++memory.mem_len=7"]
    assert main(["fit", *typed]) == 0
    assert sys.argv == ["/bin/txl", "of", "the", "caller"]
    assert fake.ran[0].data.path == "a b='c' ${x}, \\"  # type: ignore[attr-defined]
    assert relaunched(fake, 0, monkeypatch) == fake.ran[0]


def test_ranks_are_relaunched_with_the_files_they_need(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my configs" / "experiment").mkdir(parents=True)
    (tmp_path / "my configs" / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 5\n")
    assert main(["fit", "--config-dir", "my configs", "experiment=mine"]) == 0
    assert fake.ran[0].seed == 5
    assert relaunched(fake, 0, monkeypatch) == fake.ran[0]


def test_each_job_of_a_sweep_is_relaunched_as_itself(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.act = lambda config: Path(config.run_dir or "", "config.yaml").touch()
    assert main(["fit", "-m", *NASTY, "memory=none,cache", "seed=1,2"]) == 0
    assert [(config.memory.name, config.seed) for config in fake.ran] == [
        ("none", 1),
        ("none", 2),
        ("cache", 1),
        ("cache", 2),
    ]
    sweep = Path(fake.ran[0].run_dir or "").parent
    assert sweep.parent == tmp_path / "runs" / "default" and sweep.name.startswith("multirun_")
    assert [config.run_dir for config in fake.ran] == [str(sweep / str(number)) for number in range(4)]
    for number in (1, 2):
        assert relaunched(fake, number, monkeypatch) == fake.ran[number]


def test_a_sweep_into_a_typed_folder_checks_each_jobs_own(fake: Fake, tmp_path: Path) -> None:
    assert main(["fit", "-m", "seed=1,2", "run_dir=my sweep"]) == 0
    assert [config.run_dir for config in fake.checked] == ["my sweep/0", "my sweep/1"]
    assert [config.run_dir for config in fake.ran] == [str(tmp_path / "my sweep" / name) for name in ("0", "1")]


def test_a_sweep_checks_every_job_before_the_first_runs(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "-m", "trainer.max_steps=500,0"]) == 2
    assert capsys.readouterr().err.startswith("error: trainer.max_steps=0: must be >= 1; ")
    assert (fake.ran, tree()) == ([], [])


def fail_on(number: int, error: BaseException) -> Callable[[Config], None]:
    def act(config: Config) -> None:
        if config.seed == number:
            raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "ran"),
    [
        (RuntimeError("boom"), 1, [1, 2, 3]),
        (SystemExit(75), 75, [1, 2]),
        (KeyboardInterrupt(), 130, [1, 2]),
        (SystemExit(0), 0, [1, 2, 3]),
        (SystemExit(None), 0, [1, 2, 3]),
    ],
)
def test_exit_codes_of_jobs(
    error: BaseException, code: int, ran: list[int], fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.act = fail_on(2, error)
    assert main(["fit", "-m", "seed=1,2,3"]) == code
    assert [config.seed for config in fake.ran] == ran
    assert main(["fit", "seed=2"]) == code
    assert ("RuntimeError: boom" in capsys.readouterr().err) == (code == 1)


def test_a_job_that_fails_in_another_process_counts(fake: Fake) -> None:
    def act(config: Config) -> None:
        jobs._codes.clear()  # a process that a launcher plug-in started did not start Hydra
        raise RuntimeError("boom")

    fake.act = act
    assert main(["strategies"]) == 1


def test_no_code_promises_to_go_on() -> None:
    assert exit_codes.MEANINGS[75].startswith("stopped by SIGTERM or SIGUSR1 after saving")


def test_codes_are_ranked() -> None:
    assert exit_codes.worst([]) == exit_codes.worst([0, 0]) == 0
    assert exit_codes.worst([0, 2]) == 2
    assert exit_codes.worst([2, 1, 0]) == 1
    assert exit_codes.worst([1, 75]) == 75
    assert exit_codes.worst([1, 130]) == 130


def test_jobs_leave_the_process_as_it_was(fake: Fake) -> None:
    before = dict(os.environ)
    assert main(["fit", "-m", "seed=1,2"]) == 0
    assert dict(os.environ) == before
    assert not GlobalHydra.instance().is_initialized() and not HydraConfig.initialized()
    assert load(["memory=none"]).memory.name == "none"


def test_a_refusal_while_running_is_one_line(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.act = fail_on(1111, ConfigError("data.path", "x", "went away", "bring it back"))
    assert main(["fit", "trainer.max_steps=300"]) == 2
    assert capsys.readouterr().err == "error: data.path=x: went away; bring it back\n"


def test_txl_debug_shows_where(fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_DEBUG", "1")
    assert main(["fit", "model.n_layer=0"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: model.n_layer=0: must be >= 1")


def test_a_checkpoint_is_where_evaluation_starts(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    from txl_lightning import checkpoints

    stored = load(["memory.mem_len=9", "seed=4", "trainer.devices=2", "strategy=ddp", "run_dir=/its own"]).to_dict()
    read: list[str] = []

    def read_config(path: str, *, key: str) -> dict[str, Any]:
        assert key == "ckpt"
        read.append(path)
        return stored

    monkeypatch.setattr(checkpoints, "read_config", read_config)
    assert main(["eval", "ckpt=it's=here ${x}", "model.clamp_len=5", "-m", "memory=none,cache"]) == 0
    assert read == ["it's=here ${x}"]  # once for all checks and jobs
    assert [config.memory.to_dict() for config in fake.ran] == [
        {"name": "none", "reset": "epoch", "offload": "none"},
        registry.memories.get("cache").config().to_dict(),
    ]
    assert {(config.seed, config.model.clamp_len, config.trainer.devices) for config in fake.ran} == {(4, 5, 2)}
    assert {options.ckpt for options in fake.options} == {"it's=here ${x}"}
    assert relaunched(fake, 1, monkeypatch) == fake.ran[1]
    assert tree() == []


def test_ranks_started_one_by_one_need_a_folder(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = ["fit", "trainer.devices=2", "strategy=ddp"]
    assert main(args) == 2
    said = "error: run_dir=null: ranks that are started one by one need one folder; set run_dir=PATH\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "1")
    assert main([*args, "run_dir=here"]) == 0
    assert fake.ran[0].run_dir == os.path.abspath("here") and tree() == []
    assert main(["fit", "trainer.devices=1"]) == 0


def test_strategies_shows_every_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    assert main(["strategies", "memory.mem_len=100", f"out={out}"]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert {"none", "cache", "mix"} <= set(rows)
    assert rows["cache"]["keys"]["mem_len"] == 100 and rows["cache"]["keys"]["layers"] == "all"
    assert rows["cache"]["paper"] == "Dai et al. 2019, arXiv:1901.02860"
    # 4 layers of 100 rows of width 128 in float32, and a counter of 8 bytes each
    assert rows["cache"]["state_bytes_per_lane"] == 4 * (100 * 128 * 4 + 8)
    assert rows["none"]["state_bytes_per_lane"] == 0
    printed = capsys.readouterr().out
    assert "arXiv:1901.02860" in printed and "200 KiB" in printed
    assert "layers=all" in printed and "parts=[{name:" in printed  # as they are typed


TINY = [
    "data=text",
    "trainer.max_steps=2",
    "trainer.val_check_interval=1.0",
    "trainer.num_sanity_val_steps=0",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "data.batch_size=2",
    "data.segment_len=8",
    "callbacks=none",
    "logger=none",
    "model.n_layer=1",
    "model.d_model=16",
    "model.n_head=1",
    "model.d_head=8",
    "model.d_inner=16",
    "trainer.devices=2",
    "strategy=ddp",
]


@pytest.mark.distributed
@pytest.mark.parametrize("sweep", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_train_from_the_command_line(sweep: bool, tmp_path: Path) -> None:
    corpus = tmp_path / "a b='c'.txt"
    corpus.write_text("to read a text segment by segment, carrying a memory along. " * 20)
    args = [*TINY, f"data.path={corpus}", *(["-m", "memory=none,cache"] if sweep else ["run_dir=my run='x'"])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "txl_lightning", "fit", *args],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("GLOBAL_RANK: 1, MEMBER: 2/2") == (2 if sweep else 1)
    folders = sorted(path.parent for path in tmp_path.rglob("result.json"))
    found = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    assert [values["run_dir"] for values in found] == [str(folder) for folder in folders]
    assert [values["memory"]["name"] for values in found] == (["none", "cache"] if sweep else ["cache"])
    assert sorted({path.name for path in tmp_path.iterdir()}) == sorted(
        {corpus.name, "runs" if sweep else "my run='x'"}
    )


SCRIPT = """
import sys
from types import ModuleType
import lightning.pytorch as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
from txl_lightning.cli import main
from txl_lightning.process import leave_process_group

def run(config, options):
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(BoringModel())
    with open(f"{config.run_dir}/rank{trainer.global_rank}", "w") as file:
        file.write(f"{config.memory.name} {config.seed} {config.data.path}")

fit = ModuleType("txl_lightning.commands.fit")
fit.check, fit.run = lambda config, options: None, run
sys.modules["txl_lightning.commands.fit"] = fit
sys.exit(main())
"""


@pytest.mark.distributed
def test_a_script_relaunches_its_ranks_in_every_job_of_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "my txl.py").write_text(SCRIPT)
    args = ["fit", "-m", "data=text", "data.path=it's = 'x'", "seed=3,4", "memory=none"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "my txl.py", *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    sweep = next((tmp_path / "runs" / "default").iterdir())
    for number in (0, 1):
        notes = {path.name: path.read_text() for path in (sweep / str(number)).iterdir()}
        assert notes == {f"rank{rank}": f"none {3 + number} it's = 'x'" for rank in (0, 1)}


def test_a_process_leaves_its_group_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when Python is torn down around it."""
    asked: list[object] = []
    monkeypatch.setattr("txl_lightning.jobs.atexit.register", asked.append)
    assert main(["strategies"]) == 0
    assert asked == [leave_process_group]
