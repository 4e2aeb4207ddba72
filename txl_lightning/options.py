@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Keys of one command beside those of the configuration; they have no dots."""

    def refuse(self, name: str, rule: str, cure: str) -> ConfigError:
        return ConfigError(name, getattr(self, name), rule, cure)


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """`txl fit` needs nothing beside the configuration."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Options):
    """`txl eval`."""

    ckpt: str | None = key(None, "checkpoint file or run folder to evaluate (required)")
    split: str = key("test", "part of the corpus to score", choices=("train", "valid", "test"))
    other_text: bool = key(False, "score although the text is not what the checkpoint was trained on")
    out: str | None = key(None, "also write the result to this JSON file")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """`txl generate`."""

    ckpt: str | None = key(None, "checkpoint file or run folder to sample from (required)")
    prompt: str | None = key(None, "text to continue; - reads standard input")
    prompt_file: str | None = key(None, "file with the text to continue")
    tokens: int = key(300, "tokens to sample", minimum=1)
    temperature: float = key(0.8, "divides the logits; 0: always the likeliest token", minimum=0)
    top_k: int = key(0, "sample among this many likeliest tokens; 0: all", minimum=0)
    top_p: float = key(1.0, "sample among the likeliest tokens that hold this much probability", above=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """`txl data prepare|inspect`."""

    action: str = key("inspect", "build the token files, or show what is in the corpus", choices=("prepare", "inspect"))
    out: str | None = key(None, "also write what is shown to this JSON file")


@dataclass(frozen=True, kw_only=True)
class StrategiesOptions(Options):
    """`txl strategies`."""

    out: str | None = key(None, "also write the table to this JSON file")


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """`txl demo` needs nothing beside the configuration."""


COMMANDS: dict[str, type[Options]] = {
    "fit": FitOptions,
    "eval": EvalOptions,
    "generate": GenerateOptions,
    "data": DataOptions,
    "strategies": StrategiesOptions,
    "demo": DemoOptions,
}
"""Every command of `txl` and its own keys."""

FREE_TEXT = (
    "prompt",
    "prompt_file",
    "ckpt",
    "out",
    "run_dir",
    "data.path",
    "data.train",
    "data.valid",
    "data.test",
    "data.cache_dir",
)
"""Keys whose values are taken letter by letter: they may hold =, quotes, ~, spaces, or look like numbers."""


