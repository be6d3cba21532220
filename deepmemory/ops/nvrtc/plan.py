"""How a sweep is laid out on the GPU: rows per block, blocks per cluster, where weights stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from deepmemory.ops.recurrence import ACTIVATIONS, CELLS, Recurrence

GATES = {"dmu": 2, "rhn": 2, "rnn": 1, "gru": 3, "lstm": 4}  # of a layer that makes a state

CLUSTERS = (2, 3, 4, 5, 6, 7, 8, 16)  # 16 is Hopper's largest
MOST_WARPS = 16  # of a block, which then has a multiprocessor to itself
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
# What a step takes, in microseconds. READ and MULTIPLICATION are an H200's bandwidths; the others were chosen so that
# the estimate ranks the layouts that were timed on one, with the kernels of commit 0c3e6f0, as they came out.
BARRIER, EXCHANGE = 0.35, 0.6  # a layer's fixed cost in one block, and in a cluster
SEND = 5e-4  # one number to every block
READ, MULTIPLICATION = 2.1e-3, 1.3e-4  # a warp: four numbers for each lane from shared memory; one for each lane
STREAMED_BYTES = 4e4  # that one multiprocessor reads in a microsecond
BARRIERS = 4  # floats of shared memory
# Weights that a thread keeps in registers, in floats; more would leave too few for the rest, and a deep transition
# needs more for the rest. Measured: with 64 a step of ten layers takes 10 % longer than with 32.
REGISTER_FLOATS = {"shallow": 64, "deep": 32}
SHALLOW = 2  # linear layers at most


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for, apart from its layout."""

    cell: str
    activation: str
    hidden_size: int
    widths: tuple[int, ...]  # output features of each linear layer, gates not counted

    @classmethod
    def of(cls, rec: Recurrence, weights: list[Tensor]) -> Shape:
        """Read the shape off a layer's weights, with or without a dimension of runs."""
        d = weights[1].shape[-1]
        deeper = rec.deeper(weights) if rec.cell in ("dmu", "rhn") else []
        hidden = [weight.shape[-1] for weight, _ in deeper]
        return cls(rec.cell, rec.activation, d, (*hidden, d))

    def layers(self) -> Iterator[tuple[int, int, int]]:
        """(inputs, features, gates) of each linear layer."""
        inputs = self.hidden_size
        for index, features in enumerate(self.widths):
            hidden = self.cell == "dmu" and index < len(self.widths) - 1
            yield inputs, features, 1 if hidden else GATES[self.cell]
            inputs = features


@dataclass(frozen=True)
class Sweep:
    """Where the weights of one sweep stay, layer by layer, in quads of inputs per warp."""

    kept: tuple[int, ...]  # in registers
    shared: tuple[int, ...]
    streamed: tuple[int, ...]  # in global memory, read at every step
    shared_bytes: int
    streamed_floats: int  # of a block


@dataclass(frozen=True)
class Plan:
    """One layout, for the forward and the backward sweep."""

    rows: int
    cluster: int
    warps: int
    ahead: Sweep
    back: Sweep

    @property
    def on_chip(self) -> bool:
        """No weight is read from global memory after the start."""
        return not any((*self.ahead.streamed, *self.back.streamed))

    @property
    def shared_bytes(self) -> tuple[int, int]:
        """Of the forward and of the backward sweep."""
        return self.ahead.shared_bytes, self.back.shared_bytes

    def defines(self, shape: Shape, save: bool) -> dict[str, str]:
        """The constants that ``sweep.cu`` asks for."""

        def listed(numbers: tuple[int, ...]) -> str:
            return ",".join(map(str, numbers))

        values = {
            "CELL": CELLS.index(shape.cell),
            "ACTIVATION": ACTIVATIONS.index(shape.activation),
            "D": shape.hidden_size,
            "LAYERS": len(shape.widths),
            "WIDTHS": listed(shape.widths),
            "ROWS": self.rows,
            "CLUSTER": self.cluster,
            "WARPS": self.warps,
            "SAVE": int(save),
            "KEPT_AHEAD": listed(self.ahead.kept),
            "KEPT_BACK": listed(self.back.kept),
            "SHARED_AHEAD": listed(self.ahead.shared),
            "SHARED_BACK": listed(self.back.shared),
        }
        return {name: str(value) for name, value in values.items()}


