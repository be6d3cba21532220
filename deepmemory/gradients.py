"""The paper's gradient condition, and gradients on their way back through time, as numbers.

=====================  =====================================================================================
:func:`condition`      condition (star): the matrices the state passes on its way to z and to the candidate
:func:`flow`           the norm of dL/dh_t at every step of every recurrent layer of a model
:func:`step_jacobian`  dh_t/dh_t-1 of a DMU in its three terms: state kept, gate moved, candidate moved
:func:`gates`          what share of its state a DMU keeps at each step
=====================  =====================================================================================

The mathematics stands in ``docs/gradients.md``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from deepmemory.nn.dmu import DMU, DMUCell, check_listed, is_dense, joined_weights
from deepmemory.nn.recurrent import Recurrent, State
from deepmemory.ops import Sequences, plain
from deepmemory.ops.plain import ACTIVATION
from deepmemory.ops.recurrence import FULL_LENGTH

__all__ = [
    "Condition",
    "Flow",
    "Gates",
    "LayerCondition",
    "LayerGates",
    "Passage",
    "StateFlow",
    "StepJacobian",
    "condition",
    "flow",
    "gates",
    "step_jacobian",
]

GATE_LIMIT, CANDIDATE_LIMIT = 0.5, 1.0  # of the eigenvalues on the way to z and to the candidate
RADIUS_TOLERANCE = 1e-5  # relative, of an iterated spectral radius
MOST_SQUARINGS = 40
SCALE_ITERATIONS = 30
# Largest slope of the hidden activations; it is 1 for the others.
SLOPE = {"silu": 1.0998393202, "gelu": (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi)}
DIRECTIONS = ("forward", "backward")


# --- Condition (star). ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Passage:
    """The matrices from the state to z, or to the candidate, and their product (d, d), without activations.

    Everything is computed when first asked for, in float64, from a copy of the weights.
    """

    factors: tuple[Tensor, ...]  # in the order the state meets them
    limit: float  # that the paper sets for the eigenvalues: 1/2 towards z, 1 towards the candidate

    @cached_property
    def matrix(self) -> Tensor:
        """The product, (d, d): what turns a change of the state into one of z (of the candidate)."""
        return _product(self.factors)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """All d eigenvalues (complex), the largest first; exact up to rounding, O(w^3) for a narrowest width w."""
        found = torch.linalg.eigvals(self._core)
        zeros = found.new_zeros(self.factors[0].shape[1] - len(found))
        return torch.cat([found[found.abs().argsort(descending=True)], zeros])

    @cached_property
    def radius(self) -> float:
        """The largest modulus of an eigenvalue, iterated: never below the true one, above it by 1e-5 or so.

        ``|M^p| ** (1 / p)`` bounds the radius from above for every p and falls as p doubles. It takes some
        twenty products of matrices and needs no gap between eigenvalues.
        """
        log, power, p = 0.0, self._core, 1
        for _ in range(MOST_SQUARINGS):
            norm = torch.linalg.matrix_norm(power).item()
            if norm == 0:
                return 0.0
            if not math.isfinite(norm):
                return norm
            log += math.log(norm) / p
            if p > 1 and abs(math.log(norm)) < RADIUS_TOLERANCE * p:
                break
            power = power / norm
            power, p = power @ power, 2 * p
        return math.exp(log)

    @cached_property
    def norm(self) -> float:
        """The spectral norm of the product, exact up to rounding."""
        return torch.linalg.matrix_norm(self.matrix, 2).item()

    @property
    def margin(self) -> float:
        """How far the radius stays below its limit; negative beyond it."""
        return self.limit - self.radius

    @property
    def norm_margin(self) -> float:
        """How far the spectral norm stays below the same limit."""
        return self.limit - self.norm

    @property
    def satisfied(self) -> bool:
        """Whether all eigenvalues stay below the limit in modulus."""
        return self.margin > 0

    @cached_property
    def _core(self) -> Tensor:
        """The factors multiplied round from their narrowest place: the same eigenvalues but for zeros."""
        widths = [factor.shape[1] for factor in self.factors]
        start = widths.index(min(widths))
        return _product(self.factors[start:] + self.factors[:start]) if start else self.matrix

    def __repr__(self) -> str:
        widths = " -> ".join(str(n) for n in (self.factors[0].shape[1], *(f.shape[0] for f in self.factors)))
        return f"Passage({widths}, limit={self.limit})"


def _product(factors: Sequence[Tensor]) -> Tensor:
    """The last factor times ... times the first."""
    return factors[0] if len(factors) == 1 else torch.linalg.multi_dot(list(factors[::-1]))


@dataclass(frozen=True, eq=False)
class LayerCondition:
    """Condition (star) for one layer in one direction, and a bound that holds for every input."""

    layer: int
    direction: int  # 0 forward, 1 backward
    gate: Passage  # from the state to z
    candidate: Passage  # from the state to the candidate
    slope: float = field(repr=False)  # the largest of the hidden activation

    @property
    def satisfied(self) -> bool:
        """The paper's condition: eigenvalues below 1/2 towards z and below 1 towards the candidate."""
        return self.gate.satisfied and self.candidate.satisfied

    @property
    def growth(self) -> float:
        """What one step back can at most multiply ``sum(scale * abs(dL/dh))`` by, where that is more than 1.

        A bound for every input and every state in [-1, 1], from absolute values of the weights.
        """
        return self._bound[0]

    @property
    def scale(self) -> Tensor:
        """Positive weights (d,) of the norm that :attr:`growth` speaks of; the largest is 1."""
        return self._bound[1]

    @property
    def never_grows(self) -> bool:
        """Proof that ``sum(scale * abs(dL/dh))`` never grows on its way back, whatever the input."""
        return self.growth <= 1

    @cached_property
    def _bound(self) -> tuple[float, Tensor]:
        """Any positive scale gives a valid bound; iterating towards a Perron vector finds a good one."""
        shared = [factor.abs() * self.slope for factor in self.gate.factors[:-1]]
        to_gate, to_candidate = self.gate.factors[-1].abs(), self.candidate.factors[-1].abs()
        scale = to_gate.new_ones(len(to_gate))
        best = (math.inf, scale)
        for _ in range(SCALE_ITERATIONS):
            reached = scale
            for factor in shared:
                reached = factor @ reached
            gate, candidate = to_gate @ reached / scale, to_candidate @ reached / scale
            growth = _row_growth(gate, candidate).max().item()
            if growth < best[0]:
                best = growth, scale
            rows = 2 * gate + candidate
            top = rows.max()
            if top == 0 or not torch.isfinite(top):
                break
            scale = scale * (1 + rows / top)
            scale = scale / scale.max()
        return best

    @property
    def rows(self) -> list[list[str]]:
        """Two lines of :class:`Condition`'s table."""
        where = [str(self.layer), DIRECTIONS[self.direction]]
        return [
            [*where, name, *(f"{value:.4g}" for value in (p.radius, p.limit, p.margin, p.norm)), _yes(p.satisfied)]
            for name, p in (("z", self.gate), ("candidate", self.candidate))
        ]


