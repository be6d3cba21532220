"""The gate in front of the fused engines: it checks every tensor whose address they read.

Engines pass addresses to compiled code, which skips the checks of torch's own operators. This module compares shapes
with each other, dtype and device with those of the input, and the extent of a tensor with the size of its storage.
Tensors whose memory does not hold their values (negative views, zero tensors without memory) are replaced by tensors
whose memory does. Weights may have another dtype than the input, the same for all of them; each engine decides in
``refuses`` whether it supports that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deepmemory.ops.layout import GATES
from deepmemory.ops.recurrence import ACTIVATIONS, CELLS, Recurrence, Sequences

Shape = tuple[int, ...]
ShapeOfTrace = Callable[[Recurrence, Tensor, list[Tensor]], Shape]

STATES = ("h_0", "c_0")
RECORDS = {  # by the number of states
    1: ("the gradient of y", "the gradient of h_n", "y", "the trace"),
    2: ("the gradient of y", "the gradient of h_n", "the gradient of c_n", "y", "the trace"),
}


def forward(
    rec: Recurrence,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    sequences: Sequences,
    zeros: bool = False,
) -> tuple[Tensor, list[Tensor], list[Tensor], Sequences]:
    """Return x, state, weights and sequences as an engine may read them; lengths lie between 0 and the number of steps.

    With ``zeros`` the engine supports states that are zero tensors without memory.
    """
    end, inputs = 1 + len(state), [x, *state, *weights]
    check_inputs(rec, end, tuple([t.shape for t in inputs]))
    if not _all_readable(_without_zeros(inputs, end) if zeros else inputs, end, len(inputs)):
        inputs = _made_readable_inputs(rec, end, inputs)
    return inputs[0], inputs[1:end], inputs[end:], checked_sequences(rec, sequences, x, state, weights)


def _without_zeros(given: list[Tensor], end: int) -> list[Tensor]:
    """Replace states that are zero tensors without memory, which the engine supports, by x, which passes the check."""
    x = given[0]
    states = [x if t._is_zerotensor() and (t.dtype, t.device) == (x.dtype, x.device) else t for t in given[1:end]]
    return [x, *states, *given[end:]]


def _all_readable(given: list[Tensor], end: int, count: int) -> bool:
    """Whether an engine may read x and states up to ``end``, weights up to ``count`` and records as they are."""
    x, weight = given[0], given[end]
    if weight.dtype is x.dtype:
        return readable(given, x)
    return readable([*given[:end], *given[count:]], x) and readable(given[end:count], weight, x.device)


def _made_readable_inputs(rec: Recurrence, end: int, inputs: list[Tensor]) -> list[Tensor]:
    names, x = input_names(rec, len(inputs) - end), inputs[0]
    first = made_readable(rec, inputs[:end], names[:end], x)
    return [*first, *made_readable(rec, inputs[end:], names[end:], inputs[end], x.device)]


def backward(
    rec: Recurrence,
    shape_of_trace: ShapeOfTrace,
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor | None],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    sequences: Sequences,
    y: Tensor | None,
    trace: Tensor,
    zeros: bool = False,
) -> tuple[Tensor | None, list[Any], Tensor, list[Tensor], list[Tensor], Sequences, Tensor | None, Tensor]:
    """Like :func:`forward`, with everything else that the backward pass reads; the trace is contiguous."""
    end, inputs = 1 + len(state), [x, *state, *weights]
    records: list[Any] = [grad_y, *grad_final, y, trace]
    there = [t for t in records if t is not None]
    absent = tuple([t is None for t in records])
    given, count = [*inputs, *there], len(inputs)
    check_records(rec, shape_of_trace, x.dtype, end, count, tuple([t.shape for t in given]), absent)
    if not _all_readable(_without_zeros(given, end) if zeros else given, end, count):
        inputs = _made_readable_inputs(rec, end, inputs)
        names = [name for name, missing in zip(RECORDS[rec.states], absent, strict=True) if not missing]
        resolved = iter(made_readable(rec, there, names, x))
        records = [None if missing else next(resolved) for missing in absent]
    grad_y, *ends, y, trace = records
    sequences = checked_sequences(rec, sequences, x, state, weights)
    return grad_y, ends, inputs[0], inputs[1:end], inputs[end:], sequences, y, trace.contiguous()


def checked_sequences(
    rec: Recurrence, sequences: Sequences, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]
) -> Sequences:
    """Return lengths, resets and masks as an engine may read them; lengths lie between 0 and the number of steps."""
    lengths, resets, state_mask, hidden_mask = sequences
    if rec.masked != (hidden_mask is not None):
        given = "no hidden_mask was given" if rec.masked else "a hidden_mask was given"
        raise RuntimeError(f"{rec.cell.upper()}: {given} with masked={rec.masked}; they go together")
    if lengths is None and resets is None and state_mask is None and hidden_mask is None:
        return sequences
    *runs, steps, batch, _ = x.shape
    if lengths is not None:
        lengths = _checked(rec, "lengths", lengths, (*runs, batch), torch.int64, x.device).clamp(0, steps)
    if resets is not None:
        resets = _checked(rec, "resets", resets, (*runs, steps, batch), torch.bool, x.device)
    if state_mask is not None:
        width = state[0].shape[-1]
        state_mask = _checked(rec, "state_mask", state_mask, (*runs, batch, width), x.dtype, x.device)
    if hidden_mask is not None:
        width = sum(rec.hidden_widths(weights))
        hidden_mask = _checked(rec, "hidden_mask", hidden_mask, (*runs, batch, width), x.dtype, x.device)
    return Sequences(lengths, resets, state_mask, hidden_mask)


def _checked(rec: Recurrence, name: str, t: Tensor, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    if t.shape != shape:
        raise misshapen(rec, name, t.shape, shape)
    if t.dtype is not dtype or t.device != device:
        raise misplaced(rec, name, t, dtype, device)
    return t if readable([t], t) else made_readable(rec, [t], [name], t)[0]


def readable(tensors: Sequence[Tensor], like: Tensor, device: torch.device | None = None) -> bool:
    """Whether an engine may read these tensors as they are, with the dtype of ``like`` and on its device or another."""
    dtype, device, size = like.dtype, device or like.device, like.itemsize
    for t in tensors:  # one loop without calls of Python functions: small layers are limited by Python overhead
        if t.dtype is not dtype or t.device != device or t.is_neg() or not t.data_ptr():
            return False
        span = t.nbytes if t.is_contiguous() else _span(t) * size
        if t.storage_offset() * size + span > len(t.untyped_storage()):
            return False
    return True


def _span(t: Tensor) -> int:
    """The number of elements in memory from the first to the last one."""
    return 1 + sum([(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)])


def made_readable(
    rec: Recurrence, tensors: list[Tensor], names: Sequence[str], like: Tensor, device: torch.device | None = None
) -> list[Tensor]:
    """Return the same values in tensors that an engine may read; raise if that is not possible."""
    resolved, device = [], device or like.device
    for name, t in zip(names, tensors, strict=True):
        if t.dtype is not like.dtype or t.device != device:
            raise misplaced(rec, name, t, like.dtype, device)
        if t._is_zerotensor():
            t = torch.zeros_like(t)
        if t.numel() and not readable([torch._neg_view(t) if t.is_neg() else t], like, device):
            raise RuntimeError(
                f"{rec.cell.upper()}: {name}, of shape {tuple(t.shape)}, reaches beyond its storage, which was freed "
                f"or shrunk to {t.untyped_storage().nbytes()} bytes; do not resize the storage of a layer's tensors "
                "before the backward pass is done"
            )
        resolved.append(t.resolve_neg())
    return resolved


@lru_cache(maxsize=1024)
def check_inputs(rec: Recurrence, end: int, given: tuple[Shape, ...]) -> None:
    """Raise unless these are the shapes of x, of states up to ``end``, and of a layer's weights."""
    if rec.cell not in CELLS or rec.activation not in ACTIVATIONS:
        raise RuntimeError(
            f"unknown cell {rec.cell!r} or activation {rec.activation!r}; choose from {', '.join(CELLS)} and from "
            f"{', '.join(ACTIVATIONS)}"
        )
    x, *states = given[:end]
    if len(x) not in (3, 4) or len(states) != rec.states or len(states[0]) != len(x) - 1:
        raise RuntimeError(
            f"{rec.cell.upper()}: expected an input (T, B, m) and {rec.states} states (B, d), or (R, T, B, m) and "
            f"(R, B, d), got the shapes {tuple(x)} and {[tuple(shape) for shape in states]}"
        )
    runs, width = x[:-3], states[0][-1]
    of_weights = weight_shapes(rec, x[-1], width, [shape[len(runs) :] for shape in given[end:]])
    if len(given) - end != len(of_weights):
        raise RuntimeError(f"{rec.cell.upper()}: expected {len(of_weights)} weights, got {len(given) - end}")
    if (rec.residual or rec.masked) and rec.cell != "dmu":
        raise RuntimeError(f"{rec.cell.upper()}: residual and masked are options of a dmu only")
    hidden = [columns for _, columns in (of_weights[3::2] if rec.bias else of_weights[2:])] if rec.residual else []
    if len(set(hidden)) > 1:
        raise RuntimeError(f"{rec.cell.upper()}: residual needs hidden layers of equal width, got {hidden}")
    expected = [x, *[(*runs, x[-2], width)] * rec.states, *((*runs, *shape) for shape in of_weights)]
    _compare(rec, input_names(rec, len(of_weights)), given, expected)


