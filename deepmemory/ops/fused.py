"""Fused engines as torch operators: autograd, vmap, fake tensors, recomputation.

There are three ways in, with one meaning. ``deepmemory::scan`` and ``deepmemory::scan_backward`` are what
``torch.compile``, ``torch.export`` and every other tracer see. :class:`Scan` works under ``torch.func``.
:class:`EagerScan` serves ordinary tensors at a fraction of the others' cost per call. Second derivatives are
taken through the plain engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepmemory.ops import engines, plain
from deepmemory.ops.recurrence import Recurrence

State = tuple[Tensor, ...]
ORDINARY = (Tensor, torch.nn.Parameter)  # no subclass that wants to see operators

RECOMPUTED_PIECES = 8  # a sequence is cut into this many pieces whose traces are made again, one at a time


def scan(
    rec: Recurrence,
    engine: str,
    recompute: bool,
    x: Tensor,
    state: State,
    weights: list[Tensor],
    lengths: Tensor | None,
) -> tuple[Tensor, State]:
    """Run a layer on a fused engine, by the cheapest way that keeps track of what is being asked."""
    tensors = (x, *state, *weights)
    if torch.compiler.is_compiling():
        save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        out = scan_op(x, list(state), weights, lengths, *rec, engine, recompute, save)
    elif in_functorch():
        if torch.is_grad_enabled():
            out = Scan.apply(rec, engine, recompute, lengths, *tensors)
        else:
            out = scan_op(x, list(state), weights, lengths, *rec, engine, recompute, False)
    else:
        save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not all(type(t) in ORDINARY for t in tensors) or torch._C._len_torch_dispatch_stack():
            out = scan_op(x, list(state), weights, lengths, *rec, engine, recompute, save)
        elif save:
            out = EagerScan.apply(rec, engine, recompute, lengths, *tensors)
        else:
            out = run_forward(rec, engine, recompute, False, x, state, weights, lengths)
    return out[0], tuple(out[1 : 1 + rec.states])


def in_functorch() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# --- The operators. Tensors come with or without the leading dimension of runs. ---------------------


@torch.library.custom_op("deepmemory::scan", mutates_args=())
def scan_op(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    cell: str,
    activation: str,
    bias: bool,
    reverse: bool,
    engine: str,
    recompute: bool,
    save: bool,
) -> list[Tensor]:
    """y, final states, trace."""
    rec = Recurrence(cell, activation, bias, reverse)
    return run_forward(rec, engine, recompute, save, x, state, weights, lengths)


@scan_op.register_fake
def _(x, state, weights, lengths, cell, activation, bias, reverse, engine, recompute, save):
    rec = Recurrence(cell, activation, bias, reverse)
    y = x.new_empty(*x.shape[:-1], state[0].shape[-1])
    shape: tuple[int, ...] = (0,)
    if save:
        xr = x if x.dim() == 4 else x[None]
        if recompute:
            shape = _boundaries_shape(xr, state)
        else:
            # Sizes of weights are constants of a model; time and batch may be symbols.
            fixed = [torch.empty([int(n) for n in w.shape], device="meta") for w in weights]
            shape = engines.FUSED[engine].trace_shape(rec, xr, fixed)
    return [y, *(torch.empty_like(s, memory_format=torch.contiguous_format) for s in state), x.new_empty(shape)]


@torch.library.custom_op("deepmemory::scan_backward", mutates_args=())
def scan_backward_op(
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    y: Tensor,
    trace: Tensor,
    cell: str,
    activation: str,
    bias: bool,
    reverse: bool,
    engine: str,
    recompute: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, states and weights; an empty tensor where nobody asks."""
    rec = Recurrence(cell, activation, bias, reverse)
    grads = run_backward(
        rec, engine, recompute, grad_y, grad_final, x, state, weights, lengths, y, trace, list(needs)
    )
    # An operator's results must not share memory, and the fake rule promises them contiguous.
    return [x.new_empty(0) if g is None else g.clone(memory_format=torch.contiguous_format) for g in grads]


@scan_backward_op.register_fake
def _(
    grad_y, grad_final, x, state, weights, lengths, y, trace, cell, activation, bias, reverse, engine, recompute, needs
):
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed else x.new_empty(0)
        for t, needed in zip((x, *state, *weights), needs, strict=True)
    ]


# --- Autograd of the operator, for compiled graphs. ---------------------------------------------------


