"""A DMU's transition as the tools see it: its weights, or the module given in their place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepmemory.nn.dmu import DMU, DMUCell, check_listed, joined_weights


def places(dmu: DMU | DMUCell) -> list[tuple[int, int]]:
    """Every (layer, direction)."""
    if isinstance(dmu, DMUCell):
        return [(0, 0)]
    return [(layer, direction) for layer in range(dmu.num_layers) for direction in range(dmu._directions)]


def sizes(dmu: DMU | DMUCell, layer: int) -> tuple[int, int]:
    """Features of the layer's input, and of its state."""
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


def given_module(dmu: DMU | DMUCell, layer: int, direction: int) -> nn.Module | None:
    """The transition, where it was given as a module."""
    if isinstance(dmu, DMU):
        given = dmu.transition
        return given[layer * dmu._directions + direction] if isinstance(given, nn.ModuleList) else None
    return dmu.transition if isinstance(dmu.transition, nn.Module) else None


def check_place(dmu: DMU | DMUCell, layer: int, direction: int) -> None:
    """Raise where there is no such layer or direction."""
    if (layer, direction) not in places(dmu):
        raise IndexError(f"{type(dmu).__name__}: no layer {layer}, direction {direction}")


def check_deterministic(dmu: DMU | DMUCell, what: str) -> None:
    """Raise where steps are random: such a step has no single Jacobian and no single gate."""
    if dmu.training and (dmu.zoneout or (isinstance(dmu, DMU) and dmu.recurrent_dropout)):
        raise ValueError(f"{what}: zoneout and recurrent_dropout make this DMU's steps random; call .eval() first")


def for_analysis(tensor: Tensor) -> Tensor:
    """A copy in float64, on the CPU where the device is Apple's GPU, which has no float64."""
    device = "cpu" if tensor.device.type == "mps" else tensor.device
    return tensor.detach().to(device, torch.float64, copy=True)
