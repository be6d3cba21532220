"""The Recurrent Highway Network layer and cell."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepmemory.nn.cell import Cell
from deepmemory.nn.definition import Highway
from deepmemory.nn.recurrent import Recurrent


class RHN(Recurrent):
    r"""Recurrent Highway Network with a coupled carry gate (Zilly et al., 2017).

    Each time step passes the state through ``depth`` micro-layers; only the first one sees x:

    .. math::
        \hat s &= \tanh(W_h x_t [l = 1] + R_h^l s^{l-1} + b_h^l) \\
        g &= \sigma(W_g x_t [l = 1] + R_g^l s^{l-1} + b_g^l) \\
        s^l &= \hat s \circ g + s^{l-1} \circ (1 - g)

    >>> import torch, deepmemory as dm
    >>> rnn = dm.RHN(10, 20, depth=3)
    >>> output, h_n = rnn(torch.randn(5, 3, 10))
    >>> output.shape, h_n.shape
    (torch.Size([5, 3, 20]), torch.Size([1, 3, 20]))

    Args:
        input_size: Number of features of x.
        hidden_size: Number of features of the state, or a list with one width per layer.
        num_layers: Number of stacked layers.
        bias: ``False`` leaves out all biases.
        batch_first: ``True`` for input and output of shape (batch, time, features).
        dropout: Probability of dropout on the output of every layer but the last.
        bidirectional: ``True`` adds a second direction, which reads the sequence backwards.
        device: Device of the weights.
        dtype: Data type of the weights.
        depth: Number of micro-layers per time step.
        engine: ``"auto"`` or a name from :func:`deepmemory.engines`.
        recompute: ``True`` recomputes inner activations in the backward pass instead of storing them.
        recurrent_dropout: Probability of dropping a unit of the state on its way into the recurrent weights. A mask s
            is drawn once per call for each sequence, and the weights of every micro-layer get s * h instead of h.

    Inputs and outputs are those of :class:`deepmemory.DMU`.
    """

    mode = "RHN"

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        depth: int = 1,
        engine: str = "auto",
        recompute: bool = False,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            Highway(depth),
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            engine=engine,
            recompute=recompute,
            recurrent_dropout=recurrent_dropout,
        )
        self.depth = depth

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        return super().extra_repr() + (f", depth={self.depth}" if self.depth != 1 else "")


class RHNCell(Cell):
    r"""One step of :class:`RHN`, with the interface of ``nn.GRUCell``: ``h = cell(x, h)``.

    .. math::
        \hat s &= \tanh(W_h x [l = 1] + R_h^l s^{l-1} + b_h^l) \\
        g &= \sigma(W_g x [l = 1] + R_g^l s^{l-1} + b_g^l) \\
        s^l &= \hat s \circ g + s^{l-1} \circ (1 - g)

    >>> import torch, deepmemory as dm
    >>> cell = dm.RHNCell(10, 20, depth=3)
    >>> cell(torch.randn(3, 10)).shape
    torch.Size([3, 20])

    Args:
        input_size: Number of features of x.
        hidden_size: Number of features of the state.
        bias: ``False`` leaves out all biases.
        device: Device of the weights.
        dtype: Data type of the weights.
        depth: Number of micro-layers per step.

    Shapes: x (B, input_size), h and the result (B, hidden_size), all without B for one sequence. h defaults
    to zeros.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        depth: int = 1,
    ) -> None:
        super().__init__(Highway(depth), input_size, hidden_size, bias, device, dtype)
        self.depth = depth

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        return super().extra_repr() + (f", depth={self.depth}" if self.depth != 1 else "")
