"""The hidden size at which two layers, or two models, have the same number of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

SHARED = ("input_size", "num_layers", "bias", "bidirectional")  # arguments copied from the layer to be matched


def matched_hidden_size(layer: Callable[..., nn.Module], like: nn.Module | Sequence[nn.Module], **options: Any) -> int:
    """Find the hidden size at which a layer comes closest to the number of weights of another layer.

    Layers of the same hidden size have different numbers of weights: a GRU has three matrices for its state, an LSTM
    four, a DMU as many as its transition needs. Layers should be compared at equal numbers of weights.

    >>> import torch, deepmemory as dm
    >>> gru = torch.nn.GRU(10, 64, num_layers=2)
    >>> size = dm.matched_hidden_size(dm.DMU, gru)
    >>> dmu = dm.DMU(10, size, num_layers=2)
    >>> size, *(sum(weight.numel() for weight in layer.parameters()) for layer in (gru, dmu))
    (74, 39552, 39516)

    Several layers, such as an encoder and a decoder, can share one size. Their total number of weights is matched:

    >>> dm.matched_hidden_size(dm.DMU, [torch.nn.GRU(10, 64), torch.nn.GRU(24, 64)])
    70

    If other sizes depend on the hidden size, as in stacked cells or an output layer, pass a function that builds the
    model from its hidden size:

    >>> old = torch.nn.ModuleList([torch.nn.GRUCell(10, 64), torch.nn.GRUCell(64, 64), torch.nn.Linear(64, 50)])
    >>> def model(size):
    ...     return torch.nn.ModuleList([dm.DMUCell(10, size), dm.DMUCell(size, size), torch.nn.Linear(size, 50)])
    >>> dm.matched_hidden_size(model, old)
    74

    Args:
        layer: Class of a recurrent layer or cell, from this library or ``torch.nn``, or a function that builds any kind
            of module from a hidden size. The modules are built on torch's ``meta`` device, which uses no memory.
        like: The layer or cell to be matched, or several. A class is built with the input size, number of layers, bias
            and directions of each of them; with a function, ``like`` can be any module.
        options: Further arguments of ``layer``, such as ``transition=[64, 64]``; they override those of ``like``.
    """
    models: list[Any] = list(like) if isinstance(like, nn.ModuleList | list | tuple) else [like]
    whole = not isinstance(layer, type)
    if isinstance(layer, nn.Module):
        name = type(layer).__name__
        raise TypeError(
            f"matched_hidden_size: layer should be a class, or a function that builds a module from a hidden size, got "
            f"a module: {name}; call it as in matched_hidden_size(dm.{name}, nn.GRU(10, 64))"
        )
    if not models or not all(isinstance(one, nn.Module) and (whole or hasattr(one, "input_size")) for one in models):
        given = ", ".join(type(one).__name__ for one in models) or "none"
        raise TypeError(
            f"matched_hidden_size: like should be a recurrent layer or several, got: {given}; call it as in "
            "matched_hidden_size(dm.DMU, nn.GRU(10, 64)), or pass a function that builds a model from a hidden size"
        )
    wanted = sum(map(weight_count, models))

    def count(size: int) -> int:
        with torch.device("meta"):  # no memory, however large the layer is
            if whole:
                return weight_count(layer(size, **options))
            return sum(weight_count(made_like(one, size)) for one in models)

    def made_like(one: nn.Module, size: int) -> nn.Module:
        arguments = {name: getattr(one, name) for name in SHARED if hasattr(one, name)} | options
        return layer(arguments.pop("input_size"), size, **arguments)

    low, high = 1, 2
    while count(high) < wanted:
        if count(high) <= count(low):
            raise ValueError(
                f"matched_hidden_size: size {high} has no more weights than size {low}: {count(high)}; "
                "the function should build a module whose number of weights grows with the size"
            )
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < wanted else (low, middle)
    return min((low, high), key=lambda size: abs(count(size) - wanted))


def weight_count(module: nn.Module) -> int:
    """The number of weights in a module."""
    return sum(parameter.numel() for parameter in module.parameters())
