"""How a sweep is laid out on the GPU: what multiplies, rows and blocks of a cluster or team, where weights stay."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepmemory.ops.layout import GATES
from deepmemory.ops.nvrtc.spread import (
    FEW_WARPS,
    FMA,
    MMA,
    ON_TENSOR_CORES,
    PRODUCTS,
    SPLIT,
    TILE_OUTPUTS,
    Layer,
    Spread,
    own_features,
    spread_of,
)
from deepmemory.ops.recurrence import ACTIVATIONS, CELLS, FULL_LENGTH, Recurrence, Sequences

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CLUSTERS = (2, 3, 4, 5, 6, 7, 8, 16)  # 16 is Hopper's largest
MOST_WARPS = 16  # of a block, which then has a multiprocessor to itself
ROWS_OF_TILES = (4, 6, 8, 10, 12, 16, 24, 32)
ROWS = {FMA: (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), MMA: ROWS_OF_TILES, SPLIT: ROWS_OF_TILES}
# What a step takes beside its products (spread.py), in microseconds, chosen so that the estimate ranks the layouts that
# were timed on an H200 as they came out.
BARRIER, EXCHANGE, TEAM_EXCHANGE = 0.24, 0.49, 0.9  # a layer's fixed cost in one block, in a cluster, and in a team
WARP = 7e-3  # and for each warp that takes part
FINISH, ANOTHER = 0.035, 0.2  # a warp: gates, records and packing of an element for each lane; every further one
SEND = 5e-4  # 16 bytes to every block
TENSOR_LAYER = 0.06  # what it takes until the tensor cores' sums are there
STREAMED_BYTES = 7.5e4, 9.5e4  # of weights for which a multiprocessor waits a microsecond: few warps, many warps
# What teams read from the L2 cache in a microsecond: a block of its inputs, which are the same for all blocks of a
# team; all blocks together of weights, which are not.
TEAM_INPUT_BYTES, TEAM_STREAMED_BYTES = 7.3e4, 8.6e6
LOADED_WEIGHTS = 8e3  # that a block brings to the chip in a microsecond, when a sweep begins: by its instructions
MANY_STEPS = 256  # of which sequences are thought to have, unless they have one
# The same where warps finish their own sums, chosen so that the estimate picks what was fastest, or within 4 % of it,
# among the layouts that were timed. A layer's fixed cost, for each byte of a value, and for each warp; and how long a
# warp waits for four weights of an output that are not in registers, and for a sum of another lane. The kernels have
# become faster since these were fitted: by the cycles of the machine code, they take this share of the fitted times.
DIRECT_SHARE = 0.7
DIRECT_LAYER, DIRECT_BYTE, DIRECT_WARP = 0.09, 0.023, 0.0148
DIRECT_WEIGHTS, DIRECT_SHUFFLE = 0.031, 8.3e-3
BARRIERS = 4  # floats of shared memory
TEAM_BUFFERS = 16  # of a team's rows, in global memory,
TOGETHER = 8  # whose length is a multiple of so many words of 16 bytes, where warps read parts of several rows
ROW_FLOATS = 128  # of a row of 32 quads
RESERVED = 1024  # bytes of shared memory that the system takes of every block
# Weights that a thread keeps in registers, in floats; more would leave too few for the rest, and a deep transition
# needs more for the rest. A block of fewer threads has more for each.
REGISTER_FLOATS = {(FMA, "shallow"): 64, (FMA, "deep"): 32, (MMA, "shallow"): 48, (MMA, "deep"): 0}
REGISTER_FLOATS |= {(SPLIT, "shallow"): 32, (SPLIT, "deep"): 0}
MANY_REGISTER_FLOATS = 128
WITH_SUMS = 96  # of one of many threads, for weights and sums of exact products together
ELEMENT = 8  # and what it needs, on the tensor cores, for every further element that it finishes
FEW_BLOCKS = 3  # of a cluster
SHALLOW = 2  # linear layers at most
SMALL, TINY = 4096, 12  # weights of a layer in all, and its widest part
# Shared memory for weights on their way, where some are streamed: bytes at most, in a cluster and in a team, and of the
# room. Exact products read so much from it that they do better without.
AHEAD_BYTES, TEAM_AHEAD_BYTES, AHEAD_SHARE = 132_000, 66_000, 0.75
# Where the warps of a team take their inputs straight from memory: tiles of outputs at most, and tiles whose sums a
# lane has, which have to be fewer back through several layers: more of them were slower.
MOST_STRAIGHT_OUTPUTS, MOST_STRAIGHT_TILES, MOST_STRAIGHT_TILES_BACK = 2, 8, 4
# Where warps finish their own sums: lanes that may share the inputs of an output; of a thread's registers, those for
# weights, sums and elements, and what an element takes of them, for every gate and for each stage.
DIRECT_LANES = 1, 2, 4, 8
DIRECT_REGISTERS, OF_ELEMENT, OF_GATE, OF_STAGE = 212, 8, 3, 6
SLOT_ROWS = 8, 4, 2  # of 32 quads, in a slot of a warp: large ones are fetched faster
MOST_APART = 6  # layers whose code is compiled for each of them, where otherwise some would share it
HELD_ROWS = 4  # in a slot that a warp holds in registers, at most, where the layers that are streamed take one each


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for, apart from its layout."""

    cell: str
    activation: str
    hidden_size: int
    widths: tuple[int, ...]  # output features of each linear layer, gates not counted
    value: torch.dtype = torch.float32  # of x, states, results and records
    weight: torch.dtype = torch.float32
    residual: bool = False  # hidden layers of a dmu add to the one before
    hidden_mask: bool = False  # of a dmu's hidden layers
    state_mask: bool = False
    resets: bool = False

    @classmethod
    def of(
        cls, rec: Recurrence, value: torch.dtype, weights: list[Tensor], sequences: Sequences = FULL_LENGTH
    ) -> Shape:
        """Read the shape off a layer's weights, with or without a dimension of runs."""
        d = weights[1].shape[-1]
        deeper = [] if rec.classic else rec.deeper(weights)
        hidden = [weight.shape[-1] for weight, _ in deeper]
        return cls(
            rec.cell,
            rec.activation,
            d,
            (*hidden, d),
            value,
            weights[1].dtype,
            residual=rec.residual,
            hidden_mask=rec.masked,
            state_mask=sequences.state_mask is not None,
            resets=sequences.resets is not None,
        )

    def layers(self) -> Iterator[Layer]:
        """Each linear layer."""
        inputs = self.hidden_size
        for index, features in enumerate(self.widths):
            hidden = self.cell == "dmu" and index < len(self.widths) - 1
            yield Layer(inputs, features, 1 if hidden else GATES[self.cell])
            inputs = features

    def stages(self, apart: bool = False) -> list[tuple[Layer, int]]:
        """Runs of layers of one shape, which share their code; the first layer, which x goes into, is alone.

        With ``apart``, all of them are.
        """
        first, *others = self.layers()
        if apart:
            return [(layer, 1) for layer in (first, *others)]
        return [(first, 1), *((layer, len(list(run))) for layer, run in itertools.groupby(others))]


