"""`txl report`: one self-contained HTML page about runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from txl_lightning.checkpoints.manifest import replace_text
from txl_lightning.commands.compare import PLOT
from txl_lightning.commands.output import HTML, check_out
from txl_lightning.config import Config, ConfigError
from txl_lightning.options import ReportOptions
from txl_lightning.report.page import page
from txl_lightning.report.record import Record, read, read_config
from txl_lightning.training.run_folder import CONFIG, runs_under


def check(config: Config, options: ReportOptions) -> None:
    """Everything about a report that can be refused. Writes nothing; raises ConfigError."""
    if not options.folders:
        raise options.refuse("runs", "is required", "give run folders: txl report runs=[runs/a,runs/b] out=report.html")
    if options.out is None:
        raise ConfigError("out", None, "is required", "name the page, for example out=report.html")
    check_out(options.out, begins=HTML)
    for folder in run_folders(options):
        read_config(folder)


def run(config: Config, options: ReportOptions) -> None:
    """Read the runs and write the page."""
    assert options.out is not None
    folders = run_folders(options)
    records = [read(folder, name=name) for folder, name in zip(folders, short_names(folders), strict=True)]
    comparisons = [Path(os.path.expanduser(given)) / PLOT for given in options.folders]
    pictures = {f"The comparison {path.parent.name}": path.read_bytes() for path in comparisons if path.is_file()}
    path = Path(os.path.expanduser(options.out))
    replace_text(path, page(records, title=options.title or title_of(records), pictures=pictures))
    runs = "1 run" if len(records) == 1 else f"{len(records)} runs"
    print(f"{runs} in {options.out}, {path.stat().st_size / 1024:,.0f} KiB")


def run_folders(options: ReportOptions) -> list[Path]:
    """The folders given, each once; of one that holds no run itself, those of the runs below it. Raises ConfigError."""
    found: dict[Path, Path] = {}  # by where they really are
    for given in options.folders:
        folder = Path(os.path.expanduser(given))
        inner = [folder] if (folder / CONFIG).is_file() else sorted(runs_under(str(folder)))
        if not inner:
            rule = "holds no run" if folder.is_dir() else "no such folder"
            raise ConfigError("runs", given, rule, "give the folder of a run, of several, or of a comparison")
        for path in inner:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def short_names(folders: Sequence[Path]) -> list[str]:
    """As much of each path as tells it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    depth = next(n for n in range(1, max(map(len, parts)) + 1) if len({own[-n:] for own in parts}) == len(parts))
    return ["/".join(own[-depth:]) for own in parts]


def title_of(records: Sequence[Record]) -> str:
    """What the runs are of."""
    first = records[0]
    return (
        f"{first.config.experiment}: {first.name}"
        if len(records) == 1
        else f"{len(records)} runs of {first.config.experiment}"
    )
