"""Fused engines as torch operators: autograd, vmap, fake tensors, recomputation.

There are three entry points, which compute the same. ``deepmemory::scan`` and ``deepmemory::scan_backward`` are what
``torch.compile``, ``torch.export`` and every other tracer see. :class:`Scan` works under ``torch.func``.
:class:`EagerScan` serves ordinary tensors at a fraction of the others' cost per call. Second derivatives are
computed by the plain engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from deepmemory.ops import engines, gate, plain
from deepmemory.ops.recurrence import FULL_LENGTH, Recurrence, Sequences

State = tuple[Tensor, ...]
OF_SEQUENCES = len(Sequences._fields)
NOT_DIFFERENTIABLE = 3 + OF_SEQUENCES  # first arguments of Scan: rec, engine, recompute, sequences
ORDINARY = frozenset((Tensor, torch.nn.Parameter))  # types that do not intercept operators

RECOMPUTED_PIECES = 8  # a sequence is cut into this many pieces, whose traces are recomputed one at a time


def scan(
    rec: Recurrence,
    engine: str,
    recompute: bool,
    x: Tensor,
    state: State,
    weights: list[Tensor],
    sequences: Sequences,
) -> tuple[Tensor, State]:
    """Run a layer on a fused engine, through the cheapest entry point that supports this call."""
    tensors: Sequence[Tensor] = (x, *state, *weights)
    transformed = in_functorch()
    # A tensor under vmap does not tell whether it requires a gradient; a TorchScript graph serves calls of either kind.
    save = torch.is_grad_enabled() and (transformed or any(t.requires_grad for t in tensors)) and not in_jit_trace()
    out: Sequence[Tensor]
    if transformed and save and not torch.compiler.is_compiling():
        out = Scan.apply(rec, engine, recompute, *sequences, *tensors)
    elif transformed or torch.compiler.is_compiling() or seen_by_others(tensors):
        out = scan_op(x, state, weights, *sequences, *rec, engine, recompute, save)
    else:
        tensors, sequences = _unwrapped(tensors, sequences)
        if save:
            out = EagerScan.apply_to_ordinary(rec, engine, recompute, *sequences, *tensors)
        else:
            n = 1 + rec.states
            out = run_forward(rec, engine, recompute, False, tensors[0], tensors[1:n], tensors[n:], sequences)
    return out[0], tuple(out[1 : 1 + rec.states])


def _unwrapped(tensors: Sequence[Tensor], sequences: Sequences) -> tuple[list[Tensor], Sequences]:
    """Unwrap tensors that have escaped from a ``torch.func`` transform that has ended."""
    unwrap = torch._C._functorch.unwrap_if_dead
    if sequences is not FULL_LENGTH:
        sequences = Sequences(*[None if t is None else unwrap(t) for t in sequences])
    return [unwrap(t) for t in tensors], sequences


def _after_sequences(values: Sequence[Any]) -> tuple[Sequences, Sequence[Any]]:
    """Split a list of values into the lengths, resets and masks at its front, and what follows them."""
    return Sequences(*values[:OF_SEQUENCES]), values[OF_SEQUENCES:]


def seen_by_others(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor subclass, a mode or a tracer has to see operators."""
    return not ORDINARY.issuperset(map(type, tensors)) or torch._C._len_torch_dispatch_stack() > 0 or in_jit_trace()


def is_seen(tensors: Sequence[Tensor]) -> bool:
    """Whether anything but an engine may read the tensors that a call creates from these."""
    return in_functorch() or torch.compiler.is_compiling() or seen_by_others(tensors)


def in_jit_trace() -> bool:
    """Whether ``torch.jit.trace`` is recording."""
    return torch._C._get_tracing_state() is not None


def in_functorch() -> bool:
    """Whether a ``torch.func`` transform is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def one_by_one(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Make a backward pass accept batched gradients (``is_grads_batched``, ``vectorize``), too.

    Such gradients are batched by a mechanism that is older than ``torch.func`` and to which no rules can be added.
    """

    @wraps(backward)
    def taking_batches(ctx: Any, *grads: Tensor | None) -> tuple:
        for batch in grads:
            if batch is not None and torch._C._functorch.is_legacy_batchedtensor(batch):
                break
        else:
            return backward(ctx, *grads)
        # torch does not tell the level of the batch. At any other level there is none, and the result has size 0 there.
        sizes = ((level, torch._remove_batch_dim(batch, level, 0, 0).shape[0]) for level in range(1, 64))
        level, count = next(pair for pair in sizes if pair[1])
        unwrapped = [[None] * count if g is None else torch._remove_batch_dim(g, level, count, 0) for g in grads]
        results = zip(*[taking_batches(ctx, *each) for each in zip(*unwrapped, strict=True)], strict=True)
        return tuple(None if r[0] is None else torch._add_batch_dim(torch.stack(r), 0, level) for r in results)

    return taking_batches


