"""How many answers of the corpus `recall` a model gets right, segments after their pairs were shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from txl_lightning.config import Config
from txl_lightning.data.recall import RecallConfig, RecallVocab
from txl_lightning.evaluation.losses import on_device
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training.datamodule import TextDataModule, one_by_one
from txl_lightning.types import Batch


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Recall, and what it depends on."""

    accuracy: float  # share of answers whose value is the likeliest of all values
    chance: float  # what guessing gets
    n_answer: int
    answer_loss: float  # nats per answer, over the whole vocabulary
    loss: float  # nats per token, over all targets
    n_target: int
    split: str
    distance: int  # segments between pair and answer
    pairs: int
    segment_len: int
    memory: dict[str, Any]
    data_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def measure_retrieval(config: Config, model: TransformerXL, *, split: str = "test") -> Retrieval:
    """Read a split of `data=recall` in lanes with the memory carried along, and look at the answers.

    Args:
        config: lengths and data; its data are a RecallConfig.
        model: its weights; turned into evaluation mode.
        split: "train", "valid" or "test".

    Raises:
        ConfigError: the model has other symbols than the text.
    """
    keys = config.data
    assert isinstance(keys, RecallConfig)
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
        n_answer=count.answers,
        answer_loss=count.answer_nll / count.answers,
        loss=count.nll / count.targets,
        n_target=count.targets,
        split=split,
        distance=keys.distance,
        pairs=keys.pairs,
        segment_len=config.eval_segment_len,
        memory=config.memory.to_dict(),
        data_fingerprint=source.data.meta.fingerprint,
    )


class _Count:
    """Sums over answers and over all targets."""

    def __init__(self, keys: RecallConfig, vocab: RecallVocab) -> None:
        self.keys, self.values = keys, vocab.values
        self.right = self.answers = self.targets = 0
        self.nll = self.answer_nll = 0.0

    def add(self, batch: Batch, losses_BT: Tensor, log_probs_BTV: Tensor, *, start: int) -> None:
        """A segment that begins `start` tokens after the start of its lanes, which begin with an episode."""
        n_token = losses_BT.shape[1]
        place = torch.arange(start + 1, start + 1 + n_token, device=losses_BT.device)  # of the targets
        asked = place % self.keys.episode_len >= self.keys.distance * self.keys.segment_len
        is_value = (batch.targets_BT >= self.values.start) & (batch.targets_BT < self.values.stop)
        answer = asked & is_value & batch.segment.mask(n_token)
        best = log_probs_BTV[..., self.values.start : self.values.stop].argmax(dim=-1) + self.values.start
        self.right += int(((best == batch.targets_BT) & answer).sum())
        self.answers += int(answer.sum())
        self.targets += int(batch.segment.length.sum())
        self.nll += float(losses_BT.sum(dtype=torch.float64))
        self.answer_nll += float(losses_BT[answer].sum(dtype=torch.float64))
