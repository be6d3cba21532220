"""The recurrences in plain PyTorch: the definition every other engine is tested against.

They run on any device and dtype, under ``torch.func`` and ``torch.compile``, with derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmemory.ops.recurrence import FULL_LENGTH, LEAKY_SLOPE, Recurrence, Sequences

State = tuple[Tensor, ...]
Step = Callable[[Recurrence, Tensor, State, list[Tensor], Sequences], State]
BoundStep = Callable[[Tensor, State, list[Tensor], Sequences], State]

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda a: F.leaky_relu(a, LEAKY_SLOPE),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
}


def memory_update(transformed: Tensor, h: Tensor) -> Tensor:
    """``h * sigmoid(z) + tanh(candidate) * (1 - sigmoid(z))`` for ``transformed = [z, candidate]``."""
    z, candidate = transformed.chunk(2, -1)
    keep = torch.sigmoid(z)
    return h * keep + torch.tanh(candidate) * (1 - keep)


def seen(h: Tensor, sequences: Sequences) -> Tensor:
    """The state as the weights see it."""
    return h if sequences.state_mask is None else h * sequences.state_mask


def dmu_transition(
    rec: Recurrence, projected: Tensor, h: Tensor, weights: list[Tensor], sequences: Sequences
) -> Tensor:
    """[z, candidate]: linear layers with an activation between them.

    Hidden layers may be masked after their activation, and may have skip connections.
    """
    deeper = rec.deeper(weights)
    masks: Sequence[Tensor] = ()
    if sequences.hidden_mask is not None:
        masks = sequences.hidden_mask.split([weight.shape[-1] for weight, _ in deeper], -1)
    v, a = projected + F.linear(seen(h, sequences), weights[1]), None
    for k, (weight, bias) in enumerate(deeper):
        new = ACTIVATION[rec.activation](v)
        if masks:
            new = new * masks[k]
        a = new if a is None or not rec.residual else a + new
        v = F.linear(a, weight, bias)
    return v


def dmu_step(rec: Recurrence, projected: Tensor, state: State, weights: list[Tensor], sequences: Sequences) -> State:
    """The transition, then the memory update."""
    (h,) = state
    return (memory_update(dmu_transition(rec, projected, h, weights, sequences), h),)


def rhn_step(rec: Recurrence, projected: Tensor, state: State, weights: list[Tensor], sequences: Sequences) -> State:
    """One highway layer on [x, s], the others on s alone."""
    (s,) = state

    def highway(a: Tensor, s: Tensor) -> Tensor:
        candidate, transform = a.chunk(2, -1)
        open_ = torch.sigmoid(transform)
        return torch.tanh(candidate) * open_ + s * (1 - open_)

    s = highway(projected + F.linear(seen(s, sequences), weights[1]), s)
    for weight, bias in rec.deeper(weights):
        s = highway(F.linear(seen(s, sequences), weight, bias), s)
    return (s,)


def rnn_step(rec: Recurrence, projected: Tensor, state: State, weights: list[Tensor], sequences: Sequences) -> State:
    """``activation(W_ih x + b_ih + W_hh h + b_hh)``."""
    (h,) = state
    bias = weights[3] if rec.bias else None
    return (ACTIVATION[rec.activation](projected + F.linear(seen(h, sequences), weights[1], bias)),)


def gru_step(rec: Recurrence, projected: Tensor, state: State, weights: list[Tensor], sequences: Sequences) -> State:
    """torch's form: the reset gate is applied after the recurrent matrix product."""
    (h,) = state
    bias = weights[3] if rec.bias else None
    r_x, z_x, n_x = projected.chunk(3, -1)
    r_h, z_h, n_h = F.linear(seen(h, sequences), weights[1], bias).chunk(3, -1)
    reset, keep = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
    return (h * keep + torch.tanh(n_x + reset * n_h) * (1 - keep),)


