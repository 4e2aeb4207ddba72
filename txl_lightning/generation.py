"""Sampling with the memory carried along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment


class Session:
    """One lane that reads tokens in any pieces and says what may come next.

    Memory is written once per full segment, exactly as in evaluation with the same segment length; the segment under
    way is read again for each token, so every memory strategy works without code of its own.

    Memory starts anew where `memory.reset` of the model's configuration says.

    Args:
        model: in evaluation mode.
        segment_len: tokens between two writes; that of training gives training's behaviour.
        separator: the id that ends a document; with memory.reset=document.
    """

    def __init__(self, model: TransformerXL, *, segment_len: int, separator: int | None = None) -> None:
        self.reset = model.run_config.memory.reset
        if self.reset == "document" and separator is None:
            raise ValueError("memory.reset=document needs the separator: the id that ends a document")
        self.model, self.separator = model, separator
        self.segment_len = segment_len
        self.state = model.init_state(1, form="projected")
        self.partial: list[int] = []  # tokens of the segment under way
        self.before: int | None = None  # the token before them
        self.log_probs_V: Tensor | None = None  # of the next token; None before the first

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> None:
        """Read tokens. Feeding them in pieces or at once is the same."""
        rest = list(tokens)
        while rest:
            room = self.segment_len - len(self.partial)
            self.partial, rest = self.partial + rest[:room], rest[room:]
            self._read()

    def sample(self, n_token: int, *, rule: SamplingRule, generator: torch.Generator) -> Iterator[int]:
        """Choose and read n_token tokens, one after the other."""
        assert self.log_probs_V is not None, "feed a prompt first"
        for _ in range(n_token):
            token = rule.choose(self.log_probs_V, generator)
            self.feed([token])
            yield token

    def _read(self) -> None:
        n_token = len(self.partial)
        padding = self.segment_len - n_token if self.model.needs_whole_segments else 0
        tokens_BT = torch.tensor([self.partial + [0] * padding], device=self.model.device)
        out = self.model(tokens_BT, self.state, self._segment(tokens_BT, padding))
        self.log_probs_V = self.model.log_probs(out.hidden_BTD[:, n_token - 1 : n_token])[0, 0]
        if len(self.partial) == self.segment_len:
            self.state, self.before, self.partial = out.state, self.partial[-1], []

    def _segment(self, tokens_BT: Tensor, padding: int) -> Segment:
        """Length, reset and documents, as `data.lanes` gives them."""
        segment = Segment.full(tokens_BT)
        segment = segment._replace(length=segment.length - padding)
        if self.reset == "segment":
            return segment._replace(reset=torch.ones_like(segment.reset))
        if self.reset == "document":  # one begins behind each separator
            assert self.separator is not None
            ended = tokens_BT.roll(1, dims=1).eq(self.separator)
            ended[:, 0] = False
            reset = torch.full_like(segment.reset, self.before == self.separator)
            return segment._replace(reset=reset, document=ended.cumsum(dim=1))
        return segment


class SamplingRule:
    """Temperature, then top-k, then top-p.

    Args:
        temperature: divides log-probabilities; 0 takes the likeliest token.
        top_k: only this many likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together hold this probability (at least one); 1: all.
    """

    def __init__(self, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p

    def choose(self, log_probs_V: Tensor, generator: torch.Generator) -> int:
        """One token."""
        log_probs_V = log_probs_V.cpu().double()  # in this order: mps has no float64
        if self.temperature == 0:
            return int(log_probs_V.argmax())
        probability = self.keep(log_probs_V / self.temperature).softmax(dim=-1)
        return int(torch.multinomial(probability, 1, generator=generator))

    def keep(self, scores_V: Tensor) -> Tensor:
        """The scores with -inf for tokens that are out."""
        if 0 < self.top_k < len(scores_V):
            least = scores_V.topk(self.top_k).values[-1]
            scores_V = scores_V.masked_fill(scores_V < least, float("-inf"))
        if self.top_p < 1:
            ordered, index = scores_V.sort(descending=True)
            before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
            scores_V = scores_V.index_fill(0, index[before >= self.top_p], float("-inf"))
        return scores_V