@lru_cache(maxsize=1024)
def check_records(
    rec: Recurrence,
    shape_of_trace: ShapeOfTrace,
    dtype: torch.dtype,
    end: int,
    inputs: int,
    given: tuple[Shape, ...],
    absent: tuple[bool, ...],
) -> None:
    """Raise unless these are the shapes of the inputs, and of those records that are not absent."""
    check_inputs(rec, end, given[:inputs])
    names = RECORDS[rec.states]
    if len(absent) != len(names):
        raise RuntimeError(f"{rec.cell.upper()}: expected {rec.states} gradients of states, got {len(absent) - 3}")
    x, of_state = given[:2]
    weights = [torch.empty(shape, device="meta") for shape in given[end:inputs]]
    of_y, of_trace = (*x[:-1], of_state[-1]), shape_of_trace(rec, torch.empty(x, device="meta", dtype=dtype), weights)
    expected = zip(names, [of_y, *[of_state] * rec.states, of_y, of_trace], absent, strict=True)
    wanted = [(name, shape) for name, shape, missing in expected if not missing]
    _compare(rec, [name for name, _ in wanted], given[inputs:], [shape for _, shape in wanted])


def _compare(rec: Recurrence, names: Sequence[str], given: Sequence[Shape], expected: Sequence[Shape]) -> None:
    for name, shape, right in zip(names, given, expected, strict=True):
        if shape != right:
            raise misshapen(rec, name, shape, right)


