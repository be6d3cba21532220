"""Weight gradients in a launch or two: how the products of a layer are cut among blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from deepmemory.ops import layout
from deepmemory.ops.nvrtc.plan import Shape
from deepmemory.ops.recurrence import Recurrence

THREADS = 256  # as in ``products.cuh``, like all that follows of tiles
# Of a launch. Beyond, the library's products are faster, and long enough to hide their launches.
MOST_MULTIPLICATIONS = 10**9
MOST_TERMS = 40  # of a launch
BLOCKS_AT_ONCE, MOST_WAVES = 2, 6  # blocks of a multiprocessor, and how often others follow
# Estimated microseconds, such that what was fastest on an H200 is chosen, or nearly so: of a block; of a chunk of its
# rows, alone on a multiprocessor or among others, by the size of its tile; of adding up pieces, and bytes of them in
# one microsecond.
BLOCK, CHUNK_ALONE, CHUNK = 3.0, {8: 0.9, 16: 1.0, 32: 1.1, 64: 1.9}, {8: 0.5, 16: 0.6, 32: 1.0, 64: 1.6}
ADD_PIECES, PIECE_BYTES = 4.0, 2e6


class Tile(NamedTuple):
    """What a block makes at once."""

    size: int  # outputs, in both directions

    @classmethod
    def choices(cls, shape: Shape) -> Iterator[Tile]:
        """The tiles for a shape: small ones for small layers, since a thread fetches columns of a tile, else two."""
        most = max(gates * features for _, features, gates in shape.layers())
        size = next(size for size in (8, 16, 32, 64) if most <= size or size == 64)
        yield cls(size)
        if size == 64:
            yield cls(32)

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

    def microseconds(self, pieces: int, rows: int, runs: int, multiprocessors: int) -> float:
        """An estimate for the rows cut into so many pieces, which are then added up."""
        chunks, size = -(-rows // pieces // self.tile.chunk), self.tile.size
        total = 0.0 if pieces == 1 else ADD_PIECES + 4 * pieces * self.total / PIECE_BYTES
        for launch in self.launches:
            waves, rest = divmod(-(-launch.tiles * runs * pieces // multiprocessors), BLOCKS_AT_ONCE)
            for together in [BLOCKS_AT_ONCE] * waves + [rest] * (rest > 0):
                total += BLOCK + chunks * max(CHUNK_ALONE[size], together * CHUNK[size])
        return total


class Cut(NamedTuple):
    """How the products of a number of rows are cut."""

    table: int  # among those for every tile
    pieces: int  # of equal numbers of rows


def cut(tables: list[Table], rows: int, runs: int, multiprocessors: int) -> Cut:
    """The tile and the number of pieces with the smallest estimate, for some numbers of blocks of a multiprocessor."""
    choices = set[Cut]()
    for number, table in enumerate(tables):
        blocks, chunks = max(launch.tiles for launch in table.launches) * runs, -(-rows // table.tile.chunk)
        for each in range(1, MOST_WAVES * BLOCKS_AT_ONCE + 1):
            choices.add(Cut(number, min(max(1, each * multiprocessors // blocks), chunks)))
    return min(choices, key=lambda one: tables[one.table].microseconds(one.pieces, rows, runs, multiprocessors))


def terms_of(layers: int) -> int:
    """How many terms the kernel of this many linear layers has a place for, as in ``products.cuh``."""
    return min(2 * layers + 4, MOST_TERMS)


def tables(rec: Recurrence, weights: list[Tensor], runs: int, needs: tuple[bool, ...]) -> list[Table]:
    """The products that are asked for, one at least, with every tile that they can have."""
    return [table(rec, weights, runs, needs, tile) for tile in Tile.choices(Shape.of(rec, weights[1].dtype, weights))]


def table(rec: Recurrence, weights: list[Tensor], runs: int, needs: tuple[bool, ...], tile: Tile) -> Table:
    """Results lie one weight after another, in the order of ``weights``."""
    begins, total, places = [], 0, list[Place | None]()
    for weight, needed in zip(weights, needs, strict=True):
        begins.append(total)
        places.append((tuple(weight.shape), _contiguous_strides(weight.shape), total) if needed else None)
        total += weight.numel() if needed else 0
    wanted = [part for part in layout.products(rec, weights) if needs[part.weight]]
    room, launches = terms_of(len(Shape.of(rec, weights[1].dtype, weights).widths)), list[Launch]()
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
    return Table(launches, tile, total, places, sum(part.lefts * part.rights for part in wanted))


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
