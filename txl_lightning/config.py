"""The configuration: frozen dataclasses are the schema and the truth; YAML and Hydra only fill them.

Memory strategies, corpora and callbacks declare their own keys beside their code and are found through the registries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from txl_lightning import registry
from txl_lightning.errors import ConfigError, keys_renamed, suggest
from txl_lightning.options import Options
from txl_lightning.ranks import check_lanes
from txl_lightning.section import Section, build_section, key

__all__ = ["Config", "ConfigError", "Options", "Section", "build_named", "build_section", "key", "load"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The Transformer-XL itself."""

    section: ClassVar[str] = "model"

    n_layer: int = key(4, "number of layers", minimum=1)
    d_model: int = key(128, "width of the residual stream (even: half sines, half cosines)", minimum=2)
    n_head: int = key(4, "attention heads", minimum=1)
    d_head: int = key(32, "width of one head", minimum=1)
    d_inner: int = key(512, "width inside the feed-forward part", minimum=1)
    vocab_size: int = key(257, "symbols; checked against the data (257: bytes and a separator)", minimum=2)
    dropout: float = key(
        0.0, "dropout on embeddings, positions, sub-layer outputs and the output", minimum=0, maximum=0.99
    )
    dropatt: float = key(0.0, "dropout on attention weights", minimum=0, maximum=0.99)
    pre_norm: bool = key(
        False, "normalise each sub-layer's input (true) or its sum with the residual (false: the paper)"
    )
    untie_r: bool = key(False, "give every layer its own biases u and v instead of one shared pair")
    clamp_len: int = key(-1, "distances beyond this many tokens count as this many; -1: off", minimum=-1)
    tie_weights: bool = key(True, "the softmax uses the embedding's weights")
    init_std: float = key(0.02, "standard deviation of initial weights", above=0)
    attention: str = key(
        "auto", "how scores are computed: auto picks the fastest exact way", choices=("auto", "reference")
    )
    checkpointing: bool = key(False, "recompute each layer in backward instead of keeping its activations")

    def check(self) -> None:
        if self.d_model % 2:
            raise self.refuse(
                "d_model", "must be even: half of it holds sines, half cosines", "take the next even number"
            )
        if self.clamp_len == 0:
            raise self.refuse("clamp_len", "must be -1 or >= 1", "-1 turns clamping off")

    def num_params(self) -> int:
        """Parameters of the model without those of its memory, counted without building it."""
        inner, pair = self.n_head * self.d_head, 2 * self.n_head * self.d_head
        attention = 5 * self.d_model * inner  # queries, keys, values, distances, output
        feed_forward = 2 * self.d_model * self.d_inner + self.d_inner + self.d_model
        layer = attention + feed_forward + 4 * self.d_model  # two norms
        tables = self.vocab_size * self.d_model * (1 if self.tie_weights else 2) + self.vocab_size
        return tables + self.n_layer * layer + (self.n_layer * pair if self.untie_r else pair)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section):
    """What every memory strategy has; each adds its own keys in its own file."""

    section: ClassVar[str] = "memory"

    name: str = key("none", "memory strategy: see `txl strategies`")

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        """Rules between this memory, the model and the segment. Raises ConfigError."""


