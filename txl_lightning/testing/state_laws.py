"""Laws about the state as a value: 1, 2, 3, 4, 5, 10 and 12. Each function says what it compared.

Raises in all of them: LawBroken.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from txl_lightning.config import MemoryConfig
from txl_lightning.memory.base import MemoryStrategy
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.testing.bench import Bench, lanes_of, run
from txl_lightning.testing.verdict import DoesNotApply, LawBroken, demand_equal
from txl_lightning.types import Segment, State, detach


def pure(bench: Bench) -> str:
    """Law 1: forward changes nothing but its result, so doing it twice (activation checkpointing) is doing it once."""
    model = bench.make(dropout=0.1).train()
    state = bench.warm_state(model)
    copies = {key: tensor.clone() for key, tensor in state.items()}
    batches, segments = bench.stream(2, variant=2), [bench.segment(reset=[0], length=bench.ragged()), bench.segment()]
    before = _attributes(model)
    once, twice = (bench.gradients(model, state, batches, segments) for _ in range(2))
    for name, (value, size) in _attributes(model).items():
        if name not in before or before[name][0] is not value or before[name][1] != size:
            raise LawBroken(1, f"forward left something on the module: {name}")
    demand_equal(1, "the same forward a second time", twice, once)
    demand_equal(1, "the state given to forward, after it", state, copies)
    checkpointing = bench.make(dropout=0.1, checkpointing=True).train()
    again = bench.gradients(checkpointing, state, batches, segments)
    demand_equal(1, "with activation checkpointing", again, once)
    return (
        f"{len(once)} results and gradients equal the second time and with activation checkpointing; modules untouched"
    )


def static(bench: Bench) -> str:
    """Law 2: shapes, dtypes and names never change; the compiler sees one graph."""
    count = bench.warm_segments
    _demand_declared(bench)
    for form in ("hidden", "projected"):
        model = bench.make()
        state = first = model.init_state(bench.batch_size, form=form)
        _demand_lanes_first(first, model.init_state(bench.batch_size + 1, form=form), lanes=bench.batch_size + 1)
        reports: list[list[str]] = []
        for (tokens, targets), segment in zip(bench.stream(count), bench.mixed_segments(count), strict=True):
            with torch.no_grad():
                out = model(tokens, state, segment, targets)
            _demand_static(first, out.state, reported={**out.aux_losses, **out.metrics})
            reports.append([*out.aux_losses, *out.metrics])
            state = out.state
        if any(names != reports[0] for names in reports):
            raise LawBroken(2, f"the names of losses and metrics change: {reports}")
    return f"{len(first)} tensors in both forms over resets, short and dead lanes; {_one_graph(bench)}"


def independent(bench: Bench) -> str:
    """Law 3: a lane sees itself only."""
    if bench.batch_size == 1:
        raise DoesNotApply("there is one lane only")
    model = bench.make()
    state, other = bench.warm_state(model), bench.warm_state(model, variant=1)
    batch, strange = bench.stream(1, variant=2)[0], bench.stream(1, variant=3)[0]
    segment = bench.segment(reset=[bench.batch_size - 1], length=bench.ragged())
    lanes = list(range(bench.batch_size))
    ours = {key: torch.cat([tensor, other[key]]) for key, tensor in state.items()}, _joined(batch, strange)
    own = lanes * len(lanes)
    swapped = [i + bench.batch_size * (i == lane) for lane in lanes for i in lanes]  # one lane from the other text
    both = Segment(*(torch.cat([fact, fact]) for fact in segment[:2]))
    all_own, all_swapped = (run(model, *_pick(picked, *ours, both)) for picked in (own, swapped))
    base = run(model, state, batch, segment)
    for lane in lanes:
        rest = [lane * len(lanes) + i for i in lanes if i != lane]
        what = f"other tokens and memory in lane {lane} changed another lane"
        demand_equal(3, what, lanes_of(all_swapped, rest), lanes_of(all_own, rest))
        found = run(model, *_pick([lane], state, batch, segment))
        what = f"lane {lane} alone against the same lane among {bench.batch_size}"
        demand_equal(3, what, lanes_of(found, [0]), lanes_of(base, [lane]), tolerance=bench.tolerance)
    order = [*lanes[1:], 0]
    found = run(model, *_pick(order, state, batch, segment))
    demand_equal(3, "permuted lanes", lanes_of(found, lanes), lanes_of(base, order), tolerance=bench.tolerance)
    return f"{bench.batch_size} lanes permuted, exchanged one by one, and each alone"


def reset(bench: Bench) -> str:
    """Law 4: a lane that starts anew is a fresh lane, and no other lane notices; learned start values get gradient."""
    lanes = list(range(bench.batch_size))
    size = len(lanes) ** 2  # all lanes side by side, once for the reset of each
    tokens, targets = (rows.repeat(len(lanes), 1) for rows in bench.stream(1, variant=2)[0])
    for form in ("hidden", "projected"):
        model = bench.make()
        fresh_state = model.init_state(size, form=form)
        if form == "hidden":
            _demand_known_starts(model, fresh_state)
        state = {key: torch.cat([rows] * len(lanes)) for key, rows in bench.warm_state(model, form=form).items()}
        fresh, kept = (run(model, s, (tokens, targets), bench.segment(lanes=size)) for s in (fresh_state, state))
        again = [lane * len(lanes) + lane for lane in lanes]
        found = run(model, state, (tokens, targets), bench.segment(reset=again, lanes=size))
        for lane in lanes:
            rest = [lane * len(lanes) + i for i in lanes if i != lane]
            what = f"lane {lane} after its reset against a fresh lane ({form} form)"
            demand_equal(4, what, lanes_of(found, [again[lane]]), lanes_of(fresh, [again[lane]]))
            what = f"the reset of lane {lane} changed another lane"
            demand_equal(4, what, lanes_of(found, rest), lanes_of(kept, rest))
    return f"every lane reset in turn, both forms; {_learned_starts(bench)}"


def unmoved(bench: Bench) -> str:
    """Law 5: a lane without tokens keeps its state bit for bit; what stands in the padding matters to nobody."""
    turns = [bench.ragged(turn=turn) for turn in range(0, 5, min(5, bench.batch_size))]  # each length in some lane
    turns = [lengths for i, lengths in enumerate(turns) if lengths not in turns[:i]]
    for form in ("hidden", "projected"):
        model = bench.make()
        state = bench.warm_state(model, form=form)
        for lengths in turns:
            _demand_still(bench, model, state, lengths=lengths, form=form)
    model.train()
    for lengths in turns:
        if min(lengths) < bench.segment_len:
            _demand_deaf(bench, model, bench.warm_state(model), lengths=lengths)
    _demand_as_short(bench)
    seen = sorted({length for lengths in turns for length in lengths}, reverse=True)
    return f"lanes of length {', '.join(map(str, seen))}; state, losses, gradients, and the segment after it"


def _demand_still(bench: Bench, model: TransformerXL, state: State, *, lengths: list[int], form: str) -> None:
    """The lanes without tokens keep their state, those that are said to start anew among them."""
    dead = [lane for lane, length in enumerate(lengths) if length == 0]
    batch = bench.stream(1, variant=2)[0]
    for again in (False, True) if dead else ():
        found = run(model, state, batch, bench.segment(reset=again, length=lengths))
        after = {key: found[f"state {key}"][dead] for key in state}
        what = f"the state of a lane of length 0 ({form} form, reset={again})"
        demand_equal(5, what, after, {key: tensor[dead] for key, tensor in state.items()})


def _demand_deaf(bench: Bench, model: TransformerXL, state: State, *, lengths: list[int]) -> None:
    """Other tokens in the padding change nothing, and all is finite."""
    segments = [bench.segment(length=lengths), bench.segment()]
    (tokens, targets), after_that = bench.stream(2, variant=2)
    real = segments[0].mask(bench.segment_len)
    garbage = torch.where(real, tokens, (tokens + 1) % bench.model.vocab_size)
    ours, theirs = (bench.gradients(model, state, [(t, targets), after_that], segments) for t in (tokens, garbage))
    demand_equal(5, "other tokens in the padding", ours, theirs)
    infinite = [name for name, tensor in ours.items() if not tensor.isfinite().all()]
    if infinite:
        raise LawBroken(5, f"not finite with short and dead lanes: {', '.join(infinite)}")


def _demand_as_short(bench: Bench) -> None:
    """Lanes begin with a padded segment as with the short one it holds: the same losses, also in the next segment.

    They have empty places, which padding could be taken to fill. Not where there is no shorter segment to compare with,
    nor with memory tokens: those behind a segment stand behind its padding too, so they are further from its text.
    """
    model = bench.make()
    if model.needs_whole_segments or model.tokens is not None:
        return
    (tokens, targets), after_that = bench.stream(2, variant=2)
    for form in ("hidden", "projected"):
        state = model.init_state(bench.batch_size, form=form)
        for size in sorted({1, bench.segment_len // 2, bench.segment_len - 1} - {0}):
            segment = bench.segment(length=[size] * bench.batch_size)
            padded = run(model, state, (tokens, targets), segment)
            short = run(model, state, (tokens[:, :size], targets[:, :size]), segment)
            for found in (padded, short):
                left = {key: found[f"state {key}"] for key in state}
                found["losses after it"] = run(model, left, after_that, bench.segment())["losses"]
                found["losses"] = found["losses"][:, :size]
            ours, theirs = ({k: found[k] for k in ("losses", "losses after it")} for found in (padded, short))
            what = f"{size} tokens padded to {bench.segment_len} against {size} tokens alone ({form} form)"
            demand_equal(5, what, ours, theirs, tolerance=bench.tolerance)


def saved(bench: Bench) -> str:
    """Law 10: the state is plain tensors; saved and loaded it is the same, and so is what follows from it."""
    size = 0
    for form in ("hidden", "projected"):
        model = bench.make()
        state = bench.warm_state(model, form=form)
        for key, tensor in [*model.init_state(bench.batch_size, form=form).items(), *state.items()]:
            if type(tensor) is not Tensor:
                raise LawBroken(10, f"state {key} is a {type(tensor).__name__}, not a plain tensor")
        file = io.BytesIO()
        torch.save(state, file)
        size = file.tell()
        file.seek(0)
        loaded: State = torch.load(file, weights_only=True)
        demand_equal(10, f"state saved and loaded ({form} form)", loaded, state)
        batch = bench.stream(1, variant=2)[0]
        ours, theirs = (run(model, given, batch, bench.segment()) for given in (loaded, state))
        demand_equal(10, f"the segment read from the loaded state ({form} form)", ours, theirs)
    return f"both forms, {size} bytes in the file"


def undisturbed(bench: Bench) -> str:
    """Law 12: evaluation with other lanes and a longer memory does not touch training."""
    model = bench.make().train()
    state = bench.warm_state(model)
    copies = {key: tensor.clone() for key, tensor in state.items()}
    step = ([bench.stream(1, variant=2)[0]], [bench.segment()])
    before = bench.gradients(model, state, *step)
    note = "memory not made longer: it has no key mem_len; name its keys with longer={...}"
    _evaluate(bench, model.eval())
    if not all(part.extendable for _, part in model.memory_parts()):
        note = "memory not made longer: it is declared not extendable"
    elif bench.longer is not None:
        longer = bench.make(longer=True)
        longer.load_state_dict(model.state_dict())
        _evaluate(bench, longer)
        note = "also with a longer memory and the same weights"
    demand_equal(12, "the training state after an evaluation", state, copies)
    after = bench.gradients(model.train(), state, *step)
    demand_equal(12, "the training step after an evaluation", after, before)
    return f"evaluated with {bench.batch_size + 2} lanes; {note}"


def _attributes(model: TransformerXL) -> dict[str, tuple[Any, int]]:
    """Every attribute of every module, with its version or size where it can change in place."""
    found = {}
    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            size = value._version if isinstance(value, Tensor) else len(value) if isinstance(value, Sized) else 0
            found[f"{path}.{name}"] = (value, size)
    return found


def _demand_declared(bench: Bench) -> None:
    """What the configuration says before anything is built (`reaches_back`) is so."""
    if not isinstance(bench.config, MemoryConfig):
        return
    ages = {path: part.max_age for path, part in bench.make().memory_parts() if isinstance(part, MemoryStrategy)}
    if bench.config.reaches_back != any(ages.values()):
        said = f"{type(bench.config).__name__}.reaches_back is {bench.config.reaches_back}"
        raise LawBroken(2, f"{said}, but max_age is {', '.join(f'{age} in {path}' for path, age in ages.items())}")


def _demand_lanes_first(state: State, more: State, *, lanes: int) -> None:
    for key, tensor in more.items():
        if tensor.shape != (lanes, *state[key].shape[1:]):
            raise LawBroken(2, f"state {key} of {lanes} lanes has shape {tuple(tensor.shape)}; dim 0 must be the lane")


def _demand_static(first: State, state: State, *, reported: Mapping[str, Tensor]) -> None:
    if list(state) != list(first):
        raise LawBroken(2, f"the state had keys {list(first)} and has {list(state)}")
    for key, tensor in state.items():
        ours, theirs = ((t.shape, t.dtype, t.device) for t in (tensor, first[key]))
        if ours != theirs:
            raise LawBroken(2, f"state {key} was {theirs} and is {ours}")
    for name, value in reported.items():
        if value.dim():
            raise LawBroken(2, f"{name} has shape {tuple(value.shape)}; losses and metrics are single numbers")


def _one_graph(bench: Bench) -> str:
    """Compile training steps over every kind of segment and count the graphs."""
    if not bench.compiled:
        return "graphs not counted (compiled=False)"
    from torch._dynamo.testing import CompileCounterWithBackend

    model = bench.make(watched=False).train()
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    state = model.init_state(bench.batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for (tokens, targets), segment in zip(bench.stream(5), bench.mixed_segments(5), strict=True):
            state = detach(compiled(tokens, state, segment, targets).state)
    torch._dynamo.reset()
    if counter.frame_count != 1:
        raise LawBroken(2, f"{counter.frame_count} graphs compiled over 5 segments")
    return "one graph over 5 training steps"


def _joined(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two batches as one."""
    return torch.cat([ours[0], theirs[0]]), torch.cat([ours[1], theirs[1]])


