"""Weight gradients in one launch: which products a layer has, and how they are cut among blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from deepmemory.ops.nvrtc.plan import Shape
from deepmemory.ops.recurrence import Recurrence

THREADS = 256  # as in ``products.cuh``, like all that follows of tiles
MOST_MULTIPLICATIONS = 10**9  # beyond, the library's products are faster, and long enough to hide their launches

OF_X, OF_STATE, OF_TRACE, OF_ONES = range(4)  # what stands on the right of a product, as in ``products.cuh``


class Factors(NamedTuple):
    """Some rows of one weight's gradient: features of the deltas times features of what the weight saw."""

    weight: int  # index in the flat list
    row: int  # of the weight, the first
    left: int  # feature of the deltas, the first
    lefts: int
    source: int
    right: int  # feature of the trace, the first
    rights: int


def factors(rec: Recurrence, weights: list[Tensor]) -> Iterator[Factors]:
    """All products of a layer; ``hoisted`` tells how deltas and trace are laid out."""
    rows, inputs, d = weights[0].shape[-2], weights[0].shape[-1], weights[1].shape[-1]
    yield Factors(0, 0, 0, rows, OF_X, 0, inputs)
    # A GRU's deltas have four groups: r and z, the candidate as x sees it, the candidate as h sees it.
    recurrent = [(0, 0, 2 * d), (2 * d, 3 * d, d)] if rec.cell == "gru" else [(0, 0, rows)]
    for row, left, lefts in recurrent:
        yield Factors(1, row, left, lefts, OF_STATE, 0, d)
    if rec.bias:
        yield Factors(2, 0, 0, rows, OF_ONES, 0, 1)
    if rec.cell in ("rnn", "gru", "lstm"):
        if rec.bias:
            for row, left, lefts in recurrent:
                yield Factors(3, row, left, lefts, OF_ONES, 0, 1)
        return
    deeper = rec.deeper(weights)
    left, right = rows, 0 if rec.cell == "dmu" else 2 * d * (1 + len(deeper))
    index = 3 if rec.bias else 2
    for weight, bias in deeper:
        lefts, rights = weight.shape[-2:]
        yield Factors(index, 0, left, lefts, OF_TRACE, right, rights)
        if bias is not None:
            yield Factors(index + 1, 0, left, lefts, OF_ONES, 0, 1)
        index += 1 if bias is None else 2
        left, right = left + lefts, right + rights


class Tile(NamedTuple):
    """What a block makes at once."""

    size: int  # outputs, in both directions

    @classmethod
    def of(cls, shape: Shape) -> Tile:
        """A thread fetches columns of a tile, so small layers have small ones."""
        most = max(gates * features for _, features, gates in shape.layers())
        return cls(next(size for size in (8, 16, 32, 64) if most <= size or size == 64))

    @property
    def chunk(self) -> int:
        """Rows in shared memory."""
        return 2048 // self.size

    @property
    def shared_bytes(self) -> int:
        """Both sides of a chunk."""
        return 4 * 2 * self.chunk * (self.size + 4)


class Table(NamedTuple):
    """The products that somebody asks for, as ``struct Products`` of ``products.cuh`` takes them."""

    terms: list[int]  # their number, then eight numbers for each that there is a place for
    tile: Tile
    tiles: int
    total: int  # elements of all results
    multiplications: int  # for each row of each run
    features: int  # of the deltas

    def pieces(self, rows: int, runs: int, multiprocessors: int) -> int:
        """How many parts the rows are cut into, which then have to be added up.

        Two blocks for each multiprocessor at least. Then more, as long as parts are not larger than what they
        are made from, and blocks not too many.
        """
        blocks = self.tiles * runs
        worth = min(16 * multiprocessors // blocks, runs * rows * self.features // self.total)
        return max(1, min(max(-(-2 * multiprocessors // blocks), worth), -(-rows // self.tile.chunk)))


def terms_of(layers: int) -> int:
    """How many terms the kernel of this many linear layers has a place for, as in ``products.cuh``."""
    return min(2 * layers + 4, 50)


def table(rec: Recurrence, weights: list[Tensor], runs: int, needs: tuple[bool, ...]) -> Table | None:
    """Results lie one weight after another, in the order of ``weights``; None where the kernel has no place for all."""
    begins, total = [], 0
    for weight, needed in zip(weights, needs, strict=True):
        begins.append(total)
        total += weight.numel() if needed else 0
    wanted = [part for part in factors(rec, weights) if needs[part.weight]]
    shape = Shape.of(rec, weights[1].dtype, weights)
    room, tile = terms_of(len(shape.widths)), Tile.of(shape)
    if not wanted or len(wanted) > room:
        return None
    terms, tiles, multiplications = [len(wanted)], 0, 0
    for part in wanted:
        out = begins[part.weight] + part.row * part.rights
        terms += (part.left, part.lefts, part.source, part.right, part.rights)
        terms += (out, weights[part.weight].numel() // runs, tiles)
        tiles += -(-part.lefts // tile.size) * -(-part.rights // tile.size)
        multiplications += part.lefts * part.rights
    terms += (0,) * (8 * (room - len(wanted)))
    features = max(part.left + part.lefts for part in wanted)
    return Table(terms, tile, tiles, total, multiplications, features)
