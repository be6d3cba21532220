"""The share of its state that a DMU keeps at each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepmemory.gradients.observation import Observed, call, check_contains, observe
from deepmemory.gradients.summary import CALL_COLUMNS, LayerCall, Parts, quantiles, table
from deepmemory.gradients.transition import check_deterministic, transition_of
from deepmemory.nn.dmu import DMU
from deepmemory.ops import Sequences


@dataclass(frozen=True, eq=False, repr=False)
class LayerGates(LayerCall):
    """sigmoid(z) of one layer in one direction: the share of its state that each unit keeps at each step."""

    keep: Tensor  # (T, B, d); NaN where a sequence has ended

    @property
    def mean(self) -> float:
        """The mean over steps, sequences and units."""
        return self.keep.nanmean(dtype=torch.float64).item()

    def quantiles(self, q: Sequence[float] = (0.05, 0.5, 0.95)) -> Tensor:
        """Quantiles (len(q),) over all steps, sequences and units."""
        return quantiles(self.keep.flatten(), q)

    def saturated(self, within: float = 0.05) -> tuple[float, float]:
        """The shares of gates that keep less than ``within``, and more than ``1 - within``."""
        real = self.keep.isfinite().sum().item() or math.nan
        return (self.keep < within).sum().item() / real, (self.keep > 1 - within).sum().item() / real

    def __repr__(self) -> str:
        return f"LayerGates({self}: keeps {self.mean:.3g} on average)"


@dataclass(frozen=True, eq=False, repr=False)
class Gates(Parts[LayerGates]):
    """The gates of all DMU layers of a model; prints as a table."""

    def __str__(self) -> str:
        header = [*CALL_COLUMNS, "mean", "5%", "50%", "95%", "keep < 5%", "keep > 95%"]
        numbers = [[part.mean, *part.quantiles().tolist(), *part.saturated()] for part in self]
        rows = [[*part.cells, *(f"{number:.3f}" for number in of)] for part, of in zip(self, numbers, strict=True)]
        return table(header, rows)


@torch.no_grad()
def gates(model: nn.Module, inputs: Any, **options: Any) -> Gates:
    """The share of its state, sigmoid(z), that each DMU layer of a model keeps at each step.

    >>> import torch, deepmemory as dm
    >>> rnn = dm.DMU(3, 8, memory_bias=3.0)
    >>> found = dm.gradients.gates(rnn, torch.randn(20, 4, 3))
    >>> found[0].keep.shape, found[0].mean > 0.8
    (torch.Size([20, 4, 8]), True)
    >>> overwritten, held = found[0].saturated(within=0.1)

    Args:
        model: A DMU, or any module that contains DMU layers.
        inputs: Input of the model: one argument, or a tuple of several.
        options: Keyword arguments of the model.
    """
    check_contains(model, DMU, "gates", "a DMU")
    dmus = {name: module for name, module in model.named_modules() if isinstance(module, DMU)}
    for dmu in dmus.values():
        check_deterministic(dmu, "gates")
    with observe(model, DMU, stepwise=False) as observed:
        call(model, inputs, options)
    parts = []
    for record in observed:
        dmu = dmus[record.name]
        keep = record.in_order(keep_shares(dmu, record))
        parts.append(LayerGates(record.name, record.call, record.layer, record.direction, keep))
    return Gates(tuple(parts))


def keep_shares(dmu: DMU, record: Observed) -> Tensor:
    """sigmoid(z) of all steps at once, from the recorded states."""
    y, steps = record.y, len(record.y)
    masks = (None if mask is None else mask.to(y.dtype).repeat(steps, 1) for mask in record.sequences[2:])
    # A transition given as a module may accept only two-dimensional input.
    transition = transition_of(dmu, record.layer, record.direction, Sequences(None, None, *masks))
    transformed = transition(record.x.to(y.dtype).flatten(0, 1), record.states_before().flatten(0, 1))
    return torch.sigmoid(transformed[..., : y.shape[-1]]).unflatten(0, y.shape[:2])