def _row_growth(gate: Tensor, candidate: Tensor) -> Tensor:
    """The most that ``(1 + u) * gate + (1 - u ** 2) * candidate`` can be for u in [0, 1]; u is abs(tanh)."""
    inner = candidate + gate + gate**2 / (4 * candidate)
    return torch.where(gate < 2 * candidate, inner, 2 * gate)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


@dataclass(frozen=True, eq=False, repr=False)
class Condition:
    """Condition (star) for every layer and direction of a DMU; printed, it is a table."""

    layers: tuple[LayerCondition, ...]  # layer by layer, forward before backward

    @property
    def satisfied(self) -> bool:
        """The paper's condition holds in every layer and direction."""
        return all(layer.satisfied for layer in self.layers)

    @property
    def never_grows(self) -> bool:
        """In every layer and direction the gradient provably never grows from step to step."""
        return all(layer.never_grows for layer in self.layers)

    def __iter__(self) -> Iterator[LayerCondition]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> LayerCondition:
        return self.layers[index]

    def __repr__(self) -> str:
        return f"Condition({len(self)} layer(s) and direction(s); print it for the table)"

    def __str__(self) -> str:
        header = ["layer", "direction", "matrix", "radius", "limit", "margin", "norm", "inside"]
        worst = max(layer.growth for layer in self.layers)
        return "\n".join(
            [
                _table(header, [row for layer in self.layers for row in layer.rows]),
                f"condition (star): {'satisfied' if self.satisfied else 'not satisfied'}",
                f"bound for every input: {worst:.4g} per step, " + ("never grows" if self.never_grows else "may grow"),
            ]
        )


