"""The keys of ranks that work together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from txl_lightning.section import Section, key


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
