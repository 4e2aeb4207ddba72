"""`txl analyze sweep`: lengths at evaluation, chosen on valid and reported on test."""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.analyses.common import check_files, check_text, give, separator_of
from txl_lightning.commands.analyses.plot import Panel
from txl_lightning.config import Config
from txl_lightning.data.store import prepare
from txl_lightning.evaluation.sweep import Try, combinations, measure_sweep
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import AnalyzeOptions
from txl_lightning.training.trainer import device_kind


def check(config: Config, options: AnalyzeOptions) -> None:
    """There is something to choose from, which the model can be, and both splits. Raises ConfigError."""
    assert options.ckpt is not None
    if not (options.mem_lens or options.segment_lens or options.clamp_lens):
        cure = "for example mem_lens=[64,128,256], with segment_lens and clamp_lens beside it"
        raise options.refuse("mem_lens", "there is nothing to choose from", cure)
    if options.mem_lens and not hasattr(config.memory, "mem_len"):
        raise options.refuse("mem_lens", f"memory={config.memory.name} has no mem_len", "leave it out")
    for one in _tried(config, options):
        load_checkpoint(options.ckpt, one)
    check_files(options)
    for split in ("valid", "test"):
        check_text(config, replace(options, split=split), ckpt=options.ckpt)


def _tried(config: Config, options: AnalyzeOptions) -> list[Config]:
    made = {"memory.mem_len": "mem_lens", "eval.segment_len": "segment_lens", "model.clamp_len": "clamp_lens"}
    with options.said_of(made):
        return combinations(
            config, mem_lens=options.mem_lens, segment_lens=options.segment_lens, clamp_lens=options.clamp_lens
        )


def run(config: Config, options: AnalyzeOptions) -> None:
    """Try them all on valid, then the best one on test."""

    def load(wanted: Config) -> TransformerXL:
        assert options.ckpt is not None
        return load_checkpoint(options.ckpt, wanted).to(device_kind(wanted)).eval()

    data = prepare(config.data, training=False)
    valid, test = (data.require(split)[: options.tokens] for split in ("valid", "test"))
    found = measure_sweep(
        config,
        _tried(config, options),
        load,
        valid=valid,
        test=test,
        separator=separator_of(data),
        data_fingerprint=data.meta.fingerprint,
    )
    table = Table(
        title="nats per token on valid, best first",
        caption=f"test: {found.test_loss:.4f} with the first row, {found.test_loss_as_trained:.4f} as trained",
    )
    for name in ("memory.mem_len", "eval.segment_len", "model.clamp_len", "loss"):
        table.add_column(name, justify="right")
    for one in sorted(found.tries, key=lambda one: one.loss):
        table.add_row(_text(one.mem_len), str(one.segment_len), str(one.clamp_len), f"{one.loss:.4f}")
    give(options, table, found.to_dict(), [_panel(found.tries)])


def _panel(tries: list[Try]) -> Panel:
    """Loss against the memory's length, a curve for each of the rest; against the segment's where memory has none."""
    by_memory = len({one.mem_len for one in tries}) > 1
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for one in tries:
        rest = f"segment_len={one.segment_len}, " if by_memory else ""
        x, y = curves.setdefault(f"{rest}clamp_len={one.clamp_len}", ([], []))
        x.append(float((one.mem_len or 0) if by_memory else one.segment_len))
        y.append(one.loss)
    return Panel(x="mem_len" if by_memory else "segment_len", y="nats per token on valid", curves=curves)


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
