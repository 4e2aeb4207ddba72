"""The configuration: frozen dataclasses are the schema and the truth; YAML and Hydra only fill them.

Memory strategies, corpora and callbacks declare their own keys beside their code and are found through the registries.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from txl_lightning import registry
from txl_lightning.errors import ConfigError, keys_renamed, suggest
from txl_lightning.model_config import POSITIONS, ModelConfig
from txl_lightning.options import FitOptions, Options
from txl_lightning.ranks import check_chunks, check_lanes
from txl_lightning.section import Section, build_section, key

__all__ = [
    "POSITIONS",
    "Config",
    "ConfigError",
    "ModelConfig",
    "Options",
    "Section",
    "build_named",
    "build_section",
    "key",
    "load",
]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section):
    """What every memory strategy has; each adds its own keys in its own file."""

    section: ClassVar[str] = "memory"
    unbounded: ClassVar[bool] = False  # each segment makes the state anew from the last one, so nothing falls out of it
    size_key: ClassVar[str | None] = None  # the key its state grows with; None: the state has one size

    name: str = key("none", "memory strategy: see `txl strategies`")
    reset: str = key(
        "epoch",
        "where memory starts anew: with each pass over the text, with each document (also inside a segment), or with "
        "each segment",
        choices=("epoch", "document", "segment"),
    )
    offload: str = key(
        "none",
        "where the lanes' memory is between steps: on the device, or in (page-locked) memory of the cpu, whence each "
        "step fetches that of the lanes it reads",
        choices=("none", "cpu"),
    )

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        """Rules between this memory, the model and the segment. Raises ConfigError."""

    def reach(self, model: ModelConfig, *, segment_len: int) -> float | None:
        """Tokens before a segment that its first token can depend on; infinite: unbounded; None: no formula known."""
        if self.reset == "segment":
            return 0
        spans = self.layer_spans(model, segment_len=segment_len)
        return None if spans is None else reach_of(spans, segment_len=segment_len)

    def layer_spans(self, model: ModelConfig, *, segment_len: int) -> list[float] | None:
        """For each layer the age of the oldest token whose layer input can be in its memory when a segment begins.

        0: nothing is; infinite: its age has no bound; None: no formula known. Layers see all of their own segment.
        """
        return [math.inf] * model.n_layer if self.unbounded else None

    @property
    def reaches_back(self) -> bool:
        """Whether layers read slots that have a distance (any memory with `mem_len`, unless it says otherwise).

        Known before anything is built; `check_memory` compares it with `MemoryStrategy.max_age` (law 2).
        """
        return getattr(self, "mem_len", 0) > 0

    @property
    def has_state(self) -> bool:
        """Whether anything is carried from segment to segment."""
        return self.name != "none" and getattr(self, "mem_len", 1) > 0

    @property
    def why_stateless(self) -> str:
        """The setting that lets nothing be carried, where `has_state` is false."""
        return "memory.mem_len=0" if getattr(self, "mem_len", None) == 0 else f"memory={self.name}"

    @property
    def carries(self) -> bool:
        """Whether the graph may cross from one segment to the next (as the key `gradient` says, if there is one).

        Known before anything is built; `check_memory` compares it with `gradient` of what is built (law 8).
        """
        return getattr(self, "gradient", "stop") == "carry"


def reach_of(spans: Sequence[float], *, segment_len: int) -> float:
    """Tokens before a segment that its first token can depend on, from each layer's span.

    What stands in memory at age a was read in the segment that began ceil(a / T) T tokens back, and had seen all that
    the layers below had seen there. In the first layer it is the token itself.
    """
    reach: float = 0
    for index, span in enumerate(spans):
        if span == math.inf:
            return math.inf
        if span:
            reach = span if index == 0 else reach + -(-span // segment_len) * segment_len
    return reach


@dataclass(frozen=True, kw_only=True)
class LayerMemoryConfig(MemoryConfig):
    """A strategy that lives in some or all layers."""

    words: ClassVar[tuple[str, ...]] = ("all",)  # what `layers` may be beside a list

    layers: Any = key("all", "layers that have this memory: all, or a list of indices from 0")

    def check(self) -> None:
        wanted = self.layers
        if wanted in self.words:
            return
        if not isinstance(wanted, tuple) or not all(type(i) is int and i >= 0 for i in wanted):
            rule = f"must be {' or '.join(self.words)} or a list of indices >= 0"
            raise self.refuse("layers", rule, "for example [0,2]")
        if not wanted:
            raise self.refuse("layers", "is empty, so no layer would have this memory", "use memory=none")
        if len(set(wanted)) != len(wanted):
            raise self.refuse("layers", "names a layer twice", "name each layer once")

    def check_fit(self, model: ModelConfig, *, segment_len: int) -> None:
        self.layer_indices(model.n_layer)

    def span(self, model: ModelConfig, *, segment_len: int) -> float | None:
        """What `layer_spans` says of each layer that has this memory."""
        return math.inf if self.unbounded else None

    def layer_spans(self, model: ModelConfig, *, segment_len: int) -> list[float] | None:
        span = self.span(model, segment_len=segment_len)
        if span is None:
            return None
        chosen = self.layer_indices(model.n_layer)
        return [span if index in chosen else 0 for index in range(model.n_layer)]

    def layer_indices(self, n_layer: int) -> list[int]:
        """The layers this memory is in, of a model of n_layer layers."""
        if self.layers == "all":
            return list(range(n_layer))
        if any(index >= n_layer for index in self.layers):
            raise self.refuse("layers", f"the model has layers 0 to {n_layer - 1}", "leave the others out")
        return sorted(self.layers)


@dataclass(frozen=True, kw_only=True)
class UpperLayerMemoryConfig(LayerMemoryConfig):
    """A strategy that lives in one layer, three quarters of the way up, unless told otherwise."""

    words: ClassVar[tuple[str, ...]] = ("auto", "all")

    layers: Any = key(
        "auto", "layers that have this memory: auto (one, of index floor(0.75 n_layer)), all, or a list of indices"
    )

    def layer_indices(self, n_layer: int) -> list[int]:
        return [3 * n_layer // 4] if self.layers == "auto" else super().layer_indices(n_layer)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What every corpus has; each adds its own keys in its own file."""

    section: ClassVar[str] = "data"

    name: str = key("stdlib", "corpus: see configs/data/")
    segment_len: int = key(64, "tokens of one segment, per lane and step", minimum=1)
    batch_size: int = key(16, "lanes read side by side, over all ranks", minimum=1)
    shuffle: str = key(
        "none",
        "units of the training split in a new order each epoch, drawn from the seed; memory runs straight on",
        choices=("none", "document", "line"),
    )
    segment_len_std: float = key(
        0.0, "tokens that lengths of training segments spread below segment_len; 0: all alike", minimum=0
    )
    num_workers: int = key(0, "processes that read ahead; 0: read in the training process", minimum=0)
    cache_dir: str | None = key(None, "where token files are kept; null: the user's cache folder")

    def documents_begin_segments(self, *, lanes: int, segment_len: int) -> bool:
        """Whether no document begins inside a segment when a split is read in so many lanes and tokens at a time."""
        return False


