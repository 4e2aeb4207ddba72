"""Hugging Face's TransfoXL class beside ours, with the same weights: timed in the same run, its losses compared.

The class was taken out of later versions of transformers, and in its last one a slip stops it: `type_as(dtype=...)`,
which is put right in the module after it was loaded. Nothing of it is in this package.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import nn

from txl_lightning.benchmarks.timing import Task
from txl_lightning.benchmarks.workloads import autocast, common, drawn, made, turns
from txl_lightning.checkpoints.reference import from_reference, to_reference
from txl_lightning.config import Config, ConfigError
from txl_lightning.training.optim import build_optimizer
from txl_lightning.training.trainer import device_kind

VERSION = "4.57.6"
LABEL = "huggingface"
_PACKAGE = "transformers.models.deprecated.transfo_xl"


def check(config: Config) -> None:
    """The library is there and can be what the configuration says. Raises ConfigError."""
    check_version()
    model = made_like(config)
    to_reference(model, layout=LABEL)


def check_version() -> None:
    """Raise ConfigError unless the one version that still has the class is installed."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise _absent("transformers is not installed") from None
    if found != VERSION:
        raise _absent(f"transformers {found} is installed")


def _absent(rule: str) -> ConfigError:
    return ConfigError("against", LABEL, rule, f"pip install transformers=={VERSION}, into a folder of PYTHONPATH, say")


def made_like(config: Config) -> Any:
    """Our model on the CPU, whose weights both are given."""
    return made(config).cpu().float()


def classes() -> tuple[Any, Any]:
    """Their model and its configuration, ready to run."""
    check_version()
    importlib.import_module("transformers.utils.logging").set_verbosity_error()
    module = _corrected(importlib.import_module(f"{_PACKAGE}.modeling_transfo_xl"))
    return module.TransfoXLLMHeadModel, importlib.import_module(f"{_PACKAGE}.configuration_transfo_xl").TransfoXLConfig


def _corrected(module: ModuleType) -> Any:
    if not getattr(module, "_txl_lightning_corrected", False):
        source = re.sub(r"\.type_as\(\s*dtype=", ".to(dtype=", inspect.getsource(module))
        exec(compile(source, str(module.__file__), "exec"), module.__dict__)
        module._txl_lightning_corrected = True  # type: ignore[attr-defined]
    return module


def theirs(config: Config) -> nn.Module:
    """Their model with the weights and the configuration of ours.

    Raises:
        ConfigError: it cannot be what ours is, or the library is absent.
    """
    build, settings = classes()
    weights, values = to_reference(made_like(config), layout=LABEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a later version would have done
        model = build(settings(**{name: value for name, value in values.items() if name != "txl_lightning"}))
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not missing and not unknown, (missing, unknown)
    model.crit.forward = _in_float32(model.crit.forward, device_kind(config))
    return model.to(device_kind(config))


def _in_float32(losses: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Their softmax writes float32 results into a tensor of another type under autocast, so it stays outside of it."""

    def wide(hidden: torch.Tensor, *args: Any, **more: Any) -> Any:
        with torch.autocast(kind, enabled=False):
            return losses(hidden.float(), *args, **more)

    return wide


def training(config: Config) -> Task:
    """An optimizer step of theirs with the optimizer of ours. They score all but the last token of a segment."""
    lanes, n_token = config.data.batch_size, config.data.segment_len
    model = theirs(config).train()
    optimizer = build_optimizer(model.named_parameters(), config.optim, fuse=True)
    text, mems = turns(config, lanes=lanes, n_token=n_token), model.init_mems(lanes)  # type: ignore[operator]

    def step() -> None:
        nonlocal mems
        tokens = next(text).tokens_BT
        with autocast(config):
            out = model(tokens, mems=mems, labels=tokens)
        optimizer.zero_grad()
        out.loss.backward()
        if config.optim.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        mems = out.mems

    facts = common(config, "data.segment_len", n_token, lanes)
    return Task(part="training", label=LABEL, run=step, amount=lanes * n_token, facts=facts)


def evaluation(config: Config) -> Task:
    """A segment scored."""
    lanes, n_token = config.eval_batch_size, config.eval_segment_len
    model = theirs(config).eval()
    text, mems = turns(config, lanes=lanes, n_token=n_token), model.init_mems(lanes)  # type: ignore[operator]

    @torch.inference_mode()
    def read() -> None:
        nonlocal mems
        tokens = next(text).tokens_BT
        with autocast(config):
            mems = model(tokens, mems=mems, labels=tokens).mems

    facts = {**common(config, "eval.segment_len", n_token, lanes), "schedule": "segments"}
    return Task(part="evaluation", label=LABEL, run=read, amount=lanes * n_token, facts=facts)


def decoding(config: Config) -> Task:
    """A token read and the next one's distribution known."""
    model = theirs(config).eval()
    text, mems = turns(config, lanes=1, n_token=1), model.init_mems(1)  # type: ignore[operator]

    @torch.inference_mode()
    def read() -> None:
        nonlocal mems
        mems = model(next(text).tokens_BT, mems=mems).mems

    return Task(
        part="decoding",
        label=LABEL,
        run=read,
        amount=1,
        facts=common(config, "eval.segment_len", config.eval_segment_len, 1),
    )


def difference(config: Config, *, segments: int = 3, lanes: int = 2) -> float:
    """Largest relative difference of losses between their model and its weights in ours, in float32 without dropout.

    Memory starts as theirs does, with zeros that are read.
    """
    model = theirs(config).eval().cpu()
    _, values = to_reference(made_like(config), layout=LABEL)
    ours = from_reference(model.state_dict(), {k: v for k, v in values.items() if k != "txl_lightning"}, layout=LABEL)
    n_token, worst = config.data.segment_len, 0.0
    state, mems = ours.init_state(lanes), model.init_mems(lanes)  # type: ignore[operator]
    for number in range(segments):
        tokens = drawn(config, lanes=lanes, n_token=n_token, seed=number).cpu()
        with torch.no_grad():
            out = model(tokens, mems=mems, labels=tokens)
            mine = ours(tokens[:, :-1], state, None, tokens[:, 1:]).losses_BT
            state = ours(tokens, state).state
        mems = out.mems
        their_losses = out.losses[:, : n_token - 1]
        worst = max(worst, float(((their_losses - mine).abs() / mine.abs().clamp(min=1e-6)).max()))
    return worst
