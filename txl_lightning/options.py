"""The commands of `txl`: what each is for, its own keys, and which keys of the configuration it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from txl_lightning.errors import ConfigError, suggest, yaml_text
from txl_lightning.section import Section, key


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Keys of one command beside those of the configuration; they have no dots."""

    def refuse(self, name: str, rule: str, cure: str) -> ConfigError:
        return ConfigError(name, getattr(self, name), rule, cure)

    @contextmanager
    def said_of(self, keys: Mapping[str, str]) -> Iterator[None]:
        """Errors about configurations that our keys made are said of the key that was typed.

        Args:
            keys: our key by the dotted one that it sets.
        """
        try:
            yield
        except ConfigError as error:
            set_here = [name for name in keys.values() if getattr(self, name) not in (None, ())]
            if not set_here:
                raise
            named = keys.get(error.key)
            setting = f"{error.key}={yaml_text(error.value)}"
            if named in set_here:
                raise self.refuse(named, f"{setting} {error.rule}", error.cure) from error
            cure = f"leave that value out, or change {error.key} ({error.cure})"
            raise self.refuse(set_here[0], f"with {setting}: {error.rule}", cure) from error


_TRUST = "read a folder of DeepSpeed's although it holds more than numbers, and so may run code on loading"


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """`txl fit`."""

    resume: str | None = key(
        None,
        "run folder or checkpoint to go on with; auto: the run in run_dir, else the newest under runs/ that agrees, "
        "else start afresh",
    )
    trust: bool = key(False, _TRUST)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Options):
    """`txl eval`."""

    ckpt: str | None = key(None, "checkpoint file or run folder to evaluate (required)")
    split: str = key("test", "part of the corpus to score", choices=("train", "valid", "test"))
    other_text: bool = key(False, "score although the text is not what the checkpoint was trained on")
    mem_lens: tuple[int, ...] = key((), "score with each of these memory.mem_len, one after the other", minimum=0)
    bootstrap: int = key(
        0, "resamples of documents for confidence intervals (which read the text once more); 0: none", minimum=0
    )
    trust: bool = key(False, _TRUST)
    out: str | None = key(None, "also write the result to this JSON file")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """`txl generate`."""

    ckpt: str | None = key(None, "checkpoint file or run folder to sample from (required)")
    prompt: str | None = key(None, "text to continue; - reads standard input")
    prompt_file: str | None = key(None, "file with the text to continue")
    prompts: str | None = key(
        None,
        'file of many, one JSON object per line with the text under "prompt"; other keys are copied, and those that '
        "say how to go on (tokens, seed, ...) are typed for all lines at once; needs out",
    )
    interactive: bool = key(False, "read lines from the terminal and continue each; what was said stays in memory")
    out: str | None = key(None, 'with prompts: file for the same objects with the continuation under "text"')
    lanes: int = key(16, "with prompts: how many are continued side by side", minimum=1)
    tokens: int = key(300, "tokens to sample at most; with prompts and log_probs 0 scores the prompts alone", minimum=0)
    stop: Any = key(None, "text that ends the continuation, which stops before it, or several: [END,STOP]")
    samples: int = key(1, "continuations of each prompt, with seed, seed + 1, ...", minimum=1)
    log_probs: bool = key(
        False, "with prompts: each token's log-probability (nats) as well, that of the prompt's tokens included"
    )
    temperature: float = key(0.8, "divides the logits; 0: always the likeliest token", minimum=0)
    top_k: int = key(0, "sample among this many likeliest tokens; 0: all", minimum=0)
    top_p: float = key(1.0, "sample among the likeliest tokens that hold this much probability", above=0, maximum=1)
    repetition_penalty: float = key(
        1.0, "multiplies the log-probability of tokens that were there lately; 1: none", minimum=1
    )
    repetition_window: int = key(64, "latest tokens that repetition_penalty looks at", minimum=1, maximum=4096)
    trust: bool = key(False, _TRUST)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of `stop`."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """`txl data prepare|inspect`."""

    action: str = key("inspect", "build the token files, or show what is in the corpus", choices=("prepare", "inspect"))
    out: str | None = key(None, "also write what is shown to this JSON file")


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(Options):
    """`txl analyze ANALYSIS`; which keys each one reads stands in `analyses`."""

    action: str | None = key(
        None,
        "what is measured (required)",
        choices=(
            "reach",
            "scores",
            "sliding",
            "recl",
            "position",
            "age",
            "frequency",
            "sweep",
            "confidence",
            "retrieval",
            None,
        ),
    )
    ckpt: str | None = key(
        None,
        "checkpoint file or run folder; recl, confidence: several, as [A,B]; null: random weights, to measure reach",
    )
    split: str = key("test", "part of the corpus that is read", choices=("train", "valid", "test"))
    tokens: int | None = key(None, "tokens of the split that are read, from its start; null: all", minimum=2)
    segments: int | None = key(
        None, "segments that reach reads; null: 20, or more if the memory's formula needs them", minimum=1
    )
    lengths: tuple[int, ...] = key((800, 1800, 3800), "sliding: attention lengths, in tokens")
    windows: int = key(8, "sliding: targets that the sliding window scores at each length", minimum=1)
    targets: int = key(32768, "recl: targets that are scored at each context", minimum=1)
    block: int = key(25, "recl: targets scored per reading, a quarter of step at most; 1: exact contexts", minimum=1)
    start: int = key(100, "recl: the shortest context c_0, in tokens", minimum=1)
    step: int = key(100, "recl: tokens that contexts grow by", minimum=1)
    longest: int = key(1000, "recl: the longest context, in tokens", minimum=2)
    shares: tuple[float, ...] = key((0.1, 0.5, 1.0), "recl: r, the shares of hardest targets")
    mem_len: int | None = key(None, "recl: memory.mem_len of every cache; null: as trained", minimum=1)
    longest_age: int = key(
        1024, "age: tokens of the shortest document that takes part; a power of two, where the buckets end", minimum=2
    )
    mem_lens: tuple[int, ...] = key((), "sweep: values of memory.mem_len", minimum=0)
    segment_lens: tuple[int, ...] = key((), "sweep: values of eval.segment_len", minimum=1)
    clamp_lens: tuple[int, ...] = key((), "sweep: values of model.clamp_len", minimum=-1)
    samples: int = key(10_000, "confidence: draws of documents", minimum=100)
    task: str = key(
        "corpus",
        "retrieval: the answers of the made-up corpus; grid: needles of data=passkey by length and depth; "
        "passkey_text: a number hidden in words, for models of text",
        choices=("corpus", "grid", "passkey_text"),
    )
    grid_segments: tuple[int, ...] = key((1, 2, 4, 8, 16), "retrieval: lengths of grid and passkey_text, in segments")
    depths: int = key(5, "retrieval: depths of grid and passkey_text, from first to last", minimum=1)
    needles: int = key(50, "retrieval: needles at each length and depth", minimum=1)
    to: str | None = key(None, "file of single losses; scores: .jsonl or .parquet (required), recl: .npz")
    trust: bool = key(False, _TRUST)
    plot: str | None = key(None, "also draw the result into this PNG file")
    out: str | None = key(None, "also write the result to this JSON file")


@dataclass(frozen=True, kw_only=True)
class StrategiesOptions(Options):
    """`txl strategies`."""

    out: str | None = key(None, "also write the table to this JSON file")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(Options):
    """`txl reproduce NAME`."""

    name: str | None = key(None, "experiment whose published result is meant; null: list all")
    speed: float | None = key(None, "training tokens per second of one device, to estimate device-hours", above=0)
    speed_from: str | None = key(None, "folder of a short run of the experiment that measured the speed")
    out: str | None = key(None, "also write what is shown to this JSON file")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """`txl compare`."""

    memories: tuple[str, ...] = key((), "what is compared: strategies, or names that `each` explains; memory=A,B,C")
    each: str | None = key(
        None,
        "keys of some only, as YAML: {compressive: [memory.rate=2], long: [memory=cache, memory.mem_len=256]}",
    )
    budget: str = key(
        "state",
        "what is equal beside data and seeds: bytes of state per lane and tokens, training FLOPs (trainer.max_steps is "
        "that of the first), or seconds of training",
        choices=("state", "flops", "time"),
    )
    state_bytes: int | None = key(
        None, "bytes of budget=state, of a training lane in float32; null: those of the first that has state", minimum=1
    )
    seconds: float | None = key(None, "seconds of training per run, validation not counted; budget=time", above=0)
    seeds: int = key(3, "runs of each: with seed, seed + 1, ...", minimum=1)
    recall: int = key(
        0,
        "optimizer steps of a second training of each, on the made-up corpus recall with the same model, memory and "
        "segments: the table then says what share of its answers is right; 0: none",
        minimum=0,
    )
    out: str | None = key(None, "folder for the runs, comparison.json and comparison.png (required)")


BENCH_PARTS = ("training", "evaluation", "decoding", "attention", "overhead", "data")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """`txl bench`."""

    what: Any = key(
        "training,evaluation,decoding", f"parts to measure, with commas between them: {', '.join(BENCH_PARTS)}"
    )
    memories: tuple[str, ...] = key((), "strategies laid side by side, or names that `each` explains; memory=A,B,C")
    each: str | None = key(None, "keys of some only, as YAML: {compressive: [memory.rate=2]}")
    lengths: tuple[int, ...] = key(
        (), "sizes of memory to measure with, by the strategy's own key (memory.mem_len); []: as configured", minimum=1
    )
    backends: tuple[str, ...] = key(
        (),
        "of attention alone; []: all that run here",
        choices=("reference", "shift", "compiled", "triton"),
    )
    against: str | None = key(
        None, "also time this class, from an installed transformers 4.57.6", choices=("huggingface", None)
    )
    rounds: int = key(7, "repeats of each; all take turns", minimum=1)
    clock: str = key(
        "wall",
        "what seconds are: wall, or cpu: those that all threads of this process computed, for a machine that is busy",
        choices=("wall", "cpu"),
    )
    threads: int | None = key(None, "CPU threads; null: as torch finds them", minimum=1)
    peak_flops: float | None = key(
        None, "FLOP/s of the device, for the share that training uses; null: those of a large product here", above=0
    )
    out: str | None = key(None, "also write everything to this JSON file")

    @property
    def parts(self) -> tuple[str, ...]:
        """What is measured, in its own order."""
        named = {part.strip() for part in (self.what.split(",") if isinstance(self.what, str) else self.what)} - {""}
        return tuple(part for part in BENCH_PARTS if part in named)

    def check(self) -> None:
        named = tuple(self.what.split(",")) if isinstance(self.what, str) else self.what
        if not isinstance(named, tuple) or not all(isinstance(part, str) for part in named):
            raise self.refuse("what", "must name parts", f"for example what={BENCH_PARTS[0]},{BENCH_PARTS[1]}")
        for part in named:
            if part.strip() not in (*BENCH_PARTS, ""):
                raise self.refuse("what", f"there is no part {part.strip()}", suggest(part.strip(), BENCH_PARTS))


LAYOUTS = ("authors", "nvidia", "huggingface")


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Options):
    """`txl import`."""

    src: str | None = key(None, "weight file or folder of another Transformer-XL (required)")
    to: str | None = key(None, "checkpoint to write (required)")
    layout: str | None = key(None, "whose names and conventions the weights have (required)", choices=(*LAYOUTS, None))
    config: str | None = key(
        None, "JSON with the model's arguments; null: those in the file, or STEM.json or config.json beside it"
    )
    vocab: str | None = key(None, "vocab.json of a token folder: what the ids stand for; txl generate needs it")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """`txl export`."""

    ckpt: str | None = key(None, "checkpoint file or run folder to export (required)")
    to: str | None = key(None, "file to write: .safetensors, .pt or .bin, or a folder; configuration goes beside")
    trust: bool = key(False, _TRUST)
    layout: str | None = key(None, "whose names and conventions to write (required)", choices=(*LAYOUTS, None))


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """`txl convert`."""

    ckpt: str | None = key(None, "checkpoint folder or file, or run folder, to convert (required)")
    to: str | None = key(None, "file to write (required)")
    trust: bool = key(False, _TRUST)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """`txl report`."""

    runs: Any = key(None, "run folders [A,B], or a folder that holds several, such as that of txl compare (required)")
    out: str | None = key(None, "HTML file to write (required)")
    title: str | None = key(None, "heading of the page; null: the run's name")

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of `runs`."""
        return () if self.runs is None else (self.runs,) if isinstance(self.runs, str) else tuple(self.runs)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        summary: one line for the help.
        options: its own keys.
        read: patterns of what it reads of the configuration: `model` is the group, `model.*` are its keys.
        unread: patterns of what it has no use for nevertheless.
        needs_ckpt: it takes a checkpoint and starts from its configuration always, not only where one is given.
        composes: it composes configurations from what was typed: `memory=a,b` is a list, and `check` and `run` are
            given the request too.
        several_ckpts: `ckpt` may be a list; the first one's configuration is then what the command starts from.
    """

    summary: str
    options: type[Options] = Options
    read: tuple[str, ...] = ("*",)
    unread: tuple[str, ...] = ()
    needs_ckpt: bool = True
    composes: bool = False
    several_ckpts: bool = False

    def reads(self, key: str) -> bool:
        """Whether a key or group of the configuration has any effect on it."""
        used, unused = (any(fnmatchcase(key, pattern) for pattern in part) for part in (self.read, self.unread))
        return used and not unused


_MODEL = ("model", "model.*", "memory", "memory.*")
_FOR_TRAINING = tuple(
    f"model.{name}"
    for name in "dropout dropatt dropemb variational_dropout init_std proj_init_std checkpointing".split()
)
_DATA = ("data", "data.*")
_DEVICES = (
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.precision",
    "strategy",
    "strategy.*",
)
_OFFLOAD = ("memory.offload",)
_BAR = ("callbacks", "callbacks.progress_bar.*")
_ORDER = ("data.shuffle", "data.segment_len_std")  # of training
_LANES = ("data.segment_len", "data.batch_size", "data.num_workers", *_ORDER)

COMMANDS = {
    "fit": Command(
        summary="train; the run folder gets configuration, checkpoints, curves and result.json", options=FitOptions
    ),
    "eval": Command(
        summary="score a checkpoint; starts from its stored configuration",
        options=EvalOptions,
        read=(*_MODEL, *_DATA, "eval.*", *_DEVICES, *_BAR),
        unread=(*_FOR_TRAINING, *_ORDER),
    ),
    "generate": Command(
        summary="sample from a checkpoint with the memory carried along",
        options=GenerateOptions,
        read=(*_MODEL, "data.segment_len", "trainer.accelerator", "seed"),
        unread=(*_FOR_TRAINING, *_OFFLOAD),
    ),
    "analyze": Command(
        summary="measure what a memory does: txl analyze ANALYSIS; its help lists the analyses",
        options=AnalyzeOptions,
        read=("experiment", *_MODEL, *_DATA, "eval.*", "trainer.accelerator", "seed"),
        unread=(
            "eval.schedule",
            "eval.dynamic*",
            "eval.warm",
            *(name for name in _FOR_TRAINING if not name.endswith("init_std")),
            *_OFFLOAD,
        ),
        needs_ckpt=False,
        several_ckpts=True,
    ),
    "data": Command(
        summary="build the token files (prepare) or show what is in the corpus (inspect)",
        options=DataOptions,
        read=("experiment", *_DATA),
        unread=_LANES,
    ),
    "compare": Command(
        summary="train several memories under one budget, several seeds each: table, JSON and plot",
        options=CompareOptions,
        unread=("run_dir", "dry_run", "callbacks", "callbacks.*", "trainer.devices", "trainer.num_nodes", "strategy*"),
        composes=True,
    ),
    "bench": Command(
        summary="measure speed and memory: training, evaluation, decoding, attention, trainer, reading",
        options=BenchOptions,
        read=(
            *("experiment", *_MODEL, *_DATA, "eval.*", "optim", "optim.*", "seed"),
            *("trainer.accelerator", "trainer.precision", "trainer.compile"),
        ),
        unread=(*_OFFLOAD, *_ORDER, "optim.ema", "eval.dynamic*", "eval.warm"),
        composes=True,
    ),
    "strategies": Command(
        summary="list every memory strategy: keys, paper, state bytes per lane",
        options=StrategiesOptions,
        read=("experiment", *_MODEL),
        unread=(*_FOR_TRAINING, *_OFFLOAD),
    ),
    "reproduce": Command(
        summary="the commands of a published result, its score, and device-hours at a measured speed",
        options=ReproduceOptions,
        read=(),
    ),
    "import": Command(
        summary="make a checkpoint of another code's weights: the authors', NVIDIA's or Hugging Face's",
        options=ImportOptions,
        read=(*_DATA, "eval.*"),
        unread=_LANES,
    ),
    "export": Command(
        summary="write a checkpoint's weights as another code names them",
        options=ExportOptions,
        read=("memory.mem_len", "model.clamp_len", "model.same_length", "data.segment_len"),
    ),
    "convert": Command(
        summary="write the weights of a checkpoint, also of a folder that ranks wrote, as one file",
        options=ConvertOptions,
        read=(),
    ),
    "report": Command(
        summary="write one HTML page about runs: curves, what the memory did, what it can see, configuration",
        options=ReportOptions,
        read=(),
    ),
    "demo": Command(summary="train, evaluate and sample: two minutes on a laptop", unread=("dry_run",)),
}

POSITIONAL = {"analyze": "action", "data": "action", "reproduce": "name"}
"""Keys that are given by their value alone, as the first word after a command."""

FREE_TEXT = (
    "prompt",
    "prompt_file",
    "prompts",
    "stop",
    "runs",
    "title",
    "ckpt",
    "resume",
    "src",
    "to",
    "config",
    "vocab",
    "out",
    "each",
    "what",
    "speed_from",
    "plot",
    "run_dir",
    "strategy.config",
    "logger.project",
    "logger.mlflow_uri",
    "data.path",
    "data.train",
    "data.valid",
    "data.test",
    "data.tokenizer",
    "data.vocab_file",
    "data.cache_dir",
)
"""Keys whose values are taken letter by letter: they may hold =, quotes, ~, spaces, or look like numbers."""