# The operators. Tensors come with or without the leading dimension of runs.


@torch.library.custom_op("deepmemory::scan", mutates_args=())
def scan_op(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    state_mask: Tensor | None,
    hidden_mask: Tensor | None,
    cell: str,
    activation: str,
    bias: bool,
    reverse: bool,
    residual: bool,
    masked: bool,
    engine: str,
    recompute: bool,
    save: bool,
) -> list[Tensor]:
    """Run the forward pass: y, final states, trace."""
    rec = Recurrence(cell, activation, bias, reverse, residual, masked)
    sequences = Sequences(lengths, resets, state_mask, hidden_mask)
    engines.check(engine, rec, x, list(weights))
    return run_forward(rec, engine, recompute, save, x, state, weights, sequences)


@scan_op.register_fake
def _(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    state_mask: Tensor | None,
    hidden_mask: Tensor | None,
    cell: str,
    activation: str,
    bias: bool,
    reverse: bool,
    residual: bool,
    masked: bool,
    engine: str,
    recompute: bool,
    save: bool,
) -> list[Tensor]:
    y = x.new_empty(*x.shape[:-1], state[0].shape[-1])
    shape: tuple[int, ...] = (0,)
    if save:
        # Sizes of weights are constants of a model; time and batch may be symbols.
        fixed = [torch.empty([int(n) for n in w.shape], device="meta") for w in weights]
        shape_of_trace = _shape_of_starts if recompute else engines.FUSED[engine].trace_shape
        shape = shape_of_trace(Recurrence(cell, activation, bias, reverse, residual, masked), x, fixed)
    return [y, *(_contiguous_like(s) for s in state), x.new_empty(shape)]


