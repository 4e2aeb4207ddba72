"""Counts of tokens in buckets that double in size: 0, 1, 2-3, 4-7, 8-15, ..."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 33
"""Buckets of whatever fits in 32 bits."""


def bucket_of(count: Tensor) -> Tensor:
    """Index of the bucket that each non-negative integer lies in."""
    return torch.bucketize(count.contiguous(), 2 ** torch.arange(MOST - 1, device=count.device), right=True)


def bucket_name(index: int) -> str:
    """What lies in a bucket."""
    low = 2**index // 2
    high = 2**index - 1
    return str(low) if index < 2 else f"{low}-{high}"


def sums_by_bucket(count: Tensor, values: Tensor) -> Tensor:
    """(n, MOST) sums of n tensors of values (n, ...), each of the shape of the counts."""
    index = bucket_of(count).flatten()
    return values.new_zeros(len(values), MOST).index_add_(1, index, values.flatten(1))
