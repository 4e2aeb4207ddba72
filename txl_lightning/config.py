"""The configuration: frozen dataclasses are the schema and the truth; YAML and Hydra only fill them.

Memory strategies, corpora and callbacks declare their own keys beside their code and are found through the registries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txl_lightning import registry
from txl_lightning.data_config import DataConfig
from txl_lightning.errors import ConfigError, keys_renamed, suggest
from txl_lightning.eval_config import EvalConfig
from txl_lightning.logger_config import LoggerConfig
from txl_lightning.memory_config import LayerMemoryConfig, MemoryConfig, UpperLayerMemoryConfig
from txl_lightning.model_config import POSITIONS, ModelConfig
from txl_lightning.optim_config import WHOLE_TENSORS, OptimConfig
from txl_lightning.options import FitOptions, Options
from txl_lightning.ranks import check_chunks, check_lanes
from txl_lightning.section import Section, build_section, key
from txl_lightning.strategy_config import StrategyConfig
from txl_lightning.trainer_config import TrainerConfig

__all__ = [
    "POSITIONS",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "LayerMemoryConfig",
    "LoggerConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "Options",
    "Section",
    "StrategyConfig",
    "TrainerConfig",
    "UpperLayerMemoryConfig",
    "build_named",
    "build_section",
    "key",
    "load",
]

RUNS = "runs"
"""Folder of runs that were given none."""

SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "strategy": StrategyConfig,
    "logger": LoggerConfig,
    "eval": EvalConfig,
}
"""Groups with one schema. memory, data and callbacks look theirs up in the registries."""


@dataclass(frozen=True, kw_only=True)
class TopConfig(Options):
    """The keys of a run that belong to no group."""

    experiment: str = key("default", "name of the experiment the run started from")
    seed: int = key(1111, "seed of initial weights, dropout and sampling", minimum=0, maximum=2**32 - 1)
    run_dir: str | None = key(None, "folder of the run; null: runs/<experiment>/<timestamp>")
    dry_run: bool = key(False, "say what the run needs and train nothing")


TOP_KEYS = tuple(item.name for item in dataclasses.fields(TopConfig))


@dataclass(frozen=True, kw_only=True)
class Config(TopConfig):
    """Everything that defines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=lambda: registry.memories.get("cache").config())
    data: DataConfig = field(default_factory=lambda: registry.corpora.get("stdlib").config())
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    callbacks: Mapping[str, Section] = field(default_factory=dict)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def check(self) -> None:
        self.memory.check_fit(self.model, segment_len=self.data.segment_len)
        self._check_fit_at_evaluation()
        self._check_warm()
        self._check_reach()
        if self.model.architecture == "lstm" and self.memory.name != "none":
            rule = f"an LSTM has no layers that memory={self.memory.name} could live in: its state is its memory"
            raise self.model.refuse("architecture", rule, "set memory=none, or model.architecture=transformer")
        if self.trainer.bptt_segments > 1 and not self.memory.carries:
            rule = f"memory={self.memory.name} carries no gradient from one segment to the next"
            cure = "set it to 1, or memory.gradient=carry where the memory has that key"
            raise self.trainer.refuse("bptt_segments", rule, cure)
        world = self.trainer.devices * self.trainer.num_nodes
        if world > 1 and self.strategy.name == "auto":
            raise ConfigError("strategy", "auto", f"cannot run {world} ranks", "set strategy=ddp or trainer.devices=1")
        self._check_engine()
        check_lanes(self.data.batch_size, ranks=world, key="data.batch_size")
        check_lanes(self.eval_batch_size, ranks=world, key=self.eval_batch_key)
        check_chunks(self.data.batch_size, ranks=world, chunks=self.trainer.lane_chunks)
        if self.memory.offload == "cpu" and not self.memory.has_state:
            rule = f"{self.memory.why_stateless} keeps nothing that could be on the cpu"
            raise self.memory.refuse("offload", rule, "set it to none, or take a memory")

    def _check_warm(self) -> None:
        """Lanes can be warmed as asked. Raises ConfigError."""
        if not self.eval.warm:
            return
        carries = self.memory.has_state or self.model.architecture == "lstm"
        if not carries or self.memory.reset == "segment":
            what = "memory.reset=segment" if carries else self.memory.why_stateless
            raise self.eval.refuse("warm", f"{what} keeps nothing from the text before", "set it to 0")
        if self.eval.warm % self.eval_segment_len:
            rule = f"must be a multiple of the {self.eval_segment_len} tokens of a segment"
            above = -(-self.eval.warm // self.eval_segment_len) * self.eval_segment_len
            raise self.eval.refuse("warm", rule, f"set it to {above}")

    def _check_engine(self) -> None:
        """What DeepSpeed's engine cannot do. Raises ConfigError."""
        if not self.strategy.sharded:
            return
        title = self.strategy.title
        if self.trainer.lane_chunks > 1:
            rule = f"strategy={title} takes every backward pass for a step's last"
            raise self.trainer.refuse("lane_chunks", rule, "set it to 1, or use strategy=ddp")
        for name, off in (("on_divergence", "stop"), ("max_loss_rise", 0.0)):
            if getattr(self.trainer, name) != off:
                cure = "leave it out, or use strategy=ddp"
                raise self.trainer.refuse(name, f"strategy={title} makes its steps by itself", cure)
        if self.optim.ema:
            cure = "set it to 0, or use strategy=ddp"
            raise self.optim.refuse("ema", f"strategy={title} keeps no average of weights", cure)
        if self.optim.name in WHOLE_TENSORS and (self.strategy.stage or self.trainer.precision != "32-true"):
            rule = f"looks at whole matrices, and strategy={title} gives the optimizer flat pieces of them"
            raise self.optim.refuse("name", rule, "use optim=adamw, or strategy=ddp")
        if self.optim.name == "adagrad" and self.strategy.stage:
            rule = "DeepSpeed makes it anew, with one group of parameters where ours has two, and fails"
            raise self.optim.refuse("name", rule, "use optim=adamw, or strategy=ddp")
        if self.optim.name == "adabelief" and self.strategy.stage == 3:
            rule = f"counts the steps of a group, and strategy={title} steps once for each part of the parameters"
            raise self.optim.refuse("name", rule, "use optim=adamw, or strategy=deepspeed_zero2")

    def _check_fit_at_evaluation(self) -> None:
        """The memory's rules about segments hold for those of evaluation too, and are said of their key."""
        try:
            self.memory.check_fit(self.model, segment_len=self.eval_segment_len)
        except ConfigError as error:
            rule, cure = (part.replace("data.segment_len", "eval.segment_len") for part in (error.rule, error.cure))
            raise ConfigError(error.key, error.value, rule, cure) from error

    def _check_reach(self) -> None:
        if self.memory.reaches_back and not POSITIONS[self.model.position]:
            able = " or ".join(name for name, reads in POSITIONS.items() if reads)
            rule = "numbers the tokens of one segment, so it cannot tell where a memory's tokens stand"
            cure = f"set memory=none (memory.mem_len=0), or model.position to {able}"
            raise self.model.refuse("position", rule, cure)
        if self.model.same_length and getattr(self.memory, "mem_len", 0) < 1:
            found = "it is 0" if hasattr(self.memory, "mem_len") else f"memory={self.memory.name} has none"
            rule = f"needs memory.mem_len >= 1, the length it is named after, and {found}"
            raise self.model.refuse("same_length", rule, "set it to false, or use memory=cache")

    @property
    def distance_limit(self) -> int | None:
        """Largest distance a token sees under `model.same_length`; None: any."""
        if not self.model.same_length:
            return None
        return int(getattr(self.memory, "mem_len", 0)) - (self.model.same_length_rule == "mem_len")

    @property
    def eval_batch_size(self) -> int:
        """Lanes of validation and evaluation."""
        return self.eval.batch_size or self.data.batch_size

    @property
    def eval_batch_key(self) -> str:
        """The setting that `eval_batch_size` comes from."""
        return "data.batch_size" if self.eval.batch_size is None else "eval.batch_size"

    @property
    def eval_segment_len(self) -> int:
        """Tokens of a segment in validation and evaluation."""
        return self.eval.segment_len or self.data.segment_len

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build and check the whole configuration from plain containers.

        Raises:
            ConfigError: an unknown key, a wrong type or a broken rule, named by its dotted key.
        """
        values = dict(values)
        parts: dict[str, Any] = {}
        for name in [item.name for item in dataclasses.fields(cls) if item.name in values]:
            value = values.pop(name)
            if name in SECTIONS:
                parts[name] = build_section(SECTIONS[name], value or {}, path=name)
            elif name in ("memory", "data"):
                parts[name] = build_named(name, value or {}, path=name)
            elif name == "callbacks":
                parts[name] = {
                    part: build_section(registry.callbacks.get(part).config, options or {}, path=f"callbacks.{part}")
                    for part, options in (value or {}).items()
                }
            else:
                parts[name] = value
        if values:
            name = next(iter(values))
            raise ConfigError(
                name, values[name], "no such key", suggest(name, [f.name for f in dataclasses.fields(cls)])
            )
        top = {name: parts.pop(name) for name in list(parts) if name in TOP_KEYS}
        return cls(**vars(build_section(TopConfig, top, path="")), **parts)


def build_named(kind: str, values: Mapping[str, Any], *, path: str) -> Any:
    """The config dataclass of a memory strategy or corpus, chosen by `name` among the values."""
    found: registry.Registry[Any] = {"memory": registry.memories, "data": registry.corpora}[kind]
    if "name" not in values:
        raise ConfigError(f"{path}.name", None, f"a {kind} needs a name", suggest("", found.names()))
    with keys_renamed(kind, to=path):
        schema = found.get(str(values["name"])).config
    return build_section(schema, values, path=path)


def load(overrides: Sequence[str] = (), *, config_dir: str | None = None) -> Config:
    """Compose a configuration as `txl fit OVERRIDES` would, without touching data.

    Args:
        overrides: Hydra overrides, e.g. ["experiment=default", "memory.mem_len=128"].
        config_dir: a folder with more YAML groups, as `--config-dir`.
    """
    from txl_lightning.compose import compose

    return Config.from_dict(of_the_run(compose(overrides, config_dir=config_dir)))


def of_the_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was composed for `txl fit`, without the command's own keys, which are not the run's."""
    own = {item.name for item in dataclasses.fields(FitOptions)}
    return {name: value for name, value in values.items() if name not in own}
