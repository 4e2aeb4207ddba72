"""TensorBoard's page "Custom Scalars": curves grouped by the questions they answer, the first ones first."""

from __future__ import annotations

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

LAYOUT: dict[str, dict[str, list[str]]] = {
    "1. Does the memory help?": {
        "What it is worth, nats per token": ["memory/benefit/"],
        "Loss with it, without it, with another lane's": ["memory/probe/"],
        "Loss": ["train/loss$", "val/loss$"],
    },
    "2. How far back?": {
        "Loss by tokens since the reset": ["val/loss_by_age/"],
        "Loss by place in the segment": ["val/loss_by_position/"],
        "Attention on memory, by layer": ["memory/attention/L"],
        "Attention by tokens between key and query": ["memory/attention_by_age/"],
        "Tokens that can have fed an output": ["cost/effective_context$"],
    },
    "3. What does it cost?": {
        "Scores saved against full attention, percent": ["cost/saving_percent$"],
        "Scores since the reset, and those of full attention": ["cost/scores$", "cost/full_scores$"],
        "Tokens per second": ["perf/tokens_per_second$"],
        "Peak memory, 10^9 bytes": ["perf/peak_memory_gb$"],
        "Waiting for data and utilisation, shares": ["perf/data_wait$", "perf/mfu$"],
    },
    "4. What is in it?": {
        "Share in use": ["memory/.*/fill"],
        "Root mean square": ["memory/.*/norm"],
        "Change by a segment, share of that": ["memory/.*/update"],
        "Gates": ["memory/.*/gate"],
        "Terms of the scores, shares": ["memory/terms/"],
        "Lanes and documents that start anew": ["memory/resets$"],
    },
    "5. Is training sound?": {
        "Gradient norm": ["optim/grad_norm$"],
        "Gradient norm by part": ["optim/grad_norm/"],
        "Learning rate": ["optim/lr$"],
        "Loss above its lowest": ["warn/loss_rise$"],
        "Gradient norm in multiples of the usual": ["warn/grad_ratio$"],
    },
}
"""Groups, their charts, and what the tags in a chart begin with (patterns)."""


@rank_zero_only
def show_layout(logger: Logger) -> None:
    """Write it, if this is TensorBoard."""
    if isinstance(logger, TensorBoardLogger):
        charts = {group: {name: ["Multiline", tags] for name, tags in parts.items()} for group, parts in LAYOUT.items()}
        logger.experiment.add_custom_scalars(charts)
