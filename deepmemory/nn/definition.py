"""How the five cells differ: the names, shapes and initial values of their weights."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from deepmemory.ops.layout import GATES
from deepmemory.ops.recurrence import ACTIVATIONS, LEAKY_SLOPE, Recurrence

Shape = tuple[int, ...]


class Definition(Protocol):
    """One kind of cell, for any input and state size."""

    def check(self, name: str, widths: list[int]) -> None:
        """Raise an error that names the module if the cell cannot be built with states of these sizes."""

    def shapes(self, input_size: int, hidden_size: int, bias: bool) -> dict[str, Shape]:
        """Names and shapes of a layer's weights, in the order listed in :class:`Recurrence`."""

    def reset(self, weights: Mapping[str, Tensor], input_size: int, hidden_size: int) -> None:
        """Fill a layer's weights with their initial values."""

    def memory_entries(self, weights: Mapping[str, Tensor], hidden_size: int) -> Tensor:
        """A view of the bias entries that ``memory_bias`` is added to: those of the gate that keeps the state."""

    def recurrence(self, bias: bool, reverse: bool = False) -> Recurrence:
        """The recurrence that uses the weights."""

    def state_sizes(self, hidden_size: int) -> tuple[int, ...]:
        """Number of features of each state tensor; the output has as many as the first one."""

    def mask_sizes(self, hidden_size: int) -> dict[str, int]:
        """Number of features of each dropout mask of a sequence: for the state and for the hidden layers."""


def layer_names(name: str, layers: int) -> list[str]:
    """``name_2`` to ``name_n``: the second and later linear layers of a transition."""
    return [f"{name}_{k}" for k in range(2, layers + 1)]


def transition_shapes(
    widths: list[int], input_size: int, hidden_size: int, inner: list[int], bias: bool
) -> dict[str, Shape]:
    """Shapes of the first linear layer on [x, h], stored in two parts, then of each further weight and bias."""
    first = widths[0]
    shapes: dict[str, Shape] = {"weight_ih": (first, input_size), "weight_hh": (first, hidden_size)}
    if bias:
        shapes["bias_1"] = (first,)
    names = zip(layer_names("weight", len(widths)), layer_names("bias", len(widths)), strict=True)
    for (weight, bias_name), out_size, in_size in zip(names, widths[1:], inner, strict=True):
        shapes[weight] = (out_size, in_size)
        if bias:
            shapes[bias_name] = (out_size,)
    return shapes


