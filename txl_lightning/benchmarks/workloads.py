"""What a model of ours is timed at: a training step, a segment of evaluation, a decoded token.

Weights and tokens are random. Tokens are drawn as words are (Zipf), because the cost of an adaptive softmax depends on
how rare they are. Memory is in full use before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from txl_lightning.benchmarks.timing import Task
from txl_lightning.build import segments_at_once
from txl_lightning.config import Config, TrainerConfig
from txl_lightning.generation import Session
from txl_lightning.model.architectures import make_model
from txl_lightning.model.reading import Reader
from txl_lightning.model.softmax import target_counts
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.training.compiling import training_forward
from txl_lightning.training.optim import build_optimizer
from txl_lightning.training.trainer import device_kind, resolve_precision
from txl_lightning.types import Batch, Position, Segment, State, detach, n_byte

POOL = 8  # different segments that take turns


def precision_of(config: Config) -> torch.dtype | None:
    """What autocast is to compute in; None: nothing is cast."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(resolve_precision(config))


def made(config: Config) -> TransformerXL:
    """A model with random weights on its device, the same each time."""
    torch.manual_seed(config.seed)
    model: TransformerXL = make_model(config).to(device_kind(config))
    return model.to(torch.bfloat16) if resolve_precision(config) == "bf16-true" else model


def drawn(config: Config, *, lanes: int, n_token: int, seed: int = 0) -> Tensor:
    """(B, n_token) random tokens on the device: token k as often as 1 / (k + 1)."""
    generator = torch.Generator().manual_seed(config.seed + seed)
    weights = 1 / torch.arange(1, config.model.vocab_size + 1, dtype=torch.float64)
    ends = weights.cumsum(0) / weights.sum()
    places = torch.rand(lanes, n_token, generator=generator, dtype=torch.float64)
    return torch.searchsorted(ends, places).clamp(max=len(ends) - 1).to(device_kind(config))


def turns(config: Config, *, lanes: int, n_token: int) -> Iterator[Batch]:
    """Segments of n_token tokens, again and again; what the CPU can count is counted."""
    pool = []
    for number in range(POOL):
        text = drawn(config, lanes=lanes, n_token=n_token + 1, seed=number)
        tokens, targets = text[:, :-1], text[:, 1:]
        counts = target_counts(targets, cutoffs=config.model.cutoffs) if config.model.cutoffs else None
        pool.append(Batch(tokens, targets, Segment.full(tokens), tokens.numel(), Position(0, number), counts))
    while True:
        yield from pool


def state_dtype(config: Config) -> torch.dtype:
    """As in training and evaluation under this precision."""
    return torch.bfloat16 if "bf16" in resolve_precision(config) else torch.float32


def warm(model: TransformerXL, state: State, config: Config, *, segment_len: int, **more: Any) -> State:
    """The state after as many segments as fill the memory."""
    text = turns(config, lanes=len(state["age"]), n_token=segment_len)
    read, filled = 0, None
    with torch.no_grad(), autocast(config):
        while read < 2 or filled != in_use(state):
            filled = in_use(state)
            state = model(next(text).tokens_BT, state, None, **more).state
            read += 1
    return detach(state)


def in_use(state: State) -> dict[str, list[int]]:
    """Rows in use of everything that counts them."""
    return {key: counts.tolist() for key, counts in state.items() if key.endswith("filled")}


def autocast(config: Config) -> torch.autocast:
    """What `trainer.precision` computes in."""
    dtype = precision_of(config)
    return torch.autocast(device_kind(config), dtype or torch.bfloat16, enabled=dtype is not None)


def training(config: Config, *, label: str) -> Task:
    """A whole optimizer step on one segment of every lane: forward, backward, clipping, update."""
    lanes, n_token = config.data.batch_size, config.data.segment_len
    model = made(config).train()
    optimizer = build_optimizer(model.named_parameters(), config.optim, fuse=True)
    state = warm(model, model.init_state(lanes, dtype=state_dtype(config)), config, segment_len=n_token)
    text = turns(config, lanes=lanes, n_token=n_token)
    forward = training_forward(model, one_pass(config.trainer), kind=device_kind(config))
    state = forward.kept(state, place={})

    def step() -> None:
        nonlocal state
        state = forward.kept(optimizer_step(forward.read, optimizer, next(text), state, config), place=state)

    facts = {**common(config, "data.segment_len", n_token, lanes), "state_bytes_per_lane": n_byte(state) / lanes}
    return Task(part="training", label=label, run=step, amount=lanes * n_token, facts=facts)


