"""The recurrences as functions: one definition, several engines."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deepmemory.ops import engines, fused, plain
from deepmemory.ops.recurrence import (
    ACTIVATIONS,
    CELLS,
    FULL_LENGTH,
    Recurrence,
    Sequences,
    Zeros,
    resets_of_sweep,
)

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "Recurrence",
    "Sequences",
    "Zeros",
    "resets_of_sweep",
    "scan",
]


# Devices that have autocast; determined here, because older torch cannot do so inside a compiled graph.
AUTOCAST = tuple(device for device in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(device))


def scan(
    rec: Recurrence,
    x: Tensor,
    state: tuple[Tensor, ...] | Zeros,
    weights: list[Tensor],
    sequences: Sequences = FULL_LENGTH,
    *,
    engine: str = "auto",
    recompute: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in one direction over time: from x (T, B, m) and states (B, d) to y (T, B, d) and final states.

    ``weights`` are laid out as :class:`Recurrence` says, and ``sequences`` holds lengths, resets and masks, which are
    constants: no gradient flows to them. ``recompute`` stores only a few states and recomputes the rest in the
    backward pass.
    """
    if sequences.hidden_mask is not None:
        rec = rec._replace(masked=True)
    if sequences.state_mask is not None or sequences.hidden_mask is not None:
        sequences = with_constant_masks(rec, sequences)
    device = x.device.type
    if device in AUTOCAST and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)

        def lowered(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [t if t.dtype is torch.float64 else t.to(dtype) for t in tensors]

        (x,) = lowered((x,))
        low_state = state if isinstance(state, Zeros) else tuple(lowered(state))
        lengths, resets, *masks = sequences
        sequences = Sequences(lengths, resets, *(None if mask is None else mask.to(x.dtype) for mask in masks))
        with torch.autocast(device, enabled=False):
            if not engines.reads_as_they_are(engine, rec, x, weights):
                weights = lowered(weights)
            return scan(rec, x, low_state, weights, sequences, engine=engine, recompute=recompute)
    name = engines.choose(engine, rec, x, weights)
    if isinstance(state, Zeros):
        state = starting_state(state, name, x, weights)
    if name == "plain":
        return plain.scan(rec, x, state, weights, sequences)
    return fused.scan(rec, name, recompute, x, state, weights, sequences)


def starting_state(zeros: Zeros, engine: str, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """Zeros as tensors: without memory, which no kernel has to fill, if only an engine that supports it reads them."""
    shapes = [(x.shape[-2], width) for width in zeros.widths]
    if engine == "plain" or not engines.FUSED[engine].reads_zeros or fused.is_seen((x, *weights)):
        return tuple([x.new_zeros(shape) for shape in shapes])
    return tuple([torch._efficientzerotensor(shape, dtype=x.dtype, device=x.device) for shape in shapes])


def with_constant_masks(rec: Recurrence, sequences: Sequences) -> Sequences:
    """Detach the masks, which are constants in every derivative; raise if one requires a gradient."""
    lengths, resets, *masks = sequences
    if any(mask is not None and mask.requires_grad for mask in masks):
        raise RuntimeError(
            f"{rec.cell.upper()}: masks are constants, and one of them requires a gradient; pass mask.detach()"
        )
    return Sequences(lengths, resets, *(None if mask is None else mask.detach() for mask in masks))
