"""The keys of validation and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from txl_lightning.section import Section, key


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
