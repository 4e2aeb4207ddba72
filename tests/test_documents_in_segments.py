"""Memories that can start anew inside a segment: after the border nothing of the old document is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_layers import make, text

from txl_lightning import registry
from txl_lightning.types import Segment

MEMORIES: dict[str, dict[str, Any]] = {
    "cache": {"mem_len": 10},
    "window": {"window": 8, "sinks": 2},
    "compressive": {"mem_len": 8, "compressed_len": 4, "rate": 2, "positions": "time"},
    "associative": {"rule": "delta"},
    "knn": {"mem_len": 10, "top_k": 3, "layers": "all"},
    "expire": {"mem_len": 10, "max_span": 12.0, "ramp": 4.0},
}


@pytest.mark.parametrize("form", ["hidden", "projected"])
@pytest.mark.parametrize("name", MEMORIES)
def test_a_document_reads_as_if_it_were_alone(name: str, form: str) -> None:
    """20 tokens of one document and then another, of which 3 tokens are in the third segment of 8."""
    model = make(registry.memories.get(name).config(**MEMORIES[name]))
    old, new = text(21), text(19, seed=1)
    both = torch.cat([old, new], dim=1)
    number = torch.cat([torch.zeros(1, 21), torch.ones(1, 19)], dim=1).long()
    state, found = model.init_state(1, form=form), []
    alone, expected = model.init_state(1, form=form), []
    with torch.no_grad():
        for start in range(0, 40, 8):
            segment = Segment.full(both[:, start : start + 8])._replace(document=number[:, start : start + 8])
            out = model(both[:, start : start + 8], state, segment)
            state, found = out.state, [*found, out.hidden_BTD]
        for start, end in ((0, 3), (3, 11), (11, 19)):
            out = model(new[:, start:end], alone)
            alone, expected = out.state, [*expected, out.hidden_BTD]
    torch.testing.assert_close(torch.cat(found, dim=1)[:, 21:], torch.cat(expected, dim=1), atol=1e-6, rtol=0)
