"""`txl demo`: train the default experiment, score it with and without its memory, and let it write."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from txl_lightning.build import document_end
from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands import fit as fit_command
from txl_lightning.commands.evaluate import progress_bar
from txl_lightning.commands.generate import vocab_of
from txl_lightning.commands.output import write_out
from txl_lightning.commands.talk import show
from txl_lightning.config import Config, ConfigError, Options
from txl_lightning.data.store import sample
from txl_lightning.evaluation.cached import Evaluation, evaluate
from txl_lightning.generation import Session
from txl_lightning.sampling import SamplingRule
from txl_lightning.training.stopping import GracefulStop

PROMPT, PROMPT_TOKENS = "def ", 8
SAMPLE_TOKENS = 300


def check(config: Config, options: Options) -> None:
    """As for `txl fit`; the demo also needs a memory to switch off. Raises ConfigError."""
    fit_command.check(config, options)
    if config.dry_run:
        raise ConfigError("dry_run", "true", "the demo trains", "use txl fit dry_run=true")
    if not hasattr(config.memory, "mem_len"):
        raise ConfigError("memory", config.memory.name, "the demo compares with memory.mem_len=0", "use memory=cache")


def run(config: Config, options: Options) -> None:
    """Train, evaluate the test split twice, sample, and say where to look."""
    stop = fit_command.graceful_stop(config)
    fitted = fit_command.fit(config, stop=stop)
    fit_command.show_result(fitted)
    if stop.exit_code:
        sys.exit(stop.exit_code)
    run_dir = str(fitted.run_dir)
    without = replace(config, memory=replace(config.memory, mem_len=0))  # type: ignore[call-arg]
    with stop.listening():
        found = {name: _score(c, run_dir, stop) for name, c in (("with memory", config), ("without memory", without))}
    _show(found)
    write_out(f"{run_dir}/demo.json", {name: score.to_dict() for name, score in found.items()})
    _sample(config, run_dir)
    print(f"\ntrained at {fitted.result['tokens_per_second']:,.0f} tokens/s; curves: tensorboard --logdir {run_dir!r}")


def _score(config: Config, run_dir: str, stop: GracefulStop) -> Evaluation:
    model = load_checkpoint(run_dir, config)
    return evaluate(config, model, split="test", callbacks=[*progress_bar(config), stop])


def _show(found: dict[str, Evaluation]) -> None:
    first = next(iter(found.values()))
    table = Table(title=f"test split, every one of {first.n_target:,} targets scored")
    for heading in ("same weights", *first.scores, "seconds"):
        table.add_column(heading)
    for name, score in found.items():
        table.add_row(name, *(f"{value:.4f}" for value in score.scores.values()), f"{score.seconds:.1f}")
    Console().print(table)


def _sample(config: Config, run_dir: str) -> None:
    vocab = vocab_of(run_dir)
    # a prompt of Python source fits bytes; any other text begins with its own first tokens
    prompt = vocab.encode(PROMPT) if vocab.unit == "byte" else sample(config.data, n_token=PROMPT_TOKENS)[1]
    print(f"\n{SAMPLE_TOKENS} sampled {vocab.unit}s:\n\n{vocab.decode(prompt)}", end="")
    model = load_checkpoint(run_dir, config)
    session = Session(model, segment_len=config.data.segment_len, separator=document_end(vocab))
    session.feed(prompt.tolist())
    generator = torch.Generator().manual_seed(config.seed)
    show(vocab.stream(session.sample(SAMPLE_TOKENS, rule=SamplingRule(temperature=0.8), generator=generator)))