def lstm_step(rec: Recurrence, projected: Tensor, state: State, weights: list[Tensor], sequences: Sequences) -> State:
    """Gates in torch's order i, f, g, o; h is projected if there is a weight for it."""
    h, c = state
    bias = weights[3] if rec.bias else None
    i, f, g, o = (projected + F.linear(seen(h, sequences), weights[1], bias)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    if rec.projects(weights):
        h = F.linear(h, weights[-1])
    return h, c


STEP: dict[str, Step] = {
    "dmu": dmu_step,
    "rhn": rhn_step,
    "rnn": rnn_step,
    "gru": gru_step,
    "lstm": lstm_step,
}


def scan(
    rec: Recurrence,
    x: Tensor,
    state: State,
    weights: list[Tensor],
    sequences: Sequences = FULL_LENGTH,
) -> tuple[Tensor, State]:
    """Run one layer over all time steps: x (T, B, m) to y (T, B, d) and the final state."""
    projected = F.linear(without_padding(x, sequences.lengths), *rec.input_weights(weights))
    return iterate(partial(STEP[rec.cell], rec), projected, state, weights, sequences, rec.reverse)


def without_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Zero the padding of x (..., T, B, m): values in it, including NaN, must not reach a gradient."""
    if lengths is None:
        return x
    padding = torch.arange(x.shape[-3], device=x.device)[:, None] >= lengths[..., None, :]
    return x.masked_fill(padding[..., None], 0)


def iterate(
    step: BoundStep,
    inputs: Tensor,
    state: State,
    weights: list[Tensor],
    sequences: Sequences = FULL_LENGTH,
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """Apply ``step`` at every time, from zero at a reset; in the padding the state stays and y is zero."""
    # torch 2.9 reports everything that it compiles as being exported.
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    if exporting and (isinstance(inputs.shape[0], torch.SymInt) or inputs.shape[0] > 1):
        return iterate_in_graph(step, inputs, state, weights, sequences, reverse)
    lengths, resets = sequences.lengths, sequences.resets
    steps = range(inputs.shape[0])
    outputs: list[Tensor | None] = [None for _ in steps]
    unbound = inputs.unbind(0)
    for t in reversed(steps) if reverse else steps:
        if resets is not None:
            state = tuple(s.masked_fill(resets[t][:, None], 0) for s in state)
        new = step(unbound[t], state, weights, sequences)
        if lengths is None:
            outputs[t], state = new[0], new
        else:
            real = (t < lengths)[:, None]
            outputs[t] = torch.where(real, new[0], 0)
            state = tuple(torch.where(real, n, s) for n, s in zip(new, state, strict=True))
    return torch.stack(cast("list[Tensor]", outputs)), state


def iterate_in_graph(
    step: BoundStep,
    inputs: Tensor,
    state: State,
    weights: list[Tensor],
    sequences: Sequences,
    reverse: bool,
) -> tuple[Tensor, State]:
    """Like :func:`iterate`, as one operator of torch, so that an exported graph has a loop of any length."""
    from torch._higher_order_ops.scan import scan_op

    lengths, resets, *masks = sequences
    over_time = [inputs]
    if lengths is not None:
        real = torch.arange(inputs.shape[0], device=inputs.device)[:, None] < lengths
        over_time.append(real[..., None])
    if resets is not None:
        over_time.append(resets[..., None])
    # Inductor finds symbols of shapes only among the operands.
    symbols = [size for size in inputs.shape[1:-1] if isinstance(size, torch.SymInt)]
    constant = [*weights, *(mask for mask in masks if mask is not None)]

    def body(*operands: Any) -> list[Tensor]:
        given = iter(operands)
        before: State = tuple(islice(given, len(state)))
        x_t = next(given)
        real = None if lengths is None else next(given)
        if resets is not None:
            reset = next(given)
            before = tuple(s.masked_fill(reset, 0) for s in before)
        own = list(islice(given, len(weights)))
        state_mask, hidden_mask = (None if mask is None else next(given) for mask in masks)
        new = step(x_t, before, own, Sequences(state_mask=state_mask, hidden_mask=hidden_mask))
        if real is None:
            return [*new, new[0].clone()]
        kept = (torch.where(real, n, s) for n, s in zip(new, before, strict=True))
        return [*kept, torch.where(real, new[0], 0)]

    *final, y = scan_op(body, list(state), [t.flip(0) if reverse else t for t in over_time], (*constant, *symbols))
    return (y.flip(0) if reverse else y), tuple(final)
