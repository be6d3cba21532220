"""Launch of the sweeps: block sizes, packed weights, scratch.

Everything on the host happens without waiting for the device. Length has no say in what is compiled, and of the
batch only whether the GPU is full.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deepmemory.ops import hoisted, layout
from deepmemory.ops.layout import GATES, Linear
from deepmemory.ops.recurrence import Recurrence, Sequences
from deepmemory.ops.triton.streamed import backward_streamed, forward_streamed

ALIGN = 16  # widths are padded to this many features, the least a tensor core takes
TILE_COST = 96  # what starting a tile costs, in columns
MANY_PROGRAMS = 128  # with more tiles than this a GPU is full, and larger tiles read the weights less often


class Layer(NamedTuple):
    """One linear layer of the recurrence."""

    weight: Tensor  # (R, groups * width, inputs)
    bias: Tensor | None  # (R, groups * width), where the sweep has to add it
    place: Linear  # among the weights, in trace and deltas

    @property
    def groups(self) -> int:
        """Groups of outputs: gates, or 1 for a hidden layer."""
        return self.place.groups

    @property
    def width(self) -> int:
        """Number of outputs of one group."""
        return self.weight.shape[1] // self.groups

    @property
    def inputs(self) -> int:
        """Number of input features."""
        return self.weight.shape[2]


class Plan(NamedTuple):
    """Block sizes of one sweep, to be chosen in ``plan`` alone."""

    rows: int  # sequences of one program (BM)
    hidden: int  # outputs of a hidden layer at a time (BN)
    gates: int  # states at a time, times the cell's gates (BN_GATES)
    inner: int  # inputs at a time (BK)
    warps: int
    stages: int


def plan(rec: Recurrence, layers: list[Layer], tensor: Tensor, programs: int, backward: bool) -> Plan:
    """Block sizes for this case; ``programs`` is how many tiles of 16 rows there are in all runs together."""
    d = layers[0].inputs
    widest = max(layer.width for layer in layers)
    rows = 16 if programs <= MANY_PROGRAMS else 32
    cap = 512 if rows == 16 else 128  # accumulators of a row, in registers
    groups = GATES[rec.cell]
    if backward:
        gates, hidden = _tile(d, cap // 2), _tile(widest, cap // 2)
        columns = max(gates, hidden)
    else:
        gates, hidden = _tile(d, cap // _power_of_two(groups)), _tile(widest, min(256, cap))
        columns = max(groups * gates, hidden)
    inner = 32 if tensor.dtype == torch.float32 else 64
    stage = (rows + columns) * inner * tensor.element_size()  # bytes of shared memory, and one stage needs none
    stages = max(2, min(4, 1 + _shared_memory(tensor.device) // stage))
    return Plan(rows, hidden, gates, inner, warps=8 if rows * columns >= 2048 else 4, stages=stages)


def _tile(width: int, most: int) -> int:
    """Columns of a tile: few tiles, since each one waits for memory anew, but little beyond the width."""
    sizes = [size for size in (16, 32, 64, 128, 256) if size <= most]
    return min(sizes, key=lambda size: -(-width // size) * (TILE_COST + size))


def layers_of(rec: Recurrence, weights: list[Tensor]) -> list[Layer]:
    """The linear layers of a step, in order. Biases of the first one are in the projected x, but for a gru's."""
    folded = rec.cell in ("rnn", "lstm")
    return [
        Layer(weights[place.weight], None if folded or place.bias is None else weights[place.bias], place)
        for place in layout.linear_layers(rec, weights)
    ]