def condition(dmu: DMU | DMUCell) -> Condition:
    """Condition (star) of the paper, for every layer and direction.

    The state meets the recurrent part of the first weight matrix, then the hidden layers, then the rows of
    the last one that give z or the candidate. (star) asks that the eigenvalues of the two products stay below
    1/2 and 1. It looks at the linear parts alone and is neither necessary nor sufficient for a gradient that
    does not grow; :attr:`LayerCondition.growth` is a bound that holds.

    >>> import torch, deepmemory as dm
    >>> dmu = dm.DMU(3, 2, transition=[])
    >>> with torch.no_grad():
    ...     _ = dmu.weight_hh_l0.copy_(torch.tensor([[0.1, 0.0], [0.0, -0.2], [0.25, 0.0], [0.0, 0.5]]))
    >>> found = dm.gradients.condition(dmu)
    >>> found.satisfied, found.never_grows
    (True, True)
    >>> round(found[0].candidate.radius, 4), round(found[0].gate.margin, 4)
    (0.5, 0.3)
    >>> print(found)
    layer  direction  matrix     radius  limit  margin  norm  inside
    0      forward    z          0.2     0.5    0.3     0.2   yes
    0      forward    candidate  0.5     1      0.5     0.5   yes
    condition (star): satisfied
    bound for every input: 0.72 per step, never grows

    Args:
        dmu: A layer or a cell with a dense transition. One given as a module has no such matrices.
    """
    if not isinstance(dmu, DMU | DMUCell):
        raise TypeError(f"condition: expected a DMU or a DMUCell, got {type(dmu).__name__}")
    slope = SLOPE.get(dmu.activation, 1.0)
    found = []
    for layer, direction in _places(dmu):
        weights = [_for_analysis(weight) for weight, _ in _dense(dmu, layer, direction)]
        last = weights.pop() if len(weights) > 1 else None
        d = _width(dmu, layer)
        recurrent = weights[0][:, -d:]
        shared = () if last is None else (recurrent, *weights[1:])
        to_gate, to_candidate = (recurrent if last is None else last).split(d)
        gate = Passage((*shared, to_gate), GATE_LIMIT)
        candidate = Passage((*shared, to_candidate), CANDIDATE_LIMIT)
        found.append(LayerCondition(layer, direction, gate, candidate, slope))
    return Condition(tuple(found))


def _places(dmu: DMU | DMUCell) -> list[tuple[int, int]]:
    """Every (layer, direction)."""
    if isinstance(dmu, DMUCell):
        return [(0, 0)]
    return [(layer, direction) for layer in range(dmu.num_layers) for direction in range(dmu._directions)]


def _width(dmu: DMU | DMUCell, layer: int) -> int:
    return dmu.hidden_size if isinstance(dmu, DMUCell) else dmu._widths[layer]


def _dense(dmu: DMU | DMUCell, layer: int, direction: int) -> list[tuple[Tensor, Tensor | None]]:
    """The feedforward network as (weight, bias) pairs."""
    if isinstance(dmu, DMU):
        return dmu.transition_weights(layer, direction)
    _check_place(dmu, layer, direction)
    check_listed(dmu)
    return joined_weights([getattr(dmu, name) for name in dmu._names], dmu.bias)


def _check_place(dmu: DMU | DMUCell, layer: int, direction: int) -> None:
    if (layer, direction) not in _places(dmu):
        raise IndexError(f"{type(dmu).__name__}: no layer {layer}, direction {direction}")


def _check_definite(dmu: DMU | DMUCell, what: str) -> None:
    """A step that is drawn has no one Jacobian and no one gate."""
    dropped = dmu.recurrent_dropout or dmu.transition_dropout if isinstance(dmu, DMU) else 0.0
    if dmu.training and (dmu.zoneout or dropped):
        raise ValueError(f"{what}: zoneout or dropout makes this DMU's steps random; call .eval() first")


