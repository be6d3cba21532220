"""The five cells as C statements: from the input x to the state h, and c of an LSTM, which change in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deepmemory.export.rounding import round_rows
from deepmemory.nn.cell import Cell
from deepmemory.nn.definition import Classic, DeepMemory, Definition, GivenTransition, Highway
from deepmemory.nn.recurrent import Recurrent
from deepmemory.ops.recurrence import LEAKY_SLOPE


class Layer(NamedTuple):
    """One layer of a recurrent module."""

    definition: Definition
    weights: Mapping[str, Tensor]  # by name, without the number of the layer
    input_size: int
    hidden_size: int

    @property
    def cell(self) -> str:
        """The name of the cell in lower case."""
        return self.definition.recurrence(bias=True).cell

    @property
    def states(self) -> dict[str, int]:
        """Number of features of h, and of c if there is one."""
        return dict(zip("hc", self.definition.state_sizes(self.hidden_size), strict=False))


def layers_of(module: Recurrent | Cell) -> Iterator[Layer]:
    """Yield the layers of a recurrent module; raise if it cannot run step by step in C."""
    name = type(module).__name__
    if isinstance(module.definition, GivenTransition):
        raise ValueError(
            f"c: {name} has a transition given as a module, which cannot be written as C; use a list of widths"
        )
    if isinstance(module, Cell):
        weights = {key: getattr(module, key) for key in module._names}
        yield Layer(module.definition, weights, module.input_size, module.hidden_size)
        return
    if module.bidirectional:
        raise ValueError(f"c: {name} is bidirectional and cannot run step by step; use bidirectional=False")
    for index, width in enumerate(module._widths):
        keys = [key.removesuffix(module._suffix(index, 0)) for key in module._all_weights[index]]
        weights = dict(zip(keys, module._weights(index, 0), strict=True))
        yield Layer(module.definition, weights, module._layer_input_size(index), width)


def number(value: float) -> str:
    """A float32 literal in C, with enough digits to restore the same number."""
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


@dataclass
class Constants:
    """The constant arrays of the file; ``@`` stands for the prefix of all names."""

    int8: bool
    arrays: list[str] = field(default_factory=list)
    bytes: int = 0

    def vector(self, name: str, values: Tensor | None) -> str:
        """Write floats; return the argument for them in a call."""
        if values is None:
            return "NULL"
        self._write(name, self._checked(name, values))
        return f"@_{name}"

    def matrix(self, name: str, weight: Tensor) -> str:
        """Write a matrix row by row; return the arguments for it, and its scales, in a call."""
        if not self.int8:
            return self.vector(name, weight)
        whole, scale = round_rows(self._checked(name, weight))
        self._write(name, whole)
        return f"@_{name}, {self.vector(f'{name}_scale', scale)}"

    def linear(self, to: str, start: str, name: str, weight: Tensor, x: str) -> str:
        """The statement ``to = start + weight x``."""
        rows, columns = weight.shape
        return f"@_linear({to}, {start}, {self.matrix(name, weight)}, {x}, {rows}, {columns});"

    @staticmethod
    def _checked(name: str, values: Tensor) -> Tensor:
        values = values.detach().to("cpu", torch.float32)
        if not values.isfinite().all():
            raise ValueError(f"c: {name} has entries that are not finite")
        return values

    def _write(self, name: str, values: Tensor) -> None:
        whole = values.dtype == torch.int8
        texts = [str(value) if whole else number(value) for value in values.flatten().tolist()]
        per_line = 24 if whole else 8
        lines = [f"    {', '.join(texts[start : start + per_line])}," for start in range(0, len(texts), per_line)]
        kind, length = "int8_t" if whole else "float", " * ".join(map(str, values.shape))
        self.arrays.append("\n".join([f"static const {kind} @_{name}[{length}] = {{", *lines, "};"]))
        self.bytes += values.nbytes


@dataclass
class Statements:
    """The body of a layer's function: its buffers and statements."""

    constants: Constants
    name: str  # of the function
    layer: Layer
    buffers: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def bias(self, name: str) -> str:
        """A bias of the layer, or NULL if there is none."""
        return self.constants.vector(f"{self.name}_{name}", self.layer.weights.get(name))

    def joint_bias(self) -> str:
        """The sum of both biases of torch's cells."""
        parts = [self.layer.weights.get(name) for name in ("bias_ih", "bias_hh")]
        joint = None if parts[0] is None or parts[1] is None else parts[0] + parts[1]
        return self.constants.vector(f"{self.name}_bias", joint)

    def linear(self, to: str, start: str, name: str, x: str) -> None:
        """``to = start + weight x``, for a weight of the layer."""
        weight = self.layer.weights[name]
        self.lines.append(self.constants.linear(to, start, f"{self.name}_{name}", weight, x))

    def call(self, function: str, *arguments: object) -> None:
        """Call one of the shared functions."""
        self.lines.append(f"@_{function}({', '.join(map(str, arguments))});")

    def copy(self, to: str, source: str, size: int) -> None:
        """Copy floats."""
        self.lines.append(copied(to, source, size))