@dataclass(frozen=True)
class DeepMemory:
    """The DMU cell with a dense transition."""

    transition: tuple[int, ...] | None  # widths of the hidden layers; None for one as wide as the state
    activation: str
    memory_bias: float
    residual: bool = False  # hidden layers from the second on have skip connections

    def check(self, name: str, widths: list[int]) -> None:
        """See :class:`Definition`."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"{name}: unknown activation {self.activation!r}; choose from {', '.join(ACTIVATIONS)}")
        if not isinstance(self.residual, bool):
            raise TypeError(f"{name}: residual should be of type bool, got: {type(self.residual).__name__}")
        hidden = self.hidden_widths(widths[0])
        if self.residual and len(set(hidden)) > 1:
            raise ValueError(
                f"{name}: residual=True needs hidden layers of equal width, as in transition=[{hidden[0]}] * "
                f"{len(hidden)}, got the widths {hidden}"
            )

    def hidden_widths(self, hidden_size: int) -> list[int]:
        """Widths of the hidden layers for a state of this size."""
        return [hidden_size] if self.transition is None else list(self.transition)

    @property
    def depth(self) -> int:
        """The number n of linear layers in the transition."""
        return 2 if self.transition is None else len(self.transition) + 1

    @property
    def adds_layers(self) -> bool:
        """Whether any hidden layer has a skip connection."""
        return self.residual and self.depth > 2

    def shapes(self, input_size: int, hidden_size: int, bias: bool) -> dict[str, Shape]:
        """See :class:`Definition`."""
        hidden = self.hidden_widths(hidden_size)
        return transition_shapes([*hidden, 2 * hidden_size], input_size, hidden_size, hidden, bias)

    @torch.no_grad()
    def reset(self, weights: Mapping[str, Tensor], input_size: int, hidden_size: int) -> None:
        """Xavier uniform weights and zero biases; the output layer has gain 1, and the bias of z gets ``memory_bias``.

        In a residual transition of n linear layers, those with a skip connection start smaller by a factor of sqrt(n).
        """
        hidden_gain = activation_gain(self.activation)
        last = f"_{self.depth}"
        for name, weight in weights.items():
            if name.startswith("bias"):
                weight.zero_()
                continue
            fan_in, is_last = weight.shape[1], name.endswith(last)
            is_first = name in ("weight_ih", "weight_hh")  # two parts of one matrix on [x, h]
            if is_first:
                fan_in, is_last = input_size + hidden_size, self.depth == 1
            gain = 1.0 if is_last else hidden_gain
            if self.residual and not (is_first or is_last):
                gain /= math.sqrt(self.depth)
            bound = gain * math.sqrt(6 / (fan_in + weight.shape[0]))
            weight.uniform_(-bound, bound)
        if self.memory_bias:
            self.memory_entries(weights, hidden_size).add_(self.memory_bias)

    def memory_entries(self, weights: Mapping[str, Tensor], hidden_size: int) -> Tensor:
        """The biases of z: the first half of the last bias."""
        return weights[f"bias_{self.depth}"][:hidden_size]

    def recurrence(self, bias: bool, reverse: bool = False) -> Recurrence:
        """See :class:`Definition`."""
        return Recurrence("dmu", self.activation, bias, reverse, self.adds_layers)

    def state_sizes(self, hidden_size: int) -> tuple[int, ...]:
        """See :class:`Definition`."""
        return (hidden_size,)

    def mask_sizes(self, hidden_size: int) -> dict[str, int]:
        """See :class:`Definition`."""
        hidden = sum(self.hidden_widths(hidden_size))
        return {"state": hidden_size} | ({"hidden": hidden} if hidden else {})


@dataclass(frozen=True)
class GivenTransition(DeepMemory):
    """The DMU cell with a transition given as a module, which holds the weights."""

    def shapes(self, input_size: int, hidden_size: int, bias: bool) -> dict[str, Shape]:
        """No shapes: the weights are in the given module."""
        return {}

    def mask_sizes(self, hidden_size: int) -> dict[str, int]:
        """A mask for the state only: the hidden layers belong to the given module."""
        return {"state": hidden_size}


def activation_gain(activation: str) -> float:
    """The Xavier gain for this activation; silu and gelu use the gain of relu."""
    if activation == "leaky_relu":
        return nn.init.calculate_gain("leaky_relu", LEAKY_SLOPE)
    return nn.init.calculate_gain("tanh" if activation == "tanh" else "relu")


@dataclass(frozen=True)
class Highway:
    """The Recurrent Highway Network cell with a coupled carry gate."""

    depth: int  # micro-layers per step

    def check(self, name: str, widths: list[int]) -> None:
        """See :class:`Definition`."""
        if not isinstance(self.depth, int) or self.depth < 1:
            raise ValueError(f"{name}: depth should be an integer of at least 1, got {self.depth!r}")

    def shapes(self, input_size: int, hidden_size: int, bias: bool) -> dict[str, Shape]:
        """See :class:`Definition`."""
        inner = [hidden_size] * (self.depth - 1)
        return transition_shapes([2 * hidden_size] * self.depth, input_size, hidden_size, inner, bias)

    @torch.no_grad()
    def reset(self, weights: Mapping[str, Tensor], input_size: int, hidden_size: int) -> None:
        """Initialise as ``nn.Linear`` does; the only bias of each gate counts as a recurrent one."""
        for name, weight in weights.items():
            bound = 1 / math.sqrt(input_size if name == "weight_ih" else hidden_size)
            weight.uniform_(-bound, bound)

    def memory_entries(self, weights: Mapping[str, Tensor], hidden_size: int) -> Tensor:
        """Raise: an RHN has no ``memory_bias``."""
        raise NotImplementedError

    def recurrence(self, bias: bool, reverse: bool = False) -> Recurrence:
        """See :class:`Definition`."""
        return Recurrence("rhn", "tanh", bias, reverse)

    def state_sizes(self, hidden_size: int) -> tuple[int, ...]:
        """See :class:`Definition`."""
        return (hidden_size,)

    def mask_sizes(self, hidden_size: int) -> dict[str, int]:
        """See :class:`Definition`."""
        return {"state": hidden_size}


@dataclass(frozen=True)
class Classic:
    """RNN, GRU and LSTM with torch's names, shapes and initialisation."""

    cell: str
    nonlinearity: str = "tanh"
    proj_size: int = 0  # of the LSTM's output; 0 for no projection
    memory_bias: float = 0.0  # of a GRU's update gate or an LSTM's forget gate

    def check(self, name: str, widths: list[int]) -> None:
        """See :class:`Definition`."""
        if self.nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"{name}: unknown nonlinearity {self.nonlinearity!r}; choose from tanh, relu")
        if self.proj_size < 0:
            raise ValueError(f"{name}: proj_size should be a positive integer or zero, got {self.proj_size}")
        if self.proj_size >= min(widths):
            raise ValueError(
                f"{name}: proj_size has to be smaller than hidden_size, got {self.proj_size} and {min(widths)}"
            )

    def shapes(self, input_size: int, hidden_size: int, bias: bool) -> dict[str, Shape]:
        """See :class:`Definition`."""
        rows = GATES[self.cell] * hidden_size
        shapes: dict[str, Shape] = {
            "weight_ih": (rows, input_size),
            "weight_hh": (rows, self.state_sizes(hidden_size)[0]),
        }
        if bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        if self.proj_size:
            shapes["weight_hr"] = (self.proj_size, hidden_size)
        return shapes

    @torch.no_grad()
    def reset(self, weights: Mapping[str, Tensor], input_size: int, hidden_size: int) -> None:
        """Uniform in +-1 / sqrt(hidden_size), as in ``torch.nn``; then ``memory_bias`` is added."""
        bound = 1 / math.sqrt(hidden_size)
        for weight in weights.values():
            weight.uniform_(-bound, bound)
        if self.memory_bias:
            self.memory_entries(weights, hidden_size).add_(self.memory_bias)

    def memory_entries(self, weights: Mapping[str, Tensor], hidden_size: int) -> Tensor:
        """The part of ``bias_ih`` for the second gate: update in a GRU, forget in an LSTM."""
        return weights["bias_ih"].view(-1, hidden_size)[1]

    def recurrence(self, bias: bool, reverse: bool = False) -> Recurrence:
        """See :class:`Definition`."""
        return Recurrence(self.cell, self.nonlinearity, bias, reverse)

    def state_sizes(self, hidden_size: int) -> tuple[int, ...]:
        """See :class:`Definition`."""
        if self.cell == "lstm":
            return (self.proj_size or hidden_size, hidden_size)
        return (hidden_size,)

    def mask_sizes(self, hidden_size: int) -> dict[str, int]:
        """See :class:`Definition`."""
        return {"state": self.state_sizes(hidden_size)[0]}


def check_memory_bias(name: str, memory_bias: float, bias: bool) -> float:
    """Return ``memory_bias`` as a float; raise if it is not a number, or set for a module without biases."""
    if isinstance(memory_bias, bool) or not isinstance(memory_bias, numbers.Real):
        raise TypeError(f"{name}: memory_bias should be a number, got: {type(memory_bias).__name__}")
    if memory_bias and not bias:
        raise ValueError(f"{name}: memory_bias={memory_bias} needs bias=True")
    return float(memory_bias)


DEFINITIONS: dict[str, type[Definition]] = {of.__name__: of for of in (DeepMemory, GivenTransition, Highway, Classic)}
