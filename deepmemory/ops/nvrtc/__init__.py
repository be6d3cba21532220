"""Fused loops over time for NVIDIA GPUs from CUDA source that is compiled at run time.

The weights stay on the chip, spread over a cluster or a team of multiprocessors where one is too small. Products are
exact in float32, or run on the tensor cores: in bfloat16, float16 and, where torch allows it to recurrent layers, TF32,
or as three in TF32 with nearly float32's accuracy. Sums and states are float32. The compiler, NVRTC, comes with torch;
nothing has to be installed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from deepmemory.ops import hoisted
from deepmemory.ops.layout import delta_features, linear_layers, trace_features
from deepmemory.ops.nvrtc import compiler, products
from deepmemory.ops.nvrtc.plan import CLUSTERS, DTYPES, MANY_STEPS, MOST_WARPS, Plan, Shape, plans
from deepmemory.ops.nvrtc.spread import EXACT, FMA, LOW
from deepmemory.ops.recurrence import FULL_LENGTH, Recurrence, Sequences

reads_zeros = True
WIDEST = 2048  # a row of activations must fit into shared memory several times over
FEW_OUTPUTS = 4096  # of all linear layers, whose biases and activations fit into the shared memory of every GPU
LOADED_BYTES = 16  # of a matrix at a time
POISON = -1  # a word that has not come yet, as the kernels know it
NO_GRAD_Y = (0,) * 5  # address and strides
BIAS_OF_X = 2  # its place among the weights of a dmu or rhn
# Major capabilities of GPUs on which three products in TF32 are faster than one in float32: timed on Hopper. Tensor
# cores of GPUs for games take longer for them.
FAST_IN_TF32 = 9, 10
MOST_ROWS = 2**32  # (run, step, sequence), which the kernels count in 32 bits; elements may be more


def unavailable() -> str | None:
    """Why this engine cannot run on this machine at all, or None."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if torch.version.hip:
        return "written for NVIDIA GPUs, and this torch is built for AMD's"
    try:
        compiler.nvrtc()
        compiler.driver()
    except OSError as error:
        return f"NVRTC, which comes with torch's CUDA builds, was not found: {error}"
    return None


