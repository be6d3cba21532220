"""The base class of single-step cells, with the interface of ``nn.GRUCell``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deepmemory.nn.defined import Defined
from deepmemory.nn.definition import Definition
from deepmemory.nn.precision import check_state, convert_input, runs_in
from deepmemory.ops import plain
from deepmemory.ops.recurrence import FULL_LENGTH


class Cell(Defined):
    """One step of one layer: ``h = cell(x, h)``."""

    memory_bias = 0.0  # a DMUCell may have one

    def __init__(
        self,
        definition: Definition,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for option, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{type(self).__name__}: {option} should be of type int, got: {type(size).__name__}")
            if size <= 0:
                raise ValueError(f"{type(self).__name__}: {option} must be greater than zero, got {size}")
        definition.check(type(self).__name__, [hidden_size])
        self.definition = definition
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bool(bias)
        shapes = definition.shapes(input_size, hidden_size, self.bias)
        self._names = list(shapes)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def _weights_by_layer(self) -> Iterator[tuple[dict[str, Tensor], int, int]]:
        weights = {name: getattr(self, name) for name in self._names if hasattr(self, name)}
        yield weights, self.input_size, self.hidden_size

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state (B, d) from an input (B, m) and a state (B, d), all with or without B."""
        name = type(self).__name__
        if input.dim() not in (1, 2):
            raise ValueError(f"{name}: Expected input to be 1D or 2D, got {input.dim()}D instead")
        if input.shape[-1] != self.input_size:
            raise RuntimeError(f"{name}: input has {input.shape[-1]} features, expected {self.input_size}")
        weight = next(self.parameters(), input)
        if input.device != weight.device:
            raise RuntimeError(
                f"{name}: input is on {input.device} but the weights are on {weight.device}; move one with .to(...)"
            )
        if input.dtype != weight.dtype and runs_in(input) != runs_in(weight):
            raise RuntimeError(
                f"{name}: input has dtype {input.dtype} but the weights have {weight.dtype}. "
                f"{convert_input(input, weight)}"
            )
        expected = (*input.shape[:-1], self.hidden_size)
        if hx is None:
            return self._step(input, input.new_zeros(expected))
        hx = check_state(name, hx, input)
        if hx.dim() not in (1, 2):
            raise ValueError(f"{name}: Expected hidden to be 1D or 2D, got {hx.dim()}D instead")
        if hx.shape != expected:
            raise RuntimeError(f"{name}: Expected hidden size {tuple(expected)}, got {list(hx.shape)}")
        return self._step(input, hx)

    def _step(self, x: Tensor, h: Tensor) -> Tensor:
        rec = self.definition.recurrence(self.bias)
        weights = [getattr(self, name) for name in self._names]
        projected = nn.functional.linear(x, *rec.input_weights(weights))
        return plain.STEP[rec.cell](rec, projected, (h,), weights, FULL_LENGTH)[0]
