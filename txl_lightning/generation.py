"""Sampling with the memory carried along."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from txl_lightning.build import document_end
from txl_lightning.data.vocab import Vocab, from_dict
from txl_lightning.model import decoding
from txl_lightning.model.partial import Partial, sent
from txl_lightning.model.tables import Tables
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.sampling import Choice, SamplingRule, cut, has_stopped
from txl_lightning.types import Segment, lane_where

REMEMBERED = 4096
"""Tokens of each lane that a repetition penalty can look back."""


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
        capture: whether a token is read by a recorded graph; None: on CUDA (`TransformerXL.begin`).
    """

    def __init__(
        self,
        model: TransformerXL,
        *,
        segment_len: int | None = None,
        separator: int | None = None,
        lanes: int = 1,
        vocab: Vocab | None = None,
        capture: bool | None = None,
    ) -> None:
        self.reset = model.run_config.memory.reset
        self.vocab = from_dict(dict(model.vocab)) if vocab is None and model.vocab is not None else vocab
        if separator is None and self.vocab is not None:
            separator = document_end(self.vocab)
        if self.reset == "document" and separator is None:
            raise ValueError("memory.reset=document needs the separator: the id that ends a document")
        self.model, self.separator, self.lanes = model, separator, lanes
        self.segment_len = segment_len if segment_len is not None else model.run_config.data.segment_len
        self.tables, self.capture = Tables(), capture
        self.restart()

    def restart(self) -> None:
        """Forget everything that was read."""
        self.state = self.model.init_state(self.lanes, form="projected")
        self.pending: list[list[int]] = [[] for _ in range(self.lanes)]  # tokens of the segments under way
        self.before: list[int | None] = [None] * self.lanes  # the tokens before them
        self.recent: list[deque[int]] = [deque(maxlen=REMEMBERED) for _ in range(self.lanes)]  # those read lately
        self.n_read = [0] * self.lanes
        self.log_probs_BV: Tensor | None = None  # of the next tokens; None before the first
        self.partial: Partial | None = None  # buffers of the segments under way
        if decoding.steppable(self.model, documents=self.reset == "document"):
            self.partial = self.model.begin(
                self.state, segment_len=self.segment_len, tables=self.tables, reset=self.reset, capture=self.capture
            )

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

    def score(self, text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> list[list[float]]:
        """Read on and say how likely it was: for each lane the log-probability, in nats, of each token it read.

        Nothing is said of the very first token of a lane, which nothing came before: its list is one shorter. Arguments
        and errors are those of `feed`.
        """
        found: list[list[float]] = [[] for _ in range(self.lanes)]
        self._feed(self._per_lane(text), found)
        return found

    @torch.inference_mode()
    def _feed(self, rest: list[list[int]], found: list[list[float]] | None = None) -> None:
        while any(rest):
            new = [tokens[: self.segment_len - len(read)] for tokens, read in zip(rest, self.pending, strict=True)]
            if self.partial is not None and max(map(len, new)) == 1:
                log_probs_BV = self._step(new)
                self._judge(new, found)
            else:
                log_probs_BV = self._read_on(new, found)
            self._take(new, log_probs_BV)
            rest = [tokens[len(taken) :] for tokens, taken in zip(rest, new, strict=True)]

    def _read_on(self, new: list[list[int]], found: list[list[float]] | None) -> Tensor:
        """(B, V) log-probabilities after the new tokens; judges them."""
        hidden_BTD, first = self._read(new), [len(read) for read in self.pending]
        self._judge(new, found)
        for lane, tokens in enumerate(new):
            if found is not None and len(tokens) > 1:
                before = hidden_BTD[lane : lane + 1, first[lane] : first[lane] + len(tokens) - 1]
                losses = self.model.softmax.losses(before, sent([tokens[1:]], before.device))
                found[lane] += (-losses)[0].tolist()
        last = [start + len(tokens) - 1 if tokens else 0 for start, tokens in zip(first, new, strict=True)]
        index = sent(last, hidden_BTD.device)[:, None, None].expand(-1, 1, hidden_BTD.shape[2])
        return self.model.log_probs(hidden_BTD.gather(1, index))[:, 0]

    def _judge(self, new: list[list[int]], found: list[list[float]] | None) -> None:
        """Add the log-probabilities of the first of the new tokens."""
        if found is None or self.log_probs_BV is None:
            return
        known = self.log_probs_BV.gather(1, sent([[tokens[0] if tokens else 0] for tokens in new], self.model.device))
        for lane, log_prob in enumerate(known[:, 0].tolist()):
            if new[lane] and self.n_read[lane]:
                found[lane].append(log_prob)

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
            return (choices[0].token for choices in self._draw(n_token, rule, [generator]))
        return ([choice.token for choice in choices] for choices in self._draw(n_token, rule, list(generator)))

    def draw(
        self, n_token: int, *, rule: SamplingRule, generators: Sequence[torch.Generator], stop: Sequence[str] = ()
    ) -> list[list[Choice]]:
        """For each lane what it chose and read: n_token tokens, or fewer if a stop string came.

        Args:
            n_token: how many at most.
            rule: how they are chosen.
            generators: one for each lane.
            stop: a lane reads no more when one of these is in what it said; needs a vocabulary.
        """
        said: list[list[Choice]] = [[] for _ in range(self.lanes)]

        def ended(lane: int) -> bool:
            assert self.vocab is not None, "stop strings need a vocabulary"
            return has_stopped([choice.token for choice in said[lane]], vocab=self.vocab, stops=stop)

        over = [False] * self.lanes
        for choices in self._draw(n_token, rule, list(generators), over):
            for lane, choice in enumerate(choices):
                if not over[lane]:
                    said[lane].append(choice)
                    over[lane] = bool(stop) and ended(lane)
        return said

    def generate(
        self, n_token: int, *, rule: SamplingRule | None = None, seed: int = 0, stop: Sequence[str] = ()
    ) -> str | list[int] | list[str] | list[list[int]]:
        """Choose and read n_token tokens of each lane.

        Args:
            n_token: how many.
            rule: how they are chosen; by default each with the probability that the model gives it.
            seed: of the choice, the same for every lane.
            stop: a lane says no more when one of these strings comes, and its text ends before it; needs a vocabulary.

        Returns:
            Their text where there is a vocabulary, else the tokens; with several lanes a list with one entry for each.
        """
        generators = [torch.Generator().manual_seed(seed) for _ in range(self.lanes)]
        drawn = self.draw(n_token, rule=rule or SamplingRule(), generators=generators, stop=stop)
        by_lane = [[choice.token for choice in own] for own in drawn]
        if self.vocab is None:
            return by_lane[0] if self.lanes == 1 else by_lane
        texts = [cut(self.vocab.decode(np.array(tokens, dtype=np.int64)), stop) for tokens in by_lane]
        return texts[0] if self.lanes == 1 else texts

    def _draw(
        self, n_token: int, rule: SamplingRule, generators: list[torch.Generator], over: list[bool] | None = None
    ) -> Iterator[list[Choice]]:
        """What each lane chose, token by token, until all lanes are `over`, which then choose without being heard."""
        assert self.log_probs_BV is not None and all(self.n_read), "every lane needs a prompt"
        over = over if over is not None else [False] * self.lanes
        for _ in range(n_token):
            if all(over):
                return
            recent = self.recent if rule.repetition_penalty != 1 else [()] * self.lanes
            choices = rule.choose(self.log_probs_BV, generators, recent=recent)
            self._feed([[] if ended else [choice.token] for choice, ended in zip(choices, over, strict=True)])
            yield choices

    def stand(self) -> dict[str, Any]:
        """All that later text depends on, in plain containers and tensors: what `take_up` goes on from.

        What has been read of a segment stands as tokens, which are read again: up to rounding, nothing is lost.
        """
        return {
            "segment_len": self.segment_len,
            "reset": self.reset,
            "state": {key: tensor.clone() for key, tensor in self.state.items()},
            "pending": [list(tokens) for tokens in self.pending],
            "before": list(self.before),
            "recent": [list(tokens) for tokens in self.recent],
            "n_read": list(self.n_read),
            "log_probs": None if self.log_probs_BV is None else self.log_probs_BV.clone(),
        }

    def take_up(self, stand: Mapping[str, Any]) -> None:
        """Go on where a session of the same model stood.

        Raises:
            ValueError: it had other segments, lanes or another memory.
        """
        self._check(stand)
        self.restart()
        self.state = {key: stand["state"][key].to(tensor.device, copy=True) for key, tensor in self.state.items()}
        self.before = list(stand["before"])
        self._feed([list(tokens) for tokens in stand["pending"]])
        for recent, tokens in zip(self.recent, stand["recent"], strict=True):
            recent.clear()
            recent.extend(tokens)
        self.n_read = list(stand["n_read"])
        log_probs = stand["log_probs"]
        self.log_probs_BV = None if log_probs is None else log_probs.to(self.model.device, copy=True)

    def _check(self, stand: Mapping[str, Any]) -> None:
        """Raise ValueError if a stand is not one of a session like this."""
        facts = {"segment_len": self.segment_len, "reset": self.reset}
        for name, own in facts.items():
            if stand[name] != own:
                raise ValueError(f"{name} was {stand[name]} there and is {own} here")
        if len(stand["pending"]) != self.lanes:
            raise ValueError(f"there were {len(stand['pending'])} lanes there and are {self.lanes} here")
        there, here = (
            {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
            for state in (stand["state"], self.state)
        )
        if there != here:
            odd = sorted(key for key in {**there, **here} if there.get(key) != here.get(key))
            raise ValueError(
                f"the memory is another one: {odd[0]} is {there.get(odd[0])} there, {here.get(odd[0])} here"
            )

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
        """(B, V) log-probabilities after one more token of the lanes that have one."""
        assert self.partial is not None
        tokens = sent([tokens[0] if tokens else 0 for tokens in new], self.model.device)
        active, starts = [bool(tokens) for tokens in new], [self._begins(lane) for lane in range(self.lanes)]
        log_probs_BV, self.state = self.model.step(
            tokens, self.state, self.partial, active=active, starts=starts, log_probs=True
        )
        return log_probs_BV

    def _read(self, new: list[list[int]]) -> Tensor:
        """(B, T, D) hidden states of the segments under way, read from their beginning to the new tokens."""
        rows = [read + tokens if tokens else [] for read, tokens in zip(self.pending, new, strict=True)]
        length = [len(row) for row in rows]
        width = self.segment_len if self.model.needs_whole_segments else max(length)
        tokens_BT = sent([row + [0] * (width - len(row)) for row in rows], self.model.device)
        segment = self._segment(tokens_BT, length)
        full = [count == self.segment_len for count in length]
        if self.partial is not None and not all(full):
            starts = [self._begins(lane) for lane in range(self.lanes)]
            decoding.load(self.model, self.state, self.partial, starts, lanes=[count > 0 for count in length])
        hidden_BTD, self.state = decoding.read(
            self.model, tokens_BT, self.state, segment, self.partial, full=full, tables=self.tables
        )
        if self.partial is not None:
            self.partial.stand(tokens_BT, length, segment.document)
            self.partial.restart(full)
        return hidden_BTD

    def _take(self, new: list[list[int]], log_probs_BV: Tensor) -> None:
        """Remember what was read, and what may come next."""
        if self.log_probs_BV is not None and not all(new):
            moved = sent([bool(tokens) for tokens in new], log_probs_BV.device)
            log_probs_BV = lane_where(moved, log_probs_BV, self.log_probs_BV)
        self.log_probs_BV = log_probs_BV
        for lane, tokens in enumerate(new):
            self.recent[lane].extend(tokens)
            self.n_read[lane] += len(tokens)
            self.pending[lane] += tokens
            if len(self.pending[lane]) == self.segment_len:
                self.before[lane], self.pending[lane] = self.pending[lane][-1], []

    def _begins(self, lane: int) -> bool:
        """Whether a document begins with the next token."""
        before = self.pending[lane][-1] if self.pending[lane] else self.before[lane]
        return self.reset == "document" and before is not None and before == self.separator

    def _segment(self, tokens_BT: Tensor, length: list[int]) -> Segment:
        """Length, reset and documents, as `data.lanes` gives them."""
        segment = Segment.full(tokens_BT)._replace(length=sent(length, tokens_BT.device))
        if self.reset == "segment":
            return segment._replace(reset=torch.ones_like(segment.reset))
        if self.reset == "document":  # one begins behind each separator
            ended = tokens_BT.roll(1, dims=1).eq(self.separator)  # type: ignore[arg-type]
            ended[:, 0] = False
            reset = sent([before == self.separator for before in self.before], tokens_BT.device)
            return segment._replace(reset=reset, document=ended.cumsum(dim=1))
        return segment


def _nested(text: Sequence[object]) -> bool:
    """Whether the entries are texts or lists of tokens themselves."""
    return bool(len(text)) and not isinstance(text[0], int)
