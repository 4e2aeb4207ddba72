"""Time per token of cached evaluation and of decoding, ours and Hugging Face's in one run, on one CPU thread.

    python scripts/cached_speed.py                      ours alone
    python scripts/cached_speed.py --against FOLDER     beside transformers 4.57.6, installed with pip --target FOLDER

6 layers, d 256, 8 heads, feed-forward 1,024, 204 symbols, batch 1, float32, random weights and tokens, memory full. The
two take turns, so that a busy machine is equally busy for both; times are the medians of the thread's CPU time.
transformers' own code has a slip that stops it (`type_as(dtype=...)`), which is put right in the loaded module.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from txl_lightning import TransformerXL
from txl_lightning.config import load
from txl_lightning.generation import Session
from txl_lightning.model.tables import Tables

SIZES = {"n_layer": 6, "d_model": 256, "n_head": 8, "d_head": 32, "d_inner": 1024, "vocab_size": 204}
SEGMENT = 128


def tokens(count: int) -> torch.Tensor:
    """(1, count) random tokens."""
    return torch.randint(0, SIZES["vocab_size"], (1, count))


def ours(length: int) -> dict[str, Callable[[], Any]]:
    """One evaluation segment, and one decoded token."""
    keys = [f"model.{name}={value}" for name, value in SIZES.items()]
    keys += ["memory=cache", f"memory.mem_len={length}", f"data.segment_len={SEGMENT}", "model.pre_norm=false"]
    model, tables = TransformerXL(load(keys)).eval(), Tables()
    state = model.init_state(1, form="projected")

    def evaluate() -> None:
        nonlocal state
        state = model(tokens(SEGMENT), state, None, tokens(SEGMENT), tables=tables).state

    session = Session(model)
    for _ in range(-(-length // SEGMENT)):
        evaluate()
        session.feed(tokens(SEGMENT)[0].tolist())
    return {"evaluation": evaluate, "decoding": lambda: session.feed(tokens(1)[0].tolist())}


def theirs(length: int, folder: str) -> dict[str, Callable[[], Any]]:
    """The same of Hugging Face's TransfoXLLMHeadModel, whose memory is full of zeros from the start."""
    sys.path.append(folder)
    package = "transformers.models.deprecated.transfo_xl"
    module: Any = importlib.import_module(f"{package}.modeling_transfo_xl")
    source = re.sub(r"\.type_as\(\s*dtype=", ".to(dtype=", inspect.getsource(module))
    exec(compile(source, str(module.__file__), "exec"), module.__dict__)
    config = importlib.import_module(f"{package}.configuration_transfo_xl").TransfoXLConfig(
        **{**SIZES, "d_embed": SIZES["d_model"]},
        cutoffs=[],
        div_val=1,
        mem_len=length,
        clamp_len=-1,
        same_length=False,
        proj_share_all_but_first=False,
        tie_word_embeddings=False,
    )
    model = module.TransfoXLLMHeadModel(config).eval()
    mems = {name: model.init_mems(1) for name in ("evaluation", "decoding")}

    def read(name: str, count: int) -> None:
        mems[name] = model(tokens(count), mems=mems[name]).mems

    return {"evaluation": lambda: read("evaluation", SEGMENT), "decoding": lambda: read("decoding", 1)}


@torch.inference_mode()
def measure(parts: dict[str, dict[str, Callable[[], Any]]], *, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds per token by code and task."""
    spent: dict[str, dict[str, list[float]]] = {name: {task: [] for task in tasks} for name, tasks in parts.items()}
    for _ in range(rounds):
        for name, tasks in parts.items():
            for task, run in tasks.items():
                for _ in range(SEGMENT // 4 if name == "ours" and task == "decoding" else 1):
                    start = time.thread_time()
                    run()
                    spent[name][task].append(time.thread_time() - start)
    found = {}
    for name, tasks_spent in spent.items():
        evaluation = statistics.median(tasks_spent["evaluation"]) / SEGMENT
        decoding = tasks_spent["decoding"]
        # a mean for ours: one token of a segment pays for writing memory
        token = statistics.fmean(decoding) if name == "ours" else statistics.median(decoding)
        found[name] = {"evaluation": 1e3 * evaluation, "decoding": 1e3 * token}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="folder with transformers 4.57.6")
    parser.add_argument("--length", type=int, default=3800, help="tokens of memory")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = {"ours": ours(options.length)}
    if options.against:
        parts["huggingface"] = theirs(options.length, options.against)
    found: dict[str, Any] = measure(parts, rounds=options.rounds)
    if options.against:
        found["ratio"] = {task: found["huggingface"][task] / found["ours"][task] for task in found["ours"]}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
