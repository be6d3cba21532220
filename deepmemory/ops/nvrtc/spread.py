"""Who multiplies what: how a product is divided among the warps and lanes of a block, and how long it should take.

``Spread`` in ``panels.cuh`` has the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Exact float32 multiplications, tensor cores in the values' precision, and float32 from three products in TF32.
FMA, MMA, SPLIT = "fma", "mma", "split"
PRODUCTS = (FMA, MMA, SPLIT)
ON_TENSOR_CORES = (MMA, SPLIT)
EXACT, LOW = (FMA, SPLIT), (FMA, MMA)  # for the accuracy of float32; where that of the values, or of TF32, will do

FEW_WARPS = 8  # of a block, at most
TILE_OUTPUTS = 16  # of the tensor cores
MOST_TILES = 4  # whose sums a lane of many warps has in registers, if they are of more than one tile of outputs
STRAIGHT_WORDS = 8  # of weights and of inputs that a lane has at once, where these come straight from memory
MOST_FEATURES_OF_LANE = 4  # of which it has sums at once, gates not counted, where warps finish their own sums
# Microseconds. READ and MULTIPLICATION are an H200's bandwidths; for the others see plan.py.
READ, MULTIPLICATION = 2.1e-3, 1.3e-4  # a warp: four words for each lane from shared memory; one product for each lane
TILE = 9e-4  # 16 x 8 sums on the tensor cores, over half a unit
QUAD, UNIT = 0.014, 0.05  # how long a warp waits for four inputs of a row, and for a unit of the tensor cores
SPLIT_PRODUCTS = 3  # instead of one
# Where warps finish their own sums: how long a warp waits for four inputs of a row, and for their products with an
# output's weights.
DIRECT_READ, DIRECT_PRODUCT = 3.3e-3, 7.1e-3


class Layer(NamedTuple):
    """A linear layer."""

    inputs: int
    features: int  # of the output, gates not counted
    gates: int


@dataclass(frozen=True)
class Spread:
    """Who multiplies what in one product of a block."""

    row_groups: int
    at_once: int
    units_per_item: int
    slices: int
    items: int
    sets: int  # of weights, where items share them
    unit: int  # inputs
    padded_outputs: int
    quads_of_unit: int  # of weights, for all items
    quads_kept_per_unit: int  # of registers, for each lane
    sums: int  # floats
    summed: int  # floats, with those of rows that do not exist, which estimates were made with
    reads: int  # of a warp for one unit: four words for each lane, of its rows'
    weight_reads: int  # and of its outputs' weights
    multiplying: float  # microseconds that one unit of an item keeps a multiprocessor busy
    waiting: float = 0.0  # that a warp waits for one
    units_at_once: int = 1  # whose weights and inputs a lane has in registers
    # Where warps finish their own sums:
    elements: int = 0  # of a thread,
    own_sums: int = 0  # of which it has parts,
    shuffles: int = 0  # and which it gets from other lanes

    @property
    def padded_inputs(self) -> int:
        """Inputs that a product reads, those included that do not exist."""
        return self.slices * self.units_per_item * self.unit

    @property
    def rows_of_unit(self) -> int:
        """Rows of 32 quads that a warp streams for one unit of an item."""
        return -(-self.quads_of_unit // self.sets // 32)

    def microseconds(self, kept: int) -> float:
        """Estimated time of all products of a block, with ``kept`` units in registers."""
        reads = self.units_per_item * (self.reads + self.weight_reads) - kept * self.weight_reads
        busy = self.items * max(reads * READ, self.units_per_item * self.multiplying)
        return max(busy, self.units_per_item * self.waiting) + 2 * self.summed / 128 * READ


def own_features(features: int, cluster: int, product: str, size: int) -> int:
    """Features that a block owns; what blocks send one another goes in 16 bytes."""
    together = 16 // size
    return features if cluster == 1 and product == FMA else -(-features // (cluster * together)) * together


def spread_of(
    layer: Layer,
    product: str,
    size: int,
    rows: int,
    cluster: int,
    warps: int,
    backward: bool,
    direct: int,
    straight: bool = False,
) -> Spread:
    """How a layer's product is divided, in one direction; ``size`` is that of an input in bytes."""
    if direct:
        return _direct(layer, rows, warps, backward, direct)
    inputs, outputs = (own_features(features, cluster, product, size) for features in layer[:2])
    if backward:
        ins, outs = layer.gates * cluster * outputs, inputs
    else:  # straight, a block also waits for others that own padding alone
        ins, outs = cluster * inputs if straight else layer.inputs, layer.gates * outputs
    if product == FMA:
        return _lanes(ins, outs, rows, warps)
    return _tiles(ins, outs, size, rows, warps, SPLIT_PRODUCTS if product == SPLIT else 1, straight)