def _pick(
    lanes: list[int], state: State, batch: tuple[Tensor, Tensor], segment: Segment
) -> tuple[State, tuple[Tensor, Tensor], Segment]:
    chosen = {key: tensor[lanes] for key, tensor in state.items()}
    return chosen, (batch[0][lanes], batch[1][lanes]), Segment(segment.reset[lanes], segment.length[lanes])


def _demand_known_starts(model: TransformerXL, state: State) -> None:
    for path, part in model.memory_parts():
        unknown = [key for key in part.initial() if f"{path}.{key}" not in state]
        if unknown:
            raise LawBroken(4, f"{path}: initial() names {', '.join(unknown)}, which its state does not have")


def _learned_starts(bench: Bench) -> str:
    """Every parameter that a start value is made of gets gradient from segments read right after a reset."""
    model = bench.make().train()
    batches, segments = bench.stream(3), [bench.segment(reset=True), bench.segment(), bench.segment()]
    found = bench.gradients(model, model.init_state(bench.batch_size), batches, segments)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    learned = []
    for path, part in model.memory_parts():
        for key, start in part.initial().items():
            own = list(part.parameters())
            grads = (
                torch.autograd.grad(start.sum(), own, allow_unused=True) if start.requires_grad else [None] * len(own)
            )
            sources = [names[id(p)] for p, grad in zip(own, grads, strict=True) if grad is not None]
            for name in sources:
                grad = found.get(f"gradient of {name}")
                if grad is None or not grad.any():
                    raise LawBroken(
                        4, f"start value {path}.{key} is learned, but {name} gets no gradient after a reset"
                    )
            learned += sources
    return f"{len(learned)} learned start values get gradient" if learned else "no learned start values"


def _evaluate(bench: Bench, model: TransformerXL) -> None:
    lanes = bench.batch_size + 2
    state = model.init_state(lanes, form="projected")
    for i, batch in enumerate(bench.stream(bench.warm_segments, variant=4, lanes=lanes)):
        with torch.no_grad():
            out = model(batch[0], state, bench.segment(reset=i == 0, lanes=lanes), batch[1])
        state = out.state
        assert out.losses_BT is not None
        if not out.losses_BT.isfinite().all():
            raise LawBroken(12, f"the evaluation gives losses that are not finite in segment {i}")
