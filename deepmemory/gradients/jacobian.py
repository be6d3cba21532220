"""The Jacobian of one step of a DMU, in the paper's three terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmemory.gradients.transition import check_deterministic, check_place, dense_layers, sizes, transition_of
from deepmemory.nn.dmu import DMU, DMUCell, is_dense
from deepmemory.ops.plain import ACTIVATION


@dataclass(frozen=True, eq=False)
class StepJacobian:
    """dh_t[i] / dh_t-1[j] in the paper's three terms, each (d, d) or (B, d, d)."""

    kept: Tensor  # diag(s), s = sigmoid(z): the state that is kept
    gate: Tensor  # diag((h - tanh(candidate)) * s * (1 - s)) dz/dh: the gate that moves
    candidate: Tensor  # diag(tanh'(candidate) * (1 - s)) dcandidate/dh: the candidate that moves

    @property
    def total(self) -> Tensor:
        """The whole Jacobian, the sum of the three terms."""
        return self.kept + self.gate + self.candidate

    def __repr__(self) -> str:
        terms = ", ".join(
            f"|{name}|={torch.linalg.matrix_norm(getattr(self, name), 2).max().item():.3g}"
            for name in ("kept", "gate", "candidate", "total")
        )
        return f"StepJacobian({tuple(self.kept.shape)}, {terms})"


@torch.no_grad()
def step_jacobian(dmu: DMU | DMUCell, x: Tensor, h: Tensor, layer: int = 0, direction: int = 0) -> StepJacobian:
    """The exact Jacobian of one step with respect to the state before it, split as in the paper.

    Row i, column j holds dh_t[i] / dh_t-1[j]; gradients flow back as ``dL/dh_t @ J``. The paper writes the transpose.

    >>> import torch, deepmemory as dm
    >>> dmu = dm.DMU(3, 4, memory_bias=3.0)
    >>> step = dm.gradients.step_jacobian(dmu, torch.randn(3), torch.zeros(4))
    >>> step.total.shape
    torch.Size([4, 4])
    >>> bool((step.kept.diagonal() > 0.5).all())
    True

    Args:
        dmu: A layer or a cell, with any transition.
        x: The layer's input at this step: (m,) or (B, m). Above the first layer, it is the output of the layer below.
        h: The state before the step: (d,) or (B, d).
        layer: Index of the layer.
        direction: 0 forward, 1 backward.
    """
    check_place(dmu, layer, direction)
    check_deterministic(dmu, "step_jacobian")
    inputs, d = sizes(dmu, layer)
    if x.dim() not in (1, 2) or x.shape[:-1] != h.shape[:-1] or (x.shape[-1], h.shape[-1]) != (inputs, d):
        raise ValueError(
            f"step_jacobian: expected x ({inputs},) and h ({d},), or both with a leading batch dimension, "
            f"got {tuple(x.shape)} and {tuple(h.shape)}"
        )
    batched = x.dim() == 2
    x, h = (x, h) if batched else (x[None], h[None])
    if is_dense(dmu):
        z, candidate, by_state = dense_derivative(dmu, x, h, layer, direction)
    else:
        transition = transition_of(dmu, layer, direction)
        z, candidate = transition(x, h).chunk(2, -1)
        by_state = torch.func.vmap(torch.func.jacrev(transition, 1), randomness="different")(x, h)
    z_by_state, candidate_by_state = by_state.chunk(2, -2)
    keep, new = torch.sigmoid(z), torch.tanh(candidate)
    terms = (
        keep.diag_embed(),
        ((h - new) * keep * (1 - keep))[..., None] * z_by_state,
        ((1 - new**2) * (1 - keep))[..., None] * candidate_by_state,
    )
    return StepJacobian(*(term if batched else term[0] for term in terms))


def dense_derivative(
    dmu: DMU | DMUCell, x: Tensor, h: Tensor, layer: int, direction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """z, the candidate and the derivative (B, 2d, d) of both with respect to the state."""
    (weight, bias), *deeper = dense_layers(dmu, layer, direction)
    a = F.linear(torch.cat([x, h], -1), weight, bias)
    by_state = weight[:, -h.shape[-1] :].expand(len(x), -1, -1)
    for weight, bias in deeper:
        value, slope = activate(dmu.activation, a)
        by_state = weight @ (slope[..., None] * by_state)
        a = F.linear(value, weight, bias)
    z, candidate = a.chunk(2, -1)
    return z, candidate, by_state


def activate(activation: str, a: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden activation and its slope."""
    with torch.enable_grad():
        a = a.detach().requires_grad_()
        value = ACTIVATION[activation](a)
        (slope,) = torch.autograd.grad(value.sum(), a)
    return value.detach(), slope