def _cut(units: int, groups: int, warps: int) -> tuple[int, int]:
    """Units that a warp takes at once, and how many slices of them there are."""
    per_item = -(-units // max(1, min(warps // groups, units)))
    return per_item, -(-units // per_item)


def _lanes(ins: int, outs: int, rows: int, warps: int) -> Spread:
    row_groups, per_lane = lane_tile(outs, rows)
    lanes = 32 // row_groups
    groups = -(-outs // (lanes * per_lane))
    per_item, slices = _cut(-(-ins // 4), groups, warps)
    padded_outputs, rows_per_lane = groups * lanes * per_lane, rows // row_groups
    return Spread(
        row_groups=row_groups,
        at_once=per_lane,
        units_per_item=per_item,
        slices=slices,
        items=groups * slices,
        sets=groups * slices,
        unit=4,
        padded_outputs=padded_outputs,
        quads_of_unit=slices * padded_outputs,
        quads_kept_per_unit=-(-groups * slices // warps) * per_lane,
        sums=slices * rows * padded_outputs,
        summed=slices * rows * padded_outputs,
        reads=rows_per_lane,
        weight_reads=per_lane,
        multiplying=4 * rows_per_lane * per_lane * MULTIPLICATION,
        waiting=QUAD * rows_per_lane,
    )


def _tiles(ins: int, outs: int, size: int, rows: int, warps: int, products: int, straight: bool) -> Spread:
    unit, row_tiles = 64 // size, -(-rows // 8)
    spreads = []
    for at_once in (-(-outs // TILE_OUTPUTS),) if straight else (1, 2, 4):
        if not straight and at_once * row_tiles > MOST_TILES and at_once > 1 and warps > FEW_WARPS:
            break
        groups = -(-outs // (TILE_OUTPUTS * at_once))
        per_item, slices = _cut(-(-ins // unit), groups, warps)
        padded_outputs = TILE_OUTPUTS * groups * at_once
        spread = Spread(
            row_groups=1,
            at_once=at_once,
            units_per_item=per_item,
            slices=slices,
            items=groups * slices,
            sets=groups * slices,
            unit=unit,
            padded_outputs=padded_outputs,
            quads_of_unit=groups * slices * 2 * at_once * 32,
            quads_kept_per_unit=-(-groups * slices // warps) * 2 * at_once,
            sums=slices * rows * (padded_outputs + 4),
            summed=slices * 8 * row_tiles * (padded_outputs + 4),
            reads=row_tiles,
            weight_reads=2 * at_once,
            multiplying=2 * at_once * row_tiles * TILE * (1 if size == 2 else 2) * products,
            waiting=UNIT * products,
            units_at_once=min(per_item, max(1, STRAIGHT_WORDS // max(row_tiles, 2 * at_once))) if straight else 1,
        )
        spreads.append(spread)
    return min(spreads, key=lambda spread: spread.microseconds(0))


def _direct(layer: Layer, rows: int, warps: int, backward: bool, direct: int) -> Spread:
    """Items of some features with all gates, all inputs and a part of the rows, as ``layout.cuh`` has them."""
    ins, features, gates = layer.inputs, layer.features, layer.gates
    if backward:
        ins, features, gates = gates * features, ins, 1
    side_by_side, unit = 32 // direct, 4 * direct
    of_lane = min(-(-features // (side_by_side * warps)), MOST_FEATURES_OF_LANE)
    groups = -(-features // (side_by_side * of_lane))
    parts = max(n for n in range(1, rows + 1) if n == 1 or (rows % n == 0 and groups * n <= warps))
    rows_of_item, at_once = rows // parts, gates * of_lane
    items_of_warp, summed = -(-groups * parts // warps), of_lane * rows_of_item
    halved = [-(-summed // 2**n) for n in range(1, direct.bit_length())]  # until each lane has its own
    return Spread(
        row_groups=1,
        at_once=at_once,
        units_per_item=-(-ins // unit),
        slices=1,
        items=groups * parts,
        sets=groups,
        unit=unit,
        padded_outputs=groups * side_by_side * at_once,
        quads_of_unit=groups * at_once * 32,
        quads_kept_per_unit=items_of_warp * at_once,
        sums=0,
        summed=0,
        reads=rows_of_item,
        weight_reads=at_once,
        multiplying=4 * at_once * rows_of_item * MULTIPLICATION,
        waiting=items_of_warp * rows_of_item * (DIRECT_READ + at_once * DIRECT_PRODUCT),
        elements=items_of_warp * -(-summed // direct),
        own_sums=gates * summed,
        shuffles=items_of_warp * gates * sum(halved),
    )


def lane_tile(outputs: int, rows: int) -> tuple[int, int]:
    """Groups of lanes that share the rows, and outputs of a lane.

    Reading from shared memory is what limits a product, so a lane should have outputs and rows in like numbers, as long
    as padding stays under a third. Groups hold the same weights, and fewer of them in registers: they have to save a
    quarter of the reads.
    """
    tight, fewest, best = -(-outputs // 32) * 32, 2**30, (1, 1)
    for row_groups in (1, 2, 4):
        enough = fewest if row_groups == 1 else fewest * 3 // 4
        for per_lane in (1, 2, 3, 4):
            side_by_side = 32 // row_groups * per_lane
            groups = -(-outputs // side_by_side)
            reads = groups * (per_lane + rows // row_groups)
            fits = rows % row_groups == 0 and groups * side_by_side * 3 < 4 * tight
            if fits and reads <= enough and reads < fewest:
                fewest, best = reads, (row_groups, per_lane)
    return best
