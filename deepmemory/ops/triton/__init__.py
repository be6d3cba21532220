"""Fused loops over time in Triton: for GPUs where NVRTC is missing, and for very wide layers.

What does not recur is done before and after by matrix products over all steps (``hoisted``). What recurs is two
sweeps, forward and backward, in which one program takes a tile of sequences through all time steps.

With ``TRITON_INTERPRET=1`` in the environment the same kernels run, slowly, on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmemory.ops import hoisted, layout
from deepmemory.ops.recurrence import Recurrence, Sequences

reads_zeros = False
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)  # the first with TF32 and bfloat16 on the tensor cores


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def unavailable() -> str | None:
    """Why this engine cannot run on this machine at all, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with PyTorch's CUDA builds, or with 'pip install triton'"
    if not torch.cuda.is_available() and not interpreted():
        return "PyTorch finds no CUDA device; install a driver and a CUDA build of PyTorch to use a GPU"
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs and this PyTorch is built for AMD's"
    return None


def refuses(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> str | None:
    """Why this engine cannot do this case, or None."""
    wanted = "cpu" if interpreted() else "cuda"
    if x.device.type != wanted:
        return f"it runs on {wanted} tensors and the input is on {x.device.type}"
    if x.dtype not in DTYPES:
        return f"it knows {', '.join(str(dtype) for dtype in DTYPES)}, and the input is {x.dtype}"
    if any(w.dtype != x.dtype or w.device != x.device for w in weights):
        return "input and weights differ in dtype or device"
    if rec.projects(weights):
        return "it has no projected LSTM state (proj_size)"
    if rec.cell == "rnn" and rec.activation not in ("tanh", "relu", "leaky_relu"):
        return f"it has no RNN with {rec.activation}"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < LEAST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(x.device)
        return f"the GPU has compute capability {major}.{minor} and 8.0 is the least it needs"
    return None


def trace_shape(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """Shape of the trace for x (R, T, B, m), R = 1 where x has no dimension of runs."""
    runs = x.shape[:-3] or (1,)
    return *runs, *x.shape[-3:-1], layout.trace_features(rec, weights)


def forward(
    rec: Recurrence, x: Tensor, state: list[Tensor], weights: list[Tensor], sequences: Sequences, save: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    """y (R, T, B, d), final states, trace (empty unless ``save``)."""
    if x.dim() == 3:
        given = x[None], [s[None] for s in state], [w[None] for w in weights], sequences.with_run()
        y, final, trace = forward(rec, *given, save)
        return y.squeeze_(0), [f.squeeze_(0) for f in final], trace  # no views: they may be changed in place

    from deepmemory.ops.triton import sweeps  # Triton is imported when first used

    weight, bias = rec.input_weights(weights)
    if bias is not None and rec.cell in ("rnn", "lstm"):
        bias = bias + weights[3]
    projected = hoisted.project(x, weight, bias, sequences.lengths)
    return sweeps.forward(rec, projected, state, weights, sequences, save)


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
    if x.dim() == 3:
        grad_y, *grad_final = (None if t is None else t[None] for t in (grad_y, *grad_final))
        given = x[None], [s[None] for s in state], [w[None] for w in weights], sequences.with_run()
        grads = backward(rec, grad_y, grad_final, *given, y[None], trace, needs)
        return [None if g is None else g[0] for g in grads]

    from deepmemory.ops.triton import sweeps

    ends = [torch.zeros_like(s) if g is None else g for g, s in zip(grad_final, state, strict=True)]
    deltas, grad_state = sweeps.backward(rec, grad_y, ends, state, weights, sequences, y, trace)
    of_state, of_weights = needs[1 : 1 + rec.states], needs[1 + rec.states :]
    return [
        hoisted.input_gradient(x, weights[0], deltas) if needs[0] else None,
        *(g if needed else None for g, needed in zip(grad_state, of_state, strict=True)),
        *hoisted.weight_gradients(rec, x, state[0], weights, sequences, y, trace, deltas, of_weights),
    ]
