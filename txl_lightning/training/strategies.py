"""How ranks work together: DDP, and DeepSpeed's ZeRO on GPUs and on the CPU."""

from __future__ import annotations

import datetime
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import Strategy

from txl_lightning.checkpoints import lane_files
from txl_lightning.checkpoints.manifest import Facts
from txl_lightning.config import Config, ConfigError, StrategyConfig
from txl_lightning.errors import suggest
from txl_lightning.training import engine_files, engine_state, folders
from txl_lightning.training.ddp import LanesDDP
from txl_lightning.training.trouble import NotWritten, cannot_be_written
from txl_lightning.types import State

OWNED = {
    "train_batch_size": "data.batch_size",
    "train_micro_batch_size_per_gpu": "data.batch_size",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "managed_gradient_accumulation": "trainer.accumulate_grad_batches",
    "gradient_clipping": "optim.clip",
    "optimizer": "optim.name",
    "scheduler": "optim.schedule",
    "fp16": "trainer.precision",
    "bf16": "trainer.precision",
    "bfloat16": "trainer.precision",
    "torch_autocast": "trainer.precision",
    "checkpoint": "trainer.save_every_steps",
    "zero_allow_untested_optimizer": "optim.name",
}
"""Keys of DeepSpeed that a key of ours decides."""

OWNED_OF_ZERO = {
    "stage": "strategy.stage",
    "offload_optimizer": "strategy.offload_optimizer",
    "offload_param": "strategy.offload_parameters",
}

KNOWN = (
    *("zero_optimization", "zero_force_ds_cpu_optimizer", "communication_data_type", "prescale_gradients"),
    *("gradient_predivide_factor", "disable_allgather", "steps_per_print", "wall_clock_breakdown", "memory_breakdown"),
    *("dump_state", "activation_checkpointing", "aio", "flops_profiler", "comms_logger", "data_types", "timers"),
    *("seq_parallel_communication_data_type", "log_level", "disable_python_gc"),
)
"""Keys of DeepSpeed that a user's JSON may hold beside them."""


def build_strategy(config: Config, *, device: str, precision: str) -> str | Strategy:
    """What `L.Trainer(strategy=...)` takes. `device` and `precision`: what will be used."""
    keys = config.strategy
    if keys.name == "auto":
        return "auto"
    timeout = datetime.timedelta(seconds=keys.timeout_s)
    if keys.name == "ddp":
        # gradients in the buffers that are sent, else each rank holds them twice
        return LanesDDP(timeout=timeout, gradient_as_bucket_view=True)
    _prepare_import(device)
    chosen = settings(config, device=device, precision=precision)
    return FolderDeepSpeed(chosen, timeout=timeout, title=keys.title)


def check_strategy(config: Config, *, device: str) -> None:
    """DeepSpeed and what it needs are here, and its JSON can be used. Raises ConfigError."""
    keys = config.strategy
    if not keys.sharded:
        return
    if device == "mps":
        raise ConfigError("strategy", keys.title, "DeepSpeed has no use for mps", "set trainer.accelerator=cpu")
    if shutil.which("g++") is None and device == "cpu":
        cure = "install a C++ compiler that is called g++"
        raise ConfigError("strategy", keys.title, "on the cpu DeepSpeed compiles how its ranks talk", cure)
    _prepare_import(device)
    settings(config, device=device)
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise ConfigError("strategy", keys.title, f"DeepSpeed cannot be loaded: {error}", "use strategy=ddp") from error


