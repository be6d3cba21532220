"""Weight gradients in a launch or two: how the products of a layer are cut among blocks."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from deepmemory.ops import layout
from deepmemory.ops.nvrtc.plan import Shape
from deepmemory.ops.recurrence import Recurrence

THREADS = 256  # as in ``products.cuh``, like all that follows of tiles
# Of a launch. Beyond, the library's products are faster, and long enough to hide their launches: float32 values, half
# precision.
MOST_MULTIPLICATIONS = 10**9, 5 * 10**8
MOST_TERMS = 40  # of a launch


class Tile(NamedTuple):
    """What a block makes at once."""

    size: int  # outputs, in both directions

    @classmethod
    def of(cls, shape: Shape) -> Tile:
        """The tile for a shape. A thread fetches columns of a tile, so small layers have small tiles."""
        most = max(gates * features for _, features, gates in shape.layers())
        return cls(next(size for size in (8, 16, 32, 64) if most <= size or size == 64))

    @property
    def chunk(self) -> int:
        """Rows that shared memory holds at a time."""
        return 2048 // self.size

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for both factors of a chunk."""
        return 4 * 2 * self.chunk * (self.size + 4)


Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, first element


class Launch(NamedTuple):
    """Some of the products, as ``struct Products`` of ``products.cuh`` takes them."""

    terms: array[int]  # their number, then ten numbers for each that there is a place for
    tiles: int


class Table(NamedTuple):
    """The products that are asked for."""

    launches: list[Launch]
    tile: Tile
    total: int  # elements of all results
    places: list[Place | None]  # of the results among them, None for a weight that nobody asks for
    multiplications: int  # for each row of each run
    features: int  # of the deltas

    def pieces(self, rows: int, runs: int, multiprocessors: int) -> int:
        """How many parts the rows are cut into, which then have to be added up.

        Two blocks for each multiprocessor at least. Then more, as long as parts are not larger than what they
        are made from, and blocks not too many.
        """
        blocks = max(launch.tiles for launch in self.launches) * runs
        worth = min(16 * multiprocessors // blocks, runs * rows * self.features // self.total)
        return max(1, min(max(-(-2 * multiprocessors // blocks), worth), -(-rows // self.tile.chunk)))


def terms_of(layers: int) -> int:
    """How many terms the kernel of this many linear layers has a place for, as in ``products.cuh``."""
    return min(2 * layers + 4, MOST_TERMS)


def table(rec: Recurrence, weights: list[Tensor], runs: int, needs: tuple[bool, ...]) -> Table:
    """Results lie one weight after another, in the order of ``weights``; somebody asks for one of them at least."""
    begins, total, places = [], 0, list[Place | None]()
    for weight, needed in zip(weights, needs, strict=True):
        begins.append(total)
        places.append((tuple(weight.shape), _contiguous_strides(weight.shape), total) if needed else None)
        total += weight.numel() if needed else 0
    wanted = [part for part in layout.products(rec, weights) if needs[part.weight]]
    shape = Shape.of(rec, weights[1].dtype, weights)
    room, tile, launches = terms_of(len(shape.widths)), Tile.of(shape), list[Launch]()
    terms = _with_biases(wanted)
    each = -(-len(terms) // -(-len(terms) // room))

    def place(part: layout.Product | None) -> tuple[int, int]:
        if part is None:
            return -1, 0
        return begins[part.weight] + part.row * part.rights, weights[part.weight].numel() // runs

    for begin in range(0, len(terms), each):
        of_launch = terms[begin : begin + each]
        row, tiles = [len(of_launch)], 0
        for part, bias in of_launch:
            row += (part.left, part.lefts, part.source, part.right, part.rights, *place(part), *place(bias), tiles)
            tiles += -(-part.lefts // tile.size) * -(-part.rights // tile.size)
        row += (0,) * (10 * (room - len(of_launch)))
        launches.append(Launch(array("q", row), tiles))
    multiplications = sum(part.lefts * part.rights for part in wanted)
    features = max(part.left + part.lefts for part in wanted)
    return Table(launches, tile, total, places, multiplications, features)


def _with_biases(wanted: list[layout.Product]) -> list[tuple[layout.Product, layout.Product | None]]:
    """The products, each with a bias of the same deltas: their sums, which it has in passing."""
    found: dict[layout.Product, layout.Product | None] = {}
    for part in wanted:
        deltas = part.left, part.lefts
        free = (one for one, bias in found.items() if bias is None and (one.left, one.lefts) == deltas)
        other = next(free, None) if part.source is layout.Source.ONES else None
        found |= {part: None} if other is None else {other: part}
    return list(found.items())


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
