"""Tables of distances that are kept from one segment to the next while the weights rest: evaluation and generation.

In training each forward embeds and projects its distances anew, because the projection is trained and dropout acts on
the table. While nothing is trained both depend on the shape alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from txl_lightning.model.positions import DistanceTable, Position, distance_table


class Tables:
    """The longest table of each kind that was asked for; a shorter one is a part of it.

    What a layer projected is kept together with the place and version of the weights that did it, so that weights which
    changed meanwhile project again.
    """

    def __init__(self) -> None:
        self._embedded: dict[Any, DistanceTable] = {}
        self._projected: dict[Position, tuple[Any, DistanceTable]] = {}
        self._held: dict[Position, list[Tensor]] = {}  # their weights, so that no other tensor comes to lie there

    def embedded(self, *, oldest: int, n_token: int, ahead: int, **kind: Any) -> DistanceTable:
        """As `positions.distance_table`."""
        key = (oldest, *kind.values())
        kept = self._embedded.get(key)
        if kept is None or kept.first < oldest + n_token or kept.ahead < ahead:
            most = max(ahead, 0 if kept is None else kept.ahead)
            longest = max(n_token, 0 if kept is None else kept.first - oldest)
            kept = self._embedded[key] = distance_table(oldest=oldest, n_token=longest, ahead=most, **kind)
        return kept.part(first=oldest + n_token, ahead=ahead)

    def projected(self, position: Position, table: DistanceTable) -> DistanceTable:
        """The same table with what the layer's position makes of its rows."""
        stamp = (weights_of(position), autocast_type(table.rows_WD.device), table.rows_WD.device, table.rows_WD.dtype)
        known, kept = self._projected.get(position, (None, table))
        if known != stamp or kept.first < table.first or kept.ahead < table.ahead:
            made = position.project(table)
            # each head's columns side by side: that is how one query reads them fastest
            made = None if made is None else made.permute(1, 2, 0).contiguous().permute(2, 0, 1)
            kept = table._replace(projected_WHK=made)
            self._projected[position] = (stamp, kept)
            self._held[position] = [weight.detach() for weight in position.parameters() if _number(weight) is None]
        return kept.part(first=table.first, ahead=table.ahead)


def weights_of(part: nn.Module) -> tuple[Any, ...]:
    """What changes when a module's weights do.

    ZeRO 3 puts a weight together for its use, each time in another place, on each rank in one of its own: there it is
    known by its number, for all ranks must come to the same answer, and the weights rest while a table lives.
    """
    return tuple(_place(weight) for weight in part.parameters())


def _place(weight: Tensor) -> tuple[Any, ...]:
    number = _number(weight)
    return (weight.data_ptr(), _version(weight), weight.dtype) if number is None else ("divided", number)


def _number(weight: Tensor) -> int | None:
    """Under ZeRO 3; else None."""
    return getattr(weight, "ds_id", None)


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def autocast_type(device: torch.device) -> torch.dtype | None:
    """What autocast rounds matrix products to on a device; None: it is off there, or there are no numbers."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
