"""Sampling with the memory carried along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from txl_lightning.build import document_end
from txl_lightning.data.vocab import Vocab, from_dict
from txl_lightning.model import decoding
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.types import Segment, lane_where


class Session:
    """Lanes that read tokens in any pieces and say what may come next. What they have read, they remember.

        session = Session(model)
        session.feed("Once upon a time")
        print(session.generate(100))

    Memory is written once per full segment, exactly as in evaluation with the same segment length. Where memory can be
    read token by token (`MemoryStrategy.token_by_token`), each token is projected once; elsewhere the segment under way
    is read again for each token, which every strategy allows. Lanes do not see one another: each is as it would be
    alone.

    Memory starts anew where `memory.reset` of the model's configuration says.

    Args:
        model: in evaluation mode.
        segment_len: tokens between two writes; that of training, the default, gives training's behaviour.
        separator: the id that ends a document, for memory.reset=document; the vocabulary's by default.
        lanes: how many texts are read side by side.
        vocab: turns text into tokens; what the model was saved with by default.
    """

    def __init__(
        self,
        model: TransformerXL,
        *,
        segment_len: int | None = None,
        separator: int | None = None,
        lanes: int = 1,
        vocab: Vocab | None = None,
    ) -> None:
        self.reset = model.run_config.memory.reset
        self.vocab = from_dict(dict(model.vocab)) if vocab is None and model.vocab is not None else vocab
        if separator is None and self.vocab is not None:
            separator = document_end(self.vocab)
        if self.reset == "document" and separator is None:
            raise ValueError("memory.reset=document needs the separator: the id that ends a document")
        self.model, self.separator, self.lanes = model, separator, lanes
        self.segment_len = segment_len if segment_len is not None else model.run_config.data.segment_len
        self.tables = Tables()
        self.state = model.init_state(lanes, form="projected")
        self.pending: list[list[int]] = [[] for _ in range(lanes)]  # tokens of the segments under way
        self.before: list[int | None] = [None] * lanes  # the tokens before them
        self.log_probs_BV: Tensor | None = None  # of the next tokens; None before the first
        self.partial: decoding.Partial | None = None  # buffers of the segments under way
        if decoding.steppable(model, documents=self.reset == "document"):
            self.partial = model.begin(self.state, segment_len=self.segment_len, tables=self.tables, reset=self.reset)

    @property
    def log_probs_V(self) -> Tensor | None:
        """Log-probabilities of the first lane's next token; None before its first."""
        return None if self.log_probs_BV is None else self.log_probs_BV[0]

    def feed(self, text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> None:
        """Read on. Feeding in pieces or at once is the same.

        Args:
            text: tokens, or a text where there is a vocabulary; with several lanes a list with one entry for each.

        Raises:
            ValueError: there is another number of entries than of lanes, or no vocabulary for a text.
        """
        self._feed(self._per_lane(text))

    @torch.inference_mode()
    def _feed(self, rest: list[list[int]]) -> None:
        while any(rest):
            new = [tokens[: self.segment_len - len(read)] for tokens, read in zip(rest, self.pending, strict=True)]
            one_by_one = self.partial is not None and max(map(len, new)) == 1
            hidden_BD = self._step(new) if one_by_one else self._read(new)
            self._take(new, self.model.log_probs(hidden_BD[:, None])[:, 0])
            rest = [tokens[len(taken) :] for tokens, taken in zip(rest, new, strict=True)]

    @overload
    def sample(self, n_token: int, *, rule: SamplingRule, generator: torch.Generator) -> Iterator[int]: ...
    @overload
    def sample(
        self, n_token: int, *, rule: SamplingRule, generator: Sequence[torch.Generator]
    ) -> Iterator[list[int]]: ...
    def sample(
        self, n_token: int, *, rule: SamplingRule, generator: torch.Generator | Sequence[torch.Generator]
    ) -> Iterator[int] | Iterator[list[int]]:
        """Choose and read n_token tokens of each lane, one after the other.

        Args:
            n_token: how many.
            rule: how they are chosen.
            generator: of the one lane there is, or one for each lane: then each step gives a list.
        """
        if isinstance(generator, torch.Generator):
            assert self.lanes == 1, "several lanes need a generator each"
            return (tokens[0] for tokens in self._sample(n_token, rule, [generator]))
        return self._sample(n_token, rule, list(generator))

    def generate(
        self, n_token: int, *, rule: SamplingRule | None = None, seed: int = 0
    ) -> str | list[int] | list[str] | list[list[int]]:
        """Choose and read n_token tokens of each lane.

        Args:
            n_token: how many.
            rule: how they are chosen; by default each with the probability that the model gives it.
            seed: of the choice, the same for every lane.

        Returns:
            Their text where there is a vocabulary, else the tokens; with several lanes a list with one entry for each.
        """
        generators = [torch.Generator().manual_seed(seed) for _ in range(self.lanes)]
        drawn = list(self._sample(n_token, rule if rule is not None else SamplingRule(), generators))
        by_lane = [[tokens[lane] for tokens in drawn] for lane in range(self.lanes)]
        if self.vocab is None:
            return by_lane[0] if self.lanes == 1 else by_lane
        texts = [self.vocab.decode(np.array(tokens)) for tokens in by_lane]
        return texts[0] if self.lanes == 1 else texts

    def _sample(self, n_token: int, rule: SamplingRule, generators: list[torch.Generator]) -> Iterator[list[int]]:
        assert self.log_probs_BV is not None, "feed a prompt first"
        prompted = [bool(read) or before is not None for read, before in zip(self.pending, self.before, strict=True)]
        assert all(prompted), "every lane needs a prompt"
        for _ in range(n_token):
            scores_BV = self.log_probs_BV.cpu()  # one copy for all lanes
            chosen = [rule.choose(scores, own) for scores, own in zip(scores_BV, generators, strict=True)]
            self._feed([[token] for token in chosen])
            yield chosen

    def _per_lane(self, text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        entries = [text] if self.lanes == 1 and (isinstance(text, str) or not _nested(text)) else list(text)
        if (isinstance(text, str) and self.lanes > 1) or len(entries) != self.lanes:
            raise ValueError(f"there are {self.lanes} lanes: give a list with one entry for each")
        return [self._tokens(entry) for entry in entries]  # type: ignore[arg-type]

    def _tokens(self, entry: str | Sequence[int]) -> list[int]:
        if not isinstance(entry, str):
            return list(entry)
        if self.vocab is None:
            raise ValueError("the model has no vocabulary that says what text is: give tokens")
        return [int(token) for token in self.vocab.encode(entry)]

    def _step(self, new: list[list[int]]) -> Tensor:
        """(B, D) hidden states after one more token of the lanes that have one."""
        assert self.partial is not None
        tokens = torch.tensor([tokens[0] if tokens else 0 for tokens in new], device=self.model.device)
        active, starts = [bool(tokens) for tokens in new], [self._begins(lane) for lane in range(self.lanes)]
        hidden_BD, self.state = self.model.step(tokens, self.state, self.partial, active=active, starts=starts)
        return hidden_BD

    def _read(self, new: list[list[int]]) -> Tensor:
        """(B, D) hidden states after more tokens; the segments under way are read from their beginning."""
        rows = [read + tokens if tokens else [] for read, tokens in zip(self.pending, new, strict=True)]
        length = [len(row) for row in rows]
        width = self.segment_len if self.model.needs_whole_segments else max(length)
        tokens_BT = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.model.device)
        segment = self._segment(tokens_BT, length)
        full = [count == self.segment_len for count in length]
        if self.partial is not None and not all(full):
            starts = segment.reset.tolist()
            decoding.load(self.model, self.state, self.partial, starts, lanes=[count > 0 for count in length])
        hidden_BTD, self.state = decoding.read(
            self.model, tokens_BT, self.state, segment, self.partial, full=full, tables=self.tables
        )
        if self.partial is not None:
            self.partial.stand(tokens_BT, length, segment.document)
            self.partial.restart(full)
        last = (segment.length - 1).clamp(min=0)
        return hidden_BTD[torch.arange(self.lanes, device=last.device), last]

    def _take(self, new: list[list[int]], log_probs_BV: Tensor) -> None:
        """Remember what was read, and what may come next."""
        if self.log_probs_BV is not None:
            moved = torch.tensor([bool(tokens) for tokens in new], device=log_probs_BV.device)
            log_probs_BV = lane_where(moved, log_probs_BV, self.log_probs_BV)
        self.log_probs_BV = log_probs_BV
        for lane, tokens in enumerate(new):
            self.pending[lane] += tokens
            if len(self.pending[lane]) == self.segment_len:
                self.before[lane], self.pending[lane] = self.pending[lane][-1], []

    def _begins(self, lane: int) -> bool:
        """Whether a document begins with the next token."""
        before = self.pending[lane][-1] if self.pending[lane] else self.before[lane]
        return self.reset == "document" and before is not None and before == self.separator

    def _segment(self, tokens_BT: Tensor, length: list[int]) -> Segment:
        """Length, reset and documents, as `data.lanes` gives them."""
        segment = Segment.full(tokens_BT)._replace(length=torch.tensor(length, device=tokens_BT.device))
        if self.reset == "segment":
            return segment._replace(reset=torch.ones_like(segment.reset))
        if self.reset == "document":  # one begins behind each separator
            ended = tokens_BT.roll(1, dims=1).eq(self.separator)  # type: ignore[arg-type]
            ended[:, 0] = False
            reset = torch.tensor([before == self.separator for before in self.before], device=tokens_BT.device)
            return segment._replace(reset=reset, document=ended.cumsum(dim=1))
        return segment


def _nested(text: Sequence[object]) -> bool:
    """Whether the entries are texts or lists of tokens themselves."""
    return bool(len(text)) and not isinstance(text[0], int)


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
