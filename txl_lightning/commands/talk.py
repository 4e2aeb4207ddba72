"""Text on the terminal as it is sampled, and a conversation whose memory lasts until it is reset.

What is typed is read exactly as typed and continued; the next line goes on behind that. Lines that begin with a colon
are for the session itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch

from txl_lightning.commands.output import bytes_in_words
from txl_lightning.commands.prompts import rule_of
from txl_lightning.errors import ConfigError
from txl_lightning.generation import Session
from txl_lightning.memory.base import MemoryStrategy
from txl_lightning.model.block import substate
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.options import GenerateOptions
from txl_lightning.process import printable
from txl_lightning.sampling import until

CONTROL = dict.fromkeys([*range(9), *range(11, 32), 127], "\ufffd")
"""Characters that would make the terminal do something instead of showing something."""


def show(pieces: Iterable[str]) -> None:
    """Write text to standard output as it comes."""
    for piece in pieces:
        sys.stdout.write(printable(piece.translate(CONTROL)))
        sys.stdout.flush()
    sys.stdout.write("\n")


def said(
    session: Session, options: GenerateOptions, *, seed: int, ended: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """The continuation, as far as a stop string or until it is `ended`, in the pieces it comes in."""
    assert session.vocab is not None
    generator = torch.Generator().manual_seed(seed)
    tokens = session.sample(options.tokens, rule=rule_of(options), generator=generator)
    return until(session.vocab.stream(_until(tokens, ended)), options.stops)


def _until(tokens: Iterator[int], ended: Callable[[], bool]) -> Iterator[int]:
    for token in tokens:
        yield token
        if ended():
            return


@contextmanager
def holding_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Says whether Ctrl-C came; while this lasts it cuts no token in two: a session has read all of it or nothing."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)


class Talk:
    """Reads lines until the input ends. Each continuation has its own seed: seed, seed + 1, ...

    Args:
        session: one lane.
        options: how much is said at a time, and how it is chosen.
        seed: of the first continuation.
    """

    def __init__(self, session: Session, options: GenerateOptions, *, seed: int) -> None:
        self.session, self.options, self.seed = session, options, seed
        self.commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "reset": ("forget everything that was read", self._reset),
            "memory": ("what has been read, and how full each memory is", self._memory),
            "save": ("write what the session knows to a file", self._save),
            "load": ("go on where a session of the same model was saved", self._load),
            "help": ("this list", self._help),
            "quit": ("end; so does the end of the input", lambda _: None),
        }

    def run(self) -> None:
        """Until `:quit` or the end of the input; Ctrl-C cuts what is being said short, an empty line goes on."""
        print("what you type is continued, and stays in memory; an empty line goes on; :help lists commands")
        for line in lines():
            name, _, rest = line[1:].partition(" ")
            if line == ":quit":
                return
            if not line.startswith(":"):
                self._answer(line)
            elif name in self.commands:
                self.commands[name][1](rest.strip())
            else:
                print(f"no such command; {', '.join(f':{known}' for known in self.commands)}")

    def _answer(self, line: str) -> None:
        vocab = self.session.vocab
        assert vocab is not None
        try:
            tokens = vocab.encode(line)
        except ConfigError as error:
            print(f"{error.value}: {error.rule}; {error.cure}")
            return
        self.session.feed(tokens.tolist())
        if not self.session.n_read[0]:
            return  # nothing to go on from
        with holding_ctrl_c() as ended:
            show(said(self.session, self.options, seed=self.seed, ended=ended))
        self.seed += 1

    def _reset(self, rest: str) -> None:
        self.session.restart()
        print("everything is forgotten")

    def _memory(self, rest: str) -> None:
        session = self.session
        size = sum(tensor.numel() * tensor.element_size() for tensor in session.state.values())
        n_pending = len(session.pending[0])
        print(
            f"{session.n_read[0]:,} tokens read, {n_pending} of them not yet in memory; {bytes_in_words(size)} of state"
        )
        for path, memory in session.model.memory_parts():
            fill = memory.fill(substate(session.state, path)) if isinstance(memory, MemoryStrategy) else None
            if fill is not None:
                print(f"  {path}: {float(fill.float().mean()):.0%} full")

    def _save(self, path: str) -> None:
        if not path:
            print("give a file: :save FILE")
            return
        whole = Path(os.path.expanduser(path))
        part = whole.parent / f".{whole.name}.part"
        try:
            torch.save({"weights": digest_of(self.session.model), **self.session.stand()}, part)
            part.replace(whole)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            print(f"cannot be written: {first_line(error)}")
            return
        print(f"saved; go on with :load {path}")

    def _load(self, path: str) -> None:
        if not path:
            print("give a file: :load FILE")
            return
        try:
            stand = torch.load(os.path.expanduser(path), weights_only=True, map_location=self.session.model.device)
            if not isinstance(stand, dict) or "weights" not in stand:
                raise ValueError("it holds no session")
            if stand["weights"] != digest_of(self.session.model):
                raise ValueError("it was saved with other weights")
            self.session.take_up(stand)
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError, UnpicklingError) as error:
            unknown = isinstance(error, UnpicklingError)  # torch says in many lines that it is none of its files
            print(f"cannot be loaded: {'it holds no session' if unknown else first_line(error)}")
            return
        print(f"{self.session.n_read[0]:,} tokens are remembered")

    def _help(self, rest: str) -> None:
        for name, (meaning, _) in self.commands.items():
            what = f":{name} FILE" if name in ("save", "load") else f":{name}"
            print(f"{what:<12} {meaning}")


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def lines() -> Iterator[str]:
    """What is typed, line by line, asked for with a mark where there is a terminal."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return


def digest_of(model: TransformerXL) -> str:
    """sha256 over all weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
