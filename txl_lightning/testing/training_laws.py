"""Laws about graphs and gradients: 8 and 9. Each function says what it compared.

Raises in all of them: LawBroken.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from txl_lightning.config import MemoryConfig
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.testing.bench import Bench, demand_trainable
from txl_lightning.testing.verdict import LawBroken
from txl_lightning.types import State, detach

WARM_UP = 20  # segments before live tensors are counted: they differ while graphs and caches fill


def forgotten(bench: Bench) -> str:
    """Law 8: no graph older than it should be, and nothing piles up while training goes on."""
    model = bench.make(watched=False).train()
    _demand_carry(bench, model)
    state = model.init_state(bench.batch_size)
    counts: list[tuple[int, int]] = []
    loss = torch.zeros((), device=bench.device)
    stream = bench.stream(min(WARM_UP, bench.long_run))
    marks = _marks(bench.long_run)
    for i in range(1, bench.long_run + 1):
        tokens, targets = stream[i % len(stream)]
        reset: bool | list[int] = True if i == 1 else [i % bench.batch_size] if i % 17 == 0 else False
        out = model(tokens, state, bench.segment(reset=reset), targets)
        assert out.losses_BT is not None
        _demand_stopped(model, out.state, segment=i)
        loss, state = loss + out.losses_BT.mean() + sum(out.aux_losses.values()), out.state
        del out
        if i % bench.bptt_segments == 0:
            _step(model, loss, segment=i)
            loss, state = torch.zeros((), device=bench.device), detach(state)
        if i in marks:
            counts.append(_live_tensors())
    if not marks:
        return f"{bench.long_run} training segments; live tensors not counted in so few"
    for name, values in zip(("tensors", "bytes"), zip(*counts, strict=True), strict=True):
        if values[0] < values[1] < values[2]:
            figures = ", ".join(f"{value} after {mark}" for value, mark in zip(values, marks, strict=True))
            raise LawBroken(8, f"live {name} grow: {figures} segments")
    return f"{bench.long_run} training segments; {counts[-1][0]} live tensors, {counts[-1][1]} bytes, as at the start"


def _marks(n_segment: int) -> tuple[int, ...]:
    """The segments after which live tensors are counted: early, half-way and at the end; none in a short run."""
    return (WARM_UP, (WARM_UP + n_segment) // 2, n_segment) if n_segment >= WARM_UP + 10 else ()


TEXTS = 4
"""Texts that law 9 reads at most before it says that a parameter learns nothing."""


def trained(bench: Bench) -> str:
    """Law 9: a strategy's parameters learn from the loss meant for them, the model's from the language model's only."""
    model = bench.make().train()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {name for name in parameters if name.startswith("tokens.") or ".memories." in name}
    by_main: set[str] = set()
    by_aux: set[str] = set()
    for variant in range(TEXTS):  # features that are mostly zero may be so for all tokens of one short text
        if variant and not own - by_main - by_aux:
            break
        main, aux = _losses(bench, model, variant=variant)
        demand_trainable(model, parameters)
        by_main |= _reached(main, parameters)
        by_aux |= _reached(aux, parameters)
    idle = set(parameters) - own - by_main - by_aux
    idle -= _idle_anyway(bench) if idle else set()
    for name in parameters:
        if name not in own and name in by_aux:
            raise LawBroken(9, f"an auxiliary loss reaches {name}, which belongs to the model")
        if name in by_main and name in by_aux and not name.endswith(bench.both_losses):
            raise LawBroken(9, f"{name} is trained by the language model's loss and by an auxiliary loss")
        if name in idle or name in own - by_main - by_aux:
            raise LawBroken(9, f"{name} gets no gradient from any loss")
    if not own:
        return f"{len(parameters)} parameters of the model; the memory has none"
    main_count, aux_count = len(own & by_main), len(own & by_aux)
    return (
        f"of {len(own)} parameters {main_count} learn from the language model's loss, {aux_count} from one of their own"
    )