@dataclass(frozen=True)
class Sweep:
    """How one sweep multiplies and where its weights stay, stage by stage."""

    groups: tuple[int, ...]  # of a warp's lanes that share the rows
    outputs: tuple[int, ...]  # of a lane, or tiles of 16 of a warp
    units: tuple[int, ...]  # of inputs of which a warp takes a slice
    kept: tuple[int, ...]  # of these, of all layers of the stage: in registers,
    shared: tuple[int, ...]  # in shared memory,
    streamed: tuple[int, ...]  # in global memory, read at every step
    ahead: int  # slots of the latter that a warp fetches before it needs them,
    slot: int  # and rows of 32 quads of a slot
    shared_bytes: int
    streamed_quads: int  # of a block
    exchanged_quads: int  # of a team's memory for exchanges; 0 in a cluster
    straight: bool  # warps of a team take their inputs straight from there


@dataclass(frozen=True)
class Plan:
    """One layout, for the forward and the backward sweep."""

    product: str
    rows: int
    cluster: int
    warps: int
    team: bool  # its blocks exchange through global memory, and may be more than a cluster has
    direct: int  # 0, or lanes that share the inputs of an output, whose sums the same warp finishes
    apart: bool  # layers of one shape have code of their own each
    forward: Sweep
    backward: Sweep

    @property
    def shared_bytes(self) -> tuple[int, int]:
        """Bytes of shared memory of the forward and of the backward sweep."""
        return self.forward.shared_bytes, self.backward.shared_bytes

    @property
    def streams(self) -> bool:
        """Whether some weights find no room on the chip."""
        return any((*self.forward.streamed, *self.backward.streamed))

    def stages(self, shape: Shape) -> list[tuple[Layer, int]]:
        """Runs of layers that share their code."""
        return shape.stages(self.apart)

    def defines(self, shape: Shape, save: bool) -> dict[str, str]:
        """The constants that ``layout.cuh`` asks for."""

        def listed(numbers: Iterable[int]) -> str:
            return ",".join(map(str, numbers))

        stages = self.stages(shape)
        values: dict[str, object] = {
            "CELL": CELLS.index(shape.cell),
            "ACTIVATION": ACTIVATIONS.index(shape.activation),
            "VALUE": DTYPES.index(shape.value),
            "WEIGHT": DTYPES.index(shape.weight),
            "PRODUCT": PRODUCTS.index(self.product),
            "D": shape.hidden_size,
            "LAYERS": len(shape.widths),
            "STAGES": len(stages),
            "WIDTHS": listed(layer.features for layer, _ in stages),
            "REPEATS": listed(repeat for _, repeat in stages),
            "ROWS": self.rows,
            "CLUSTER": self.cluster,
            "TEAM": int(self.team),
            "DIRECT": self.direct,
            "WARPS": self.warps,
            "SAVE": int(save),
            "RESIDUAL": int(shape.residual),
            "HIDDEN_MASK": int(shape.hidden_mask),
            "STATE_MASK": int(shape.state_mask),
            "RESETS": int(shape.resets),
        }
        for direction, sweep in ("FORWARD", self.forward), ("BACKWARD", self.backward):
            for name in ("groups", "outputs", "units", "kept", "shared"):
                values[f"{name.upper()}_{direction}"] = listed(getattr(sweep, name))
            values[f"AHEAD_{direction}"], values[f"SLOT_{direction}"] = sweep.ahead, sweep.slot
            values[f"STRAIGHT_{direction}"] = int(sweep.straight)
        return {name: str(value) for name, value in values.items()}