def _for_analysis(tensor: Tensor) -> Tensor:
    """A copy in float64, which Apple's GPUs do not have."""
    device = "cpu" if tensor.device.type == "mps" else tensor.device
    return tensor.detach().to(device, torch.float64, copy=True)


# --- One step of a DMU. -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepJacobian:
    """dh_t[i] / dh_t-1[j] in the paper's three terms, each (d, d) or (B, d, d)."""

    kept: Tensor  # diag(s), s = sigmoid(z): the state that stays
    gate: Tensor  # diag((h - tanh(candidate)) * s * (1 - s)) dz/dh: the gate that moves
    candidate: Tensor  # diag(tanh'(candidate) * (1 - s)) dcandidate/dh: the candidate that moves

    @property
    def total(self) -> Tensor:
        """The whole Jacobian."""
        return self.kept + self.gate + self.candidate

    def __repr__(self) -> str:
        terms = ", ".join(
            f"|{name}|={torch.linalg.matrix_norm(getattr(self, name), 2).max().item():.3g}"
            for name in ("kept", "gate", "candidate", "total")
        )
        return f"StepJacobian({tuple(self.kept.shape)}, {terms})"


@torch.no_grad()
def step_jacobian(dmu: DMU | DMUCell, x: Tensor, h: Tensor, layer: int = 0, direction: int = 0) -> StepJacobian:
    """The exact Jacobian of one step by the state before it, split as in the paper.

    Row i, column j holds dh_t[i] / dh_t-1[j]; gradients travel back as ``dL/dh_t @ J``. The paper writes the
    transpose.

    >>> import torch, deepmemory as dm
    >>> dmu = dm.DMU(3, 4, memory_bias=3.0)
    >>> step = dm.gradients.step_jacobian(dmu, torch.randn(3), torch.zeros(4))
    >>> step.total.shape
    torch.Size([4, 4])
    >>> bool((step.kept.diagonal() > 0.5).all())
    True

    Args:
        dmu: A layer or a cell, with any transition.
        x: What this layer reads at the step: (m,) or (B, m). Above the first layer that is the output below.
        h: The state before the step: (d,) or (B, d).
        layer: Which layer.
        direction: 0 forward, 1 backward.
    """
    _check_place(dmu, layer, direction)
    _check_definite(dmu, "step_jacobian")
    d = _width(dmu, layer)
    inputs = dmu._layer_input_size(layer) if isinstance(dmu, DMU) else dmu.input_size
    if x.dim() not in (1, 2) or x.shape[:-1] != h.shape[:-1] or (x.shape[-1], h.shape[-1]) != (inputs, d):
        raise ValueError(
            f"step_jacobian: expected x ({inputs},) and h ({d},), or both with a batch in front, "
            f"got {tuple(x.shape)} and {tuple(h.shape)}"
        )
    batched = x.dim() == 2
    x, h = (x, h) if batched else (x[None], h[None])
    if is_dense(dmu):
        z, candidate, by_state = _dense_derivative(dmu, x, h, layer, direction)
    else:
        transition = _transition(dmu, layer, direction)
        z, candidate = transition(x, h).chunk(2, -1)
        by_state = torch.func.vmap(torch.func.jacrev(transition, 1), randomness="different")(x, h)
    z_by_state, candidate_by_state = by_state.chunk(2, -2)
    keep, new = torch.sigmoid(z), torch.tanh(candidate)
    kept = dmu.zoneout  # on average, whatever the gate says
    terms = (
        (kept + (1 - kept) * keep).diag_embed(),
        ((1 - kept) * (h - new) * keep * (1 - keep))[..., None] * z_by_state,
        ((1 - kept) * (1 - new**2) * (1 - keep))[..., None] * candidate_by_state,
    )
    return StepJacobian(*(term if batched else term[0] for term in terms))


