"""`txl data prepare|inspect`: build the token files of a corpus, or show what is in it."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from txl_lightning.commands.output import JSON, check_out, write_out
from txl_lightning.config import Config, DataConfig
from txl_lightning.data import store
from txl_lightning.data.counts import verdict
from txl_lightning.data.store import Survey
from txl_lightning.options import DataOptions

SAMPLE = 200  # tokens shown from the start of the training split


def check(config: Config, options: DataOptions) -> None:
    """Refuse what cannot serve.

    Raises:
        ConfigError: the sources, the cache folder (to prepare) or the file `out` are of no use.
    """
    if options.action == "prepare":
        store.survey(config.data, training=False)
    else:
        store.look(config.data)
    check_out(options.out, begins=JSON)


def run(config: Config, options: DataOptions) -> None:
    """Prepare or inspect; the facts go to stdout, and as JSON to the file `out`."""
    console = Console(highlight=False, soft_wrap=True)
    if options.action == "prepare":
        store.prepare(config.data, training=False)
    found = store.look(config.data)
    facts = _facts(found)
    if options.action == "prepare":
        _print_files(console, found)
    else:
        facts["sample"] = _sample(config.data)
        _print_facts(console, found, facts["sample"])
    write_out(options.out, facts)


def _facts(found: Survey) -> dict[str, Any]:
    """The survey as plain containers, and what its names stand for."""
    facts = {item.name: getattr(found, item.name) for item in dataclasses.fields(found) if item.name != "vocab"}
    facts |= {"folder": str(found.folder), "vocab_rule": found.vocab.rule}
    facts["files"] = {split: str(found.folder / f"{split}.bin") for split in found.tokens} if found.cached else {}
    return facts


def _sample(config: DataConfig) -> dict[str, str]:
    """The first split there is, and its first tokens as text."""
    split, tokens = store.sample(config, n_token=SAMPLE)
    found = store.look(config)
    return {"split": split, "text": found.vocab.decode(tokens)}


def _print_facts(console: Console, found: Survey, sample: dict[str, str]) -> None:
    details = ", ".join(f"{name} {_value(value)}" for name, value in found.details.items() if name != "made_from")
    lines = {
        "corpus": f"{found.corpus}, rule version {found.rule_version}",
        "vocabulary": f"{found.vocab_name}, {found.vocab_size} ids: {found.vocab.rule}",
        "splits": found.split_rule,
        "details": details,
        "fingerprint": found.fingerprint,
        "token files": f"{found.folder}{'' if found.cached else ' (not built yet)'}",
    }
    for name, value in lines.items():
        console.print(Text(f"{name:<12} {value}"))
    for note in found.notes:
        console.print(Text(f"{'note':<12} {note}"))
    table = Table()
    for title in ("split", "documents", "tokens", "bytes"):
        table.add_column(title, justify="left" if title == "split" else "right")
    for split in found.tokens:
        counts = (found.documents[split], found.tokens[split], found.bytes[split])
        table.add_row(split, *map(_number, counts))
    console.print(table)
    if found.published:
        _print_published(console, found)
    console.print(Text(f"{sample['split']} begins:\n{_printable(sample['text'])}"))


def _print_files(console: Console, found: Survey) -> None:
    for split, n_token in found.tokens.items():
        console.print(Text(f"{split:<6} {_number(n_token):>15} tokens  {found.folder / f'{split}.bin'}"))
    console.print(Text(f"fingerprint {found.fingerprint}"))


def _print_published(console: Console, found: Survey) -> None:
    """Counts of the literature beside ours."""
    table = Table()
    for title in ("count", "split", "ours", "published", ""):
        table.add_column(title, justify="right" if title in ("ours", "published") else "left")
    for row in found.published:
        differs = "differs" if row["differs"] else ""
        table.add_row(row["what"], row["split"], _number(row["ours"]), _number(row["published"]), differs)
    console.print(table)
    console.print(Text(verdict(found.published)))


def _value(value: object) -> str:
    """A detail; one that differs between splits is given for each."""
    if isinstance(value, dict):
        return " / ".join(map(_number, value.values()))
    return _number(value)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _printable(text: str) -> str:
    """Control characters as escapes: a corpus must not steer the terminal."""
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)