def copied(to: str, source: str, size: int) -> str:
    """The statement that copies floats."""
    return f"memcpy({to}, {source}, {size} * sizeof(float));"


def dmu(body: Statements) -> None:
    """The transition, from one buffer to the other and back, then the memory update."""
    definition, d = body.layer.definition, body.layer.hidden_size
    assert isinstance(definition, DeepMemory)
    widths = [*definition.hidden_widths(d), 2 * d]
    body.buffers = {name: max(widths[first::2]) for first, name in enumerate(("a", "b")) if widths[first:]}
    here, there = "a", "b"
    body.linear(here, body.bias("bias_1"), "weight_ih", "x")
    body.linear(here, here, "weight_hh", "h")
    for k, width in enumerate(widths[:-1], start=1):
        slope = [number(LEAKY_SLOPE)] if definition.activation == "leaky_relu" else []
        body.call(definition.activation, here, width, *slope)
        if definition.residual and k > 1:
            body.call("add", here, there, width)
        body.linear(there, body.bias(f"bias_{k + 1}"), f"weight_{k + 1}", here)
        here, there = there, here
    body.call("memory_update", "h", here, d)


def rhn(body: Statements) -> None:
    """One highway layer on [x, h], the others on h alone."""
    definition, d = body.layer.definition, body.layer.hidden_size
    assert isinstance(definition, Highway)
    body.buffers = {"a": 2 * d}
    body.linear("a", body.bias("bias_1"), "weight_ih", "x")
    body.linear("a", "a", "weight_hh", "h")
    body.call("highway", "h", "a", d)
    for k in range(2, definition.depth + 1):
        body.linear("a", body.bias(f"bias_{k}"), f"weight_{k}", "h")
        body.call("highway", "h", "a", d)


def rnn(body: Statements) -> None:
    """One linear layer and its activation."""
    definition, d = body.layer.definition, body.layer.hidden_size
    assert isinstance(definition, Classic)
    body.buffers = {"a": d}
    body.linear("a", body.joint_bias(), "weight_ih", "x")
    body.linear("a", "a", "weight_hh", "h")
    body.call(definition.nonlinearity, "a", d)
    body.copy("h", "a", d)


def gru(body: Statements) -> None:
    """The step of a GRU. Input and state have separate buffers, because the reset gate applies to the state's part."""
    d = body.layer.hidden_size
    body.buffers = {"a": 3 * d, "b": 3 * d}
    body.linear("a", body.bias("bias_ih"), "weight_ih", "x")
    body.linear("b", body.bias("bias_hh"), "weight_hh", "h")
    body.call("gru_update", "h", "a", "b", d)


def lstm(body: Statements) -> None:
    """Four gates; h is projected if there is a weight for it."""
    d = body.layer.hidden_size
    body.buffers = {"a": 4 * d}
    body.linear("a", body.joint_bias(), "weight_ih", "x")
    body.linear("a", "a", "weight_hh", "h")
    if "weight_hr" in body.layer.weights:
        body.buffers["b"] = d
        body.call("lstm_update", "b", "c", "a", d)
        body.linear("h", "NULL", "weight_hr", "b")
    else:
        body.call("lstm_update", "h", "c", "a", d)


CELLS: dict[str, Callable[[Statements], None]] = {"dmu": dmu, "rhn": rhn, "rnn": rnn, "gru": gru, "lstm": lstm}


def step_of(constants: Constants, name: str, layer: Layer) -> Statements:
    """The statements of one layer for one step."""
    body = Statements(constants, name, layer)
    CELLS[layer.cell](body)
    return body
