"""How a sweep is laid out on the GPU: rows per block, blocks per cluster, where weights stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from deepmemory.ops.recurrence import ACTIVATIONS, CELLS, Recurrence

GATES = {"dmu": 2, "rhn": 2, "rnn": 1, "gru": 3, "lstm": 4}  # of a layer that makes a state

CLUSTERS = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # 16 is Hopper's largest
ROWS = (1, 2, 4, 8, 16)
BARRIERS = 4  # floats of shared memory
REGISTER_FLOATS = 64  # of weights that a thread keeps; more would leave too few registers for the rest


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


def plan(shape: Shape, runs: int, batch: int, multiprocessors: int, shared_limit: int, largest_cluster: int) -> Plan:
    """The fewest blocks per cluster that hold the weights on chip, the fewest rows per block that fill the GPU once."""
    products = sum(inputs * features * gates for inputs, features, gates in shape.layers())
    warps = 2 if products <= 512 else 4 if products <= 4096 else 8 if products <= 8192 else 16
    resident = 16 // warps  # blocks that share a multiprocessor
    for cluster in CLUSTERS:
        if cluster > largest_cluster:
            break
        rows = _rows(runs, batch, cluster, multiprocessors * resident)
        layout = lay_out(shape, rows, cluster, warps, shared_limit)
        while max(layout.shared_bytes) > shared_limit and rows > 1:
            rows //= 2
            layout = lay_out(shape, rows, cluster, warps, shared_limit)
        if layout.on_chip:
            break
    return layout


def _rows(runs: int, batch: int, cluster: int, blocks: int) -> int:
    for rows in ROWS:
        if runs * -(-batch // rows) * cluster <= blocks:
            return rows
    return ROWS[-1]


def lay_out(
    shape: Shape, rows: int, cluster: int, warps: int, shared_limit: int, register_floats: int = REGISTER_FLOATS
) -> Plan:
    """Put weights into registers, then shared memory, then leave the rest in global memory."""
    sweeps = []
    for backward in (False, True):
        spreads = [_spread(layer, cluster, warps, backward) for layer in shape.layers()]
        stride = max(spread.padded_inputs for spread in spreads)
        sums = max(spread.slices * rows * spread.padded_outputs for spread in spreads)
        used = BARRIERS + 2 * rows * stride + sums + -(-rows // 4) * 4
        registers = register_floats // 4
        kept, shared, streamed = [], [], []
        for spread in spreads:
            quads = spread.quads_per_item
            kept.append(min(quads, registers // spread.quads_kept_per_quad))
            registers -= kept[-1] * spread.quads_kept_per_quad
            size = 4 * spread.slices * spread.padded_outputs  # floats of one quad per item
            shared.append(max(0, min(quads - kept[-1], (shared_limit // 4 - used) // size)))
            used += shared[-1] * size
            streamed.append(quads - kept[-1] - shared[-1])
        sweeps.append(Sweep(tuple(kept), tuple(shared), tuple(streamed), 4 * used))
    return Plan(rows, cluster, warps, *sweeps)


@dataclass(frozen=True)
class _Spread:
    """The same numbers as ``Spread`` in ``sweep.cu``."""

    slices: int
    quads_per_item: int
    quads_kept_per_quad: int  # quads of registers that one quad of inputs takes
    padded_outputs: int

    @property
    def padded_inputs(self) -> int:
        return self.slices * self.quads_per_item * 4


def _spread(layer: tuple[int, int, int], cluster: int, warps: int, backward: bool) -> _Spread:
    inputs, features, gates = layer
    if backward:
        inputs, outputs = gates * features, -(-inputs // cluster)
    else:
        outputs = gates * -(-features // cluster)
    per_lane = outputs_per_lane(outputs)
    quads, groups = -(-inputs // 4), -(-outputs // (32 * per_lane))
    slices = max(1, min(warps // groups, quads))
    items_per_warp = -(-groups * slices // warps)
    return _Spread(slices, -(-quads // slices), items_per_warp * per_lane, groups * per_lane * 32)


def outputs_per_lane(outputs: int) -> int:
    """As in ``sweep.cu``."""
    tight = -(-outputs // 32) * 32
    return next((n for n in (4, 2) if -(-outputs // (32 * n)) * 32 * n * 3 <= 4 * tight), 1)