@torch.library.custom_op("deepmemory::scan_backward", mutates_args=())
def scan_backward_op(
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    state_mask: Tensor | None,
    hidden_mask: Tensor | None,
    y: Tensor | None,
    trace: Tensor,
    cell: str,
    activation: str,
    bias: bool,
    reverse: bool,
    residual: bool,
    masked: bool,
    engine: str,
    recompute: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, states and weights; an empty tensor where ``needs`` is false."""
    rec = Recurrence(cell, activation, bias, reverse, residual, masked)
    sequences = Sequences(lengths, resets, state_mask, hidden_mask)
    engines.check(engine, rec, x, list(weights))
    asked = 1 + len(state) + len(weights)
    if len(needs) != asked or (y is None) != recompute:
        raise RuntimeError(
            f"{cell.upper()}: expected y unless recompute is set, and {asked} entries of needs; got "
            f"{'no y' if y is None else 'y'} with recompute={recompute}, and {len(needs)} entries"
        )
    grads = run_backward(
        rec, engine, recompute, grad_y, grad_final, x, state, weights, sequences, y, trace, list(needs)
    )
    return [x.new_empty(0) if g is None else _on_its_own(g) for g in grads]


def _on_its_own(t: Tensor) -> Tensor:
    """Copy a result if necessary: an operator's results must not share memory and are promised to be contiguous."""
    alone = t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()
    return t if alone else t.clone(memory_format=torch.contiguous_format)


def _contiguous_like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@scan_backward_op.register_fake
def _(
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    state_mask: Tensor | None,
    hidden_mask: Tensor | None,
    y: Tensor | None,
    trace: Tensor,
    cell: str,
    activation: str,
    bias: bool,
    reverse: bool,
    residual: bool,
    masked: bool,
    engine: str,
    recompute: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    tensors = zip((x, *state, *weights), needs, strict=True)
    return [_contiguous_like(t) if needed else x.new_empty(0) for t, needed in tensors]


# Autograd of the operator, for compiled graphs.


def _op_setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, state, weights, *rest, ctx.saved = inputs
    sequences, ctx.spec = _after_sequences(rest)
    y, *_, trace = output
    *_, recompute = ctx.spec
    ctx.states = len(state)
    ctx.needs = [t.requires_grad for t in (x, *state, *weights)]
    ctx.save_for_backward(*sequences, None if recompute else y, trace, x, *state, *weights)


def _op_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    grad_y, *grad_final, _ = grads
    sequences, (y, trace, x, *rest) = _after_sequences(ctx.saved_tensors)
    state, weights = rest[: ctx.states], rest[ctx.states :]
    if not ctx.saved:  # the graph was traced without gradients
        *_, trace = scan_op(x, state, weights, *sequences, *ctx.spec, True)
    grad = scan_backward_op(grad_y, grad_final, x, state, weights, *sequences, y, trace, *ctx.spec, ctx.needs)
    of_x, *others = (g if needed else None for g, needed in zip(grad, ctx.needs, strict=True))
    return of_x, others[: ctx.states], others[ctx.states :], *([None] * (OF_SEQUENCES + len(ctx.spec) + 1))


scan_op.register_autograd(_op_backward, setup_context=_op_setup_context)


# Runs as a dimension.


def _runs_first(tensors: Sequence[Tensor | None], dims: Sequence[int | None], runs: int, nested: bool) -> list[Any]:
    """Move the dimension of runs to the front of all tensors; those that all runs share are expanded, not copied.

    Nested runs are merged: if tensors already have a dimension of runs, (R2, R1, ...) becomes (R2 * R1, ...).
    """

    def first(t: Tensor, dim: int | None) -> Tensor:
        t = t.expand(runs, *t.shape) if dim is None else t.movedim(dim, 0)
        return t.flatten(0, 1) if nested else t

    return [None if t is None else first(t, dim) for t, dim in zip(tensors, dims, strict=True)]


def _split(t: Tensor, runs: int, nested: bool) -> Tensor:
    """The reverse of :func:`_runs_first`, for one result."""
    return t.unflatten(0, (runs, t.shape[0] // runs)) if nested else t


@scan_op.register_vmap
def _(
    info: Any,
    in_dims: tuple,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    *rest: Any,
) -> tuple[list[Tensor], list[int | None]]:
    of_x, of_state, of_weights, *others = in_dims
    runs, nested, n = info.batch_size, x.dim() - (of_x is not None) == 4, len(state)
    sequences, spec = _after_sequences(rest)
    in_runs = _runs_first(sequences, others[:OF_SEQUENCES], runs, nested)
    x, *merged = _runs_first((x, *state, *weights), (of_x, *of_state, *of_weights), runs, nested)
    *out, trace = scan_op(x, merged[:n], merged[n:], *in_runs, *spec)
    return [*(_split(t, runs, nested) for t in out), trace], [*([0] * len(out)), None]


# Autograd of eager calls: a cheap one, and one for torch.func.


def _zeros_for_none(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, like, strict=True)]


def _change_counter(t: Tensor) -> Tensor:
    """A tensor that shares the version counter of ``t`` but not its memory: it shows changes in place."""
    counter = t.detach()
    counter.data = _nothing(t.device)
    return counter


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


class Saved(NamedTuple):
    """What the backward pass takes from the forward pass."""

    x: Tensor
    state: list[Tensor]
    weights: list[Tensor]
    sequences: Sequences
    y: Tensor | None
    trace: Tensor


def _unpack(ctx: Any) -> Saved:
    """Return what was saved; y is recomputed if the caller changed it in place, which ``nn.GRU`` allows, too."""
    sequences, (y, trace, x, *rest) = _after_sequences(ctx.saved_tensors)
    n = ctx.rec.states
    state, weights = _with_zeros(rest[:n], ctx.zeros, x), rest[n:]
    if ctx.counter is not None and ctx.counter._version != ctx.version:
        with torch.no_grad():
            y, *_ = scan_op(x, state, weights, *sequences, *ctx.rec, ctx.engine, False, False)
    return Saved(x, state, weights, sequences, y, trace)


def _with_zeros(state: list[Any], shapes: list[Any], x: Tensor) -> list[Tensor]:
    """Replace states that were not saved by zero tensors of these shapes, without memory."""

    def zeros(shape: Any) -> Tensor:
        return torch._efficientzerotensor(shape, dtype=x.dtype, device=x.device)

    return [zeros(shape) if t is None else t for t, shape in zip(state, shapes, strict=True)]


class EagerScan(torch.autograd.Function):
    """Like :class:`Scan`, for ordinary tensors outside of ``torch.func``, at a lower cost per call."""

    @staticmethod
    def forward(ctx: Any, rec: Recurrence, engine: str, recompute: bool, *tensors: Any) -> tuple[Tensor, ...]:
        """y, final states, trace."""
        n, (sequences, inputs) = 1 + rec.states, _after_sequences(tensors)
        out = run_forward(rec, engine, recompute, True, inputs[0], inputs[1:n], inputs[n:], sequences)
        ctx.rec, ctx.engine, ctx.recompute = rec, engine, recompute
        ctx.counter, ctx.version = None if recompute else _change_counter(out[0]), out[0]._version
        ctx.mark_non_differentiable(out[-1])
        ctx.set_materialize_grads(False)
        # Zero tensors without memory are not saved, because hooks of saved tensors may read them.
        ctx.zeros = [t.shape if t._is_zerotensor() else None for t in inputs[1:n]]
        state = [t if shape is None else None for t, shape in zip(inputs[1:n], ctx.zeros, strict=True)]
        # Not y itself, which torch does not return once it has been changed; _unpack then recomputes it.
        y = None if recompute else out[0].data
        ctx.save_for_backward(*sequences, y, out[-1], inputs[0], *state, *inputs[n:])
        return tuple(out)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad_y: Tensor | None, *grads: Tensor | None) -> tuple:
        """Return None for rec, engine, recompute and sequences, then the gradients of x, states and weights."""
        if torch.is_grad_enabled() or in_functorch():  # to be differentiated again, or for many gradients at once
            return Scan.backward(ctx, grad_y, *grads)
        needs = list(ctx.needs_input_grad[NOT_DIFFERENTIABLE:])
        grad = run_backward(ctx.rec, ctx.engine, ctx.recompute, grad_y, grads[:-1], *_unpack(ctx), needs)
        return *([None] * NOT_DIFFERENTIABLE), *grad

    @classmethod
    def apply_to_ordinary(cls, *args: Any) -> tuple[Tensor, ...]:
        """Like ``apply``, without its steps for ``torch.func``: no transform is active, and tensors are unwrapped."""
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class Scan(torch.autograd.Function):
    """y, final states and trace of one layer; takes ``(rec, engine, recompute, *sequences, x, *state, *weights)``."""

    @staticmethod
    def forward(rec: Recurrence, engine: str, recompute: bool, *tensors: Any) -> tuple[Tensor, ...]:
        """Call the operator, because there may be another transform below this one."""
        sequences, (x, *rest) = _after_sequences(tensors)
        state, weights = rest[: rec.states], rest[rec.states :]
        return tuple(scan_op(x, state, weights, *sequences, *rec, engine, recompute, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        """Save what the backward pass needs."""
        ctx.rec, ctx.engine, ctx.recompute, *tensors = inputs
        y, *_, trace = output
        ctx.counter, ctx.zeros = None, [None] * ctx.rec.states
        ctx.mark_non_differentiable(trace)
        ctx.set_materialize_grads(False)
        sequences, given = _after_sequences(tensors)
        ctx.save_for_backward(*sequences, None if ctx.recompute else y, trace, *given)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad_y: Tensor | None, *grads: Tensor | None) -> tuple:
        """Call a separate autograd function, so that the gradient can be differentiated, too."""
        x, state, weights, sequences, y, trace = _unpack(ctx)
        state = [s if shape is None else x.new_zeros(shape) for s, shape in zip(state, ctx.zeros, strict=True)]
        grad_final, needs = _zeros_for_none(grads[:-1], state), list(ctx.needs_input_grad[NOT_DIFFERENTIABLE:])
        spec = ctx.rec, ctx.engine, ctx.recompute, needs
        grad = ScanBackward.apply(*spec, *sequences, y, trace, grad_y, *grad_final, x, *state, *weights)
        asked = (g if needed else None for g, needed in zip(grad, needs, strict=True))
        return *([None] * NOT_DIFFERENTIABLE), *asked

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, rec: Recurrence, engine: str, recompute: bool, *tensors: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """Compute all runs in one call."""
        x, of_x = tensors[OF_SEQUENCES], in_dims[NOT_DIFFERENTIABLE]
        runs, nested = info.batch_size, x.dim() - (of_x is not None) == 4
        merged = _runs_first(tensors, in_dims[3:], runs, nested)
        below = Scan if in_functorch() or seen_by_others(merged[OF_SEQUENCES:]) else EagerScan
        *out, trace = below.apply(rec, engine, recompute, *merged)
        # The trace has no dimension to split: it goes back to this layer's backward pass as a whole.
        return (*(_split(t, runs, nested) for t in out), trace), (*([0] * len(out)), None)


class ScanBackward(torch.autograd.Function):
    """The backward pass, which is itself differentiable through the plain engine.

    Takes ``(rec, engine, recompute, needs, *sequences, y, trace, grad_y, *grad_final, x, *state, *weights)``.
    """

    @staticmethod
    def forward(
        rec: Recurrence,
        engine: str,
        recompute: bool,
        needs: list[bool],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """Gradients of x, states and weights, empty where ``needs`` is false."""
        (sequences, (y, trace, grad_y, *rest)), n = _after_sequences(tensors), rec.states
        grad_final, x, state, weights = rest[:n], rest[n], rest[n + 1 : 2 * n + 1], rest[2 * n + 1 :]
        inputs = x, state, weights, *sequences, y, trace
        return tuple(scan_backward_op(grad_y, grad_final, *inputs, *rec, engine, recompute, needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        """Save what the pass was computed from; neither y nor the trace is a variable of it."""
        ctx.rec, _, _, ctx.needs, *tensors = inputs
        sequences, (_, _, grad_y, *rest) = _after_sequences(tensors)
        ctx.mark_non_differentiable(*(g for g, needed in zip(output, ctx.needs, strict=True) if not needed))
        ctx.save_for_backward(*sequences, grad_y, *rest)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """The derivative of the plain engine's backward pass."""
        sequences, (grad_y, *tensors) = _after_sequences(ctx.saved_tensors)
        rec, n = ctx.rec, ctx.rec.states

        def first_backward(grad_y: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
            grad_final, inputs = tensors[:n], tensors[n:]

            def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
                y, final = _plain_runs(rec, inputs[0], inputs[1 : 1 + n], list(inputs[1 + n :]), sequences)
                return final if grad_y is None else (y, *final)

            _, pullback, *_ = torch.func.vjp(forward, *inputs)
            pulled = pullback(grad_final if grad_y is None else (grad_y, *grad_final))
            return tuple(g for g, needed in zip(pulled, ctx.needs, strict=True) if needed)

        wanted = tuple(g for g, needed in zip(grads, ctx.needs, strict=True) if needed)
        if grad_y is None:
            _, pullback, *_ = torch.func.vjp(partial(first_backward, None), *tensors)
            second = None, *pullback(wanted)
        else:
            _, pullback, *_ = torch.func.vjp(first_backward, grad_y, *tensors)
            second = pullback(wanted)
        return *([None] * (4 + OF_SEQUENCES + 2)), *second

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple,
        rec: Recurrence,
        engine: str,
        recompute: bool,
        needs: list[bool],
        *tensors: Any,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """Compute all runs in one call."""
        given, (y, trace, grad_y, *rest) = _after_sequences(tensors)
        of_sequences, (of_y, _, *of_rest) = in_dims[4 : 4 + OF_SEQUENCES], in_dims[4 + OF_SEQUENCES :]
        n, of_inputs = rec.states, of_rest[1 + rec.states :]
        runs, nested = info.batch_size, rest[n].dim() - (of_inputs[0] is not None) == 4
        sequences = _runs_first(given, of_sequences, runs, nested)
        y, grad_y, *merged = _runs_first((y, grad_y, *rest), (of_y, *of_rest), runs, nested)
        if all(dim is None for dim in (*of_sequences, *of_inputs)):
            # Many gradients of one forward pass, as jacrev computes them: its trace has one run, so compute it for all.
            y_again, *_, trace = Scan.apply(rec, engine, recompute, *sequences, *merged[n:])
            y = None if recompute else y_again
        out = ScanBackward.apply(rec, engine, recompute, needs, *sequences, y, trace, grad_y, *merged)
        grads = (_split(g, runs, nested) if needed else g for g, needed in zip(out, needs, strict=True))
        return tuple(grads), tuple(0 if needed else None for needed in needs)


def _plain_runs(
    rec: Recurrence, x: Tensor, state: State, weights: list[Tensor], sequences: Sequences
) -> tuple[Tensor, State]:
    weights = [w.to(x.dtype) for w in weights]
    if x.dim() == 3:
        return plain.scan(rec, x, state, weights, sequences)
    of_sequences = Sequences._make(None if t is None else 0 for t in sequences)
    return torch.vmap(partial(plain.scan, rec), in_dims=(0, 0, 0, of_sequences))(x, state, weights, sequences)


# One call of an engine, whole or in pieces; tensors with or without the dimension of runs.


def run_forward(
    rec: Recurrence,
    engine: str,
    recompute: bool,
    save: bool,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    sequences: Sequences,
) -> list[Tensor]:
    """y, final states and trace. With ``recompute`` the trace is the state at the start of every piece."""
    run = engines.FUSED[engine]
    x, state, weights, sequences = gate.forward(rec, x, state, weights, sequences, run.reads_zeros)
    if not (recompute and save):
        y, final, trace = run.forward(rec, x, state, weights, sequences, save)
        return [y, *final, trace]
    outputs, starts = [], []
    for t0, t1 in _pieces(x.shape[-3], rec.reverse):
        starts.append(torch.cat([s.flatten() for s in state]))
        if t0 == t1:
            continue
        y, state, _ = run.forward(rec, x[..., t0:t1, :, :], state, weights, sequences.piece(t0, t1), False)
        outputs.append(y)
    if rec.reverse:
        outputs.reverse()
    return [torch.cat(outputs, -3), *state, torch.stack(starts)]


def run_backward(
    rec: Recurrence,
    engine: str,
    recompute: bool,
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor | None],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    sequences: Sequences,
    y: Tensor | None,
    trace: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """Gradients of x, states and weights."""
    run = engines.FUSED[engine]
    shape_of_trace = _shape_of_starts if recompute else run.trace_shape
    grad_y, grad_final, x, state, weights, sequences, y, trace = gate.backward(
        rec, shape_of_trace, grad_y, grad_final, x, state, weights, sequences, y, trace, run.reads_zeros
    )
    if recompute:
        return _backward_in_pieces(rec, run, grad_y, grad_final, x, state, weights, sequences, trace, needs)
    return run.backward(rec, grad_y, grad_final, x, state, weights, sequences, cast(Tensor, y), trace, needs)


def _backward_in_pieces(
    rec: Recurrence,
    run: engines.FusedEngine,
    grad_y: Tensor | None,
    grad_final: Sequence[Tensor | None],
    x: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    sequences: Sequences,
    starts: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """Run each piece forward again from its start, then backward, beginning with the piece visited last."""
    first = 1 + rec.states
    inner = [needs[0], *([True] * rec.states), *needs[first:]]  # states carry the gradient from piece to piece
    sizes, pieces = [s.numel() for s in state], _pieces(x.shape[-3], rec.reverse)
    of_x: list[Any] = []
    of_weights: list[Any] = []
    grad_state: Sequence[Any] = grad_final
    for (t0, t1), start in zip(reversed(pieces), reversed(starts.unbind()), strict=True):
        if t0 == t1:
            continue
        x_piece, within = x[..., t0:t1, :, :], sequences.piece(t0, t1)
        at_start = [part.view(s.shape) for part, s in zip(start.split(sizes), state, strict=True)]
        y_piece, _, trace = run.forward(rec, x_piece, at_start, weights, within, True)
        gy_piece = None if grad_y is None else grad_y[..., t0:t1, :, :]
        grad = run.backward(rec, gy_piece, grad_state, x_piece, at_start, weights, within, y_piece, trace, inner)
        of_x.append(grad[0])
        grad_state, of_piece = grad[1:first], grad[first:]
        if of_weights:
            sums, parts = ([g for g in grads if g is not None] for grads in (of_weights, of_piece))
            if sums:
                torch._foreach_add_(sums, parts)  # one launch for all of them
        else:
            of_weights = of_piece
    if not rec.reverse:
        of_x.reverse()
    asked = (g if needed else None for g, needed in zip(grad_state, needs[1:first], strict=True))
    return [torch.cat(of_x, -3) if needs[0] else None, *asked, *of_weights]


def _shape_of_starts(rec: Recurrence, x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """Shape of the trace with ``recompute``: the states at the start of every piece, flattened."""
    *runs, _, batch, _ = x.shape
    return RECOMPUTED_PIECES, rec.states * math.prod(runs) * batch * weights[1].shape[-1]


def _pieces(steps: int, reverse: bool) -> list[tuple[int, int]]:
    """Pieces of the time axis in the order in which the recurrence visits them; some are empty in a short sequence."""
    at = [steps * k // RECOMPUTED_PIECES for k in range(RECOMPUTED_PIECES + 1)]
    cuts = list(pairwise(at))
    return cuts[::-1] if reverse else cuts
