"""The layout: where a step's linear layers are among the weights, and their features in the trace and the deltas.

A sweep is the part that loops over time. The sweeps leave two records, both (R, T, B, features):

*trace*, from the forward sweep, with the features of a step in this order:

====  ==================================================================================================
dmu   hidden activations a_1 ... a_n-1; with ``needs_slopes`` their slopes, mask * f'; z; tanh(candidate)
rhn   for each micro-layer tanh(candidate), sigmoid(transform); then s_1 ... s_n-1
rnn   nothing: y is enough
gru   r, z, n, W_hn h + b_hn
lstm  i, f, g, o, c
====  ==================================================================================================

*deltas*, from the backward sweep: the gradient of the loss with respect to the output of each linear layer, zero in
the padding:

====  ==================================================================================================
dmu   of layer 1, ..., of layer n
rhn   of micro-layer 1, ..., of micro-layer n
rnn   of the sum inside the activation
gru   of r, z, n before their activation, then of W_hn h + b_hn
lstm  of i, f, g, o before their activation
====  ==================================================================================================

``nvrtc/layout.cuh`` is the same layout in CUDA. The CPU engine has its own trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from deepmemory.ops.recurrence import Recurrence

GATES = {"dmu": 2, "rhn": 2, "rnn": 1, "gru": 3, "lstm": 4}  # groups of rows in a layer that updates a state


class Linear(NamedTuple):
    """One linear layer of a step, on the state or on a hidden layer."""

    weight: int  # place of its matrix among the weights
    bias: int | None  # place of its bias; None for the first layer of a dmu or rhn, whose bias goes with x
    inputs: int
    outputs: int
    groups: int  # of outputs: gates, or 1 for a hidden layer
    seen: int | None  # in the trace, where its inputs begin; None: the state before the step
    made: int  # in the trace, where its activations or gates begin
    after: int  # in the trace, where a hidden layer's slopes begin, or the state after an rhn's micro-layer
    delta: int  # in the deltas, where its outputs begin


def linear_layers(rec: Recurrence, weights: Sequence[Tensor]) -> list[Linear]:
    """The linear layers of a step, in the order in which the state passes them."""
    return _linear_layers(rec, tuple([tuple(weight.shape[-2:]) for weight in weights]))


@lru_cache(maxsize=1024)
def _linear_layers(rec: Recurrence, shapes: tuple[tuple[int, ...], ...]) -> list[Linear]:
    rows, d = shapes[1]
    if rec.classic:
        return [Linear(1, 3 if rec.bias else None, d, rows, GATES[rec.cell], None, 0, 0, 0)]
    places = [1, *(range(3, len(shapes), 2) if rec.bias else range(2, len(shapes)))]
    depth, layers = len(places), list[Linear]()
    hidden = sum(shapes[place][1] for place in places[1:]) if rec.cell == "dmu" else 0
    delta = made = 0
    for k, place in enumerate(places):
        outputs, inputs = shapes[place]
        is_hidden = rec.cell == "dmu" and k < depth - 1
        after = made + hidden if rec.cell == "dmu" else 2 * d * depth + d * k
        if rec.cell == "dmu" and not is_hidden and needs_slopes(rec):
            made = 2 * hidden
        seen = None if k == 0 else layers[-1].made if rec.cell == "dmu" else layers[-1].after
        bias = place + 1 if rec.bias and k > 0 else None
        layers.append(
            Linear(place, bias, inputs, outputs, 1 if is_hidden else GATES[rec.cell], seen, made, after, delta)
        )
        delta, made = delta + outputs, made + outputs
    return layers


def needs_slopes(rec: Recurrence) -> bool:
    """Whether the slopes of a DMU's hidden layers are kept.

    The slopes of silu and gelu cannot be computed from their values, and no slope from a masked value or from a sum.
    """
    return rec.cell == "dmu" and (rec.activation in ("silu", "gelu") or rec.residual or rec.masked)


def trace_features(rec: Recurrence, weights: Sequence[Tensor]) -> int:
    """Features of a step in the trace."""
    last, d = linear_layers(rec, weights)[-1], weights[1].shape[-1]
    if rec.cell == "rhn":
        return last.after  # the state after the last micro-layer is y
    return {"dmu": last.made + 2 * d, "rnn": 0, "gru": 4 * d, "lstm": 5 * d}[rec.cell]


def delta_features(rec: Recurrence, weights: Sequence[Tensor]) -> int:
    """Features of a step in the deltas."""
    last = linear_layers(rec, weights)[-1]
    return last.delta + last.outputs + (weights[1].shape[-1] if rec.cell == "gru" else 0)


class Source(IntEnum):
    """What a weight is multiplied with; the numbers are those of ``products.cuh``."""

    X = 0
    STATE = 1  # before the step, as the weights see it
    TRACE = 2
    ONES = 3  # a bias


class Product(NamedTuple):
    """Some rows of one weight's gradient: features of the deltas times features of the weight's input."""

    weight: int  # its place among the weights
    row: int  # of the weight, the first
    left: int  # feature of the deltas, the first
    lefts: int
    source: Source
    right: int  # feature of the source, the first
    rights: int


def products(rec: Recurrence, weights: Sequence[Tensor]) -> Iterator[Product]:
    """Yield the sums over steps and sequences that make up the gradients of a layer's weights."""
    first, *deeper = linear_layers(rec, weights)
    rows, d = first.outputs, first.inputs
    yield Product(0, 0, 0, rows, Source.X, 0, weights[0].shape[-1])
    # A GRU's deltas have four groups: r and z, the candidate as x sees it, the candidate as h sees it.
    recurrent = [(0, 0, 2 * d), (2 * d, 3 * d, d)] if rec.cell == "gru" else [(0, 0, rows)]
    for row, left, lefts in recurrent:
        yield Product(first.weight, row, left, lefts, Source.STATE, 0, d)
    if rec.bias:
        yield Product(2, 0, 0, rows, Source.ONES, 0, 1)
    if first.bias is not None:
        for row, left, lefts in recurrent:
            yield Product(first.bias, row, left, lefts, Source.ONES, 0, 1)
    for layer in deeper:
        assert layer.seen is not None
        yield Product(layer.weight, 0, layer.delta, layer.outputs, Source.TRACE, layer.seen, layer.inputs)
        if layer.bias is not None:
            yield Product(layer.bias, 0, layer.delta, layer.outputs, Source.ONES, 0, 1)
