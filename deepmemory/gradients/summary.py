"""What the results share: a sequence of parts that prints as a table, and quantiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

DIRECTIONS = ("forward", "backward")

Part = TypeVar("Part")


@dataclass(frozen=True, eq=False, repr=False)
class Parts(Generic[Part]):
    """One result for each layer and direction; prints as a table."""

    parts: tuple[Part, ...]  # in the order in which the model runs them

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Part:
        return self.parts[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} part(s); print it for the table)"


@dataclass(frozen=True, eq=False, repr=False)
class LayerCall:
    """One call of one layer in one direction."""

    name: str  # of the module inside the model; empty if the model is the layer
    call: int  # counts the calls of one module during one pass of the model
    layer: int
    direction: int  # 0 forward, 1 backward, where gradients flow towards later steps

    @property
    def cells(self) -> list[str]:
        """The first columns of a table."""
        return [self.name or "-", str(self.call), str(self.layer), DIRECTIONS[self.direction]]

    def __str__(self) -> str:
        return f"{self.name!r}, call {self.call}, layer {self.layer}, {DIRECTIONS[self.direction]}"


CALL_COLUMNS = ["module", "call", "layer", "direction"]


def quantiles(values: Tensor, q: Sequence[float]) -> Tensor:
    """Quantiles (len(q), ...) over the last dimension, ignoring NaN; torch's own stop at 16 million values."""
    if not all(0 <= share <= 1 for share in q):
        raise ValueError(f"quantiles: expected numbers between 0 and 1, got {list(q)}")
    count = (~values.isnan()).sum(-1, keepdim=True)
    ordered = values.sort(dim=-1).values  # NaN comes last
    found = []
    for share in q:
        place = share * (count - 1).clamp(min=0).double()
        low = place.floor().long()
        high = torch.minimum(low + 1, (count - 1).clamp(min=0))
        below, above = ordered.gather(-1, low), ordered.gather(-1, high)
        found.append(torch.where(low == high, below, torch.lerp(below, above, (place - low).to(below.dtype)))[..., 0])
    return torch.stack(found)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a table with its columns aligned to the left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