def refuses(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
    """Why this engine cannot do this case, or None."""
    if x.device.type != "cuda":
        return f"it runs on NVIDIA GPUs, and the input is on {x.device.type}"
    return _refuses_anywhere(rec, x, weights) or _finds_no_room(rec, x, weights)


def _finds_no_room(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
    """Why a layer does not fit into this GPU, or None; in words that torch can compile."""
    if sum([weight.shape[-2] for weight in weights if weight.dim() > 1]) <= FEW_OUTPUTS:
        return None
    shapes = tuple([tuple(weight.shape) for weight in weights])
    if () in shapes or _fits(rec, x.dtype, weights[0].dtype, shapes, x.device.index):
        return None  # a weight without a shape is the gate's business
    return "the biases and activations of this layer do not fit into the shared memory of this GPU"


Shapes = tuple[tuple[int, ...], ...]


def _fits(rec: Recurrence, value: torch.dtype, weight: torch.dtype, shapes: Shapes, index: int | None) -> bool:
    """Whether a GPU has room for a layer with weights of these shapes, if not for the weights themselves."""
    return _has_layout(rec, value, weight, shapes, torch.cuda.current_device() if index is None else index)


_fits._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in ``engines.unavailable``


@cache
def _has_layout(rec: Recurrence, value: torch.dtype, weight: torch.dtype, shapes: Shapes, index: int) -> bool:
    weights = [torch.empty(shape, dtype=weight, device="meta") for shape in shapes]
    return bool(plans(Shape.of(rec, value, weights), (FMA,), 1, 1, *_device(index)[1:]))


def _refuses_anywhere(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
    """What has nothing to do with the device, in words that torch can compile."""
    if x.dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, and the input is {x.dtype}"
    for weight in weights:
        if weight.dtype is not weights[0].dtype or weight.dtype not in DTYPES:
            return "it takes weights of one type: float32, bfloat16 or float16"
    if rec.projects(weights):
        return "it has no LSTM with projections"
    if rec.cell == "rnn" and rec.activation in ("silu", "gelu"):
        return f"it has no RNN with {rec.activation}: y does not tell the slope"
    for at in rec.between(weights):
        if weights[at].dim() and weights[at].shape[-1] > WIDEST:
            return f"it is written for layers of at most {WIDEST} features"
    return None


def trace_shape(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """The shape of the trace: (R, T, B, features)."""
    return (*x.shape[:-1], trace_features(rec, weights))


class Device(NamedTuple):
    """The properties of a GPU that a layout depends on."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_limit: int  # bytes of a block
    clusters_at_once: dict[int, int]  # by their size; empty where blocks have no clusters


@cache
def _device(index: int) -> Device:
    properties: Any = torch.cuda.get_device_properties(index)
    capability, shared_limit = (properties.major, properties.minor), properties.shared_memory_per_block_optin
    largest_cluster = 16 if capability == (9, 0) else 8 if properties.major > 9 else 1
    sizes = [size for size in CLUSTERS if size <= largest_cluster]
    with torch.cuda.device(index):
        at_once = [compiler.clusters_at_once(size, 32 * MOST_WARPS, shared_limit, capability, index) for size in sizes]
    clusters = {size: count for size, count in zip(sizes, at_once, strict=True) if count}
    return Device(capability, properties.multi_processor_count, shared_limit, clusters)


class Launcher(Protocol):
    """The interface of :class:`compiler.Kernels`."""

    def sweep(self, backward: bool, arguments: array[int], blocks: int, runs: int, threads: int) -> None:
        """Queue one sweep on the current stream."""

    def sum_products(self, arguments: array[int], blocks: int, runs: int, shared_bytes: int) -> None:
        """Queue all products of a layer on the current stream."""


class Layer(NamedTuple):
    """What is known of a layer before its tensors come; worked out once, since a small layer waits for Python."""

    shape: Shape
    layout: Plan
    runs: int
    blocks: int  # of a sweep, for each run
    threads: int  # of a block
    device: int  # index of the GPU
    trace_features: int
    delta_features: int
    weights: list[int | None]  # places of matrices and biases among the weights, in the order of ``struct Arguments``
    streamed: tuple[int, int]  # float32 numbers of memory for what a sweep, forward or backward, reads at every step
    exchanged: tuple[int, int]  # and 32-bit words of memory that teams exchange through
    kernels: dict[bool, Launcher]  # by whether they save
    tables: dict[tuple[bool, ...], list[products.Table]]  # of weight gradients, by which of them somebody asks for
    cuts: dict[tuple[tuple[bool, ...], int], products.Cut]  # and how they are cut, for each number of steps

    def launcher(self, save: bool) -> Launcher:
        """The layer's kernels, compiled when first used."""
        kernels = self.kernels.get(save)
        if kernels is None:
            kernels = self.kernels[save] = _kernels(self.shape, self.layout, save, self.device)
        return kernels


_layers: dict[tuple, Layer] = {}


def _layer(rec: Recurrence, x: Tensor, weights: list[Tensor], sequences: Sequences = FULL_LENGTH) -> Layer:
    size, index = x.shape, x.device.index
    runs, steps, batch = size[0] if len(size) == 4 else 1, size[-3], size[-2]
    if runs * steps * batch >= MOST_ROWS:
        raise RuntimeError(
            f"engine='nvrtc' takes fewer than {MOST_ROWS} runs x steps x sequences, got {runs} x {steps} x {batch}; "
            "give it fewer at a time, or use engine='triton'"
        )
    exact = x.dtype is torch.float32 and not hoisted.tf32_allowed()
    own = sequences.resets is not None, sequences.state_mask is not None
    case = rec, x.dtype, weights[1].dtype, exact, runs, batch, steps == 1, index, own
    key = (*case, *[weight.shape for weight in weights])
    layer = _layers.get(key)
    if layer is None:
        shape = Shape.of(rec, x.dtype, weights, sequences)
        layout = _layout(shape, exact, runs, batch, steps == 1, index)
        blocks, threads = -(-batch // layout.rows) * layout.cluster, 32 * layout.warps
        features = trace_features(rec, weights), delta_features(rec, weights)
        linear = linear_layers(rec, weights)
        # The bias that goes with x is added in the sweep, which reads it as it is. Torch's own cells have another one
        # there, and the one of x is in the projected x: a GRU has to keep the two apart.
        first, *others = [part.bias for part in linear]
        if rec.bias and not rec.classic:
            first = BIAS_OF_X
        places = [*[part.weight for part in linear], first, *others]
        quads = layout.forward.streamed_quads, layout.backward.streamed_quads
        streamed = runs * layout.cluster * quads[0] * 4, runs * layout.cluster * quads[1] * 4
        groups = runs * (blocks // layout.cluster)
        exchanged = groups * layout.forward.exchanged_quads * 4, groups * layout.backward.exchanged_quads * 4
        known = shape, layout, runs, blocks, threads, index, *features, places, streamed, exchanged
        layer = _layers[key] = Layer(*known, {}, {}, {})
    return layer


def _layout(shape: Shape, exact: bool, runs: int, batch: int, single: bool, index: int) -> Plan:
    device = _device(index)
    if exact:
        products = EXACT if device.capability[0] in FAST_IN_TF32 else (FMA,)
    else:
        products = LOW if device.capability >= (8, 0) else (FMA,)
    return plans(shape, products, runs, batch, *device[1:], 1 if single else MANY_STEPS)[0]


@cache
def _kernels(shape: Shape, layout: Plan, save: bool, index: int) -> Launcher:
    cubin = compiler.compile_to_cubin(layout.defines(shape, save), _device(index).capability)
    with torch.cuda.device(index):
        return compiler.Kernels(cubin, layout.cluster, layout.shared_bytes, save, index, layout.team)


def forward(
    rec: Recurrence,
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    sequences: Sequences,
    save: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """y (R, T, B, d), final states, trace (empty unless ``save``)."""
    lengths = sequences.lengths
    layer = _layer(rec, x, weights, sequences)
    weight, bias = rec.input_weights(weights)
    projected = hoisted.project(x, weight, bias if rec.classic else None, lengths)
    y = _record(x, layer.shape.hidden_size, lengths)
    trace = _record(x, layer.trace_features, lengths) if save else x.new_empty(0)
    final = [_empty_like(s) for s in state]
    of_weights = _weights_of_the_sweep(layer, x, weights, backward=False)
    tensors = [*of_weights, projected, *_h_and_c(state), *sequences, y, *_h_and_c(final), trace, None, None, None]
    _sweep(rec, layer, x, tensors, None, backward=False, save=save)
    return y, final, trace


def backward(
    rec: Recurrence,
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor | None],
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    sequences: Sequences,
    y: Tensor,
    trace: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """Gradients of x, each state and each weight, None where ``needs`` says nobody asks."""
    lengths = sequences.lengths
    layer = _layer(rec, x, weights, sequences)
    of_state, of_weights = needs[1 : 1 + rec.states], tuple(needs[1 + rec.states :])
    deltas = _record(x, layer.delta_features, lengths)
    grad_state = [_empty_like(s) if needed else None for s, needed in zip(state, of_state, strict=True)]
    matrices = _weights_of_the_sweep(layer, x, weights, backward=True)
    tensors = [*matrices, None, *_h_and_c(state), *sequences, y, *_h_and_c(grad_final), trace, deltas]
    _sweep(rec, layer, x, [*tensors, *_h_and_c(grad_state)], grad_y, backward=True, save=True)
    grad_x = hoisted.input_gradient(x, weights[0], deltas) if needs[0] else None
    grads = _weight_gradients(rec, layer, x, state[0], weights, sequences, y, trace, deltas, of_weights)
    return [grad_x, *grad_state, *grads]


def _record(x: Tensor, features: int, lengths: Tensor | None) -> Tensor:
    """Memory for something of every step; a sweep ends with the longest of its rows and leaves the rest as it is."""
    make = x.new_empty if lengths is None else x.new_zeros
    return make(*x.shape[:-1], features)


def _empty_like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _h_and_c(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    return tensors[0], tensors[1] if len(tensors) == 2 else None


def _addresses(tensors: Sequence[Tensor | None], matrices: int = 0) -> tuple[list[int], list[Tensor]]:
    """Where contiguous values of tensors lie, and those that were copied, to be kept until a launch is queued.

    The first ones are ``matrices``, of which kernels load 16 bytes at a time.
    """
    addresses, copies = [], []
    for t in tensors:
        if t is None:
            addresses.append(0)
            continue
        if not t.is_contiguous():
            t = t.contiguous()
            copies.append(t)
        address = t.data_ptr()
        if address % LOADED_BYTES and len(addresses) < matrices:
            t = t.clone()
            copies.append(t)
            address = t.data_ptr()
        addresses.append(address)
    return addresses, copies


def _weights_of_the_sweep(layer: Layer, x: Tensor, weights: list[Tensor], backward: bool) -> list[Tensor | None]:
    """Matrices, biases, memory for what is read at every step, in the order in which it is, and for exchanges."""
    size, words = layer.streamed[backward], layer.exchanged[backward]
    streamed = x.new_empty(size, dtype=torch.float32) if size else None
    exchanged = x.new_full((words,), POISON, dtype=torch.int32) if words else None
    return [*[None if place is None else weights[place] for place in layer.weights], streamed, exchanged]


def _sweep(
    rec: Recurrence,
    layer: Layer,
    x: Tensor,
    tensors: Sequence[Tensor | None],
    grad_y: Tensor | None,
    *,
    backward: bool,
    save: bool,
) -> None:
    """Queue one sweep; ``tensors`` come in the order of ``struct Arguments``."""
    row, _copies = _addresses(tensors, matrices=len(layer.weights) // 2)
    row += NO_GRAD_Y if grad_y is None else (grad_y.data_ptr(), *_strides(grad_y))
    row += (*x.shape[-3:-1], rec.reverse)
    layer.launcher(save).sweep(backward, array("q", row), layer.blocks, layer.runs, layer.threads)


def _strides(t: Tensor) -> tuple[int, ...]:
    """The strides of runs, steps, sequences and features."""
    return t.stride() if t.dim() == 4 else (0, *t.stride())


def _weight_gradients(
    rec: Recurrence,
    layer: Layer,
    x: Tensor,
    h0: Tensor,
    weights: list[Tensor],
    sequences: Sequences,
    y: Tensor,
    trace: Tensor,
    deltas: Tensor,
    needs: tuple[bool, ...],
) -> Sequence[Tensor | None]:
    """The gradients of the weights. Small products take a launch or two, whose results are parts of one tensor."""
    if not any(needs):
        return [None] * len(needs)
    runs, (steps, batch) = layer.runs, x.shape[-3:-1]
    if needs not in layer.tables:
        layer.tables[needs] = products.tables(rec, weights, runs, needs)
    tables = layer.tables[needs]
    multiplications = runs * steps * batch * tables[0].multiplications
    if multiplications > products.MOST_MULTIPLICATIONS * len(tables[0].launches):
        return hoisted.weight_gradients(rec, x, h0, weights, sequences, y, trace, deltas, needs)
    if (needs, steps) not in layer.cuts:
        layer.cuts[needs, steps] = products.cut(tables, steps * batch, runs, _device(layer.device).multiprocessors)
    number, pieces = layer.cuts[needs, steps]
    table = tables[number]
    out = x.new_empty(pieces, table.total, dtype=torch.float32)
    x = x if x.stride(-1) == 1 else x.contiguous()
    records, _copies = _addresses([h0, y, trace, *sequences[:3]])
    row = [deltas.data_ptr(), x.data_ptr(), *records, out.data_ptr()]
    row += (*_strides(x)[:3], steps, batch, rec.reverse, -(-steps * batch // pieces), table.tile.size)
    for terms, tiles in table.launches:
        arguments = array("q", (*row, tiles, table.total)) + terms
        layer.launcher(True).sum_products(arguments, tiles * pieces, runs, table.tile.shared_bytes)
    flat = out.sum(0) if pieces > 1 else out
    if weights[1].dtype is not torch.float32:
        flat = flat.to(weights[1].dtype)
    return [None if place is None else flat.as_strided(*place) for place in table.places]
