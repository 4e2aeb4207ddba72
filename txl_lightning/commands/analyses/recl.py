"""`txl analyze recl`: relative effective context length of a group of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from rich.table import Table

from txl_lightning.checkpoints import load_checkpoint
from txl_lightning.commands.analyses.common import check_files, check_text, give, text_of
from txl_lightning.commands.analyses.group import check_own_settings, check_vocabularies, configs_of, members_of
from txl_lightning.commands.analyses.plot import Panel
from txl_lightning.config import Config
from txl_lightning.evaluation.recl import Group, Member, Recl, block_starts, longest_context, measure_recl
from txl_lightning.options import AnalyzeOptions
from txl_lightning.ranks import is_first_rank
from txl_lightning.training.trainer import device_kind

PAPER = (
    "in the paper: 900 against 500 (QRNN) and 700 against 128 (a vanilla Transformer), of two different groups; "
    "lengths hold within a group only"
)


def check(config: Config, options: AnalyzeOptions) -> None:
    """There is a group that can be compared, and text enough. Raises ConfigError."""
    paths = members_of(options)
    if len(paths) < 2:
        rule = "the baseline is the best of a group, and one checkpoint makes none"
        raise options.refuse("ckpt", rule, "give several: ckpt=[runs/a,runs/b]")
    configs = configs_of(config, options)
    check_own_settings(config, paths[0])
    check_vocabularies(paths, options)
    _check_lengths(configs, paths, options)
    check_files(options)
    if options.to is not None and not options.to.endswith(".npz"):
        raise options.refuse("to", "is no kind of file that losses of a group are written to", "let it end in .npz")
    least = options.longest + -(-options.targets // options.block) * options.block + 1
    check_text(config, options, ckpt=paths[0], least=least)
    for path, own in zip(paths, configs, strict=True):
        load_checkpoint(path, own)


def _check_lengths(configs: list[Config], paths: list[str], options: AnalyzeOptions) -> None:
    if options.longest < options.start + options.step:
        least = options.start + options.step
        raise options.refuse("longest", f"start and step make {least}, so nothing can grow", f"set it to {least}")
    if options.block > max(1, options.step // 4) and options.block > 1:
        rule = f"contexts would differ by more than a quarter of step={options.step}"
        raise options.refuse("block", rule, f"set it to {max(1, options.step // 4)} or less; 1 is exact")
    for share in options.shares:
        if not 0 < share <= 1:
            raise options.refuse("shares", "each is a part of the targets, above 0 and at most 1", "as [0.1,0.5,1.0]")
    for path, config in zip(paths, configs, strict=True):
        longest = longest_context(config)
        if longest is not None and options.start + options.block - 1 > longest:
            rule = f"model.position={config.model.position} of {path} was trained on {longest} tokens and knows no more"
            most = longest - options.block + 1
            cure = f"set it to {most} or less" if most > 0 else "set block=1"
            raise options.refuse("start", rule, cure)


def run(config: Config, options: AnalyzeOptions) -> None:
    """Read the group at each context that is needed; print, and write what was asked for."""
    data, tokens = text_of(config, options)
    paths, configs = members_of(options), configs_of(config, options)
    models = [
        load_checkpoint(path, own).to(device_kind(config)).eval() for path, own in zip(paths, configs, strict=True)
    ]
    firsts = block_starts(n_token=len(tokens), n_target=options.targets, block=options.block, longest=options.longest)
    group = Group(configs, models, tokens, firsts, options.block)
    members = [
        Member(
            ckpt=path,
            parameters=sum(weight.numel() for weight in model.parameters()),
            position=own.model.position,
            memory=own.memory.to_dict(),
            segment_len=own.eval_segment_len,
            longest=longest_context(own),
        )
        for path, own, model in zip(paths, configs, models, strict=True)
    ]
    found = measure_recl(
        group,
        members,
        shares=options.shares,
        start=options.start,
        step=options.step,
        longest=options.longest,
        split=options.split,
        data_fingerprint=data.meta.fingerprint,
    )
    if options.to is not None and is_first_rank():
        targets = (firsts[:, None] + np.arange(options.block)).ravel()
        losses = np.stack([group.known[context] for context in found.contexts])
        file = Path(os.path.expanduser(options.to))
        np.savez(file, ckpt=np.array(paths), contexts=found.contexts, targets=targets, losses=losses)
    show(found, options)


def show(found: Recl, options: AnalyzeOptions) -> None:
    """The table and the plot."""
    exact = "exact" if found.block == 1 else f"contexts of c ... c + {found.block - 1}"
    title = (
        f"RECL in tokens: c from {found.start} by {found.step} to {found.longest}, {found.n_target:,} targets, {exact}"
    )
    table = Table(title=title, caption=PAPER)
    table.add_column("checkpoint", overflow="fold")
    table.add_column("parameters", justify="right")
    for share in found.shares:
        table.add_column(f"r = {share}", justify="right")
    table.add_column(f"loss at {found.contexts[0]}", justify="right")
    table.add_column(f"at {found.contexts[-1]}", justify="right")
    for index, member in enumerate(found.members):
        lengths = [row[index] for row in found.effective]
        shown = [f"{'>= ' if part.open_end else ''}{part.length}" for part in lengths]
        losses = found.losses[index]
        row = [member.ckpt, f"{member.parameters:,}", *shown, f"{losses[0]:.4f}", f"{losses[-1]:.4f}"]
        table.add_row(*row)
    table.add_section()
    ratios = [_ratio([part.length for part in row]) for row in found.effective]
    table.add_row("longest / shortest", "", *ratios, "", "")
    contexts = [float(context) for context in found.contexts]
    losses_by = {member.ckpt: (contexts, found.losses[i]) for i, member in enumerate(found.members)}
    gains_by = {
        member.ckpt: ([found.start + found.step * k for k in range(len(part.gains))], part.gains)
        for member, part in zip(found.members, found.effective[0], strict=True)
    }
    panels = [
        Panel(x="context (tokens)", y="nats per token", curves=losses_by),
        Panel(
            x="context c (tokens)",
            y=f"gain of {found.step} tokens more, r = {found.shares[0]}",
            curves=gains_by,
            levels={"threshold": found.threshold},
        ),
    ]
    give(options, table, found.to_dict(), panels)


def _ratio(lengths: list[int]) -> str:
    return f"{max(lengths) / min(lengths):.2f}"
