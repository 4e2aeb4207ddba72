"""Laws about what reading memory gives: 6, 7 and 11. Each function says what it compared.

Raises in all of them: LawBroken, or DoesNotApply with the reason.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from txl_lightning.memory.base import MemoryStrategy
from txl_lightning.model.transformer import TransformerXL
from txl_lightning.testing.bench import Bench, run
from txl_lightning.testing.verdict import DoesNotApply, LawBroken, demand_equal, difference
from txl_lightning.types import State


def causal(bench: Bench) -> str:
    """Law 6: a token changes no loss before it; what it writes is read by later segments only."""
    for form in ("hidden", "projected"):
        model = bench.make()
        size, lanes = bench.segment_len, bench.batch_size
        tokens, targets = (rows.repeat(size, 1) for rows in bench.stream(1, variant=2)[0])
        state = {key: torch.cat([tensor] * size) for key, tensor in bench.warm_state(model, form=form).items()}
        place = torch.arange(size, device=tokens.device)
        change = (place == place.repeat_interleave(lanes)[:, None]).long()  # all lanes once for each token
        segment = bench.segment(lanes=size * lanes)
        base = run(model, state, (tokens, targets), segment)["losses"]
        other = run(model, state, ((tokens + change) % bench.model.vocab_size, targets), segment)["losses"]
        for t, (found, wanted) in enumerate(zip(other.split(lanes), base.split(lanes), strict=True)):
            what = f"another token {t} changed the losses before it ({form} form)"
            demand_equal(6, what, {"losses": found[:, :t]}, {"losses": wanted[:, :t]})
    return f"each of {bench.segment_len} tokens changed in turn, both forms"


def matters(bench: Bench) -> str:
    """Law 7: another state gives another output; without any memory the model is the plain one, bit for bit."""
    model = bench.make()
    parts = dict(model.memory_parts())
    if not parts:
        return _plain(bench, model)
    state, other = bench.warm_state(model), bench.warm_state(model, variant=1)
    base = _losses_after(bench, model, state)
    seen = []
    for path in parts:
        own = {key: other[key] for key in state if key.startswith(f"{path}.")}
        if not own:
            continue
        found = _losses_after(bench, model, {**state, **own})
        for lane in range(bench.batch_size):
            if difference(found[lane], base[lane]) is None:
                raise LawBroken(7, f"another history in {path} changes no loss of lane {lane}")
        seen.append(path)
    if not seen:
        raise DoesNotApply("the memory has no state")
    return f"another history changes the losses through each of {', '.join(seen)}"


def _losses_after(bench: Bench, model: TransformerXL, state: State) -> Tensor:
    """(B, N) losses of the next 16 tokens or more: features that are mostly zero may be so for a few."""
    losses = []
    for tokens, targets in bench.stream(max(1, 16 // bench.segment_len), variant=2):
        with torch.no_grad():
            out = model(tokens, state, bench.segment(), targets)
        assert out.losses_BT is not None
        losses.append(out.losses_BT)
        state = out.state
    return torch.cat(losses, dim=1)


def equal_passes(bench: Bench) -> str:
    """Law 11: the two forms of a state mean the same; a lossless memory makes segments equal to one long pass."""
    bench = dataclasses.replace(bench, dtype=torch.float64, mixed=False)
    model = bench.make()
    count = bench.warm_segments
    states = {form: model.init_state(bench.batch_size, form=form) for form in ("hidden", "projected")}
    for i, (batch, segment) in enumerate(zip(bench.stream(count), bench.mixed_segments(count), strict=True)):
        losses = {}
        for form in states:
            with torch.no_grad():
                out = model(batch[0], states[form], segment, batch[1])
            assert out.losses_BT is not None
            states[form], losses[form] = out.state, out.losses_BT
        what = f"projected form against hidden form in segment {i}"
        demand_equal(11, what, {"losses": losses["projected"]}, {"losses": losses["hidden"]}, tolerance=1e-6)
    both = f"projected form equals hidden form over {count} segments in float64"
    if not bench.lossless:
        return f"{both}; one long pass not compared: memory is not said to be lossless"
    return f"{both}; {_one_pass(bench, model)}"


def _plain(bench: Bench, model: TransformerXL) -> str:
    plain = bench.make(plain=True).train()
    plain.load_state_dict(model.state_dict())
    batches, segments = (
        bench.stream(3),
        [bench.segment(reset=True), bench.segment(length=bench.ragged()), bench.segment()],
    )
    ours, theirs = (
        bench.gradients(which.train(), which.init_state(bench.batch_size), batches, segments)
        for which in (model, plain)
    )
    demand_equal(7, "against the model without memory", ours, theirs)
    fresh = bench.gradients(model, model.init_state(bench.batch_size), batches[2:], segments[2:])
    demand_equal(
        7, "the third segment against the same one read alone", {"losses": ours["losses"]}, {"losses": fresh["losses"]}
    )
    return f"no memory: {len(ours)} results and gradients equal those of the plain model bit for bit"


def _one_pass(bench: Bench, model: TransformerXL) -> str:
    """Read a text at once, and in segments of several lengths, some of them ragged."""
    reach = min((part.max_age for _, part in model.memory_parts() if isinstance(part, MemoryStrategy)), default=0)
    if reach < 2 * bench.segment_len:
        raise LawBroken(11, f"lossless=True needs a memory of two segments; it holds {reach} tokens")
    count = reach // bench.segment_len
    batches = bench.stream(count, variant=2)
    tokens, targets = (torch.cat(rows, dim=1) for rows in zip(*batches, strict=True))
    n_token = tokens.shape[1]
    whole = dataclasses.replace(bench, segment_len=n_token)
    base = run(model, model.init_state(bench.batch_size), (tokens, targets), whole.segment())["losses"]
    for form in ("hidden", "projected"):
        for size in sorted({1, bench.segment_len - 1, bench.segment_len, n_token} - {0}):
            found = _in_segments(bench, model, tokens, targets, size=size, form=form)
            what = f"segments of {size} tokens against one pass of {n_token} ({form} form)"
            demand_equal(11, what, {"losses": found}, {"losses": base}, tolerance=1e-9)
    return f"segments of 1 to {n_token} tokens equal one pass of {n_token} to 1e-9, each lane at its own pace"


def _in_segments(
    bench: Bench, model: TransformerXL, tokens: Tensor, targets: Tensor, *, size: int, form: str
) -> Tensor:
    """(B, N) losses of a text read piece by piece; lanes read now all, now fewer, now none of a segment's tokens."""
    state: State = model.init_state(bench.batch_size, form=form)
    losses = torch.full(tokens.shape, float("nan"), dtype=bench.dtype)
    done, turn = [0] * bench.batch_size, 0
    while min(done) < tokens.shape[1]:
        paces = (size, size, max(1, size - 1), 0)
        length = [min(paces[(lane + turn) % 4], tokens.shape[1] - start) for lane, start in enumerate(done)]
        index = torch.tensor(done, device=tokens.device)[:, None] + torch.arange(size, device=tokens.device)
        index = index.clamp(max=tokens.shape[1] - 1)  # (B, size)
        with torch.no_grad():
            out = model(tokens.gather(1, index), state, bench.segment(length=length), targets.gather(1, index))
        assert out.losses_BT is not None
        for lane, (start, n) in enumerate(zip(done, length, strict=True)):
            losses[lane, start : start + n] = out.losses_BT[lane, :n]
        done, state, turn = [start + n for start, n in zip(done, length, strict=True)], out.state, turn + 1
    return losses.to(tokens.device)
