"""What does not recur, for engines on the GPU: one matrix product over all time steps before and after the sweep.

A sweep is the part that loops over time. It leaves two records, both (R, T, B, features):

*trace*, from the forward sweep, with the features of a step in this order:

====  ==========================================================================================
dmu   hidden activations a_1 ... a_n-1; with ``needs_slopes`` their slopes, mask f', as well; z; tanh(candidate)
rhn   for each micro-layer tanh(candidate), sigmoid(transform); then s_1 ... s_n-1
rnn   nothing: y says it all
gru   r, z, n, W_hn h + b_hn
lstm  i, f, g, o, c
====  ==========================================================================================

*deltas*, from the backward sweep: the gradient of the loss by what each linear layer gave out, zero where a
step is padding:

====  ==========================================================================================
dmu   of layer 1, ..., of layer n
rhn   of micro-layer 1, ..., of micro-layer n
rnn   of the sum inside the activation
gru   of r, z, n before their activation, then of W_hn h + b_hn
lstm  of i, f, g, o before their activation
====  ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmemory.ops.plain import without_padding
from deepmemory.ops.recurrence import Recurrence, Sequences

BLOCKS = 1024  # of 64 x 64 sums: eight for each multiprocessor of a large GPU, since a block waits for memory
FEWEST_ROWS = 256  # of a piece


def product(left: Tensor, right: Tensor) -> Tensor:
    """Sum over rows of left times right: (R, I, N), (R, I, K) to (R, N, K).

    Sums over very many rows that give small matrices leave most of a GPU idle, so they are cut into pieces: of all
    runs at once where these follow one another in memory, else run by run.
    """
    runs, rows, n = left.shape
    blocks = -(-n // 64) * -(-right.shape[2] // 64)
    together = all(t.stride(0) == rows * t.stride(1) for t in (left, right))
    pieces = pieces_of(rows, blocks * runs if together else blocks)
    if pieces == 1 or (not together and runs >= pieces):
        return torch.bmm(left.mT, right)
    a, b = (t.unflatten(1, (pieces, -1)) for t in (left, right))
    if together:
        return torch.bmm(a.flatten(0, 1).mT, b.flatten(0, 1)).unflatten(0, (runs, pieces)).sum(1)
    return torch.stack([torch.bmm(of_a.mT, of_b).sum(0) for of_a, of_b in zip(a, b, strict=True)])


def pieces_of(rows: int, blocks: int) -> int:
    """Into how many equal parts a sum over so many rows is cut if one part is so many blocks of work."""
    pieces = math.gcd(rows, 64)  # a power of two
    while pieces > 1 and (pieces * blocks > BLOCKS or rows < pieces * FEWEST_ROWS):
        pieces //= 2
    return pieces


def needs_slopes(rec: Recurrence) -> bool:
    """Whether the slopes of a DMU's hidden layers are kept.

    The slope of silu and gelu cannot be told from their value, nor any slope from a masked value or from a sum.
    """
    return rec.cell == "dmu" and (rec.activation in ("silu", "gelu") or rec.residual or rec.masked)


def trace_features(rec: Recurrence, weights: list[Tensor]) -> int:
    """Features of a step in the trace."""
    d = weights[1].shape[-1]
    if rec.cell == "dmu":
        return sum(rec.hidden_widths(weights)) * (2 if needs_slopes(rec) else 1) + 2 * d
    if rec.cell == "rhn":
        depth = 1 + len(rec.deeper(weights))
        return 2 * d * depth + d * (depth - 1)
    return {"rnn": 0, "gru": 4, "lstm": 5}[rec.cell] * d


def delta_features(rec: Recurrence, weights: list[Tensor]) -> int:
    """Features of a step in the deltas."""
    extra = weights[1].shape[-1] if rec.cell == "gru" else 0
    if rec.cell in ("dmu", "rhn"):
        extra = sum(weight.shape[-2] for weight, _ in rec.deeper(weights))
    return weights[1].shape[-2] + extra


PRECISION_BY_NAME = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # newer torch; the two ways do not mix


def tf32_allowed() -> bool:
    """Whether torch lets cuDNN's recurrent layers use TF32: ours follow the same setting."""
    rnn: Any = getattr(torch.backends.cudnn, "rnn", None)
    if hasattr(rnn, "fp32_precision"):
        return bool(rnn.fp32_precision == "tf32")
    return bool(torch.backends.cudnn.allow_tf32)


def matmul_like_the_sweep(device: torch.device) -> AbstractContextManager[None]:
    """Float32 matrix products in the precision of the sweep, whatever the setting for products at large is."""
    wanted = tf32_allowed()
    fits = device.type != "cuda" or wanted == torch.backends.cuda.matmul.allow_tf32
    return nullcontext() if fits else _matmul_with_tf32(wanted)