@dataclass(frozen=True, kw_only=True)
class LayerMemoryConfig(MemoryConfig):
    """A strategy that lives in some or all layers."""

    layers: Any = key("all", "layers that have this memory: all, or a list of indices from 0")

    def check(self) -> None:
        wanted = self.layers
        if wanted == "all":
            return
        if not isinstance(wanted, tuple) or not all(type(i) is int and i >= 0 for i in wanted):
            raise self.refuse("layers", "must be all or a list of indices >= 0", "for example [0,2]")
        if len(set(wanted)) != len(wanted):
            raise self.refuse("layers", "names a layer twice", "name each layer once")

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        self.layer_indices(model.n_layer)

    def layer_indices(self, n_layer: int) -> list[int]:
        """The layers this memory is in, of a model of n_layer layers."""
        if self.layers == "all":
            return list(range(n_layer))
        if any(index >= n_layer for index in self.layers):
            raise self.refuse("layers", f"the model has layers 0 to {n_layer - 1}", "leave the others out")
        return sorted(self.layers)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What every corpus has; each adds its own keys in its own file."""

    section: ClassVar[str] = "data"
    unit: ClassVar[str] = "byte"  # what one token stands for in scores: bits per byte, per char, per word

    name: str = key("stdlib", "corpus: see configs/data/")
    segment_len: int = key(64, "tokens of one segment, per lane and step", minimum=1)
    batch_size: int = key(16, "lanes read side by side, over all ranks", minimum=1)
    num_workers: int = key(0, "processes that read ahead; 0: read in the training process", minimum=0)
    cache_dir: str | None = key(None, "where token files are kept; null: the user's cache folder")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    section: ClassVar[str] = "optim"

    name: str = key("adamw", "optimizer", choices=("adamw", "adam"))
    lr: float = key(2.5e-4, "peak learning rate", above=0)
    betas: tuple[float, float] = key((0.9, 0.999), "decay of the two running averages", minimum=0, maximum=0.9999999)
    eps: float = key(1e-8, "added to the denominator of the update", above=0)
    weight_decay: float = key(0.0, "decay of matrices; never of biases, norms, u and v", minimum=0)
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", minimum=0)
    schedule: str = key(
        "cosine", "after the warm-up: fall to lr_min along a cosine, or stay", choices=("cosine", "constant")
    )
    lr_min: float = key(0.0, "what the cosine falls to, reached right after the last step", minimum=0)
    clip: float = key(0.25, "largest gradient norm; 0: off", minimum=0)

    def check(self) -> None:
        if len(self.betas) != 2:
            raise self.refuse("betas", "must be two numbers", "for example optim.betas=[0.9,0.999]")
        if self.lr_min > self.lr:
            raise self.refuse("lr_min", f"must be <= optim.lr={self.lr}", "lower it or raise optim.lr")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Section):
    """How long and on what to train. All steps are optimizer steps unless a key says batches."""

    section: ClassVar[str] = "trainer"

    max_steps: int = key(1000, "optimizer steps of the whole run; the schedule ends here", minimum=1)
    accelerator: str = key("auto", "device kind", choices=("auto", "cpu", "cuda", "gpu", "mps"))
    devices: int = key(1, "devices on each node; one rank each", minimum=1)
    num_nodes: int = key(1, "machines", minimum=1)
    precision: str = key(
        "auto",
        "auto: bf16-mixed where the device computes it natively, else 32-true",
        choices=("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed"),
    )
    val_check_interval: int | float = key(
        1.0, "validate every so many batches (integer) or fraction of an epoch (float)", above=0
    )
    log_every_n_steps: int = key(10, "optimizer steps between two points of the curves", minimum=1)
    num_sanity_val_steps: int = key(1, "validation batches tried before training; 0: none", minimum=0)
    accumulate_grad_batches: int = key(
        1, "segments in time before one step; its gradient is the mean over all their targets", minimum=1
    )
    save_every_steps: int = key(
        0, "optimizer steps between two writes of the checkpoint `last`; 0: only at the end", minimum=0
    )
    detect_anomaly: bool = key(False, "let autograd name the operation that made a NaN (slow)")

    def check(self) -> None:
        value = self.val_check_interval
        if isinstance(value, float) and value > 1.0:
            raise self.refuse(
                "val_check_interval", "a fraction of an epoch must be <= 1.0", "write an integer for batches"
            )


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Section):
    """How ranks work together."""

    section: ClassVar[str] = "strategy"

    name: str = key("auto", "auto: one rank; ddp: one process per device", choices=("auto", "ddp"))
    timeout_s: int = key(1800, "seconds a rank waits for the others before it gives up", minimum=1)


@dataclass(frozen=True, kw_only=True)
class LoggerConfig(Section):
    """Where curves go. Several loggers may be on at once."""

    section: ClassVar[str] = "logger"

    tensorboard: bool = key(False, "write TensorBoard events into the run folder")
    csv: bool = key(False, "write csv/metrics.csv into the run folder")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Lanes and segments of validation and evaluation; they need not be those of training."""

    section: ClassVar[str] = "eval"

    batch_size: int | None = key(None, "lanes; null: data.batch_size", minimum=1)
    segment_len: int | None = key(None, "tokens of a segment; null: data.segment_len", minimum=1)


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
        world = self.trainer.devices * self.trainer.num_nodes
        if world > 1 and self.strategy.name == "auto":
            raise ConfigError("strategy", "auto", f"cannot run {world} ranks", "set strategy=ddp or trainer.devices=1")
        check_lanes(self.data.batch_size, ranks=world, key="data.batch_size")
        check_lanes(self.eval_batch_size, ranks=world, key=self.eval_batch_key)

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

    return Config.from_dict(compose(overrides, config_dir=config_dir))