def plan(
    shape: Shape, runs: int, batch: int, multiprocessors: int, shared_limit: int, clusters_at_once: Mapping[int, int]
) -> Plan:
    """The layout whose steps should take the least time, with as many waves of blocks as it needs.

    ``clusters_at_once`` says for each size of a cluster above one how many of them run at the same time.
    """
    products = sum(inputs * features * gates for inputs, features, gates in shape.layers())
    warps = 2 if products <= 512 else 4 if products <= 4096 else 8 if products <= 8192 else MOST_WARPS
    resident = MOST_WARPS // warps  # blocks that share a multiprocessor
    best: tuple[float, Plan] | None = None
    for cluster in (1, *clusters_at_once):
        at_once = multiprocessors * resident if cluster == 1 else clusters_at_once[cluster]
        for rows in (rows for rows in ROWS if rows <= batch or rows == 1):
            layout = lay_out(shape, rows, cluster, warps, shared_limit)
            if max(layout.shared_bytes) <= shared_limit:
                waves = -(-runs * -(-batch // rows) // at_once)
                cost = waves * sum(microseconds(shape, layout, backward) for backward in (False, True))
                if best is None or cost < best[0]:
                    best = cost, layout
    assert best is not None, "one row in one block always fits: weights may be streamed"
    return best[1]


def microseconds(shape: Shape, layout: Plan, backward: bool) -> float:
    """An estimate of one step of one block."""
    sweep = layout.back if backward else layout.ahead
    total = 0.0
    for layer, streamed in zip(shape.layers(), sweep.streamed, strict=True):
        spread = _spread(layer, layout.rows, layout.cluster, layout.warps, backward)
        quads = spread.items * spread.quads_per_item  # that some warp multiplies
        total += quads * max(spread.reads * READ, 4 * spread.products * MULTIPLICATION)
        total += 16 * spread.slices * spread.padded_outputs * streamed / STREAMED_BYTES
        if layout.cluster == 1:
            total += BARRIER
        else:
            _, features, gates = layer
            sent = layout.rows * features * (gates if backward else 1)
            total += EXCHANGE + SEND * sent
    return total


def lay_out(
    shape: Shape, rows: int, cluster: int, warps: int, shared_limit: int, register_floats: int | None = None
) -> Plan:
    """Put weights into registers, then shared memory, then leave the rest in global memory."""
    if register_floats is None:
        register_floats = REGISTER_FLOATS["shallow" if len(shape.widths) <= SHALLOW else "deep"]
    sweeps = []
    for backward in (False, True):
        spreads = [_spread(layer, rows, cluster, warps, backward) for layer in shape.layers()]
        stride = max(spread.padded_inputs for spread in spreads)
        sums = max(spread.slices * rows * spread.padded_outputs for spread in spreads)
        used = BARRIERS + 2 * rows * stride + sums + -(-rows // 4) * 4
        registers = register_floats // 4
        kept, shared, streamed, streamed_floats = [], [], [], 0
        for spread in spreads:
            quads = spread.quads_per_item
            kept.append(min(quads, registers // spread.quads_kept_per_quad))
            registers -= kept[-1] * spread.quads_kept_per_quad
            size = 4 * spread.slices * spread.padded_outputs  # floats of one quad per item
            shared.append(max(0, min(quads - kept[-1], (shared_limit // 4 - used) // size)))
            used += shared[-1] * size
            streamed.append(quads - kept[-1] - shared[-1])
            streamed_floats += streamed[-1] * size
        sweeps.append(Sweep(tuple(kept), tuple(shared), tuple(streamed), 4 * used, streamed_floats))
    return Plan(rows, cluster, warps, *sweeps)


@dataclass(frozen=True)
class _Spread:
    """The same numbers as ``Spread`` in ``sweep.cu``."""

    slices: int
    items: int
    quads_per_item: int
    quads_kept_per_quad: int  # quads of registers that one quad of inputs takes
    padded_outputs: int
    reads: int  # of a lane for one quad of inputs: its rows', and its outputs' weights
    products: int  # of a lane with one input: outputs times rows

    @property
    def padded_inputs(self) -> int:
        return self.slices * self.quads_per_item * 4


def _spread(layer: tuple[int, int, int], rows: int, cluster: int, warps: int, backward: bool) -> _Spread:
    inputs, features, gates = layer
    if backward:
        inputs, outputs = gates * features, -(-inputs // cluster)
    else:
        outputs = gates * -(-features // cluster)
    row_groups, per_lane = lane_tile(outputs, rows)
    side_by_side = 32 // row_groups * per_lane
    quads, groups = -(-inputs // 4), -(-outputs // side_by_side)
    quads_per_item = -(-quads // max(1, min(warps // groups, quads)))
    slices = -(-quads // quads_per_item)
    items_per_warp = -(-groups * slices // warps)
    rows_per_lane = rows // row_groups
    return _Spread(
        slices,
        groups * slices,
        quads_per_item,
        items_per_warp * per_lane,
        groups * side_by_side,
        rows_per_lane + per_lane,
        rows_per_lane * per_lane,
    )


def lane_tile(outputs: int, rows: int) -> tuple[int, int]:
    """As in ``sweep.cu``: groups of lanes that share the rows, and outputs of a lane."""
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