def _op_setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, state, weights, lengths, *ctx.spec, ctx.engine, ctx.recompute, _ = inputs
    y, *final, trace = output
    ctx.sizes = len(state), len(weights)
    ctx.needs = [t.requires_grad for t in (x, *state, *weights)]
    ctx.save_for_backward(x, *state, *weights, lengths, y, trace)


def _op_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    grad_y, *grad_final, _ = grads
    states, count = ctx.sizes
    x, *rest, lengths, y, trace = ctx.saved_tensors
    state, weights = rest[:states], rest[states:]
    grad = scan_backward_op(
        grad_y, grad_final, x, state, weights, lengths, y, trace, *ctx.spec, ctx.engine, ctx.recompute, ctx.needs
    )
    grad = [g if needed else None for g, needed in zip(grad, ctx.needs, strict=True)]
    return grad[0], grad[1 : 1 + states], grad[1 + states :], *([None] * 8)


scan_op.register_autograd(_op_backward, setup_context=_op_setup_context)


# --- Runs as a dimension. -----------------------------------------------------------------------------


def _front(tensors: Sequence[Tensor | None], dims: Sequence[int | None], runs: int) -> list[Tensor | None]:
    """Put the dimension of runs first everywhere; what all runs share is expanded, not copied."""
    moved = []
    for t, dim in zip(tensors, dims, strict=True):
        if t is None:
            moved.append(None)
        else:
            moved.append(t.expand(runs, *t.shape) if dim is None else t.movedim(dim, 0))
    return moved


def _merge(tensors: Sequence[Tensor | None], nested: bool) -> list[Any]:
    """Runs of runs are runs: (R2, R1, ...) becomes (R2 * R1, ...)."""
    return [t.flatten(0, 1) if nested and t is not None else t for t in tensors]


def _split(tensors: Sequence[Any], runs: int, nested: bool) -> list[Any]:
    return [t.unflatten(0, (runs, -1)) if nested and t is not None and t.numel() else t for t in tensors]


@scan_op.register_vmap
def _(info, in_dims, x, state, weights, lengths, *spec):
    dx, dstate, dweights, dlengths, *_ = in_dims
    runs, nested = info.batch_size, x.dim() - (dx is not None) == 4
    flat = _merge(
        _front((x, *state, *weights, lengths), (dx, *dstate, *dweights, dlengths), runs),
        nested,
    )
    x, *rest, lengths = flat
    out = scan_op(x, rest[: len(state)], rest[len(state) :], lengths, *spec)
    *out, trace = out
    return [*_split(out, runs, nested), trace], [*([0] * len(out)), None]


# --- Eager autograd: thin, and at home under torch.func. ----------------------------------------------


def _zeros_for_none(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, like, strict=True)]


class EagerScan(torch.autograd.Function):
    """As :class:`Scan`, for ordinary tensors outside of ``torch.func``."""

    @staticmethod
    def forward(ctx: Any, rec: Recurrence, engine: str, recompute: bool, lengths: Tensor | None, *tensors: Tensor):
        n = 1 + rec.states
        out = run_forward(rec, engine, recompute, True, tensors[0], tensors[1:n], tensors[n:], lengths)
        ctx.rec, ctx.engine, ctx.recompute = rec, engine, recompute
        ctx.mark_non_differentiable(out[-1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, lengths, out[0], out[-1])
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, *grads: Tensor | None) -> tuple:
        if torch.is_grad_enabled():  # the result may be differentiated again
            return Scan.backward(ctx, grad_y, *grads)
        *tensors, lengths, y, trace = ctx.saved_tensors
        n = 1 + ctx.rec.states
        x, state, weights = tensors[0], tensors[1:n], tensors[n:]
        grad_final, needs = _zeros_for_none(grads[:-1], state), list(ctx.needs_input_grad[4:])
        return None, None, None, None, *run_backward(
            ctx.rec, ctx.engine, ctx.recompute, grad_y, grad_final, x, state, weights, lengths, y, trace, needs
        )