def optimizer_step(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    state: State,
    config: Config,
) -> State:
    """One update as a bare loop makes it, without trainer, checks and logging; the memory after it."""
    optimizer.zero_grad()
    with autocast(config):
        out = model(batch.tokens_BT, state, batch.segment, batch.targets_BT, target_counts=batch.target_counts)
    loss = out.losses_BT.mean() + sum(out.aux_losses.values())
    loss.backward()
    if config.optim.clip:
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, config.optim.clip)
    optimizer.step()
    return detach(out.state)


def one_pass(keys: TrainerConfig) -> TrainerConfig:
    """The same with steps of one segment and one pass, which is what is measured."""
    return replace(
        keys, accumulate_grad_batches=1, accumulate_from_step=0, bptt_segments=1, bptt_grow_steps=0, lane_chunks=1
    )


def evaluation(config: Config, *, label: str, by_layers: bool = False) -> Task:
    """One segment of every lane scored with the memory carried along, or several at once layer by layer."""
    lanes, n_token = config.eval_batch_size, config.eval_segment_len
    model = made(config).eval()
    reader = Reader(model)
    state = model.init_state(lanes, form="projected", dtype=state_dtype(config))
    state = warm(model, state, config, segment_len=n_token, tables=reader.tables)
    at_once = segments_at_once(config, lanes=lanes, segment_len=n_token) if by_layers else 1
    text = turns(config, lanes=lanes, n_token=n_token * at_once)
    segments = [Segment.full(drawn(config, lanes=lanes, n_token=n_token)) for _ in range(at_once)]

    @torch.inference_mode()
    def read() -> None:
        nonlocal state
        batch = next(text)
        with autocast(config):
            if by_layers:
                tokens, targets = batch.tokens_BT, batch.targets_BT
                state = model.read_by_layers(tokens, state, segments, targets, tables=reader.tables).state
            else:
                _, state = reader.read(batch, state)

    facts = {
        **common(config, "eval.segment_len", n_token, lanes),
        "schedule": "layers" if by_layers else "segments",
        "state_bytes_per_lane": n_byte(state) / lanes,
    }
    return Task(part="evaluation", label=label, run=read, amount=lanes * n_token * at_once, facts=facts)


def decoding(config: Config, *, label: str) -> Task:
    """One token of one lane read and the next one's distribution known, writes of memory included."""
    n_token = config.eval_segment_len
    session = Session(made(config).eval(), segment_len=n_token, separator=0)
    tokens, filled = iter_tokens(config), None
    while filled != in_use(session.state) or not int(session.state["age"][0]):
        filled = in_use(session.state)
        session.feed([next(tokens) for _ in range(n_token)])

    def read() -> None:
        session.feed([next(tokens)])

    facts = {
        **common(config, "eval.segment_len", n_token, 1),
        "state_bytes_per_lane": n_byte(session.state),
        "token_by_token": session.partial is not None,
    }
    return Task(part="decoding", label=label, run=read, amount=1, group=n_token, facts=facts)


def iter_tokens(config: Config) -> Iterator[int]:
    """Random tokens one by one."""
    pool = drawn(config, lanes=1, n_token=1024)[0].tolist()
    while True:
        yield from pool


def common(config: Config, key: str, n_token: int, lanes: int) -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "memory": config.memory.to_dict(),
        "lanes": lanes,
        key: n_token,
        "precision": resolve_precision(config),
        "device": device_kind(config),
    }


def with_memory_length(config: Config, length: int) -> Config:
    """The same with another size of memory, by the strategy's own key."""
    name = config.memory.size_key
    assert name is not None, "checked before"
    return replace(config, memory=replace(config.memory, **{name: length}))  # type: ignore[arg-type]