@contextmanager
def _matmul_with_tf32(wanted: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32" if wanted else "ieee") if PRECISION_BY_NAME else ("allow_tf32", wanted)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The part of the first linear layer that x decides, for all steps: (R, T, B, features), or without runs."""
    x, weight = without_padding(x, lengths), weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    with matmul_like_the_sweep(x.device):
        if x.dim() == 3:
            return F.linear(x, weight, bias)
        flat = x.flatten(1, 2)
        out = torch.bmm(flat, weight.mT) if bias is None else torch.baddbmm(bias[:, None], flat, weight.mT)
    return out.unflatten(1, x.shape[1:3])


def input_gradient(x: Tensor, weight: Tensor, deltas: Tensor) -> Tensor:
    """The gradient of x, with or without runs."""
    delta, weight = deltas[..., : weight.shape[-2]], weight.to(x.dtype)
    with matmul_like_the_sweep(x.device):
        if x.dim() == 3:
            return delta @ weight
        return torch.bmm(delta.flatten(1, 2), weight).view(x.shape)


def weight_gradients(
    rec: Recurrence,
    x: Tensor,
    h0: Tensor,
    weights: list[Tensor],
    sequences: Sequences,
    y: Tensor,
    trace: Tensor,
    deltas: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """From the records of both sweeps to the gradients that ``needs`` asks for; with or without runs."""
    if x.dim() == 3:
        x, h0, y, trace, deltas = (t[None] for t in (x, h0, y, trace, deltas))
        weights = [w[None] for w in weights]
        grads = weight_gradients(rec, x, h0, weights, sequences.with_run(), y, trace, deltas, needs)
        return [None if g is None else g[0] for g in grads]
    rows = weights[0].shape[-2]
    out: list[Tensor | None] = [None] * len(weights)
    with matmul_like_the_sweep(x.device):
        if needs[0]:
            delta = deltas[..., :rows].flatten(1, 2)  # [R, T*B, rows]
            out[0] = product(delta, without_padding(x, sequences.lengths).flatten(1, 2))
        if needs[1]:
            out[1] = _recurrent_weight(rec, deltas, h0, sequences, y, rows)
        if rec.cell in ("dmu", "rhn"):
            _deeper_weights(rec, weights, trace, deltas, sequences.state_mask, needs, out)
    if rec.bias:
        _biases(rec, weights, deltas, needs, out)
    asked = zip(out, weights, needs, strict=True)
    return [g.to(weight.dtype) if needed and g is not None else None for g, weight, needed in asked]


def _recurrent_weight(
    rec: Recurrence, deltas: Tensor, h0: Tensor, sequences: Sequences, y: Tensor, rows: int
) -> Tensor:
    """Sum over steps of delta times the state before the step as weights see it: y one step earlier, or h0."""
    delta = deltas if rec.cell == "gru" else deltas[..., :rows]
    lengths, resets, mask, _ = sequences
    if not rec.reverse:
        later, before = delta[:, 1:], y[:, :-1]
    else:
        later, before = delta[:, :-1], y[:, 1:]  # past its end a sequence's y is zero and adds nothing
    start = _first_visited(delta, rec.reverse, lengths)
    if resets is not None:
        h0 = h0.masked_fill(_first_visited(resets[..., None], rec.reverse, lengths), 0)
        before = before.masked_fill((resets[:, :-1] if rec.reverse else resets[:, 1:])[..., None], 0)
    if mask is not None:
        h0, before = h0 * mask, before * mask[:, None]
    grad = product(start, h0)
    if later.shape[1]:
        grad = grad + product(later.flatten(1, 2), before.flatten(1, 2))
    return _without_candidate(rec, grad)


def _first_visited(record: Tensor, reverse: bool, lengths: Tensor | None) -> Tensor:
    """Of a record (R, T, B, features), the step that each sequence begins with."""
    if not reverse:
        return record[:, 0]
    if lengths is None:
        return record[:, -1]
    last = (lengths - 1).clamp(min=0)[:, None, :, None]
    return record.gather(1, last.expand(-1, 1, -1, record.shape[-1]))[:, 0]


def _without_candidate(rec: Recurrence, rows: Tensor) -> Tensor:
    """Of a GRU's four groups of rows the recurrent side has r, z and the last one."""
    if rec.cell != "gru":
        return rows
    r, z, _, n = rows.chunk(4, 1)
    return torch.cat([r, z, n], 1)


def _deeper_weights(
    rec: Recurrence,
    weights: list[Tensor],
    trace: Tensor,
    deltas: Tensor,
    state_mask: Tensor | None,
    needs: Sequence[bool],
    out: list[Tensor | None],
) -> None:
    deeper = rec.deeper(weights)
    d = weights[1].shape[-1]
    at_input = 0 if rec.cell == "dmu" else 2 * d * (1 + len(deeper))
    at_delta = weights[1].shape[-2]
    stride = 2 if rec.bias else 1
    for k, (weight, _) in enumerate(deeper):
        rows, columns = weight.shape[-2:]
        delta = deltas[..., at_delta : at_delta + rows].flatten(1, 2)
        index = (3 if rec.bias else 2) + stride * k
        if needs[index]:
            inputs = trace[..., at_input : at_input + columns]
            if rec.cell == "rhn" and state_mask is not None:
                inputs = inputs * state_mask[:, None]
            out[index] = product(delta, inputs.flatten(1, 2))
        at_input += columns
        at_delta += rows


def _biases(
    rec: Recurrence, weights: list[Tensor], deltas: Tensor, needs: Sequence[bool], out: list[Tensor | None]
) -> None:
    """All biases from one pass over the deltas; the results are parts of one tensor."""
    classic = rec.cell in ("rnn", "gru", "lstm")
    at = (2, 3) if classic else range(2, len(weights), 2)
    if not any(needs[index] for index in at):
        return
    sums = deltas.sum((1, 2))  # [R, features]
    if classic:
        out[2] = sums[:, : weights[0].shape[-2]]
        out[3] = _without_candidate(rec, sums) if rec.cell == "gru" else sums.clone()
    else:
        for index, part in zip(at, sums.split([weights[index].shape[-1] for index in at], 1), strict=True):
            out[index] = part
