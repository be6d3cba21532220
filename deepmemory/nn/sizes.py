"""The hidden size at which two layers have equally many weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

SHARED = ("input_size", "num_layers", "bias", "bidirectional")  # arguments that a layer takes over from another


def matched_hidden_size(layer: Callable[..., nn.Module], like: nn.Module, **options: Any) -> int:
    """The hidden size at which a layer comes closest to another one's number of weights.

    Layers of equal size differ in weights: a GRU has three matrices for each state, an LSTM four, a DMU as many as its
    transition needs. A comparison is fair at equal weights.

    >>> import torch, deepmemory as dm
    >>> gru = torch.nn.GRU(10, 64, num_layers=2)
    >>> size = dm.matched_hidden_size(dm.DMU, gru)
    >>> dmu = dm.DMU(10, size, num_layers=2)
    >>> size, *(sum(weight.numel() for weight in layer.parameters()) for layer in (gru, dmu))
    (74, 39552, 39516)

    Args:
        layer: Class of a recurrent layer or cell, of this library or of ``torch.nn``.
        like: The layer or cell to be matched. Its input size, number of layers, bias and directions are used.
        options: Further arguments of ``layer``, such as ``transition=[64, 64]``; they come before those of ``like``.
    """
    if not isinstance(like, nn.Module) or not hasattr(like, "input_size"):
        raise TypeError(
            "matched_hidden_size: like should be a recurrent layer, as in "
            f"matched_hidden_size(dm.DMU, nn.GRU(10, 64)), got: {type(like).__name__}"
        )
    shared = {name: getattr(like, name) for name in SHARED if hasattr(like, name)}
    arguments = {**shared, **options, "device": "meta"}  # no memory, however large the layer is
    input_size, wanted = arguments.pop("input_size"), weight_count(like)

    def count(size: int) -> int:
        return weight_count(layer(input_size, size, **arguments))

    low, high = 1, 2
    while count(high) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < wanted else (low, middle)
    return min((low, high), key=lambda size: abs(count(size) - wanted))


def weight_count(module: nn.Module) -> int:
    """How many weights a module has."""
    return sum(parameter.numel() for parameter in module.parameters())
