"""How many answers of a made-up corpus a model gets right, and how that depends on length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from txl_lightning.config import Config
from txl_lightning.data.episodes import EpisodesConfig, RecallVocab
from txl_lightning.data.passkey import Passkey, PasskeyConfig
from txl_lightning.data.vocab import Tokens
from txl_lightning.evaluation.losses import on_device
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training.datamodule import TextDataModule, one_by_one
from txl_lightning.types import Batch, Segment


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Recall, and what it depends on."""

    accuracy: float  # share of answers whose value is the likeliest of all values
    chance: float  # what guessing gets
    whole: float  # share of episodes all of whose answers are right
    whole_chance: float
    n_answer: int
    answer_loss: float  # nats per answer, over the whole vocabulary
    loss: float  # nats per token, over all targets
    n_target: int
    split: str
    task: str
    details: dict[str, Any]  # what decides an episode, e.g. distance and pairs
    segment_len: int
    memory: dict[str, Any]
    data_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, the details among them."""
        found = asdict(self)
        return {**found, **found.pop("details")}


def measure_retrieval(config: Config, model: TransformerXL, *, split: str = "test") -> Retrieval:
    """Read a split of a made-up corpus in lanes with the memory carried along, and look at the answers.

    Args:
        config: lengths and data; its data are an EpisodesConfig.
        model: its weights; turned into evaluation mode.
        split: "train", "valid" or "test".

    Lanes are read from their own first episode on, whatever `eval.warm` says.

    Raises:
        ConfigError: the model has other symbols than the text.
    """
    keys, config = config.data, replace(config, eval=replace(config.eval, warm=0))
    assert isinstance(keys, EpisodesConfig)
    source = TextDataModule(config, test_split=split)
    loader, vocab = source.test_dataloader(), source.data.vocab
    assert isinstance(vocab, RecallVocab)
    model.eval()
    count = _Count(keys, vocab)
    state = model.init_state(config.eval_batch_size, form="projected")
    with torch.no_grad():
        for batch in one_by_one(loader):
            batch = on_device(batch, model.device)
            out = model(batch.tokens_BT, state, batch.segment, batch.targets_BT)
            state = out.state
            start = loader.layout.span(batch.position.segment, epoch=0)[0]
            count.add(batch, out.losses_BT, model.log_probs(out.hidden_BTD), start=start)
    return Retrieval(
        accuracy=count.right / count.answers,
        chance=keys.chance,
        whole=count.whole,
        whole_chance=keys.chance**keys.n_answer,
        n_answer=count.answers,
        answer_loss=count.answer_nll / count.answers,
        loss=count.nll / count.targets,
        n_target=count.targets,
        split=split,
        task=keys.name,
        details={name: getattr(keys, name) for name in keys.kept},
        segment_len=config.eval_segment_len,
        memory=config.memory.to_dict(),
        data_fingerprint=source.data.meta.fingerprint,
    )


class _Count:
    """Sums over answers and over all targets."""

    def __init__(self, keys: EpisodesConfig, vocab: RecallVocab) -> None:
        self.keys, self.values = keys, vocab.values
        self.right = self.answers = self.targets = 0
        self.nll = self.answer_nll = 0.0
        self.by_episode: dict[int, Any] = {}  # number in the lane to right answers of each lane

    def add(self, batch: Batch, losses_BT: Tensor, log_probs_BTV: Tensor, *, start: int) -> None:
        """A segment that begins `start` tokens after the start of its lanes, which begin with an episode."""
        n_token = losses_BT.shape[1]
        place = torch.arange(start + 1, start + 1 + n_token, device=losses_BT.device)  # of the targets
        asked = place % self.keys.episode_len >= self.keys.answer_from
        is_value = (batch.targets_BT >= self.values.start) & (batch.targets_BT < self.values.stop)
        answer = asked & is_value & batch.segment.mask(n_token)
        right = answer & (best_value(log_probs_BTV, self.values) == batch.targets_BT)
        self.right += int(right.sum())
        self.answers += int(answer.sum())
        self.targets += int(batch.segment.length.sum())
        self.nll += float(losses_BT.sum(dtype=torch.float64))
        self.answer_nll += float(losses_BT[answer].sum(dtype=torch.float64))
        for number in (place // self.keys.episode_len).unique().tolist():
            inside = place // self.keys.episode_len == number
            count_B = right[:, inside].sum(dim=1)
            self.by_episode[number] = self.by_episode.get(number, 0) + count_B

    @property
    def whole(self) -> float:
        """Share of episodes all of whose answers are right."""
        right = sum(int((count_B == self.keys.n_answer).sum()) for count_B in self.by_episode.values())
        return right * self.keys.n_answer / self.answers


def best_value(log_probs_BTV: Tensor, values: range) -> Tensor:
    """(B, T) the likeliest of all values."""
    return log_probs_BTV[..., values.start : values.stop].argmax(dim=-1) + values.start


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Needles at one length and depth."""

    length: int  # tokens of an episode
    depth: float
    accuracy: float  # share of values
    whole: float  # share of needles all of whose values are right


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Needles at lengths by depths, each in a lane with fresh memory."""

    cells: list[Cell]
    worst: dict[int, float]  # length to the least `whole` over depths
    needles: int  # per cell
    chance: float
    whole_chance: float
    segment_len: int
    memory: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def depths_of(n: int) -> list[float]:
    """n depths from first to last."""
    return [index / (n - 1) for index in range(n)] if n > 1 else [0.0]


def measure_grid(config: Config, model: TransformerXL, *, segments: Sequence[int], depths: int, needles: int) -> Grid:
    """Hide one needle of `data=passkey` at each length and depth.

    Args:
        config: its data are a PasskeyConfig.
        model: its weights; turned into evaluation mode.
        segments: lengths, in segments of data.segment_len.
        depths: how many, from first to last.
        needles: episodes per cell.

    Raises:
        ConfigError: an episode of one of the lengths has no room for a needle.
    """
    assert isinstance(config.data, PasskeyConfig)
    model.eval()
    cells = []
    for length in segments:
        for depth in depths_of(depths):
            keys = replace(config.data, segments=length, needles=1, queries=1, depth=depth)
            text = Passkey(keys).draw(needles, np.random.default_rng([keys.draw, length, round(1000 * depth)]))
            right = answers_right(model, text, keys, segment_len=config.eval_segment_len)
            cells.append(
                Cell(
                    length=keys.episode_len,
                    depth=depth,
                    accuracy=float(right.mean()),
                    whole=float(right.all(axis=1).mean()),
                )
            )
    return Grid(
        cells=cells,
        worst={
            length: min(c.whole for c in cells if c.length == length) for length in sorted({c.length for c in cells})
        },
        needles=needles,
        chance=config.data.chance,
        whole_chance=config.data.chance**config.data.value_len,
        segment_len=config.eval_segment_len,
        memory=config.memory.to_dict(),
    )


@torch.no_grad()
def answers_right(model: TransformerXL, text_BN: Tokens, keys: EpisodesConfig, *, segment_len: int) -> Any:
    """(episodes, answers) whether each answer at the end of an episode is right, each in a lane with fresh memory."""
    text = torch.from_numpy(text_BN.astype(np.int64)).to(model.device)
    state, tables, found = model.init_state(len(text), form="projected"), Tables(), []
    for start in range(0, text.shape[1] - 1, segment_len):
        inputs = text[:, start : min(start + segment_len, text.shape[1] - 1)]
        targets = text[:, start + 1 : start + 1 + inputs.shape[1]]
        whole = Segment.full(inputs)
        out = model(inputs, state, whole._replace(reset=torch.full_like(whole.reset, start == 0)), tables=tables)
        state = out.state
        place = torch.arange(start + 1, start + 1 + inputs.shape[1], device=text.device)
        if int(place[-1]) < keys.answer_from:
            continue
        values = keys.vocab.values
        answer = (place >= keys.answer_from) & (targets >= values.start) & (targets < values.stop)
        right = best_value(model.log_probs(out.hidden_BTD), values) == targets
        found.append(right[answer].view(len(text), -1).cpu().numpy())
    return np.concatenate(found, axis=1)