def _transition(
    dmu: DMU | DMUCell, layer: int, direction: int, sequences: Sequences = FULL_LENGTH
) -> Callable[[Tensor, Tensor], Tensor]:
    """From x (..., m) and h (..., d) to [z, candidate]."""
    given: Any = dmu.transition
    if isinstance(dmu, DMU):
        weights = dmu._weights(layer, direction)
        given = given[layer * dmu._directions + direction] if isinstance(given, nn.ModuleList) else given
    else:
        weights = [getattr(dmu, name) for name in dmu._names]
    if isinstance(given, nn.Module):
        return lambda x, h: given(torch.cat([x, plain.seen(h, sequences)], -1))
    rec = dmu.definition.recurrence(dmu.bias)

    def dense(x: Tensor, h: Tensor) -> Tensor:
        fitting = [weight.to(x.dtype) for weight in weights]
        projected = F.linear(x, *rec.input_weights(fitting))
        return plain.dmu_transition(rec, projected, h, fitting, sequences, dmu.layer_norm)

    return dense


def _dense_derivative(
    dmu: DMU | DMUCell, x: Tensor, h: Tensor, layer: int, direction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """z, candidate and the derivative (B, 2d, d) of both by the state."""
    (weight, bias), *deeper = _dense(dmu, layer, direction)
    a = F.linear(torch.cat([x, h], -1), weight, bias)
    by_state = weight[:, -h.shape[-1] :].expand(len(x), -1, -1)
    for weight, bias in deeper:
        value, slope = _activate(dmu.activation, a)
        by_state = weight @ (slope[..., None] * by_state)
        a = F.linear(value, weight, bias)
    z, candidate = a.chunk(2, -1)
    return z, candidate, by_state


def _activate(activation: str, a: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden activation and its slope."""
    with torch.enable_grad():
        a = a.detach().requires_grad_()
        value = ACTIVATION[activation](a)
        (slope,) = torch.autograd.grad(value.sum(), a)
    return value.detach(), slope


# --- Watching the recurrent layers of a model. ------------------------------------------------------------

Run = Callable[[int, int, Tensor, State, Sequences], tuple[Tensor, State]]


@dataclass
class _Watched:
    """What one layer in one direction did during one call; time first, batch as the layer has it inside."""

    name: str
    call: int
    layer: int
    direction: int
    x: Tensor  # (T, B, m)
    start: State
    sequences: Sequences
    order: Tensor | None  # puts a sorted batch back into the caller's order
    y: Tensor  # (T, B, d)
    steps: list[State]  # the state after each time step; empty unless asked for

    def tidy(self, values: Tensor) -> Tensor:
        """Values (T, B, ...) in the caller's order, NaN at padding."""
        lengths = self.sequences.lengths
        if lengths is not None:
            padding = torch.arange(len(values), device=lengths.device)[:, None] >= lengths
            padding = padding.to(values.device)
            values = values.masked_fill(padding[(...,) + (None,) * (values.dim() - 2)], math.nan)
        return values if self.order is None else values.index_select(1, self.order.to(values.device))


@contextmanager
def _watch(model: nn.Module, kind: type[Recurrent], stepwise: bool) -> Iterator[list[_Watched]]:
    """Record every call of the layers of this kind inside the model; leaves the model as it was."""
    watched: list[_Watched] = []
    with ExitStack() as undo:
        if "torch._dynamo" in sys.modules:  # compiled code does not ask again what a layer runs
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            if isinstance(module, kind):
                _watch_one(name, module, stepwise, watched, undo)
        yield watched


def _watch_one(name: str, module: Recurrent, stepwise: bool, watched: list[_Watched], undo: ExitStack) -> None:
    original: Run = module._run
    order: list[Tensor | None] = [None]
    calls = -1

    def note_order(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        order[0] = given.unsorted_indices if isinstance(given, PackedSequence) else None

    def run(layer: int, direction: int, x: Tensor, state: State, sequences: Sequences) -> tuple[Tensor, State]:
        nonlocal calls
        calls += layer == direction == 0
        steps: list[State] = []
        if stepwise:
            y, final, steps = _step_by_step(original, layer, direction, x, state, sequences)
        else:
            y, final = original(layer, direction, x, state, sequences)
        watched.append(_Watched(name, calls, layer, direction, x, state, sequences, order[0], y, steps))
        return y, final

    undo.callback(module.register_forward_pre_hook(note_order, with_kwargs=True).remove)
    # On this one object: its class and its parameters stay as they are.
    replaced: dict[str, Any] = {"_run": run}
    if stepwise:  # nobody asks for gradients of weights, which would be taken at every step
        weights = module._weights
        replaced["_weights"] = lambda layer, direction: [weight.detach() for weight in weights(layer, direction)]
    for attribute, function in replaced.items():
        undo.callback(vars(module).pop, attribute)
        vars(module)[attribute] = function


def _step_by_step(
    run: Run, layer: int, direction: int, x: Tensor, state: State, sequences: Sequences
) -> tuple[Tensor, State, list[State]]:
    """What ``run`` does in one go, as one call per time step with the states in between in the open.

    Each state is a tensor of its own on which all that comes later depends, the output included: the gradient
    by it is whole.
    """
    steps: list[State] = [() for _ in range(len(x))]
    outputs: list[Tensor] = [x for _ in range(len(x))]
    inputs = x.unbind(0)  # slices would each pass back a gradient of the length of x
    for t in reversed(range(len(x))) if direction else range(len(x)):
        real = None if sequences.lengths is None else sequences.lengths > t
        _, state = run(layer, direction, inputs[t][None], state, sequences.piece(t, t + 1))
        state = tuple(s.view_as(s) if s.requires_grad else s.detach().requires_grad_() for s in state)
        steps[t] = state
        outputs[t] = state[0] if real is None else torch.where(real[:, None], state[0], 0)
    return torch.stack(outputs), state, steps


def _call(model: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
    """One argument, or a tuple of several."""
    args = inputs if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence) else (inputs,)
    return model(*args, **options)


# --- Gradients through time. ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class StateFlow:
    """The norm of dL/dh_t, or of dL/dc_t, at every step of one layer in one direction during one call."""

    name: str  # of the module inside the model; empty where the model is the layer
    call: int  # counts the calls of one module during one pass of the model
    layer: int
    direction: int  # 0 forward, 1 backward: there the gradient travels towards later times
    state: str  # "h", or "c" of an LSTM
    norms: Tensor  # (T, B), float64 on the CPU; NaN where a sequence has ended

    def quantiles(self, q: Sequence[float] = (0.05, 0.5, 0.95)) -> Tensor:
        """Quantiles over the batch, (len(q), T), NaN at times that no sequence reaches."""
        return _quantiles(self.norms, q)

    @property
    def median(self) -> Tensor:
        """The median over the batch, (T,)."""
        return self.quantiles([0.5])[0]

    def __repr__(self) -> str:
        steps, batch = self.norms.shape
        where = f"{self.name!r}, call {self.call}, layer {self.layer}, {DIRECTIONS[self.direction]}"
        return f"StateFlow({where}, {self.state}: {steps} steps of {batch} sequence(s))"


@dataclass(frozen=True, eq=False, repr=False)
class Flow:
    """The gradients of one loss by the states of all recurrent layers of a model; printed, it is a table."""

    loss: float
    parts: tuple[StateFlow, ...]  # in the order in which the model ran them

    def pick(self, **fields: Any) -> StateFlow:
        """The one part with these values, as in ``pick(layer=1, state="c")``."""
        found = [part for part in self.parts if all(getattr(part, key) == value for key, value in fields.items())]
        if len(found) != 1:
            raise LookupError(f"{len(found)} of {len(self)} parts have {fields}; there are {list(self.parts)}")
        return found[0]

    def __iter__(self) -> Iterator[StateFlow]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> StateFlow:
        return self.parts[index]

    def __repr__(self) -> str:
        return f"Flow(loss={self.loss:.4g}, {len(self)} part(s); print it for the table)"

    def __str__(self) -> str:
        header = ["module", "call", "layer", "direction", "state", "steps", "first", "middle", "last"]
        rows = []
        for part in self.parts:
            median, steps = part.median, len(part.norms)
            numbers = [f"{median[t].item():.3g}" for t in (0, steps // 2, steps - 1)]
            where = [part.name or "-", str(part.call), str(part.layer), DIRECTIONS[part.direction], part.state]
            rows.append([*where, str(steps), *numbers])
        return _table(header, rows) + "\nmedian over the batch of the norm of the gradient"


def flow(model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor], **options: Any) -> Flow:
    """The norm of dL/dh_t at every step, for every recurrent layer, direction and sequence of a model.

    These are whole derivatives: h_t counts with all it brings about, in later steps, in the layers above and
    in the output. The layers run one step at a time on their own engines, so the numbers are exact up to
    rounding; a pass costs what T short calls cost. The model is left as it was, its ``.grad`` included.

    >>> import torch, deepmemory as dm
    >>> rnn = dm.DMU(3, 8, num_layers=2)
    >>> found = dm.gradients.flow(rnn, torch.randn(20, 4, 3), lambda out: out[0][-1].square().sum())
    >>> found[1].norms.shape, found.pick(layer=1).quantiles([0.1, 0.9]).shape
    (torch.Size([20, 4]), torch.Size([2, 20]))

    Args:
        model: Any module with DMU, RHN, RNN, GRU or LSTM layers of this package inside.
        inputs: What the model is called with: one argument, or a tuple of them.
        loss: From what the model returns to a scalar.
        options: Further arguments of the model, by name.

    Of an LSTM both states are told. They count as the next step gets them: dL/dc_t is without the way from
    c_t through h_t of the same step, which is in dL/dh_t.
    """
    _check_contains(model, Recurrent, "flow", "a recurrent layer of deepmemory")
    with torch.enable_grad(), _watch(model, Recurrent, stepwise=True) as watched:
        value = loss(_call(model, inputs, options))
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"flow: loss should give a scalar tensor, got {given}")
    states = [state for record in watched for step in record.steps for state in step]
    if not states or not value.requires_grad:
        raise ValueError("flow: the loss does not depend on any recurrent layer by way of differentiable operations")
    grads = iter(torch.autograd.grad(value, states, allow_unused=True))
    parts = []
    for record in watched:
        found = [[next(grads) for _ in step] for step in record.steps]
        for index, state in enumerate("hc"[: len(record.start)]):
            by_step = zip(found, record.steps, strict=True)
            norms = torch.stack([_norm(grad[index], step[index]) for grad, step in by_step])
            norms = record.tidy(norms.cpu())
            parts.append(StateFlow(record.name, record.call, record.layer, record.direction, state, norms))
    return Flow(value.item(), tuple(parts))


def _norm(grad: Tensor | None, state: Tensor) -> Tensor:
    """Per sequence, in float64: squares of a vanishing float32 gradient would be zero."""
    return torch.linalg.vector_norm(_for_analysis(torch.zeros_like(state) if grad is None else grad), dim=-1)


def _check_contains(model: nn.Module, kind: type[Recurrent], function: str, what: str) -> None:
    if not any(isinstance(module, kind) for module in model.modules()):
        raise ValueError(f"{function}: {type(model).__name__} is not and does not contain {what}")


# --- Gates. -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class LayerGates:
    """sigmoid(z) of one layer in one direction: the share of its state that each unit keeps at each step."""

    name: str  # of the module inside the model; empty where the model is the layer
    call: int
    layer: int
    direction: int
    keep: Tensor  # (T, B, d); NaN where a sequence has ended

    @property
    def mean(self) -> float:
        """Over steps, sequences and units."""
        return self.keep.nanmean(dtype=torch.float64).item()

    def quantiles(self, q: Sequence[float] = (0.05, 0.5, 0.95)) -> Tensor:
        """Over steps, sequences and units together, (len(q),)."""
        return _quantiles(self.keep.flatten(), q)

    def saturated(self, within: float = 0.05) -> tuple[float, float]:
        """Shares of the gates that keep less than ``within``, and that keep more than ``1 - within``."""
        real = self.keep.isfinite().sum().item() or math.nan
        return (self.keep < within).sum().item() / real, (self.keep > 1 - within).sum().item() / real

    def __repr__(self) -> str:
        where = f"{self.name!r}, call {self.call}, layer {self.layer}, {DIRECTIONS[self.direction]}"
        return f"LayerGates({where}: keeps {self.mean:.3g} on average)"


@dataclass(frozen=True, eq=False, repr=False)
class Gates:
    """The gates of all DMU layers of a model; printed, it is a table."""

    parts: tuple[LayerGates, ...]  # in the order in which the model ran them

    def __iter__(self) -> Iterator[LayerGates]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> LayerGates:
        return self.parts[index]

    def __repr__(self) -> str:
        return f"Gates({len(self)} part(s); print it for the table)"

    def __str__(self) -> str:
        header = ["module", "call", "layer", "direction", "mean", "5%", "50%", "95%", "keep < 5%", "keep > 95%"]
        rows = []
        for part in self.parts:
            numbers = [part.mean, *part.quantiles().tolist(), *part.saturated()]
            where = [part.name or "-", str(part.call), str(part.layer), DIRECTIONS[part.direction]]
            rows.append([*where, *(f"{number:.3f}" for number in numbers)])
        return _table(header, rows)


@torch.no_grad()
def gates(model: nn.Module, inputs: Any, **options: Any) -> Gates:
    """What share of its state, sigmoid(z), each DMU layer of a model keeps at each step.

    >>> import torch, deepmemory as dm
    >>> rnn = dm.DMU(3, 8, memory_bias=3.0)
    >>> found = dm.gradients.gates(rnn, torch.randn(20, 4, 3))
    >>> found[0].keep.shape, found[0].mean > 0.8
    (torch.Size([20, 4, 8]), True)
    >>> overwritten, held = found[0].saturated(within=0.1)

    Args:
        model: Any module with DMU layers inside.
        inputs: What the model is called with: one argument, or a tuple of them.
        options: Further arguments of the model, by name.
    """
    _check_contains(model, DMU, "gates", "a DMU")
    for module in model.modules():
        if isinstance(module, DMU):
            _check_definite(module, "gates")
    with _watch(model, DMU, stepwise=False) as watched:
        _call(model, inputs, options)
    modules = dict(model.named_modules())
    parts = []
    for record in watched:
        dmu = modules[record.name]
        assert isinstance(dmu, DMU)
        keep = record.tidy(dmu.zoneout + (1 - dmu.zoneout) * _keep(dmu, record))
        parts.append(LayerGates(record.name, record.call, record.layer, record.direction, keep))
    return Gates(tuple(parts))


def _keep(dmu: DMU, record: _Watched) -> Tensor:
    """sigmoid(z) of all steps at once, from the states that the layer went through."""
    start, y = record.start[0].to(record.y.dtype)[None], record.y
    lengths, resets, *masks = record.sequences
    if not record.direction:
        before = torch.cat([start, y[:-1]])
    else:
        before = torch.cat([y[1:], start])
        if lengths is not None:
            last = torch.arange(len(y), device=y.device)[:, None] == lengths - 1
            before = torch.where(last[..., None], start, before)
    if resets is not None:
        before = before.masked_fill(resets[..., None], 0)
    fitting = Sequences(None, None, *(None if mask is None else mask.to(y.dtype).repeat(len(y), 1) for mask in masks))
    transition = _transition(dmu, record.layer, record.direction, fitting)  # which may be a module for a batch of rows
    transformed = transition(record.x.to(y.dtype).flatten(0, 1), before.flatten(0, 1))
    return torch.sigmoid(transformed[..., : y.shape[-1]]).unflatten(0, y.shape[:2])


# --- Numbers and tables. ----------------------------------------------------------------------------------


def _quantiles(values: Tensor, q: Sequence[float]) -> Tensor:
    """Quantiles (len(q), ...) over the last dimension, NaN left out; torch's own stop at 16 million values."""
    if not all(0 <= share <= 1 for share in q):
        raise ValueError(f"quantiles: expected numbers between 0 and 1, got {list(q)}")
    count = (~values.isnan()).sum(-1, keepdim=True)
    ordered = values.sort(dim=-1).values  # NaN comes last
    found = []
    for share in q:
        place = share * (count - 1).clamp(min=0).double()
        low = place.floor().long()
        high = torch.minimum(low + 1, (count - 1).clamp(min=0))
        below, above = ordered.gather(-1, low), ordered.gather(-1, high)
        found.append(torch.where(low == high, below, torch.lerp(below, above, (place - low).to(below.dtype)))[..., 0])
    return torch.stack(found)


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Columns aligned to the left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
