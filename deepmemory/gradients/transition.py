"""A DMU's transition for analysis: as weights or as a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepmemory.nn.dmu import DMU, DMUCell, check_listed, joined_weights
from deepmemory.ops import Sequences, plain
from deepmemory.ops.recurrence import FULL_LENGTH


def places(dmu: DMU | DMUCell) -> list[tuple[int, int]]:
    """All pairs (layer, direction) of a module."""
    if isinstance(dmu, DMUCell):
        return [(0, 0)]
    return [(layer, direction) for layer in range(dmu.num_layers) for direction in range(dmu._directions)]


def sizes(dmu: DMU | DMUCell, layer: int) -> tuple[int, int]:
    """Number of features of the layer's input and of its state."""
    if isinstance(dmu, DMUCell):
        return dmu.input_size, dmu.hidden_size
    return dmu._layer_input_size(layer), dmu._widths[layer]


def dense_layers(dmu: DMU | DMUCell, layer: int, direction: int) -> list[tuple[Tensor, Tensor | None]]:
    """The feedforward network as (weight, bias) pairs."""
    if isinstance(dmu, DMU):
        return dmu.transition_weights(layer, direction)
    check_place(dmu, layer, direction)
    check_listed(dmu)
    return joined_weights([getattr(dmu, name) for name in dmu._names], dmu.bias)


def transition_of(
    dmu: DMU | DMUCell, layer: int, direction: int, sequences: Sequences = FULL_LENGTH
) -> Callable[[Tensor, Tensor], Tensor]:
    """The function from x (..., m) and h (..., d) to [z, candidate], with the masks of ``sequences``."""
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
        return plain.dmu_transition(rec, projected, h, fitting, sequences)

    return dense


def check_place(dmu: DMU | DMUCell, layer: int, direction: int) -> None:
    """Raise if there is no such layer or direction."""
    if (layer, direction) not in places(dmu):
        raise IndexError(f"{type(dmu).__name__}: no layer {layer}, direction {direction}")


def check_deterministic(dmu: DMU | DMUCell, what: str) -> None:
    """Raise if dropout makes the steps random: a random step has no single Jacobian and no single gate."""
    if dmu.training and isinstance(dmu, DMU) and (dmu.recurrent_dropout or dmu.transition_dropout):
        raise ValueError(f"{what}: dropout makes this DMU's steps random; call .eval() first")


def for_analysis(tensor: Tensor) -> Tensor:
    """A copy in float64; on the CPU if the tensor is on an Apple GPU, which has no float64."""
    device = "cpu" if tensor.device.type == "mps" else tensor.device
    return tensor.detach().to(device, torch.float64, copy=True)
