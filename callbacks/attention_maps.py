"""Pictures of attention: who looks at what, and how much of that is memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.nn import functional as F

from txl_lightning import registry
from txl_lightning.callbacks.attention_seen import LayerAttention, attention_seen
from txl_lightning.callbacks.probe import Every, at_rest, can_look, first_lanes, say_no_looks
from txl_lightning.config import Section, key

GAP = 2
"""White pixels between the maps of two heads."""


@dataclass(frozen=True, kw_only=True)
class AttentionMapsConfig(Section):
    """Keys of `callbacks.attention_maps`."""

    section = "callbacks.attention_maps"

    every_n_steps: int = key(500, "optimizer steps between two pictures, each an extra forward pass", minimum=1)
    pixels: int = key(
        256, "most pixels of a map's side; where it has more keys, the largest of neighbours is drawn", minimum=8
    )


@registry.callbacks.register("attention_maps", config=AttentionMapsConfig)
class AttentionMaps(L.Callback):
    """Shows at the points of every `every_n_steps`-th step, of the first training lane of rank 0 (not
    under ZeRO 3):

    attention/L<layer>   one map for each head, side by side: a row for each query, a column for each key, darker where
                         the root of the weight is larger (the map's largest is black); left of the red line is memory,
                         oldest first. From the `reference`, with weights and memory as before that step, no dropout

    Nothing is shown of model=lstm, which has no attention.
    """

    def __init__(self, config: AttentionMapsConfig) -> None:
        self.config = config
        self._every = Every(config.every_n_steps)
        self._images: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        say_no_looks(trainer, pl_module, what="attention_maps")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._every.begin(pl_module.last_point())
        self._images.clear()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.config.model.architecture != "transformer":
            return
        point = pl_module.next_point()
        if point is None or not (self._every.is_due(point) and pl_module.at_border and can_look(pl_module)):
            return
        self._every.take(point)
        first = batch[0] if isinstance(batch, list) else batch
        state, first = first_lanes(pl_module.state_before(first), first, 1)
        with at_rest(pl_module), attention_seen(pl_module.model, self._draw):
            pl_module.model(first.tokens_BT, state, first.segment)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._images and pl_module.logs_now():
            for tag, image in self._images.items():
                pl_module.log_image(tag=tag, image_3HW=image)
            self._images.clear()

    def _draw(self, seen: LayerAttention) -> None:
        maps = seen.weights_BHTP[0]
        self._images[f"attention/L{seen.layer}"] = picture(maps, n_memory=seen.n_memory, pixels=self.config.pixels)


def picture(weights_HTP: Tensor, *, n_memory: int, pixels: int) -> Tensor:
    """(3, rows, columns) from 0 to 1: the maps of all heads side by side.

    Args:
        weights_HTP: attention.
        n_memory: columns that are memory, the first ones; a red line stands behind them, if there are any.
        pixels: most of a map's side.
    """
    step = -(-max(weights_HTP.shape[1:]) // pixels)
    dark = (weights_HTP / weights_HTP.amax(dim=(1, 2), keepdim=True).clamp(min=1e-30)).sqrt()
    parts = [part for part in dark.split([n_memory, dark.shape[2] - n_memory], dim=2) if part.shape[2]]
    small = [1 - F.max_pool2d(part, step, ceil_mode=True) for part in parts]
    height = small[0].shape[1]
    red = torch.tensor([1.0, 0.0, 0.0], device=dark.device)[:, None, None].expand(3, height, 1)
    gap = dark.new_ones(3, height, GAP)
    columns: list[Tensor] = []
    for head in range(len(dark)):
        drawn = [part[head].expand(3, -1, -1) for part in small]
        columns += [gap] if head else []
        columns += [drawn[0], red, drawn[1]] if len(drawn) == 2 else drawn
    return torch.cat(columns, dim=2)