class Scan(torch.autograd.Function):
    """y, final states and trace of one layer; takes ``(rec, engine, recompute, lengths, x, *state, *weights)``."""

    @staticmethod
    def forward(rec: Recurrence, engine: str, recompute: bool, lengths: Tensor | None, x: Tensor, *rest: Tensor):
        state, weights = rest[: rec.states], rest[rec.states :]
        return tuple(scan_op(x, state, weights, lengths, *rec, engine, recompute, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.rec, ctx.engine, ctx.recompute, lengths, *tensors = inputs
        y, *_, trace = output
        ctx.mark_non_differentiable(trace)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, lengths, y, trace)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, *grads: Tensor | None) -> tuple:
        *tensors, lengths, y, trace = ctx.saved_tensors
        state = tensors[1 : 1 + ctx.rec.states]
        grad_final, needs = _zeros_for_none(grads[:-1], state), list(ctx.needs_input_grad[4:])
        grad = ScanBackward.apply(
            ctx.rec, ctx.engine, ctx.recompute, needs, lengths, y, trace, grad_y, *grad_final, *tensors
        )
        return None, None, None, None, *(g if needed else None for g, needed in zip(grad, needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, rec: Recurrence, engine: str, recompute: bool, lengths: Tensor | None, *tensors):
        runs, nested = info.batch_size, tensors[0].dim() - (in_dims[4] is not None) == 4
        lengths, *merged = _merge(_front((lengths, *tensors), in_dims[3:], runs), nested)
        *out, trace = Scan.apply(rec, engine, recompute, lengths, *merged)
        # The trace has no dimension to split: it goes back to this very layer's backward pass, whole.
        return (*_split(out, runs, nested), trace), (*([0] * len(out)), None)


class ScanBackward(torch.autograd.Function):
    """The backward pass, itself differentiable by way of the plain engine."""

    @staticmethod
    def forward(rec, engine, recompute, needs, lengths, y, trace, grad_y, *tensors):
        n = rec.states
        grad_final, x, state, weights = tensors[:n], tensors[n], tensors[n + 1 : 2 * n + 1], tensors[2 * n + 1 :]
        return tuple(
            scan_backward_op(
                grad_y, grad_final, x, state, weights, lengths, y, trace, *rec, engine, recompute, needs
            )
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.rec, _, _, ctx.needs, lengths, y, _, grad_y, *tensors = inputs
        ctx.mark_non_differentiable(*(g for g, needed in zip(output, ctx.needs, strict=True) if not needed))
        ctx.save_for_backward(lengths, y if grad_y is None else grad_y, *tensors)
        ctx.has_grad_y = grad_y is not None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        lengths, grad_y, *tensors = ctx.saved_tensors
        rec, n = ctx.rec, ctx.rec.states
        if not ctx.has_grad_y:
            grad_y = torch.zeros_like(grad_y)

        def first_backward(grad_y: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            grad_final, inputs = tensors[:n], tensors[n:]

            def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
                y, final = _plain_runs(rec, inputs[0], inputs[1 : 1 + n], list(inputs[1 + n :]), lengths)
                return y, *final

            _, pullback = torch.func.vjp(forward, *inputs)
            pulled = pullback((grad_y, *grad_final))
            return tuple(g for g, needed in zip(pulled, ctx.needs, strict=True) if needed)

        _, pullback = torch.func.vjp(first_backward, grad_y, *tensors)
        second = pullback(tuple(g for g, needed in zip(grads, ctx.needs, strict=True) if needed))
        if not ctx.has_grad_y:
            second = (None, *second[1:])
        return *([None] * 7), *second

    @staticmethod
    def vmap(info: Any, in_dims: tuple, rec, engine, recompute, needs, lengths, y, trace, grad_y, *tensors):
        n = rec.states
        x, dim = tensors[n], in_dims[8 + n]
        runs, nested = info.batch_size, x.dim() - (dim is not None) == 4
        dims = (in_dims[4], in_dims[5], *in_dims[7:])
        lengths, y, grad_y, *merged = _merge(_front((lengths, y, grad_y, *tensors), dims, runs), nested)
        out = ScanBackward.apply(rec, engine, recompute, needs, lengths, y, trace, grad_y, *merged)
        return tuple(_split(out, runs, nested)), tuple(0 if needed else None for needed in needs)


def _plain_runs(rec: Recurrence, x: Tensor, state: State, weights: list[Tensor], lengths: Tensor | None):
    if x.dim() == 3:
        return plain.scan(rec, x, state, weights, lengths)
    runs = torch.vmap(
        lambda x, state, weights, lengths: plain.scan(rec, x, state, weights, lengths),
        in_dims=(0, 0, 0, None if lengths is None else 0),
    )
    return runs(x, state, weights, lengths)


# --- One call of an engine, whole or in pieces. -------------------------------------------------------


def run_forward(
    rec: Recurrence,
    engine: str,
    recompute: bool,
    save: bool,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
) -> list[Tensor]:
    """y, final states and trace, from tensors with or without the leading dimension of runs."""
    if x.dim() == 4:
        y, final, trace = _forward(rec, engine, recompute, save, x, list(state), list(weights), lengths)
        return [y, *final, trace]
    one = None if lengths is None else lengths[None]
    state, weights = [s[None] for s in state], [w[None] for w in weights]
    y, final, trace = _forward(rec, engine, recompute, save, x[None], state, weights, one)
    return [y[0], *(f[0] for f in final), trace]


def run_backward(
    rec: Recurrence,
    engine: str,
    recompute: bool,
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    y: Tensor,
    trace: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """Gradients of x, states and weights, from tensors with or without the leading dimension of runs."""
    one = x.dim() == 3
    if one:
        grad_y = None if grad_y is None else grad_y[None]
        lengths = None if lengths is None else lengths[None]
        x, y = x[None], y[None]
        grad_final, state, weights = ([t[None] for t in ts] for ts in (grad_final, state, weights))
    grads = _backward(
        rec, engine, recompute, grad_y, list(grad_final), x, list(state), list(weights), lengths, y, trace, needs
    )
    return [None if g is None else g[0] for g in grads] if one else grads


def _forward(rec, engine, recompute, save, x, state, weights, lengths):
    """Tensors with runs in front. With ``recompute`` the trace is the state at the start of every piece."""
    run = engines.FUSED[engine]
    if not (recompute and save):
        return run.forward(rec, x, state, weights, lengths, save)
    outputs, starts, pieces = [], [], _pieces(x.shape[1], rec.reverse)
    for t0, t1 in pieces:
        starts.append(torch.cat([s.flatten() for s in state]))
        y, state, _ = run.forward(rec, x[:, t0:t1], state, weights, _lengths_within(lengths, t0, t1), False)
        outputs.append(y)
    if rec.reverse:
        outputs.reverse()
    return torch.cat(outputs, 1), state, torch.stack(starts)


def _backward(rec, engine, recompute, grad_y, grad_final, x, state, weights, lengths, y, trace, needs):
    run = engines.FUSED[engine]
    if not recompute:
        return run.backward(rec, grad_y, grad_final, x, state, weights, lengths, y, trace, needs)
    first = 1 + rec.states
    inner = [needs[0], *([True] * rec.states), *needs[first:]]
    grads_x, sums, pieces = [], None, _pieces(x.shape[1], rec.reverse)
    for (t0, t1), start in zip(reversed(pieces), reversed(trace.unbind()), strict=True):
        within = _lengths_within(lengths, t0, t1)
        parts = start.split([s.numel() for s in state])
        at_start = [part.view(s.shape) for part, s in zip(parts, state, strict=True)]
        y_piece, _, trace_piece = run.forward(rec, x[:, t0:t1], at_start, weights, within, True)
        grad_piece = None if grad_y is None else grad_y[:, t0:t1]
        grad_x, *grad = run.backward(
            rec, grad_piece, grad_final, x[:, t0:t1], at_start, weights, within, y_piece, trace_piece, inner
        )
        grad_final = grad[: rec.states]
        grads_x.append(grad_x)
        of_weights = grad[rec.states :]
        sums = of_weights if sums is None else [None if a is None else a + b for a, b in zip(sums, of_weights)]
    if not rec.reverse:
        grads_x.reverse()
    grad_x = torch.cat(grads_x, 1) if needs[0] else None
    return [grad_x, *(g if needed else None for g, needed in zip(grad_final, needs[1:first])), *(sums or [])]


def _piece_length(steps: int) -> int:
    return max(1, -(-steps // RECOMPUTED_PIECES))


def _pieces(steps: int, reverse: bool) -> list[tuple[int, int]]:
    """Cuts of the time axis in the order in which the recurrence visits them."""
    length = _piece_length(steps)
    cuts = [(t0, min(t0 + length, steps)) for t0 in range(0, steps, length)]
    return cuts[::-1] if reverse else cuts


def _boundaries_shape(x: Tensor, state: Sequence[Tensor]) -> tuple[int, ...]:
    length = _piece_length(x.shape[1])
    return (-(-x.shape[1] // length), sum(s.numel() for s in state))


def _lengths_within(lengths: Tensor | None, t0: int, t1: int) -> Tensor | None:
    return None if lengths is None else (lengths - t0).clamp(0, t1 - t0)