def _idle_anyway(bench: Bench) -> set[str]:
    """Parameters of the model that learn nothing without memory either: a token alone in its segment weighs nothing."""
    plain = bench.make(plain=True).train()
    main, _ = _losses(bench, plain)
    parameters = dict(plain.named_parameters())
    return set(parameters) - _reached(main, parameters)


def _step(model: TransformerXL, loss: Tensor, *, segment: int) -> None:
    """One update; its in-place change of the weights makes a graph that should be gone fail."""
    model.zero_grad(set_to_none=True)
    try:
        loss.backward()
    except RuntimeError as error:
        raise LawBroken(
            8, f"backward of segment {segment} reaches an older graph: {str(error).splitlines()[0]}"
        ) from error
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)
    model.zero_grad(set_to_none=True)


def _demand_stopped(model: TransformerXL, state: State, *, segment: int) -> None:
    for path, part in model.memory_parts():
        if part.gradient not in ("stop", "carry"):
            raise LawBroken(8, f"{path}: gradient is {part.gradient!r}; it must be 'stop' or 'carry'")
        for key, tensor in state.items():
            if part.gradient == "stop" and key.startswith(f"{path}.") and tensor.requires_grad:
                what = f"state {key} still has a graph after segment {segment}"
                raise LawBroken(8, f"{what}, but {path} declares gradient='stop'")


def _demand_carry(bench: Bench, model: TransformerXL) -> None:
    """A strategy that says the graph crosses the border lets it, and its configuration says so too."""
    state = model.init_state(bench.batch_size)
    batches = bench.stream(bench.warm_segments + 1)
    for i, (tokens, targets) in enumerate(batches[:-1]):
        state = model(tokens, detach(state), bench.segment(reset=i == 0), targets).state
    out = model(batches[-1][0], state, bench.segment(), batches[-1][1])
    assert out.losses_BT is not None
    for path, part in model.memory_parts():
        own = [tensor for key, tensor in state.items() if key.startswith(f"{path}.") and tensor.requires_grad]
        grads = torch.autograd.grad(out.losses_BT.sum(), own, allow_unused=True, retain_graph=True) if own else ()
        has_state = any(key.startswith(f"{path}.") for key in state)
        if part.gradient == "carry" and has_state and not any(grad is not None and bool(grad.any()) for grad in grads):
            raise LawBroken(
                8, f"{path} declares gradient='carry', but the next segment's loss does not reach its state"
            )
    carried = any(part.gradient == "carry" for _, part in model.memory_parts())
    if isinstance(bench.config, MemoryConfig) and bench.config.carries != carried:
        said = f"{type(bench.config).__name__}.carries is {bench.config.carries}"
        raise LawBroken(8, f"{said}, so trainer.bptt_segments would be misjudged: gradient of its parts says otherwise")


def _live_tensors() -> tuple[int, int]:
    """How many tensors Python holds, and the bytes behind them."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values())


def _losses(bench: Bench, model: TransformerXL, *, variant: int = 0) -> tuple[Tensor, Tensor]:
    """The language model's loss and the auxiliary ones, over enough segments for memory to be in full use."""
    count = bench.warm_segments + 2
    state = model.init_state(bench.batch_size)
    main = aux = torch.zeros((), device=bench.device)
    for i, (tokens, targets) in enumerate(bench.stream(count, variant=variant)):
        out = model(tokens, state, bench.segment(reset=i == 0), targets)
        assert out.losses_BT is not None
        main, aux, state = main + out.losses_BT.mean(), aux + sum(out.aux_losses.values()), out.state
    return main, aux


def _reached(loss: Tensor, parameters: Mapping[str, Tensor]) -> set[str]:
    """Names of the parameters that get a gradient from this loss which is not all zeros."""
    if not loss.requires_grad:
        return set()
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {name for name, grad in zip(parameters, grads, strict=True) if grad is not None and bool(grad.any())}
