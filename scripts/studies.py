"""Two small studies on the CPU, with several seeds; the tables in docs/benchmarks.md come from here.

    python scripts/studies.py positions      recurrence on and off x positions, evaluated at several memories
    python scripts/studies.py fragmentation  lines in random order: where in the segment does recurrence help?

Results go to runs/studies/NAME.json as they come; a run that is there already is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from txl_lightning import TransformerXL, load_checkpoint
from txl_lightning.commands.fit import fit
from txl_lightning.config import POSITIONS, Config, load
from txl_lightning.evaluation.cached import evaluate
from txl_lightning.training.datamodule import TextDataModule, one_by_one

FOLDER = Path("runs/studies")
SEEDS = (1, 2, 3)
SEGMENT, SHORT = 64, 32  # tokens, of the second and the first study
KINDS = ("transformer_xl", "shaw", "rotary", "absolute")
MEMORIES = (0, 32, 64, 128)  # at evaluation
SMALLER = ["model.n_layer=3", "model.d_model=96", "model.n_head=3", "model.d_inner=384"]
BUCKETS = ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64))  # positions in the segment
COMMON = ["callbacks=none", "logger=none", "trainer.accelerator=cpu", "trainer.precision=32-true", "eval.batch_size=64"]


def train(name: str, *overrides: str) -> tuple[Config, TransformerXL]:
    """The model of a run of this name, trained unless it is there already."""
    run_dir = FOLDER / "runs" / name
    config = load([*COMMON, *overrides, f"run_dir={run_dir}"])
    if not (run_dir / "result.json").exists():
        fit(config)
    return config, load_checkpoint(str(run_dir))


def bits(config: Config, path: str, *, mem_len: int) -> float:
    """Test bits per byte with another memory length."""
    memory = dataclasses.replace(config.memory, mem_len=mem_len)  # type: ignore[call-arg]
    other = dataclasses.replace(config, memory=memory)
    return evaluate(other, load_checkpoint(path, other), split="test").scores["bits_per_byte"]


def study_positions(steps: int) -> None:
    """Each kind of position trained with and without recurrence, evaluated at growing memories."""
    results = Results("positions")
    runs = [(kind, mem_len) for kind in KINDS for mem_len in ((SHORT, 0) if POSITIONS[kind] else (0,))]
    sizes = [*SMALLER, f"trainer.max_steps={steps}", f"data.segment_len={SHORT}", "data.batch_size=32"]
    for seed in SEEDS:
        for kind, mem_len in runs:
            name = f"{kind}-{mem_len}-{seed}"
            if name not in results.found:
                rows = ["model.max_distance=160"] if kind == "shaw" else []
                keys = [f"model.position={kind}", *rows, f"memory.mem_len={mem_len}", f"seed={seed}"]
                config, _ = train(name, *sizes, *keys)
                lengths = MEMORIES if POSITIONS[kind] else (0,)
                path = str(FOLDER / "runs" / name)
                results.add(name, {str(m): bits(config, path, mem_len=m) for m in lengths})
    print("| position | trained with memory | " + " | ".join(f"evaluated with {m}" for m in MEMORIES) + " |")
    for kind, mem_len in runs:
        found = [results.found[f"{kind}-{mem_len}-{seed}"] for seed in SEEDS]
        cells = [spread([run[str(m)] for run in found]) if str(m) in found[0] else "refused" for m in MEMORIES]
        print(f"| {kind} | {mem_len} | " + " | ".join(cells) + " |")


def study_fragmentation(steps: int) -> None:
    """Lines of Python in random order: no line says anything about the one before, yet segments cut lines in two."""
    results, corpus = Results("fragmentation"), shuffled_lines()
    for seed in SEEDS:
        for mem_len in (SEGMENT, 0):
            name = f"lines-{mem_len}-{seed}"
            if name in results.found:
                continue
            data = ["data=text", *(f"data.{split}={path}" for split, path in corpus.items())]
            keys = [f"memory.mem_len={mem_len}", f"seed={seed}", f"trainer.max_steps={steps}"]
            config, model = train(name, *data, *keys, f"data.segment_len={SEGMENT}")
            results.add(name, {"by_position": loss_by_position(config, model)})
    print("| position in the segment | with recurrence | without | gain |")
    for low, high in (*BUCKETS, (0, SEGMENT)):
        with_memory, without = (
            [statistics.fmean(results.found[f"lines-{m}-{seed}"]["by_position"][low:high]) for seed in SEEDS]
            for m in (SEGMENT, 0)
        )
        gains = [b - a for a, b in zip(with_memory, without, strict=True)]
        print(f"| {low + 1} to {high} | {spread(with_memory)} | {spread(without)} | {spread(gains)} |")


@torch.inference_mode()
def loss_by_position(config: Config, model: TransformerXL) -> list[float]:
    """Mean test loss (nats per byte) of each of the T positions of a segment, the very first segment left out."""
    loader = TextDataModule(config).test_dataloader()
    state = model.init_state(config.eval_batch_size, form="projected")
    total, count = torch.zeros(SEGMENT, dtype=torch.float64), torch.zeros(SEGMENT, dtype=torch.float64)
    for batch in one_by_one(loader):
        out = model(batch.tokens_BT, state, batch.segment, batch.targets_BT)
        state = out.state
        if batch.position.segment > 0:
            assert out.losses_BT is not None
            total += out.losses_BT.double().sum(0)
            count += batch.segment.mask(SEGMENT).sum(0)
    return (total / count).tolist()


def shuffled_lines() -> dict[str, Path]:
    """Python's own sources as lines of 20 characters and more, each once, in random order; one file per split."""
    root, lines = Path(sysconfig.get_path("stdlib")), set()
    for path in sorted(root.glob("*.py")):
        lines |= {line for line in path.read_text("utf-8", "ignore").splitlines() if len(line.strip()) >= 20}
    ordered = sorted(lines)
    random.Random(0).shuffle(ordered)
    cut = [0, int(0.9 * len(ordered)), int(0.95 * len(ordered)), len(ordered)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    paths = {split: (FOLDER / f"lines.{split}.txt").resolve() for split in ("train", "valid", "test")}
    for (_, path), start, end in zip(paths.items(), cut, cut[1:], strict=False):
        path.write_text("\n".join(ordered[start:end]) + "\n", "utf-8")
    return paths


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


class Results:
    """What has been found so far, kept in a JSON file."""

    def __init__(self, name: str) -> None:
        self.path = FOLDER / f"{name}.json"
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, name: str, value: Any) -> None:
        """Remember one run's figures."""
        self.found[name] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1))
        print(name, value, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("positions", "fragmentation"))
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    given = parser.parse_args()
    {"positions": study_positions, "fragmentation": study_fragmentation}[given.study](given.steps)
