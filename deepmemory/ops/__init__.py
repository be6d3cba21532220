"""The recurrences as functions: one meaning, several engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deepmemory.ops import engines, fused, plain
from deepmemory.ops.recurrence import ACTIVATIONS, CELLS, Recurrence, Variation

__all__ = ["ACTIVATIONS", "CELLS", "Recurrence", "Variation", "scan"]


# Devices that have autocast; asked here, since older torch cannot ask inside a compiled graph.
AUTOCAST = tuple(device for device in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(device))


def scan(
    rec: Recurrence,
    x: Tensor,
    state: tuple[Tensor, ...],
    weights: list[Tensor],
    lengths: Tensor | None = None,
    *,
    engine: str = "auto",
    recompute: bool = False,
    variation: Variation | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in one direction over time: x (T, B, m), each state (B, d) to y (T, B, d), final state.

    ``weights`` are laid out as :class:`Recurrence` says. Step t of sequence b is real while
    ``t < lengths[b]``; past it the state stays as it is and y is zero. ``recompute`` stores only a few
    states and computes the rest again in the backward pass. ``variation`` is for the plain engine.
    """
    device = x.device.type
    if device in AUTOCAST and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)

        def lowered(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [t if t.dtype is torch.float64 else t.to(dtype) for t in tensors]

        x, *low_state = lowered((x, *state))
        with torch.autocast(device, enabled=False):
            if not engines.takes_as_they_are(engine, rec, x, weights, variation):
                weights = lowered(weights)
            options: dict[str, Any] = {"engine": engine, "recompute": recompute, "variation": variation}
            return scan(rec, x, tuple(low_state), weights, lengths, **options)
    name = engines.choose(engine, rec, x, weights, variation)
    if name == "plain":
        return plain.scan(rec, x, state, weights, lengths, variation)
    return fused.scan(rec, name, recompute, x, state, weights, lengths)