def _prepare_import(device: str) -> None:
    """Say what DeepSpeed looks up when it is imported."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def settings(config: Config, *, device: str, precision: str = "32-true") -> dict[str, Any]:
    """DeepSpeed's configuration: ours, with the user's JSON on top. Raises ConfigError."""
    keys = config.strategy
    # with nothing divided and nothing rounded each rank has its gradients at hand, and we clip as everywhere else
    engine_clips = keys.stage or precision != "32-true"
    ours: dict[str, Any] = {
        "gradient_accumulation_steps": config.trainer.accumulate_grad_batches,
        "train_micro_batch_size_per_gpu": 1,  # for its own reports
        "gradient_clipping": config.optim.clip if engine_clips else 0.0,
        "zero_allow_untested_optimizer": True,  # those that would come to other weights are refused
        "zero_force_ds_cpu_optimizer": False,  # torch's own: its results are those of one process
    }
    theirs = _read(keys)
    zero = {**_zero(keys, device=device), **theirs.pop("zero_optimization", {})}
    return {**ours, **theirs, **({"zero_optimization": zero} if keys.stage else {})}


def _zero(keys: StrategyConfig, *, device: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": keys.stage, "contiguous_gradients": True}
    if keys.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
    if keys.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": device == "cuda"}
    if device != "cpu":
        return {**zero, "overlap_comm": True}
    # there is nothing to overlap with, and what is small on a GPU is large here: everything is divided
    small = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000, "overlap_comm": False}
    return {**zero, **small, **({"stage3_param_persistence_threshold": 0} if keys.stage == 3 else {})}


def _read(keys: StrategyConfig) -> dict[str, Any]:
    """What the user's JSON says, if it says nothing that is not its business. Raises ConfigError."""
    if keys.config is None:
        return {}
    try:
        held = json.loads(Path(os.path.expanduser(keys.config)).read_text(encoding="utf-8"))
    except OSError as error:
        raise keys.refuse("config", f"cannot be read: {error.strerror}", "give a JSON file") from error
    except ValueError as error:
        raise keys.refuse("config", f"is no JSON: {error}", "give a JSON file") from error
    if not isinstance(held, dict) or not isinstance(held.get("zero_optimization", {}), dict):
        raise keys.refuse("config", "holds no JSON object of settings", "give DeepSpeed's settings by name")
    _refuse(keys, held, known=KNOWN, owned=OWNED, prefix="")
    zero = held.get("zero_optimization", {})
    if zero.get("stage") == keys.stage:
        zero = {name: value for name, value in zero.items() if name != "stage"}
    _refuse(keys, zero, known=_zero_keys(), owned=OWNED_OF_ZERO, prefix="zero_optimization.")
    if zero and not keys.stage:
        raise keys.refuse("config", "zero_optimization has no use in stage 0", "leave it out, or set strategy.stage")
    return {**held, "zero_optimization": zero}


def _refuse(
    keys: StrategyConfig, held: Mapping[str, Any], *, known: tuple[str, ...], owned: Mapping[str, str], prefix: str
) -> None:
    for name in held:
        if name in owned:
            rule = f"{prefix}{name} is decided by {owned[name]}"
            raise keys.refuse("config", rule, f"take it out of the file and set {owned[name]}")
        if name not in known:
            raise keys.refuse("config", f"DeepSpeed has no key {prefix}{name}", suggest(str(name), known))


def _zero_keys() -> tuple[str, ...]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    names = {*fields, *(str(field.alias) for field in fields.values() if field.alias)}
    return tuple(names - {"elastic_checkpoint", "load_from_fp32_weights"})  # they say what of a checkpoint is left out