def plans(
    shape: Shape,
    products: tuple[str, ...],
    runs: int,
    batch: int,
    multiprocessors: int,
    shared_limit: int,
    clusters_at_once: Mapping[int, int],
    steps: int = MANY_STEPS,
) -> list[Plan]:
    """Every layout that is worth considering, the one first whose sweeps should take the least time.

    Weights may be streamed; there is none where biases and activations alone are too much for a block's shared memory.
    ``clusters_at_once`` says for each size of a cluster above one how many of them run at the same time.
    """
    found: list[tuple[float, Plan]] = []  # with estimated microseconds, for as many waves of blocks as it needs
    for layout in layouts(shape, products, batch, shared_limit, clusters_at_once):
        # Blocks that share a multiprocessor, unless they fill its registers or its shared memory.
        resident = MOST_WARPS // layout.warps if _small(shape) or layout.product in ON_TENSOR_CORES else 1
        if layout.direct:
            resident = max(1, FEW_WARPS // layout.warps)
        resident = min(resident, (shared_limit + RESERVED) // (max(layout.shared_bytes) + RESERVED))
        at_once = multiprocessors * resident if layout.cluster == 1 else clusters_at_once[layout.cluster]
        waves = -(-runs * -(-batch // layout.rows) // at_once)
        found.append((waves * _of_sweeps(shape, layout, runs, batch, steps), layout))
    if clusters_at_once:
        for (team, rows), product in itertools.product(teams(shape, runs, batch, multiprocessors), products):
            for warps in (MOST_WARPS, FEW_WARPS):
                layout = lay_out(shape, product, rows, team, warps, shared_limit, team=True)
                if max(layout.shared_bytes) <= shared_limit:
                    found.append((_of_sweeps(shape, layout, runs, batch, steps), layout))
                    break  # many warps receive faster; few need less room for their sums
    return [layout for _, layout in sorted(found, key=lambda pair: pair[0])]


def layouts(
    shape: Shape, products: tuple[str, ...], batch: int, shared_limit: int, clusters: Collection[int]
) -> Iterator[Plan]:
    """Every layout of a single block or a cluster that fits and is worth considering."""
    for product, cluster in itertools.product(products, (1, *clusters)):
        for warps, rows in itertools.product(_warps(shape, product, cluster), _rows(product, batch)):
            # Without clusters no engine copies to shared memory either: a ring would be filled by hand.
            layout = lay_out(shape, product, rows, cluster, warps, shared_limit, ring=bool(clusters))
            if layout.streams and product == FMA and warps <= FEW_WARPS:
                continue  # few warps do not hide how far the memory is
            if max(layout.shared_bytes) <= shared_limit:
                yield layout
    if FMA in products:
        yield from _direct_layouts(shape, batch, shared_limit)


def _direct_layouts(shape: Shape, batch: int, shared_limit: int) -> Iterator[Plan]:
    """The same where warps finish their own sums; weights of layers that share their code may be streamed."""
    deep = len(shape.stages()) < len(shape.widths)
    for direct, warps, rows in itertools.product(DIRECT_LANES, _direct_warps(shape), _rows(FMA, batch)):
        case = FMA, 4, rows, 1, warps
        spreads = [spread_of(layer, *case, back, direct) for layer in shape.layers() for back in (False, True)]
        for apart in (True, False) if deep and len(shape.widths) <= MOST_APART else (False,):
            if _registers_left(shape.stages(apart), spreads) < 0:
                continue
            layout = lay_out(shape, FMA, rows, 1, warps, shared_limit, direct=direct, apart=apart)
            if max(layout.shared_bytes) <= shared_limit and (not layout.streams or _held(shape, layout)):
                yield layout
                break


def _held(shape: Shape, layout: Plan) -> bool:
    """Whether what is streamed is of layers that share their code, and each warp holds its part of one in registers."""
    for backward, sweep in enumerate((layout.forward, layout.backward)):
        stages = zip(layout.stages(shape), sweep.streamed, strict=True)
        for layer, repeat in [stage for stage, units in stages if units]:
            spread = spread_of(layer, FMA, 4, layout.rows, 1, layout.warps, bool(backward), layout.direct)
            rows = spread.units_per_item * spread.rows_of_unit
            if repeat == 1 or spread.items != layout.warps or rows > sweep.slot:
                return False
    return True


def _rows(product: str, batch: int) -> list[int]:
    """Rows of a block or a cluster: the fewest, and more where there are as many."""
    return [rows for rows in ROWS[product] if rows <= batch or rows == ROWS[product][0]]


def teams(shape: Shape, runs: int, batch: int, multiprocessors: int) -> Iterator[tuple[int, int]]:
    """Blocks of a team and rows of each, where a block owns whole tiles of outputs and all blocks run at once."""
    for outputs in itertools.count(TILE_OUTPUTS, TILE_OUTPUTS):
        team = -(-max(shape.widths) // outputs)
        if team <= CLUSTERS[-1]:
            return
        at_once = multiprocessors // (team * runs)
        rows = max(-(-batch // max(at_once, 1)), ROWS_OF_TILES[0])
        if at_once and rows <= ROWS_OF_TILES[-1]:
            yield team, rows


def _of_sweeps(shape: Shape, layout: Plan, runs: int, batch: int, steps: int) -> float:
    """Estimated microseconds of both sweeps, loading of the weights included."""
    weights = sum(layer.inputs * layer.features * layer.gates for layer in shape.layers())
    blocks = runs * -(-batch // layout.rows) * layout.cluster
    of_steps = steps * sum(microseconds(shape, layout, blocks, backward) for backward in (False, True))
    return of_steps + 2 * weights / layout.cluster / LOADED_WEIGHTS


def _small(shape: Shape) -> bool:
    """Whether a few warps hold all weights in registers, and more of them only wait for one another."""
    return sum(layer.inputs * layer.features * layer.gates for layer in shape.layers()) <= SMALL


def _warps(shape: Shape, product: str, cluster: int) -> tuple[int, ...]:
    """Warps of a block."""
    if _small(shape):
        return (2,) if max(shape.widths) <= TINY else (4,)
    if product in ON_TENSOR_CORES:
        return FEW_WARPS, MOST_WARPS
    return (4, FEW_WARPS, MOST_WARPS) if cluster <= FEW_BLOCKS else (MOST_WARPS,)


def _direct_warps(shape: Shape) -> tuple[int, ...]:
    """The same where warps finish their own sums."""
    if _small(shape):
        return (1, 2) if max(shape.widths) <= TINY else (2, 4)
    return 4, FEW_WARPS


def microseconds(shape: Shape, layout: Plan, blocks: int, backward: bool) -> float:
    """An estimate of one step of one block; teams have so many ``blocks`` in all."""
    sweep = layout.backward if backward else layout.forward
    size = input_bytes(shape, layout.product)
    total = 0.0
    for index, (layer, repeat) in enumerate(layout.stages(shape)):
        case = layout.product, size, layout.rows, layout.cluster, layout.warps, backward, layout.direct
        spread = spread_of(layer, *case, sweep.straight)
        if layout.direct:
            read = (spread.units_per_item - sweep.kept[index]) * spread.quads_kept_per_unit
            fitted = spread.units_per_item * spread.waiting + read * DIRECT_WEIGHTS + spread.shuffles * DIRECT_SHUFFLE
            fitted += DIRECT_LAYER + shape.value.itemsize * DIRECT_BYTE + layout.warps * DIRECT_WARP
            total += repeat * DIRECT_SHARE * (fitted + ANOTHER * (spread.elements - 1))
            continue
        inputs, features = (own_features(width, layout.cluster, layout.product, size) for width in layer[:2])
        finished = layout.rows * (inputs if backward else features) / 32  # warps' worth of elements
        layer_cost = spread.microseconds(sweep.kept[index]) + WARP * layout.warps + FINISH * finished
        layer_cost += ANOTHER * (-(-finished // layout.warps) - 1)
        layer_cost += TENSOR_LAYER if layout.product in ON_TENSOR_CORES else 0
        exchanged = layout.rows * features * layout.cluster * size * (layer.gates if backward else 1)  # bytes
        if layout.cluster == 1:
            layer_cost += BARRIER
        elif layout.team:
            layer_cost += TEAM_EXCHANGE + exchanged / TEAM_INPUT_BYTES
        else:
            layer_cost += EXCHANGE + SEND * exchanged / 16
        streamed = 16 * spread.quads_of_unit * sweep.streamed[index]
        streaming = TEAM_STREAMED_BYTES / blocks if layout.team else STREAMED_BYTES[layout.warps > FEW_WARPS]
        total += repeat * layer_cost + streamed / streaming
    return total


def input_bytes(shape: Shape, product: str) -> int:
    """Bytes of one number that is multiplied."""
    return shape.value.itemsize if product == MMA else 4


def lay_out(
    shape: Shape,
    product: str,
    rows: int,
    cluster: int,
    warps: int,
    shared_limit: int,
    register_floats: int | None = None,
    ring: bool = True,
    team: bool = False,
    direct: int = 0,
    apart: bool = False,
    straight: bool | None = None,
) -> Plan:
    """Put weights into registers, then shared memory, then leave the rest in global memory.

    With ``ring``, the tensor cores' weights come from there by way of a ring in shared memory. With ``team``, the
    blocks of a cluster are a team, whose warps take their inputs ``straight`` from global memory, or not, or where that
    is faster. With ``direct``, the warps of a single block finish their own sums of exact products, and so many lanes
    share the inputs of one; with ``apart`` no layers share their code.
    """
    size, stages = input_bytes(shape, product), shape.stages(apart)

    def sweep_of(backward: bool, straight: bool) -> Sweep:
        case = product, size, rows, cluster, warps, backward, direct, straight
        spreads = [spread_of(layer, *case) for layer, _ in stages]
        used = _used_floats(stages, spreads, rows, backward)
        used += (0 if straight else 1 if team else 2) * rows * _row_bytes(shape, stages, spreads, product, cluster) // 4
        ahead = ring and product in ON_TENSOR_CORES
        shared_memory = used, shared_limit, (TEAM_AHEAD_BYTES if team else AHEAD_BYTES) if ahead else 0
        floats = register_floats
        if floats is None:
            widest = max(own_features(width, cluster, product, size) for width in shape.widths)
            elements = -(-rows * widest // (32 * warps))
            floats = _register_floats(shape, product, warps, spreads, elements)
            if direct:
                floats = max(0, min(floats, _registers_left(stages, spreads)))
        quad = 2 if product == FMA and shape.value.itemsize == 2 else 4
        sweep = _place(spreads, stages, warps, floats, *shared_memory, quad, whole=bool(direct))
        if any(sweep.streamed) and product in ON_TENSOR_CORES and warps > FEW_WARPS:  # no registers are left
            sweep = _place(spreads, stages, warps, 0, *shared_memory, quad)
        if not team:
            return sweep
        words = _words_of_row(shape, product, cluster, backward, straight)
        return replace(sweep, exchanged_quads=TEAM_BUFFERS * rows * words, straight=straight)

    sweeps = []
    for backward in (False, True):
        sweep = sweep_of(backward, straight=bool(straight))
        # It needs no room for rows, and pays where weights find too little.
        if straight is None and team and product in ON_TENSOR_CORES and any(sweep.streamed):
            most = MOST_STRAIGHT_TILES_BACK if backward and len(shape.widths) > 1 else MOST_STRAIGHT_TILES
            other = sweep_of(backward, straight=True)
            outputs = max(other.outputs)
            if outputs <= MOST_STRAIGHT_OUTPUTS and outputs * -(-rows // 8) <= most:
                sweep = other
        sweeps.append(sweep)
    return Plan(product, rows, cluster, warps, team, direct, apart, *sweeps)


def _used_floats(stages: list[tuple[Layer, int]], spreads: list[Spread], rows: int, backward: bool) -> int:
    """Shared memory for all but rows and weights."""
    used = BARRIERS + max(spread.sums for spread in spreads) + -(-rows // 4) * 4
    if backward:
        return used
    biases = zip(spreads, stages, strict=True)
    return used + -(-sum(repeat * spread.padded_outputs for spread, (_, repeat) in biases if repeat > 1) // 4) * 4


def _row_bytes(shape: Shape, stages: list[tuple[Layer, int]], spreads: list[Spread], product: str, cluster: int) -> int:
    """Shared memory for the inputs of one row."""
    size = input_bytes(shape, product)
    row = size * max(
        max(spread.padded_inputs, cluster * own_features(layer.inputs, cluster, product, size))
        for spread, (layer, _) in zip(spreads, stages, strict=True)
    )
    if product not in ON_TENSOR_CORES:
        return row
    row = -(-row // 64) * 64
    return row if row % 128 else row + 64


def _words_of_row(shape: Shape, product: str, cluster: int, backward: bool, straight: bool) -> int:
    """Words of 16 bytes that the blocks of a team exchange for a row."""
    size = input_bytes(shape, product)
    sent = [(layer.features, layer.gates) if backward else (layer.inputs, 1) for layer, _ in shape.stages()]
    most = cluster * max(gates * own_features(width, cluster, product, size) for width, gates in sent)
    together = TOGETHER if straight else 1
    return -(-most * size // (16 * together)) * together


def _register_floats(shape: Shape, product: str, warps: int, spreads: list[Spread], elements: int) -> int:
    """Weights that a thread, which finishes so many elements of a layer, may keep in registers."""
    if product == FMA and warps <= FEW_WARPS:
        return MANY_REGISTER_FLOATS
    floats = REGISTER_FLOATS[product, "shallow" if len(shape.widths) <= SHALLOW else "deep"]
    if product == FMA:
        return max(0, min(floats, WITH_SUMS - max(spread.reads * spread.at_once for spread in spreads)))
    return max(0, floats - ELEMENT * (elements - 1)) if warps > FEW_WARPS else floats


def _registers_left(stages: list[tuple[Layer, int]], spreads: list[Spread]) -> int:
    """Registers of a thread for weights, where warps finish their own sums."""
    element = OF_ELEMENT + OF_GATE * stages[-1][0].gates + OF_STAGE * len(stages)
    sums, elements = (max(getattr(spread, name) for spread in spreads) for name in ("own_sums", "elements"))
    return DIRECT_REGISTERS - sums - element * elements


def _place(
    spreads: list[Spread],
    stages: list[tuple[Layer, int]],
    warps: int,
    register_floats: int,
    used: int,
    shared_limit: int,
    ahead_bytes: int,
    quad: int,
    whole: bool = False,
) -> Sweep:
    """Where the weights of a sweep stay, beside ``used`` floats of shared memory, where four of them take ``quad``.

    Where some find no room, a part of the shared memory is for those that are on their way. With ``whole``, those of
    layers that share their code are on the chip or not, layer by layer.
    """
    room, ahead, ring = shared_limit // 4 - used, 0, 0
    kept, shared, streamed, floats = _fill(spreads, stages, register_floats, room, quad, whole)
    rows = [
        spread.rows_of_unit * min(count, spread.units_per_item)
        for spread, count in zip(spreads, streamed, strict=True)
        if count
    ]
    slot = HELD_ROWS if SLOT_ROWS[-1] < max(rows, default=0) <= HELD_ROWS else SLOT_ROWS[-1]
    if any(streamed) and ahead_bytes:
        missing = sum(4 * spread.quads_of_unit * count for spread, count in zip(spreads, streamed, strict=True))
        wanted = int(min(missing, ahead_bytes / 4, AHEAD_SHARE * room))
        for slot in SLOT_ROWS[warps > FEW_WARPS :]:
            level = warps * (slot * ROW_FLOATS + 2)  # floats of one slot of every warp, with its barrier
            if wanted >= 2 * level:
                break
        ahead = max(wanted // level, *(_slots_at_once(spread, slot) for spread in spreads))
        ring = -(-ahead * level // 4) * 4
        kept, shared, streamed, floats = _fill(spreads, stages, register_floats, room - ring, quad, whole)
    slots = 0
    for spread, (_, repeat), on_chip in zip(spreads, stages, map(sum, zip(kept, shared, strict=True)), strict=True):
        all_units, in_slot = spread.units_per_item, max(1, slot // spread.rows_of_unit)
        units = [all_units - min(max(on_chip - layer * all_units, 0), all_units) for layer in range(repeat)]
        of_item = sum(-(-count // in_slot) for count in units) * -(-spread.rows_of_unit // slot)
        slots += of_item * -(-spread.items // warps)
    return Sweep(
        groups=tuple(spread.row_groups for spread in spreads),
        outputs=tuple(spread.at_once for spread in spreads),
        units=tuple(spread.units_per_item for spread in spreads),
        kept=kept,
        shared=shared,
        streamed=streamed,
        ahead=ahead,
        slot=slot,
        shared_bytes=4 * (used + ring + floats),
        streamed_quads=warps * slots * slot * 32,
        exchanged_quads=0,
        straight=False,
    )


def _slots_at_once(spread: Spread, slot: int) -> int:
    """Slots that a warp has to wait for before it can give one back."""
    in_slot = max(1, slot // spread.rows_of_unit)
    return (1 + (spread.units_at_once + in_slot - 2) // in_slot) * -(-spread.rows_of_unit // slot)


def _fill(
    spreads: list[Spread],
    stages: list[tuple[Layer, int]],
    register_floats: int,
    room: int,
    quad: int,
    whole: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Units of each stage in registers, in shared memory and streamed, and the floats of shared memory they take."""
    registers, used = register_floats // 4, 0
    kept, shared, streamed = ([0] * len(stages) for _ in range(3))
    # With `whole`, what is left by layers that are alone is for the others.
    for index in sorted(range(len(stages)), key=lambda index: whole and stages[index][1] > 1):
        spread, (_, repeat) = spreads[index], stages[index]
        units, floats = repeat * spread.units_per_item, quad * spread.quads_of_unit
        # Registers cannot be told apart at run time, as layers that share their code are.
        kept[index] = min(units, registers // spread.quads_kept_per_unit) if repeat == 1 else 0
        registers -= kept[index] * spread.quads_kept_per_unit
        shared[index] = max(0, min(units - kept[index], (room - used) // floats))
        if whole and repeat > 1:
            shared[index] -= shared[index] % spread.units_per_item
        used += shared[index] * floats
        streamed[index] = units - kept[index] - shared[index]
    return tuple(kept), tuple(shared), tuple(streamed), used
