"""The gradient of a loss with respect to every state of every recurrent layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepmemory.gradients.observation import call, check_contains, observe
from deepmemory.gradients.summary import CALL_COLUMNS, LayerCall, Parts, quantiles, table
from deepmemory.gradients.transition import for_analysis
from deepmemory.nn.recurrent import Recurrent


@dataclass(frozen=True, eq=False, repr=False)
class StateFlow(LayerCall):
    """The norm of dL/dh_t, or of dL/dc_t, at every step of one layer in one direction during one call."""

    state: str  # "h", or "c" of an LSTM
    norms: Tensor  # (T, B), float64 on the CPU; NaN where a sequence has ended

    def quantiles(self, q: Sequence[float] = (0.05, 0.5, 0.95)) -> Tensor:
        """Quantiles (len(q), T) over the batch; NaN at steps that no sequence reaches."""
        return quantiles(self.norms, q)

    @property
    def median(self) -> Tensor:
        """The median over the batch, (T,)."""
        return self.quantiles([0.5])[0]

    def __repr__(self) -> str:
        steps, batch = self.norms.shape
        return f"StateFlow({self}, {self.state}: {steps} steps of {batch} sequence(s))"


@dataclass(frozen=True, eq=False, repr=False)
class Flow(Parts[StateFlow]):
    """The gradients of a loss with respect to the states of all recurrent layers; prints as a table."""

    loss: float

    def pick(self, **fields: Any) -> StateFlow:
        """Return the only part with these values, as in ``pick(layer=1, state="c")``."""
        found = [part for part in self if all(getattr(part, key) == value for key, value in fields.items())]
        if len(found) != 1:
            raise LookupError(
                f"{len(found)} of {len(self)} parts have {fields}, expected one; the parts are {list(self)}"
            )
        return found[0]

    def __str__(self) -> str:
        rows = []
        for part in self:
            median, steps = part.median, len(part.norms)
            numbers = [f"{median[t].item():.3g}" for t in (0, steps // 2, steps - 1)]
            rows.append([*part.cells, part.state, str(steps), *numbers])
        header = [*CALL_COLUMNS, "state", "steps", "first", "middle", "last"]
        return table(header, rows) + "\nmedian over the batch of the norm of the gradient"


def flow(model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor], **options: Any) -> Flow:
    """The norm of dL/dh_t at every step, for every recurrent layer, direction and sequence of a model.

    These are total derivatives: they include the paths through later steps, the layers above and the output. The
    layers run one step at a time on their own engines, so the numbers are exact up to rounding, and a pass costs as
    much as T calls with one step each. The model and its ``.grad`` are not changed.

    >>> import torch, deepmemory as dm
    >>> rnn = dm.DMU(3, 8, num_layers=2)
    >>> found = dm.gradients.flow(rnn, torch.randn(20, 4, 3), lambda out: out[0][-1].square().sum())
    >>> found[1].norms.shape, found.pick(layer=1).quantiles([0.1, 0.9]).shape
    (torch.Size([20, 4]), torch.Size([2, 20]))

    Args:
        model: A DMU, RHN, RNN, GRU or LSTM of this package, or any module that contains such layers.
        inputs: Input of the model: one argument, or a tuple of several.
        loss: Function from the output of the model to a scalar.
        options: Keyword arguments of the model.

    An LSTM has two states, h and c. They are taken as the next step receives them: dL/dc_t leaves out the path from
    c_t through h_t of the same step, which is part of dL/dh_t.
    """
    check_contains(model, Recurrent, "flow", "a recurrent layer of deepmemory")
    with torch.enable_grad(), observe(model, Recurrent, stepwise=True) as observed:
        value = loss(call(model, inputs, options))
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"flow: loss should return a scalar tensor, got {given}")
    states = [state for record in observed for step in record.steps for state in step]
    if not states or not value.requires_grad:
        raise ValueError(
            "flow: the loss does not depend on any recurrent layer through differentiable operations; compute it from "
            "the output of the model, without detach() or no_grad()"
        )
    grads = iter(torch.autograd.grad(value, states, allow_unused=True))
    parts = []
    for record in observed:
        by_step = [[norm(next(grads), state) for state in step] for step in record.steps]
        for state, norms in zip("hc", zip(*by_step, strict=True), strict=False):
            found = record.in_order(torch.stack(norms).cpu())
            parts.append(StateFlow(record.name, record.call, record.layer, record.direction, state, found))
    return Flow(tuple(parts), value.item())


def norm(grad: Tensor | None, state: Tensor) -> Tensor:
    """The norm for each sequence, in float64: squares of a vanishing gradient would underflow in float32."""
    return torch.linalg.vector_norm(for_analysis(torch.zeros_like(state) if grad is None else grad), dim=-1)