class FolderDeepSpeed(DeepSpeedStrategy):
    """DeepSpeed's engine, also on CPUs (over gloo), with checkpoints as folders that are whole or not there.

    Lightning refuses CPUs, for no need: devices with an index are enough. Nothing is unpickled that is more than
    numbers and DeepSpeed's own plain records.

    Args:
        config: DeepSpeed's settings.
        timeout: how long a rank waits for the others.
        title: what a user calls this strategy.
    """

    ranks_write_lanes = True

    def __init__(self, config: dict[str, Any], *, timeout: datetime.timedelta, title: str) -> None:
        super().__init__(config=config, timeout=timeout, logging_level=logging.ERROR)
        self.title = title

    def setup_environment(self) -> None:
        """Number the CPUs: DeepSpeed takes devices by their index."""
        assert self.parallel_devices is not None
        if self.parallel_devices[0].type == "cpu":
            self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
            _find_ninja()
        DDPStrategy.setup_environment(self)

    def _format_batch_size_and_grad_accum_config(self) -> None:
        """It is all in the settings: the module tells the engine where a step ends."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Every rank writes its part; `filepath` becomes the name of the whole. Every rank must call it.

        Raises:
            NotWritten: on all ranks, if one of them cannot write; nothing of it stays.
        """
        target = Path(self.broadcast(str(filepath)))
        folder = Path(self.broadcast(str(folders.new_place(target, step=checkpoint["global_step"]))))
        part = folder.with_name(f".{folder.name}.part")
        given = {name: held for name, held in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        self._demand_written(engine_files.make(part), target, part)
        lanes = given.get("txl_lightning", {}).get("lanes", {})
        if "own" in lanes:
            lanes["shards"] = self._write_lanes(lanes.pop("own"), target, part)
        self._demand_written(engine_files.write(self.deepspeed_engine, part, given), target, part)
        found = self._flushed(target, part)
        cause = None
        if self.is_global_zero:
            try:
                folders.give_name(part, folder, target, files={n: facts for own in found for n, facts in own.items()})
            except OSError as error:
                cause = engine_files.number_of(error)
        self._demand_written(cause, target, part)

    def _write_lanes(self, own: State, target: Path, part: Path) -> list[dict[str, Any]]:
        """The list of all ranks' files of lanes. Raises NotWritten on all ranks."""
        entry: dict[str, Any] = {}
        cause = None
        try:
            entry = lane_files.write(own, part, name=folders.TAG, rank=self.global_rank)
        except (OSError, RuntimeError) as error:  # torch's writer raises the second
            cause = engine_files.number_of(error)
        self._demand_written(cause, target, part)
        return self._of_all_ranks(entry)

    def _flushed(self, target: Path, part: Path) -> list[dict[str, Facts]]:
        """What each rank wrote, when all of it is on disk. Raises NotWritten on all ranks."""
        own, cause = {}, None
        try:
            own = folders.flushed(part, rank=self.global_rank)
        except OSError as error:
            cause = engine_files.number_of(error)
        self._demand_written(cause, target, part)
        return self._of_all_ranks(own)

    def _demand_written(self, cause: int | None, target: Path, part: Path) -> None:
        """Go on together if no rank has met trouble with the disk. Raises NotWritten on all of them."""
        causes = self._of_all_ranks(cause)
        failed = next((rank for rank, found in enumerate(causes) if found is not None), None)
        if failed is None:
            return
        if self.is_global_zero:  # what the others wrote takes room that may be short
            shutil.rmtree(part, ignore_errors=True)
        raise NotWritten(f"on rank {failed} {cannot_be_written(target, causes[failed])}")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What was stored beside weights and optimizer state, which the engine takes over.

        A folder that as many ranks wrote under the same stage is read by DeepSpeed, each rank its part. From any other,
        and from files, each rank reads the whole and takes its share.
        """
        from txl_lightning.checkpoints import read_checkpoint, zero

        path = Path(checkpoint_path).resolve()
        own = self.is_global_zero and zero.is_folder(path) and engine_state.is_as_stored(self.deepspeed_engine, path)
        if self.broadcast(own):  # all ranks take the same way
            with zero.restricted_loading():
                return super().load_checkpoint(path, weights_only)
        saved = read_checkpoint(str(path), key="resume", optimizer=True)
        engine_state.take_over(self.deepspeed_engine, saved)
        return {name: held for name, held in saved.items() if name not in ("state_dict", "optimizer_states")}

    def _of_all_ranks(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(found, own)
        return found


def engine_of(trainer: L.Trainer) -> Any:
    """DeepSpeed's engine while it trains, or None."""
    strategy = trainer.strategy
    return strategy.model if isinstance(strategy, FolderDeepSpeed) and trainer.state.fn == "fit" else None


def clips_itself(engine: Any) -> bool:
    """Whether DeepSpeed's engine has the gradients where only it can clip them."""
    return bool(engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled())


def whole_gradient(parameter: torch.nn.Parameter, engine: Any) -> torch.Tensor | None:
    """A gradient over all ranks' lanes, before the update and before clipping; None: there is none.

    Under ZeRO ranks hold shares of it: then every rank must call this, for each parameter in the same order.
    """
    if engine is None or not engine.zero_optimization():
        return parameter.grad
    from deepspeed.utils import safe_get_full_grad

    found = safe_get_full_grad(parameter)
    return found / engine.optimizer.loss_scale if found is not None and engine.fp16_enabled() else found


def own_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank holds of a weight: all of it, but under ZeRO 3."""
    share = getattr(parameter, "ds_tensor", None)
    if share is None:
        return parameter
    # the last ranks' shares of uneven weights are filled up with whatever was in memory
    real = int(parameter.ds_numel) - torch.distributed.get_rank() * share.numel()  # type: ignore[attr-defined]
    return share.flatten()[: max(0, real)]


def n_parameter(module: torch.nn.Module) -> int:
    """Parameters of the whole module, also where ranks hold shares of them."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def is_sound(module: L.LightningModule) -> bool:
    """Whether all weights are finite. Under ZeRO 3 every rank must call it."""
    own = all(bool(own_part(parameter).isfinite().all()) for parameter in module.parameters())
    divided = any(hasattr(parameter, "ds_tensor") for parameter in module.parameters())
    return module.trainer.strategy.reduce_boolean_decision(own, all=True) if divided else own


def _find_ninja() -> None:
    """Let DeepSpeed find the `ninja` that was installed with it, also where its environment is not activated."""
    beside = os.path.dirname(sys.executable)
    if shutil.which("ninja") is None and os.path.exists(os.path.join(beside, "ninja")):
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{beside}"
