"""The Lightning Trainer that a configuration describes."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger

from txl_lightning.config import Config, ConfigError
from txl_lightning.model.backends import check_backend
from txl_lightning.training.checkpointing import WholeFiles
from txl_lightning.training.compiling import check_compile
from txl_lightning.training.strategies import build_strategy, check_strategy


def build_trainer(config: Config, *, callbacks: Sequence[L.Callback] = (), loggers: Sequence[Logger] = ()) -> L.Trainer:
    """Trainer with the given observers; nothing of its own is written to disk."""
    keys = config.trainer
    interval, precision = keys.val_check_interval, resolve_precision(config)
    return L.Trainer(
        accelerator=keys.accelerator,
        devices=keys.devices,
        num_nodes=keys.num_nodes,
        strategy=build_strategy(config, device=device_kind(config), precision=precision),
        precision=precision,  # type: ignore[arg-type]
        max_steps=keys.max_steps,
        max_epochs=-1,
        val_check_interval=interval,
        # an integer counts batches across epochs
        check_val_every_n_epoch=None if isinstance(interval, int) else 1,
        num_sanity_val_steps=keys.num_sanity_val_steps,
        log_every_n_steps=keys.log_every_n_steps,
        accumulate_grad_batches=keys.accumulate_grad_batches,
        detect_anomaly=keys.detect_anomaly,
        logger=list(loggers) or False,
        callbacks=list(callbacks),
        plugins=[WholeFiles(), *_cluster()],
        use_distributed_sampler=False,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def device_kind(config: Config) -> str:
    """The device that will be used: "cpu", "cuda" or "mps".

    Raises:
        ConfigError: the one asked for is not here, or `model.attention` cannot be computed on it.
    """
    found = _device_kind(config)
    check_backend(config.model.attention, found)
    return found


def _device_kind(config: Config) -> str:
    wanted = {"gpu": "cuda"}.get(config.trainer.accelerator, config.trainer.accelerator)
    here = {"cuda": CUDAAccelerator.is_available(), "mps": MPSAccelerator.is_available(), "cpu": True}
    if wanted == "auto":
        return next(kind for kind, found in here.items() if found)
    if not here[wanted]:
        found = ", ".join(kind for kind, present in here.items() if present)
        raise ConfigError("trainer.accelerator", config.trainer.accelerator, "no such device here", f"here is: {found}")
    return wanted


def check_devices(config: Config) -> None:
    """The devices and precision asked for exist. Raises ConfigError."""
    kind = device_kind(config)
    count = {"cpu": config.trainer.devices, "mps": 1}.get(kind, CUDAAccelerator.auto_device_count())
    if config.trainer.devices > count:
        raise ConfigError("trainer.devices", config.trainer.devices, f"{kind} has {count}", f"use at most {count}")
    if config.trainer.precision == "16-mixed" and kind == "cpu":
        raise ConfigError("trainer.precision", "16-mixed", "the cpu cannot train in fp16", "use bf16-mixed or 32-true")
    check_strategy(config, device=kind)
    check_compile(config.trainer.compile, deepspeed=config.strategy.sharded)


def resolve_precision(config: Config) -> str:
    """`trainer.precision` with "auto" replaced: bf16 where the device multiplies it natively."""
    if config.trainer.precision != "auto":
        return config.trainer.precision
    kind = device_kind(config)
    native = {
        "cuda": lambda: torch.cuda.is_bf16_supported(including_emulation=False),
        "cpu": lambda: bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()),
        "mps": lambda: False,
    }
    return "bf16-mixed" if native[kind]() else "32-true"


def _cluster() -> list[SLURMEnvironment]:
    """SLURM's environment where there is one. Requeueing is left to the job's script: see docs/slurm.sh."""
    here = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return [SLURMEnvironment(auto_requeue=False)] if here else []
