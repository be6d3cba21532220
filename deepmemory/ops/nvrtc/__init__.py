"""Fused loops over time for NVIDIA GPUs from CUDA source that is compiled at run time, float32.

Exact float32 arithmetic with the weights held on the chip, spread over a cluster of multiprocessors where one is
too small. The compiler, NVRTC, comes with torch; nothing has to be installed.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from deepmemory.ops import hoisted
from deepmemory.ops.nvrtc import compiler
from deepmemory.ops.nvrtc.plan import Plan, Shape, plan
from deepmemory.ops.recurrence import Recurrence

TINY = 90  # features on both sides of a product that our own kernel beats the library at
WIDEST = 2048  # a row of activations must fit into shared memory several times over


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
    if x.dtype is not torch.float32:
        return f"it computes in float32, and the input is {x.dtype}"
    if rec.cell == "lstm" and len(weights) == (5 if rec.bias else 3):
        return "it has no LSTM with projections"
    if rec.cell == "rnn" and rec.activation in ("silu", "gelu"):
        return f"it has no RNN with {rec.activation}: y does not tell the slope"
    if max(Shape.of(rec, weights).widths) > WIDEST:
        return f"it is written for layers of at most {WIDEST} features"
    return None


def trace_shape(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """(R, T, B, features)."""
    return (*x.shape[:3], hoisted.trace_features(rec, weights))


@cache
def _device(index: int) -> tuple[tuple[int, int], int, int, int]:
    """Capability, multiprocessors, bytes of shared memory per block, largest cluster."""
    properties: Any = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    largest_cluster = 16 if capability == (9, 0) else 8 if properties.major > 9 else 1
    return capability, properties.multi_processor_count, properties.shared_memory_per_block_optin, largest_cluster


@cache
def _plan(shape: Shape, runs: int, batch: int, index: int) -> Plan:
    _, multiprocessors, shared_limit, largest_cluster = _device(index)
    return plan(shape, runs, batch, multiprocessors, shared_limit, largest_cluster)


@cache
def _kernels(shape: Shape, layout: Plan, save: bool, index: int) -> compiler.Kernels:
    cubin = compiler.compile_to_cubin(layout.defines(shape, save), _device(index)[0])
    return compiler.Kernels(cubin, layout.cluster, layout.shared_bytes, index)


def _sweep(backward: bool, shape: Shape, layout: Plan, save: bool, x: Tensor, arguments: ctypes.Structure) -> None:
    runs, _, batch, _ = x.shape
    with torch.cuda.device(x.device):
        blocks = -(-batch // layout.rows) * layout.cluster
        kernels = _kernels(shape, layout, save, x.device.index)
        kernels.sweep(backward, arguments, blocks, runs, 32 * layout.warps)


def _sum_products(shape: Shape, layout: Plan, products: compiler.Products, left: Tensor) -> None:
    with torch.cuda.device(left.device):
        _kernels(shape, layout, True, left.device.index).sum_products(products, left.shape[0])


def _product(shape: Shape, layout: Plan, left: Tensor, right: Tensor) -> Tensor:
    """(R, I, N) and (R, I, K) to (R, N, K), for tiny N and K by our own kernel."""
    runs, count, lefts = left.shape
    rights = right.shape[2]
    tiny = lefts * rights <= compiler.MOST_PAIRS and lefts + rights <= TINY
    if not tiny or left.stride(2) != 1 or right.stride(2) != 1:
        return torch.bmm(left.mT, right)
    splits = min(256, -(-count // compiler.ROWS_AT_ONCE))
    out = left.new_empty(runs, splits, lefts, rights)
    sizes = (*left.stride()[:2], *right.stride()[:2], count, splits, lefts, rights)
    products = compiler.Products(left.data_ptr(), right.data_ptr(), out.data_ptr(), *sizes)
    _sum_products(shape, layout, products, left)
    return out.sum(1)


def _layout(shape: Shape, x: Tensor) -> Plan:
    return _plan(shape, x.shape[0], x.shape[2], x.device.index)


def forward(
    rec: Recurrence,
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """y (R, T, B, d), final states, trace (empty unless ``save``)."""
    shape = Shape.of(rec, weights)
    layout = _layout(shape, x)
    y = x.new_empty(*x.shape[:3], shape.hidden_size)
    final = [torch.empty_like(s, memory_format=torch.contiguous_format) for s in state]
    trace = x.new_empty(trace_shape(rec, x, weights) if save else (0,))
    tensors: dict[str, Tensor | None] = {
        "projected": hoisted.project(rec, x, weights, lengths),
        "y": y,
        "trace": trace,
        "lengths": lengths,
        **_of_states("{}0", state),
        **_of_states("{}_n", final),
    }
    arguments, _alive = _arguments(rec, layout, weights, tensors, x, backward=False)
    _sweep(False, shape, layout, save, x, arguments)
    return y, final, trace


def backward(
    rec: Recurrence,
    grad_y: Tensor | None,
    grad_final: list[Tensor],
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    lengths: Tensor | None,
    y: Tensor,
    trace: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """Gradients of x, each state and each weight, None where ``needs`` says nobody asks."""
    shape = Shape.of(rec, weights)
    layout = _layout(shape, x)
    deltas = x.new_empty(*x.shape[:3], hoisted.delta_features(rec, weights))
    grad_state = [torch.empty_like(s, memory_format=torch.contiguous_format) for s in state]
    tensors: dict[str, Tensor | None] = {
        "grad_y": grad_y,
        "y": y,
        "trace": trace,
        "deltas": deltas,
        "lengths": lengths,
        **_of_states("{}0", state),
        **_of_states("{}_n", grad_final),
        **_of_states("grad_{}0", grad_state),
    }
    arguments, _alive = _arguments(rec, layout, weights, tensors, x, backward=True)
    _sweep(True, shape, layout, True, x, arguments)
    product = partial(_product, shape, layout)
    return hoisted.gradients(rec, x, state, weights, lengths, y, trace, deltas, grad_state, needs, product)


def _of_states(pattern: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    return {pattern.format(name): tensor for name, tensor in zip("hc", tensors, strict=False)}


def _arguments(
    rec: Recurrence,
    layout: Plan,
    weights: list[Tensor],
    tensors: dict[str, Tensor | None],
    x: Tensor,
    backward: bool,
) -> tuple[ctypes.Structure, list[Tensor]]:
    """The kernel's arguments, and the tensors to keep until the launch is queued."""
    deeper = rec.deeper(weights) if rec.cell in ("dmu", "rhn") else []
    matrices = [weights[1], *(weight for weight, _ in deeper)]
    biases = [weights[3] if rec.bias and rec.cell == "gru" else None, *(bias for _, bias in deeper)]
    alive: list[Tensor] = []

    def pointer(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        alive.append(tensor.contiguous())
        return alive[-1].data_ptr()

    arguments: Any = compiler.arguments_type(len(matrices))()
    for index, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        arguments.weight[index] = pointer(matrix)
        if not backward and layout.ahead.streamed[index]:
            arguments.turned[index] = pointer(matrix.mT)
        arguments.bias[index] = pointer(bias)
    for name, tensor in tensors.items():
        setattr(arguments, name, pointer(tensor))
    arguments.steps, arguments.batch, arguments.reverse = x.shape[1], x.shape[2], rec.reverse
    return arguments, alive
