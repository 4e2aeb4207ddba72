"""Sums over what layers' attention shows, and the figures they give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from txl_lightning.callbacks.attention_seen import TERMS, LayerAttention
from txl_lightning.callbacks.buckets import bucket_name, sums_by_bucket
from txl_lightning.types import Segment


class AttentionFigures:
    """Attention of the real tokens of one segment.

    Args:
        segment: what is known of its lanes.
        layers: of the model.
    """

    def __init__(self, segment: Segment, *, layers: int) -> None:
        self.segment, self.layers = segment, layers
        self._on_memory: list[Tensor] = []  # () each, by layer
        self._by_age: list[Tensor] = []  # (1 + MOST,) each: no place, then buckets
        self._terms: list[Tensor] = []  # (terms,) each
        self._names: list[str] = []
        self._hits: dict[int, Tensor] = {}  # by layer (2 + MOST,): ages, hits, hits in buckets

    def add(self, seen: LayerAttention) -> None:
        """The next layer's."""
        real = self.segment.mask(seen.weights_BHTP.shape[2]).float()[:, :, None]
        weights = seen.weights_BHTP.mean(dim=1) * real
        self._on_memory.append(weights[..., : seen.n_memory].sum())
        distance = seen.distance_BTP.expand_as(weights)
        placed = weights * (distance >= 0)
        by_bucket = sums_by_bucket(distance.clamp(min=0), placed[None])[0]
        self._by_age.append(torch.cat([(weights - placed).sum()[None], by_bucket]))
        if seen.terms_BHTP:
            pairs = (seen.visible_BTP * (real > 0))[:, None]
            sizes = [(term.abs() * pairs).sum() for term in seen.terms_BHTP.values()]
            self._names = list(seen.terms_BHTP)
            self._terms.append(torch.stack(sizes))

    def add_hits(self, layer: int, age_BHTn: Tensor) -> None:
        """What a layer's queries found; age 0: nothing."""
        real = self.segment.mask(age_BHTn.shape[2])[:, None, :, None] & (age_BHTn > 0)
        hit = real.float()
        by_bucket = sums_by_bucket(age_BHTn, hit[None])[0]
        self._hits[layer] = torch.cat([(age_BHTn * hit).sum()[None], hit.sum()[None], by_bucket])

    def show(self, module: Any) -> None:
        """Log the figures of all ranks. Every rank must call it."""
        tokens = self.segment.length.sum().float()
        parts = [tokens[None], torch.stack(self._on_memory), torch.stack(self._by_age).flatten()]
        parts += [torch.stack(self._terms).flatten()] if self._terms else []
        parts += self._hits.values()
        joined: Any = module.trainer.strategy.reduce(torch.cat(parts), reduce_op="sum")
        found = [part.cpu() for part in joined.split([len(part) for part in parts])]
        count, on_memory, by_age = found[0].clamp(min=1), found[1], found[2].view(self.layers, -1)
        figures = {f"memory/attention/L{layer}": float(mass / count) for layer, mass in enumerate(on_memory)}
        shares = by_age / count
        named = {"no_place": shares[:, 0]} if shares[:, 0].any() else {}
        named |= {bucket_name(index): shares[:, 1 + index] for index in range(self._used(shares[:, 1:]))}
        figures |= {f"memory/attention_by_age/{name}": float(share.mean()) for name, share in named.items()}
        if self._terms:
            figures |= self._of_terms(found[3].view(self.layers, -1))
        for layer, hits in zip(self._hits, found[3 + bool(self._terms) :], strict=True):
            figures |= self._of_hits(layer, hits)
        module.log_curves(figures)
        rows = [[layer, *(float(share[layer]) for share in named.values())] for layer in range(self.layers)]
        module.log_table(tag="memory/attention_by_age", columns=["layer", *named], rows=rows)

    def _of_terms(self, sizes: Tensor) -> dict[str, float]:
        """Shares of each layer, then their means."""
        shares = (sizes / sizes.sum(dim=1, keepdim=True).clamp(min=1e-30)).mean(dim=0)
        order = [name for name in TERMS.values() if name in self._names]
        return {f"memory/terms/{name}": float(shares[self._names.index(name)]) for name in order}

    def _of_hits(self, layer: int, sums: Tensor) -> dict[str, float]:
        ages, count, by_bucket = float(sums[0]), float(sums[1]), sums[2:]
        if not count:
            return {}
        used = range(1, self._used(by_bucket[None]))
        start = f"memory/knn/hits_by_age/L{layer}"
        shares = {f"{start}/{bucket_name(index)}": float(by_bucket[index]) / count for index in used}
        return {f"memory/knn/hit_age/L{layer}": ages / count, **shares}

    @staticmethod
    def _used(sums: Tensor) -> int:
        """Buckets up to the last one that holds anything."""
        return 1 + int(sums.any(dim=0).nonzero().max()) if sums.any() else 0