def weight_shapes(rec: Recurrence, features: int, width: int, given: list[Shape]) -> list[Shape]:
    """The shapes that weights should have; the widths of a DMU's hidden layers are taken from the given shapes."""
    if rec.classic:
        rows = GATES[rec.cell] * width
        return [(rows, features), (rows, width), *([(rows,)] * 2 if rec.bias else [])]
    deeper = given[3::2] if rec.bias else given[2:]
    between = [width] * len(deeper)
    if rec.cell == "dmu":
        between = [shape[0] if shape else 0 for shape in [*given[:1], *deeper][:-1]]
    outputs = [*(between if rec.cell == "dmu" else [2 * width] * len(deeper)), 2 * width]
    shapes: list[Shape] = [(outputs[0], features)]
    for rows, columns in zip(outputs, [width, *between], strict=True):
        shapes += [(rows, columns), *([(rows,)] if rec.bias else [])]
    return shapes


def input_names(rec: Recurrence, weights: int) -> list[str]:
    """Names of x, the states and this many weights, as in the modules but without layer and direction."""
    names = ["x", *STATES[: rec.states], "weight_ih", "weight_hh"]
    if rec.classic:
        names += ["bias_ih", "bias_hh"]
    else:
        names += ["bias_1"] * rec.bias
        for k in range(2, weights):
            names += [f"weight_{k}", *[f"bias_{k}"] * rec.bias]
    return names[: 1 + rec.states + weights]


def misshapen(rec: Recurrence, name: str, given: Shape, expected: Shape) -> RuntimeError:
    """The error for a tensor whose shape does not fit the others."""
    return RuntimeError(
        f"{rec.cell.upper()}: {name} has the shape {tuple(given)}, expected {tuple(expected)}; input, state and "
        "weights must have the shapes that the layer was built for"
    )


def misplaced(rec: Recurrence, name: str, t: Tensor, dtype: torch.dtype, device: torch.device) -> RuntimeError:
    """The error for a tensor of the wrong dtype or device."""
    return RuntimeError(
        f"{rec.cell.upper()}: {name} is {t.dtype} on {t.device}, expected {dtype} on {device}; convert it with .to(...)"
    )
