"""Condition (star) of the paper: eigenvalues of the weights between one state and the next, and a guaranteed bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from deepmemory.gradients.summary import DIRECTIONS, Parts, table
from deepmemory.gradients.transition import dense_layers, for_analysis, places, sizes
from deepmemory.nn.dmu import DMU, DMUCell

GATE_LIMIT, CANDIDATE_LIMIT = 0.5, 1.0  # limits of the eigenvalues towards z and towards the candidate
RADIUS_TOLERANCE = 1e-5  # relative, of an iterated spectral radius
MOST_SQUARINGS = 40
SCALE_ITERATIONS = 30
# Largest slope of the hidden activations; it is 1 for the others.
SLOPE = {"silu": 1.0998393202, "gelu": (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi)}


@dataclass(frozen=True, eq=False, repr=False)
class Passage:
    """The matrices from the state to z, or to the candidate, and their product (d, d), without activations.

    Everything is computed on first access, in float64, from a copy of the weights.
    """

    factors: tuple[Tensor, ...]  # in the order in which they are applied to the state
    limit: float  # of the eigenvalues in the paper: 1/2 towards z, 1 towards the candidate

    @cached_property
    def matrix(self) -> Tensor:
        """The product (d, d), which maps a change of the state to a change of z (or of the candidate)."""
        return product(self.factors)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """All d eigenvalues (complex), largest first, exact up to rounding; costs O(w^3) for the narrowest width w."""
        found = torch.linalg.eigvals(self._core)
        zeros = found.new_zeros(self.factors[0].shape[1] - len(found))
        return torch.cat([found[found.abs().argsort(descending=True)], zeros])

    @cached_property
    def radius(self) -> float:
        """The spectral radius, found by iteration: never below the true value, and above it by about 1e-5.

        ``|M^p| ** (1 / p)`` bounds the radius from above for every p and decreases as p doubles. This takes about
        twenty matrix products and needs no gap between eigenvalues.
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
        """How far the radius is below its limit; negative if it is above."""
        return self.limit - self.radius

    @property
    def norm_margin(self) -> float:
        """How far the spectral norm is below the same limit; negative if it is above."""
        return self.limit - self.norm

    @property
    def satisfied(self) -> bool:
        """Whether the modulus of every eigenvalue is below the limit."""
        return self.margin > 0

    @cached_property
    def _core(self) -> Tensor:
        """The product of the factors, rotated to start at the narrowest width: the same eigenvalues except zeros."""
        widths = [factor.shape[1] for factor in self.factors]
        start = widths.index(min(widths))
        return product(self.factors[start:] + self.factors[:start]) if start else self.matrix

    def __repr__(self) -> str:
        widths = " -> ".join(str(n) for n in (self.factors[0].shape[1], *(f.shape[0] for f in self.factors)))
        return f"Passage({widths}, limit={self.limit})"


def product(factors: Sequence[Tensor]) -> Tensor:
    """The last factor times ... times the first."""
    return factors[0] if len(factors) == 1 else torch.linalg.multi_dot(list(factors[::-1]))


@dataclass(frozen=True, eq=False)
class LayerCondition:
    """Condition (star) for one layer in one direction, and a bound that holds for every input."""

    layer: int
    direction: int  # 0 forward, 1 backward
    gate: Passage  # from the state to z
    candidate: Passage  # from the state to the candidate
    slope: float = field(repr=False)  # largest slope of the hidden activation

    @property
    def satisfied(self) -> bool:
        """The paper's condition: eigenvalues below 1/2 towards z and below 1 towards the candidate."""
        return self.gate.satisfied and self.candidate.satisfied

    @property
    def growth(self) -> float:
        """One step back in time multiplies ``sum(scale * abs(dL/dh))`` by at most ``max(1, growth)``.

        The bound holds for every input and every state in [-1, 1]; it is computed from absolute values of weights.
        """
        return self._bound[0]

    @property
    def scale(self) -> Tensor:
        """The positive weights (d,) in the sum that :attr:`growth` bounds; the largest is 1."""
        return self._bound[1]

    @property
    def never_grows(self) -> bool:
        """Whether ``sum(scale * abs(dL/dh))`` provably never grows on its way back in time, for any input."""
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
            growth = row_growth(gate, candidate).max().item()
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
        """The layer's two rows in the table of :class:`Condition`."""
        rows = []
        for name, passage in (("z", self.gate), ("candidate", self.candidate)):
            numbers = (passage.radius, passage.limit, passage.margin, passage.norm)
            where = [str(self.layer), DIRECTIONS[self.direction], name]
            rows.append([*where, *(f"{number:.4g}" for number in numbers), "yes" if passage.satisfied else "no"])
        return rows


def row_growth(gate: Tensor, candidate: Tensor) -> Tensor:
    """The maximum of ``(1 + u) * gate + (1 - u ** 2) * candidate`` over u in [0, 1]; u stands for abs(tanh)."""
    inner = candidate + gate + gate**2 / (4 * candidate)
    return torch.where(gate < 2 * candidate, inner, 2 * gate)


@dataclass(frozen=True, eq=False, repr=False)
class Condition(Parts[LayerCondition]):
    """Condition (star) for every layer and direction of a DMU; prints as a table."""

    @property
    def satisfied(self) -> bool:
        """Whether the paper's condition holds in every layer and direction."""
        return all(layer.satisfied for layer in self)

    @property
    def never_grows(self) -> bool:
        """Whether the gradient provably never grows from step to step, in every layer and direction."""
        return all(layer.never_grows for layer in self)

    def __str__(self) -> str:
        header = ["layer", "direction", "matrix", "radius", "limit", "margin", "norm", "inside"]
        worst = max(layer.growth for layer in self)
        return "\n".join(
            [
                table(header, [row for layer in self for row in layer.rows]),
                f"condition (star): {'satisfied' if self.satisfied else 'not satisfied'}",
                f"bound for every input: {worst:.4g} per step, " + ("never grows" if self.never_grows else "may grow"),
            ]
        )


def condition(dmu: DMU | DMUCell) -> Condition:
    """Check condition (star) of the paper for every layer and direction.

    The state is multiplied by the recurrent part of the first weight matrix, then by the matrices of the hidden
    layers, then by the rows of the last matrix that give z or the candidate. (star) requires the eigenvalues of the
    two products to be below 1/2 and 1. It considers the linear parts only and is neither necessary nor sufficient for
    a gradient that does not grow; :attr:`LayerCondition.growth` is a guaranteed bound.

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
        dmu: A layer or a cell with a dense transition. A transition given as a module has no such matrices.
    """
    if not isinstance(dmu, DMU | DMUCell):
        raise TypeError(f"condition: expected a DMU or a DMUCell, got {type(dmu).__name__}")
    slope = SLOPE.get(dmu.activation, 1.0)
    found = []
    for layer, direction in places(dmu):
        weights = [for_analysis(weight) for weight, _ in dense_layers(dmu, layer, direction)]
        last = weights.pop() if len(weights) > 1 else None
        _, d = sizes(dmu, layer)
        recurrent = weights[0][:, -d:]
        shared = () if last is None else (recurrent, *weights[1:])
        to_gate, to_candidate = (recurrent if last is None else last).split(d)
        gate = Passage((*shared, to_gate), GATE_LIMIT)
        candidate = Passage((*shared, to_candidate), CANDIDATE_LIMIT)
        found.append(LayerCondition(layer, direction, gate, candidate, slope))
    return Condition(tuple(found))
