"""The random generators of a process as tensors and numbers, so that a checkpoint holds them and runs no code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """State of the generators of python, numpy and torch, and of the device if it is a GPU."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"
    found: dict[str, Any] = {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(place), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(saved: dict[str, Any], device: torch.device) -> None:
    """Put the generators where `capture` found them."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, place, has_gauss, cached = saved["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), place, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)


def reseed(*numbers: int) -> None:
    """Seed the generators of python, numpy and torch, GPUs too, from several numbers at once."""
    words = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))