TORCH_OPTIMIZERS = ("adam", "adamw", "nadam", "radam", "adagrad", "rmsprop", "sgd", "adafactor")
MORE_OPTIMIZERS = ("lamb", "lion", "adabelief")
"""Those of the package pytorch-optimizer."""

OPTIMIZERS = (*TORCH_OPTIMIZERS, *MORE_OPTIMIZERS)

WHOLE_TENSORS = ("adafactor", "lamb")
"""Those whose update of a number depends on the rest of its matrix."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    section: ClassVar[str] = "optim"

    name: str = key("adamw", f"optimizer; {', '.join(MORE_OPTIMIZERS)} need the extra optimizers", choices=OPTIMIZERS)
    lr: float = key(2.5e-4, "peak learning rate", above=0)
    betas: tuple[float, float] = key(
        (0.9, 0.999),
        "decay of the two running averages; not read by sgd, adagrad, rmsprop, adafactor",
        minimum=0,
        maximum=0.9999999,
    )
    momentum: float = key(0.0, "of sgd and rmsprop", minimum=0, maximum=0.9999999)
    eps: float = key(1e-8, "added to the denominator of the update; not read by sgd, adafactor, lion", above=0)
    weight_decay: float = key(
        0.0, "decay of matrices; never of biases, norms, gates, u and v and learned positions", minimum=0
    )
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", minimum=0)
    lr_start: float = key(0.0, "rate that the warm-up rises from; its first step is one rung above it", minimum=0)
    schedule: str = key(
        "cosine",
        "after the warm-up: fall to lr_min along a cosine, fall with 1/sqrt(step), fall by lr_factor whenever val/loss "
        "has not fallen for `patience` validations, or stay",
        choices=("cosine", "inverse_sqrt", "plateau", "constant"),
    )
    lr_min: float = key(
        0.0, "the rate never falls below it; the cosine gets there right after the last step", minimum=0
    )
    lr_factor: float = key(0.5, "what plateau multiplies the rate with", above=0, maximum=0.999)
    patience: int = key(5, "validations without a lower val/loss before plateau lowers the rate", minimum=1)
    clip: float = key(0.25, "largest gradient norm; 0: off", minimum=0)
    ema: float = key(
        0.0,
        "decay of the weights' moving average, which validation, checkpoints and evaluation then use; 0: off",
        minimum=0,
        maximum=0.9999999,
    )

    def check(self) -> None:
        if self.momentum and self.name not in ("sgd", "rmsprop"):
            raise self.refuse(
                "momentum", f"optim={self.name} has none", "set it to 0: optim.betas says how it averages"
            )
        if self.lr_min and self.schedule == "constant":
            raise self.refuse("lr_min", "optim.schedule=constant never falls", "set it to 0")
        if len(self.betas) != 2:
            raise self.refuse("betas", "must be two numbers", "for example optim.betas=[0.9,0.999]")
        if self.lr_start and not self.warmup_steps:
            raise self.refuse("lr_start", "there is no warm-up to begin with it", "set optim.warmup_steps too")
        if self.lr_start > self.lr:
            raise self.refuse("lr_start", f"must be <= optim.lr={self.lr}", "lower it or raise optim.lr")
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
    accumulate_from_step: int = key(
        0, "optimizer steps made on one segment each before accumulate_grad_batches begins", minimum=0
    )
    lane_chunks: int = key(
        1,
        "parts that each rank's lanes are read in, one after the other, for one update: activations of one part at a "
        "time (batch_chunk of the authors); trainer.accumulate_grad_batches takes segments in time instead",
        minimum=1,
    )
    bptt_segments: int = key(
        1,
        "consecutive segments that one backward pass goes through where memory.gradient=carry; "
        "trainer.accumulate_grad_batches, the segments of a step, must be a multiple",
        minimum=1,
    )
    bptt_grow_steps: int = key(
        0, "optimizer steps after which bptt_segments reaches one segment further, from 1 on; 0: all at once", minimum=0
    )
    save_every_steps: int = key(
        0, "optimizer steps between two writes of the checkpoint `last`; 0: only at the end", minimum=0
    )
    save_every_minutes: float = key(0.0, "minutes between two writes of `last`; 0: as the steps say", minimum=0)
    save_top_k: int = key(1, "checkpoints of the lowest val/loss that are kept; `best` is the lowest", minimum=1)
    stop_at_step: int | None = key(
        None,
        "save and end after this optimizer step; a later resume goes on as if there had been no stop; null: run on",
        minimum=1,
    )
    max_time: str | None = key(None, "save and end after so long, as HH:MM:SS or DD:HH:MM:SS; null: run on")
    on_divergence: str = key(
        "stop",
        "when a loss or gradient is not finite, or max_loss_rise is passed: stop saves what was before and ends with "
        "exit code 1; skip leaves the step out, so that only the place in the text and the schedule move on",
        choices=("stop", "skip"),
    )
    max_loss_rise: float = key(
        0.0, "nats per token a step's loss may lie above the running mean of the steps before it; 0: any", minimum=0
    )
    max_skipped_steps: int = key(10, "steps in a row that skip leaves out before it stops after all", minimum=1)
    compile: Any = key(
        "auto",
        "compile the model for training: auto: on CUDA, where there is a compiler (on a CPU it is slower)",
        choices=("auto", True, False),
    )
    detect_anomaly: bool = key(False, "let autograd name the operation that made a NaN (slow)")

    def check(self) -> None:
        value = self.val_check_interval
        if isinstance(value, float) and value > 1.0:
            raise self.refuse(
                "val_check_interval", "a fraction of an epoch must be <= 1.0", "write an integer for batches"
            )
        if self.accumulate_from_step and self.accumulate_grad_batches == 1:
            rule, cure = "trainer.accumulate_grad_batches=1 accumulates nothing", "set that too, to 4 say"
            raise self.refuse("accumulate_from_step", rule, cure)
        if self.max_time is not None and self.max_seconds is None:
            raise self.refuse("max_time", "is no time", "write HH:MM:SS or DD:HH:MM:SS, as 11:30:00")
        self._check_bptt()

    @property
    def max_seconds(self) -> float | None:
        """Seconds of `max_time`; None if there is no limit or it cannot be read."""
        if self.max_time is None or not re.fullmatch(r"(\d+:)?\d+:[0-5]?\d:[0-5]?\d", self.max_time):
            return None
        parts = [int(part) for part in self.max_time.split(":")]
        return float(sum(part * unit for part, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False)))

    def _check_bptt(self) -> None:
        if self.accumulate_grad_batches % self.bptt_segments:
            rule = f"must divide trainer.accumulate_grad_batches={self.accumulate_grad_batches}, the segments of a step"
            raise self.refuse("bptt_segments", rule, f"set trainer.accumulate_grad_batches={self.bptt_segments} too")
        if self.bptt_segments > 1 and self.accumulate_from_step:
            rule = "trainer.accumulate_from_step begins with steps of one segment"
            raise self.refuse("bptt_segments", rule, "set one of them only; bptt_grow_steps is a curriculum too")
        if self.bptt_grow_steps and self.bptt_segments == 1:
            raise self.refuse("bptt_grow_steps", "trainer.bptt_segments=1 has nothing to grow to", "set that to 4, say")

    def bptt_of_step(self, step: int) -> int:
        """Segments that a backward pass goes through in optimizer step number `step`, counted from 0."""
        if not self.bptt_grow_steps:
            return self.bptt_segments
        return min(self.bptt_segments, 1 + step // self.bptt_grow_steps)

    def segments_of_step(self, step: int) -> int:
        """Segments that optimizer step number `step`, counted from 0, sums over."""
        return 1 if step < self.accumulate_from_step else self.accumulate_grad_batches

    def segments_of_run(self) -> int:
        """Segments that max_steps read, if no epoch ends inside a step."""
        alone = min(self.max_steps, self.accumulate_from_step)
        return alone + (self.max_steps - alone) * self.accumulate_grad_batches


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Section):
    """How ranks work together."""

    section: ClassVar[str] = "strategy"

    name: str = key(
        "auto",
        "auto: one rank; ddp: one process per device; deepspeed: the same with ZeRO (deepspeed_zero0 ... zero3)",
        choices=("auto", "ddp", "deepspeed"),
    )
    timeout_s: int = key(1800, "seconds a rank waits for the others before it gives up", minimum=1)
    stage: int | None = key(
        None,
        "what ZeRO divides among the ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too",
        choices=(0, 1, 2, 3, None),
    )
    offload_optimizer: bool = key(False, "keep optimizer state and its arithmetic on the CPU; ZeRO 1, 2, 3")
    offload_parameters: bool = key(False, "keep parameters on the CPU between their uses; ZeRO 3")
    config: str | None = key(
        None, "JSON of DeepSpeed's own settings, on top of ours; what other keys here decide it must not hold"
    )

    def check(self) -> None:
        if not self.sharded:
            for name in ("stage", "offload_optimizer", "offload_parameters", "config"):
                if getattr(self, name) not in (None, False):
                    raise self.refuse(name, f"strategy={self.name} has none", "take strategy=deepspeed_zero2, say")
            return
        if self.stage is None:
            raise self.refuse("stage", "DeepSpeed needs one", "take strategy=deepspeed_zero2, say")
        if self.offload_optimizer and self.stage == 0:
            raise self.refuse("offload_optimizer", "ZeRO 0 leaves the optimizer alone", "set strategy.stage=2")
        if self.offload_parameters and self.stage != 3:
            raise self.refuse("offload_parameters", "parameters are divided by ZeRO 3 only", "set strategy.stage=3")

    @property
    def sharded(self) -> bool:
        """Whether DeepSpeed's engine trains and writes checkpoints as folders."""
        return self.name == "deepspeed"

    @property
    def title(self) -> str:
        """As it is chosen on the command line."""
        if not self.sharded:
            return self.name
        offload = "_offload" if self.offload_optimizer or self.offload_parameters else ""
        return f"deepspeed_zero{self.stage}{offload}"


