"""Lanes: one token stream read side by side in B places, T tokens at a time.

A stream of N tokens has N - 1 targets: every token but the first. They are cut into one contiguous piece per lane,
sizes differing by at most one, the longer ones first. Lane b's inputs are the tokens just before its targets, so
neighbours share one token and every target is scored exactly once per pass. A pass has as many segments as the longest
lane needs; a lane's last segment is short, and a lane that has ended stands by with length 0.

Memory starts anew with each pass, or with each segment, or with each document (`reset`); documents may begin inside a
segment, whose tokens then carry document numbers.

An evaluation may warm its lanes: before its own targets each lane then reads whole segments of the text before them,
which are not scored and are no targets of its own, so that its memory is not empty.

In training the stream may be shuffled by documents or lines and segments may vary in length (`data/order.py`); both
change from epoch to epoch, and the rule stays: what is read is one stream of the same N tokens.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from txl_lightning.data.order import Borders, Shuffled, segment_borders
from txl_lightning.data.vocab import Tokens
from txl_lightning.errors import ConfigError
from txl_lightning.ranks import check_lanes
from txl_lightning.types import Batch, Position, Segment

Counts = npt.NDArray[np.int64]


def used_lanes(n_token: int, *, lanes: int, segment_len: int) -> int:
    """Lanes an evaluation uses: as many as the stream fills with one segment each, at least 1, at most `lanes`."""
    return max(1, min(lanes, (n_token - 1) // segment_len))


def check_filled(n_token: int, *, lanes: int, key: str, text: str = "text") -> None:
    """Each lane in use gets a token and its target.

    Args:
        n_token: tokens of the stream.
        lanes: those in use.
        key: the setting that says how many lanes, for the message.
        text: what the stream is, for the message.

    Raises:
        ConfigError: there are too few tokens.
    """
    if n_token < lanes + 1:
        rule = f"the {text} has {n_token} tokens, and {lanes} lanes need at least {lanes + 1}"
        cure = f"set {key} to {n_token - 1} or less, or give more text" if n_token > 1 else "give more text"
        raise ConfigError(key, lanes, rule, cure)


@dataclass(frozen=True, kw_only=True)
class LaneLayout:
    """Where each lane's targets are in the stream.

    Attributes:
        n_token: tokens N of the stream.
        lanes: lanes B over all ranks.
        used: lanes that get targets; the rest are dead.
        segment_len: tokens T of a segment.
        segment_len_std: spread of lengths in tokens; 0: every segment has T, else T is the longest.
        seed: what varying lengths are drawn from.
        warm: segments of a pass that come first and are not scored; lanes with less text before them read fewer.
            Those that no lane has are left out.
    """

    n_token: int
    lanes: int
    used: int
    segment_len: int
    segment_len_std: float = 0.0
    seed: int = 0
    warm: int = 0

    def __post_init__(self) -> None:
        most = int(self.starts()[self.used - 1]) // self.segment_len
        object.__setattr__(self, "warm", min(self.warm, most))

    def sizes(self) -> Counts:
        """(B,) targets of each lane."""
        share, longer = divmod(self.n_token - 1, self.used)
        lane = np.arange(self.lanes)
        return np.where(lane < self.used, share + (lane < longer), 0)

    def starts(self) -> Counts:
        """(B,) position in the stream of each lane's first input."""
        size_B = self.sizes()
        return np.cumsum(size_B) - size_B

    @property
    def n_segment(self) -> int:
        """Segments of a pass, the same in every epoch."""
        if self.segment_len_std:
            return len(self._borders(0)) - 1
        return self.warm - (-int(self.sizes()[0]) // self.segment_len)

    def begins(self) -> Counts:
        """(B,) the segment that each lane reads first: as many before `warm` as fit into the text before it."""
        return self.warm - np.minimum(self.warm, self.starts() // self.segment_len)

    def span(self, segment: int, *, epoch: int) -> tuple[int, int]:
        """Offsets from the start of each lane where a segment starts and ends; below 0 they are not scored."""
        if self.segment_len_std:
            borders = self._borders(epoch)
            start, end = borders[np.minimum([segment, segment + 1], len(borders) - 1)].tolist()
            return start, end
        return (segment - self.warm) * self.segment_len, (segment - self.warm + 1) * self.segment_len

    def lengths(self, segment: int, *, epoch: int) -> Counts:
        """(B,) real tokens of each lane in one segment, 0..T; 0 behind the last segment."""
        start, end = self.span(segment, epoch=epoch)
        if start < 0:
            return np.where((self.begins() <= segment) & (self.sizes() > 0), self.segment_len, 0)
        return np.clip(self.sizes() - start, 0, end - start)

    def _borders(self, epoch: int) -> Counts:
        total = int(self.sizes()[0])
        return segment_borders(
            total=total, longest=self.segment_len, std=self.segment_len_std, seed=self.seed, epoch=epoch
        )


class SegmentReader(Dataset[Tokens]):
    """Random access to the tokens of one rank's lanes in one epoch, keyed by segment; stateless, so worker processes
    can share it.

    Gives (B, 1 + T + 1) ids as they are on disk: the token before the segment (of no meaning at the very start of the
    stream), then inputs and targets, which overlap; so little travels between processes. Behind the real tokens of a
    segment they are of no meaning.
    """

    def __init__(
        self, tokens: Tokens, layout: LaneLayout, *, own: slice, epoch: int = 0, order: Shuffled | None = None
    ) -> None:
        self.tokens, self.layout, self.epoch, self.order = tokens, layout, epoch, order
        self.start_B = layout.starts()[own]

    def __getitem__(self, segment: int) -> Tokens:
        first = self.start_B + self.layout.span(segment, epoch=self.epoch)[0]
        index = first[:, None] + np.arange(-1, self.layout.segment_len + 1)  # (B, 1 + T + 1)
        index = index.clip(0, self.layout.n_token - 1)
        return np.asarray(self.tokens[index if self.order is None else self.order.locate(index)])

    def __getstate__(self) -> dict[str, Any]:
        # a memory-mapped file travels to a spawned worker by name; pickled as it is, all of it would be copied
        state = self.__dict__.copy()
        tokens = self.tokens
        if isinstance(tokens, np.memmap) and isinstance(tokens.base, mmap.mmap):
            state["tokens"] = _Mapped(str(tokens.filename), tokens.dtype.str, tokens.shape, tokens.offset)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, _Mapped):
            self.tokens = self.tokens.open()


@dataclass(frozen=True)
class _Mapped:
    """How to open a memory-mapped array again in another process."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def open(self) -> Tokens:
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=self.shape, offset=self.offset)


class LaneLoader:
    """Batches of one rank, in order; each iteration is one pass over the data, or the rest of one.

    Not a torch DataLoader, so nothing replaces its order; Lightning takes it as it is. Iterating leaves the global
    random generators alone. A pass counts as begun when its first batch is asked for; the iteration after it starts
    the next pass, even if this one was left early.

    Args:
        tokens: (N,) ids of the stream, usually memory-mapped.
        segment_len: tokens T of a segment.
        lanes: lanes B over all ranks.
        used_lanes: lanes that get targets; the rest have length 0 throughout.
        units: what is read in a new order each epoch, from `order.find_units`; None: the stream as it is.
        segment_len_std: spread of lengths in tokens; 0: every segment has T, else T is the longest.
        seed: what order and lengths are drawn from, together with the epoch.
        reset: where memory starts anew: "epoch", "segment" or "document".
        separator: the id that ends a document; with reset "document".
        inner_documents: with reset "document", whether one may begin inside a segment; False: segments have no document
            numbers, so that memories which cannot start anew there can be used.
        group: segments handed out together, as a list; 0: one by one. A pass's last group may be smaller.
        warm: segments before the scored ones, with `Batch.n_target` 0; in no group with others.
        rank, world_size: this rank owns lanes [rank * B / world_size, (rank + 1) * B / world_size).
        num_workers: processes that read ahead; 0 reads in this process.
        pin_memory: put batches into page-locked memory where there is a GPU to copy them to.
        key: the setting that `lanes` comes from, for messages.

    Raises:
        ConfigError: too few tokens for the lanes, or the lanes do not divide into the ranks.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        segment_len: int,
        lanes: int,
        used_lanes: int,
        units: Borders | None = None,
        segment_len_std: float = 0.0,
        seed: int = 0,
        reset: str = "epoch",
        separator: int | None = None,
        inner_documents: bool = True,
        group: int = 0,
        warm: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        key: str = "data.batch_size",
    ) -> None:
        assert 1 <= used_lanes <= lanes and 0 <= rank < world_size
        assert reset in ("epoch", "segment") or separator is not None
        check_lanes(lanes, ranks=world_size, key=key)
        check_filled(len(tokens), lanes=used_lanes, key=key)
        self.tokens, self.units = tokens, units
        self.layout = LaneLayout(
            n_token=len(tokens),
            lanes=lanes,
            used=used_lanes,
            segment_len=segment_len,
            segment_len_std=segment_len_std,
            seed=seed,
            warm=warm,
        )
        assert not (warm and segment_len_std), "segments of varying length are for training"
        self.reset, self.separator, self.group = reset, separator, group
        self.inner_documents = inner_documents
        self.num_workers = num_workers
        self.pin_memory = pin_memory and torch.cuda.is_available()
        per_rank = lanes // world_size
        self._own = slice(rank * per_rank, (rank + 1) * per_rank)
        self._next = self._reached = Position(0, 0)

    def __len__(self) -> int:
        """Segments (or groups of them) of a whole pass, the same on every rank."""
        warm = self.layout.warm
        return warm - (-(self.layout.n_segment - warm) // max(1, self.group))

    @property
    def next_position(self) -> Position:
        """Where the next iteration starts; set it to start elsewhere."""
        return self._next

    @next_position.setter
    def next_position(self, position: Position) -> None:
        epoch, segment = position
        if not 0 <= segment <= self.layout.n_segment:
            rule = f"a pass has {self.layout.n_segment} segments, the checkpoint stands before segment {segment}"
            cure = "go on with the settings of the checkpoint"
            raise ConfigError("data.segment_len", self.layout.segment_len, rule, cure)
        at_end = segment == self.layout.n_segment
        self._next = self._reached = Position(epoch + 1, 0) if at_end else Position(epoch, segment)

    def state_dict(self) -> dict[str, list[int]]:
        """Where to go on after the last batch handed out (those read ahead by workers do not count)."""
        return {"position": list(self._reached)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Let the next iteration start where `state_dict` said."""
        self.next_position = Position(*state["position"])

    def __iter__(self) -> Iterator[Any]:
        """Batches, or lists of them with `group`."""
        segments = self._segments()
        if not self.group:
            yield from segments
            return
        alone = max(0, self.layout.warm - self._next.segment)  # lanes begin at different segments of these
        for segment in islice(segments, alone):
            yield [segment]
        while group := list(islice(segments, self.group)):
            yield group

    def _segments(self) -> Iterator[Batch]:
        epoch, start = self._next
        self._next = self._reached = Position(epoch + 1, 0)
        with warnings.catch_warnings():
            # how many workers is the user's choice, and they start clean: they only ever touch numpy and a queue
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            windows = iter(self._torch_loader(self._reader(epoch), range(start, self.layout.n_segment)))
        for segment, window in zip(range(start, self.layout.n_segment), windows, strict=False):
            last = segment == self.layout.n_segment - 1
            if last:
                next(windows, None)  # lets the workers end now: who knows the length never asks beyond the last batch
            self._reached = self._next if last else Position(epoch, segment + 1)
            yield self._batch(window, Position(epoch, segment))

    def _reader(self, epoch: int) -> SegmentReader:
        order = Shuffled(self.units, seed=self.layout.seed, epoch=epoch) if self.units is not None else None
        return SegmentReader(self.tokens, self.layout, own=self._own, epoch=epoch, order=order)

    def _torch_loader(self, reader: SegmentReader, segments: range) -> DataLoader[Tokens]:
        return DataLoader(
            reader,
            sampler=segments,
            batch_size=None,
            collate_fn=_as_is,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # its own: a DataLoader draws a seed even where nothing is random
        )

    def _batch(self, window: Tokens, position: Position) -> Batch:
        length_all = self.layout.lengths(position.segment, epoch=position.epoch)
        length_B = length_all[self._own]
        real = np.arange(self.layout.segment_len) < length_B[:, None]  # (B, T)
        wide = window.astype(np.int64)
        reset_B = (self.layout.begins()[self._own] == position.segment) | (self.reset == "segment")
        document_BT = None
        if self.reset == "document":  # one begins behind each separator
            ended = wide[:, :-2] == self.separator
            reset_B |= ended[:, 0]
            ended[:, 0] = False
            assert self.inner_documents or not ended.any()
            document_BT = torch.from_numpy(np.cumsum(ended, axis=1)) if self.inner_documents else None
        batch = Batch(
            tokens_BT=torch.from_numpy(np.where(real, wide[:, 1:-1], 0)),
            targets_BT=torch.from_numpy(np.where(real, wide[:, 2:], 0)),
            segment=Segment(torch.from_numpy(reset_B), torch.from_numpy(length_B.copy()), document_BT),
            n_target=int(length_all.sum()) if position.segment >= self.layout.warm else 0,
            position=position,
        )
        return _pinned(batch) if self.pin_memory else batch


def _as_is(window: Any) -> Any:
    return window


def _pinned(batch: Batch) -> Batch:
    segment = batch.segment
    return batch._replace(
        tokens_BT=batch.tokens_BT.pin_memory(),
        targets_BT=batch.targets_BT.pin_memory(),
        segment=Segment(
            segment.reset.pin_memory(),
            segment.length.pin_memory(),
            None if segment.document is None else segment.document.pin_memory(),
        ),
    )