def forward(
    rec: Recurrence,
    projected: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    sequences: Sequences,
    save: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """y (R, T, B, d), final states, trace (R, T, B, features)."""
    layers, lengths = layers_of(rec, weights), sequences.lengths
    runs, steps, batch, _ = projected.shape
    d = layers[0].inputs
    features = layout.trace_features(rec, weights) if save else 0
    new = projected.new_empty if lengths is None else projected.new_zeros  # the sweep ends with the longest sequence
    y = new(runs, steps, batch, d)
    trace = new(runs, steps, batch, features) if save else projected.new_empty(0)
    final = [s.new_empty(s.shape) for s in state]
    if y.numel() == 0:
        for f, s in zip(final, state, strict=True):
            f.copy_(s)
        return y, final, trace
    chosen = plan(rec, layers, projected, runs * -(-batch // 16), backward=False)
    tiles = runs * -(-batch // chosen.rows)
    state = [s.contiguous() for s in state]
    tensors, own = (projected, state[0], state[-1]), [_contiguous(t) for t in sequences]
    results = y, final[0], final[-1], trace
    choices = {
        "CELL": rec.cell,
        "ACTIVATION": rec.activation,
        "GROUPS": GATES[rec.cell],
        "LENGTHS": lengths is not None,
        "RESETS": sequences.resets is not None,
        "STATE_MASK": sequences.state_mask is not None,
        "HIDDEN_MASK": rec.masked,
        "RESIDUAL": rec.residual,
        "REVERSE": rec.reverse,
        "SAVE": save,
        "SLOPES": layout.needs_slopes(rec),
        "PRECISION": precision(projected),
        "BM": chosen.rows,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
        "enable_fp_fusion": True,
    }
    with _device_of(projected):
        packed, starts = pack(layers, transposed=False)
        biases, bias_starts = pack_biases(layers)
        table = layer_table(layers, starts, bias_starts, projected.device)
        width = max(_padded(layer.inputs) for layer in layers)
        operand = projected.new_empty(tiles, 2, chosen.rows, width)
        carry = projected.new_empty(tiles, rec.states, chosen.rows, _padded(d), dtype=torch.float32)
        forward_streamed[(tiles,)](
            *tensors, packed, biases, *own, table, *results, operand, carry,
            steps, batch, d, _padded(d), len(layers), len(layers) - 1 if rec.cell == "dmu" else 0,
            projected.shape[-1], features, width, packed.shape[1], 0 if biases is None else biases.shape[1],
            sum(rec.hidden_widths(weights)),
            BIAS=biases is not None, BN=chosen.hidden, BN_GATES=chosen.gates, BK=chosen.inner, **choices,
        )  # fmt: skip
    return y, final, trace


def backward(
    rec: Recurrence,
    grad_y: Tensor | None,
    grad_final: list[Tensor],
    state: list[Tensor],
    weights: list[Tensor],
    sequences: Sequences,
    y: Tensor,
    trace: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Deltas (R, T, B, features) and the gradients of the initial states."""
    layers, lengths = layers_of(rec, weights), sequences.lengths
    runs, steps, batch, d = y.shape
    features = layout.delta_features(rec, weights)
    new = y.new_empty if lengths is None else y.new_zeros
    deltas = new(runs, steps, batch, features)
    grads = [s.new_empty(s.shape) for s in state]
    if y.numel() == 0:
        for g, f in zip(grads, grad_final, strict=True):
            g.copy_(f)
        return deltas, grads
    chosen = plan(rec, layers, y, runs * -(-batch // 16), backward=True)
    tiles = runs * -(-batch // chosen.rows)
    state, grad_final = [s.contiguous() for s in state], [g.contiguous() for g in grad_final]
    tensors = _contiguous(grad_y), grad_final[0], grad_final[-1], y.contiguous(), state[0], state[-1], trace
    own = [_contiguous(t) for t in sequences[:3]]  # the hidden mask is in the slopes
    results = deltas, grads[0], grads[-1]
    choices = {
        "CELL": rec.cell,
        "ACTIVATION": rec.activation,
        "HAS_GRAD_Y": grad_y is not None,
        "LENGTHS": lengths is not None,
        "RESETS": sequences.resets is not None,
        "STATE_MASK": sequences.state_mask is not None,
        "RESIDUAL": rec.residual,
        "REVERSE": rec.reverse,
        "SLOPES": layout.needs_slopes(rec),
        "PRECISION": precision(y),
        "BM": chosen.rows,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
        "enable_fp_fusion": True,
    }
    with _device_of(y):
        packed, starts = pack(layers, transposed=True)
        table = layer_table(layers, starts, (0,) * len(layers), y.device)
        width = max(layer.groups * _padded(layer.width) for layer in layers)
        operand = y.new_empty(tiles, 2, chosen.rows, width)
        carry = y.new_empty(tiles, rec.states, chosen.rows, _padded(d), dtype=torch.float32)
        sums = None
        if rec.residual:
            sums = y.new_empty(tiles, chosen.rows, _padded(layers[-1].inputs), dtype=torch.float32)
        backward_streamed[(tiles,)](
            *tensors, packed, *own, table, *results, operand, carry, sums,
            steps, batch, d, _padded(d), len(layers), len(layers) - 1 if rec.cell == "dmu" else 0,
            trace.shape[-1], features, width, packed.shape[1], 0 if sums is None else sums.shape[-1],
            BN=chosen.hidden, BN_GATES=chosen.gates, BK=chosen.inner, **choices,
        )  # fmt: skip
    return deltas, grads


def precision(tensor: Tensor) -> str:
    """How products are taken; three products in TF32 are as accurate as one in float32."""
    if tensor.dtype == torch.float32:
        return "tf32" if hoisted.tf32_allowed() else "tf32x3"
    return "tf32" if tensor.is_cuda else "upcast"


def pack(layers: list[Layer], transposed: bool) -> tuple[Tensor, tuple[int, ...]]:
    """All weights of a run in one row, padded with zeros, and where each layer begins."""
    sizes = [layer.groups * _padded(layer.width) * _padded(layer.inputs) for layer in layers]
    starts = tuple(accumulate(sizes[:-1], initial=0))
    first = layers[0].weight
    aligned = all(layer.width % ALIGN == layer.inputs % ALIGN == 0 for layer in layers)
    if aligned and not transposed and len(layers) == 1:
        return first.flatten(1).contiguous(), starts
    packed = (first.new_empty if aligned else first.new_zeros)(first.shape[0], sum(sizes))
    for layer, start, size in zip(layers, starts, sizes, strict=True):
        groups, width, inputs = layer.groups, layer.width, layer.inputs
        block, weight = packed[:, start : start + size], layer.weight.unflatten(1, (groups, width))
        if transposed:
            view = block.view(-1, _padded(inputs), groups, _padded(width))[:, :inputs, :, :width]
            view.copy_(weight.permute(0, 3, 1, 2))
        else:
            block.view(-1, groups, _padded(width), _padded(inputs))[:, :, :width, :inputs].copy_(weight)
    return packed, starts


def pack_biases(layers: list[Layer]) -> tuple[Tensor | None, tuple[int, ...]]:
    """The biases the sweep adds, of a run in one row, and where each layer's begins."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    sizes = [0 if layer.bias is None else layer.bias.shape[1] for layer in layers]
    starts = tuple(accumulate(sizes[:-1], initial=0))
    if not biases:
        return None, starts
    return biases[0].contiguous() if len(biases) == 1 else torch.cat(biases, 1), starts


def layer_table(
    layers: list[Layer], starts: tuple[int, ...], bias_starts: tuple[int, ...], device: torch.device
) -> Tensor:
    """Sizes and places of each layer, as ``streamed`` reads them."""
    rows = []
    for layer, start, bias_start in zip(layers, starts, bias_starts, strict=True):
        sizes = _padded(layer.inputs), layer.width, layer.groups * _padded(layer.width)
        rows.append((*sizes, start, bias_start, layer.place.made, layer.place.after, layer.place.delta))
    return _on_device(tuple(rows), device)


@lru_cache(maxsize=256)
def _on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Copy to the device. The result is cached, because a CUDA graph cannot capture such a copy."""
    return torch.tensor(rows, dtype=torch.int32, device=device)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory one block may have; what every supported GPU has where torch does not tell."""
    least = 99 * 1024
    if device.type != "cuda":
        return least
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", least))


def _padded(width: int) -> int:
    return -(-width // ALIGN) * ALIGN


def _power_of_two(width: int) -> int:
    """The least power of two that covers ``width``."""
    return 1 << (width - 1).bit_length()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device_of(tensor) if tensor.is_cuda else nullcontext()