@dataclass(frozen=True, kw_only=True)
class LoggerConfig(Section):
    """Where curves go. Several loggers may be on at once."""

    section: ClassVar[str] = "logger"

    tensorboard: bool = key(False, "write TensorBoard events into the run folder")
    csv: bool = key(False, "write csv/metrics.csv into the run folder")
    wandb: bool = key(False, "log to Weights & Biases; needs the extra wandb")
    mlflow: bool = key(False, "log to MLflow; needs the extra mlflow")
    project: str = key("txl_lightning", "project at Weights & Biases, experiment in MLflow")
    offline: bool = key(False, "wandb: only write into the run folder; `wandb sync` sends it later")
    mlflow_uri: str | None = key(None, "where MLflow's store is; null: MLFLOW_TRACKING_URI, else in the run folder")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Lanes and segments of validation and evaluation; they need not be those of training."""

    section: ClassVar[str] = "eval"

    batch_size: int | None = key(None, "lanes; null: data.batch_size", minimum=1)
    segment_len: int | None = key(None, "tokens of a segment; null: data.segment_len", minimum=1)
    warm: int = key(
        0, "tokens before its own text that each lane reads unscored, so that its memory is not empty", minimum=0
    )
    schedule: str = key(
        "auto",
        "how txl eval runs: segments: one after the other; layers: each layer over many segments at once, the same "
        "scores sooner, for a cache or a window; auto: layers where it applies",
        choices=("auto", "layers", "segments"),
    )
    dynamic: str = key(
        "none",
        "txl eval learns from each segment once it is scored, on one device: sgd, or rms: each weight at its own rate",
        choices=("none", "sgd", "rms"),
    )
    dynamic_lr: float | None = key(
        None, "size of a step, to be tuned on split=valid; null: 0.03 for sgd, 3e-5 for rms", above=0
    )
    dynamic_decay: float = key(
        0.0, "share of the way back to the trained weights that each step goes", minimum=0, maximum=1
    )
    dynamic_eps: float = key(1e-5, "eval.dynamic=rms: added to the root mean square of a weight's gradients", above=0)
    dynamic_segments: int = key(
        200, "eval.dynamic=rms: training segments (of eval.batch_size lanes) that measure it", minimum=1
    )

    def check(self) -> None:
        if self.dynamic != "none" and self.schedule == "layers":
            rule = "weights that follow the text read it segment by segment"
            raise self.refuse("schedule", rule, "set it to segments, or eval.dynamic=none")

    def dynamic_keys(self) -> dict[str, Any] | None:
        """What dynamic evaluation was told; None: there is none."""
        if self.dynamic == "none":
            return None
        lr = self.dynamic_lr if self.dynamic_lr is not None else {"sgd": 0.03, "rms": 3e-5}[self.dynamic]
        of_rms = {"eps": self.dynamic_eps, "segments": self.dynamic_segments} if self.dynamic == "rms" else {}
        return {"name": self.dynamic, "lr": lr, "decay": self.dynamic_decay, **of_rms}


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
