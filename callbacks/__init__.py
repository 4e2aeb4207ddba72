"""Lightning callbacks. Each observes and never steers; the line here makes its name known."""

from txl_lightning.callbacks import (
    attention_maps,
    cost_meter,
    early_divergence,
    gradient_norms,
    loss_by_position,
    memory_benefit,
    memory_monitor,
    progress_bar,
    text_samples,
    throughput,
)

__all__ = [
    "attention_maps",
    "cost_meter",
    "early_divergence",
    "gradient_norms",
    "loss_by_position",
    "memory_benefit",
    "memory_monitor",
    "progress_bar",
    "text_samples",
    "throughput",
]
