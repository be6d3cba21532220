"""RNN, GRU and LSTM with torch's signatures and state_dict keys, on the engines of this library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepmemory.nn.definition import Classic, check_memory_bias
from deepmemory.nn.recurrent import Recurrent


class RNN(Recurrent):
    r"""Elman network, :math:`h_t = \tanh(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh})`.

    Accepts the arguments and the state_dict of ``nn.RNN``, and works in cases that ``nn.RNN`` does not support: under
    ``torch.vmap`` over weights, with ``lengths=`` and ``resets=``, and with layers of different widths.

    >>> import torch, deepmemory as dm
    >>> theirs, ours = torch.nn.RNN(4, 8), dm.RNN(4, 8)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(5, 3, 4)
    >>> torch.allclose(theirs(x)[0], ours(x)[0], atol=1e-5)
    True

    Args:
        input_size: Number of features of x.
        hidden_size: Number of features of the state, or a list with one width per layer.
        num_layers: Number of stacked layers.
        nonlinearity: ``"tanh"`` or ``"relu"``.
        bias: ``False`` leaves out all biases.
        batch_first: ``True`` for input and output of shape (batch, time, features).
        dropout: Probability of dropout on the output of every layer but the last.
        bidirectional: ``True`` adds a second direction, which reads the sequence backwards.
        device: Device of the weights.
        dtype: Data type of the weights.
        engine: ``"auto"`` or a name from :func:`deepmemory.engines`.
        recompute: ``True`` recomputes inner activations in the backward pass instead of storing them.
        recurrent_dropout: Probability of dropping a unit of the state on its way into the recurrent weights. A mask s
            is drawn once per call for each sequence, and the weights get s * h instead of h.

    Inputs and outputs are those of :class:`deepmemory.DMU`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        engine: str = "auto",
        recompute: bool = False,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            Classic("rnn", nonlinearity),
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
        self.nonlinearity = nonlinearity
        self.mode = f"RNN_{nonlinearity.upper()}"

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        return super().extra_repr() + ("" if self.nonlinearity == "tanh" else ", nonlinearity='relu'")


class GRU(Recurrent):
    r"""Gated recurrent unit in torch's form, with the reset gate applied after the recurrent matrix product:

    .. math::
        r_t &= \sigma(W_{ir} x_t + b_{ir} + W_{hr} h_{t-1} + b_{hr}) \\
        z_t &= \sigma(W_{iz} x_t + b_{iz} + W_{hz} h_{t-1} + b_{hz}) \\
        n_t &= \tanh(W_{in} x_t + b_{in} + r_t \circ (W_{hn} h_{t-1} + b_{hn})) \\
        h_t &= (1 - z_t) \circ n_t + z_t \circ h_{t-1}

    Accepts the arguments and the state_dict of ``nn.GRU``, and works in cases that ``nn.GRU`` does not support: under
    ``torch.vmap`` over weights, with ``lengths=`` and ``resets=``, and with layers of different widths.

    >>> import torch, deepmemory as dm
    >>> theirs, ours = torch.nn.GRU(4, 8), dm.GRU(4, 8)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(5, 3, 4)
    >>> torch.allclose(theirs(x)[0], ours(x)[0], atol=1e-5)
    True

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
        memory_bias: Added to the bias of the update gate at initialisation, as in :class:`deepmemory.DMU`; with 3, a
            new layer keeps most of its state. Loading a state_dict overwrites it.
        engine: ``"auto"`` or a name from :func:`deepmemory.engines`.
        recompute: ``True`` recomputes inner activations in the backward pass instead of storing them.
        recurrent_dropout: Probability of dropping a unit of the state on its way into the recurrent weights. A mask s
            is drawn once per call for each sequence, and the weights get s * h instead of h.

    Inputs and outputs are those of :class:`deepmemory.DMU`.
    """

    mode = "GRU"

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
        memory_bias: float = 0.0,
        engine: str = "auto",
        recompute: bool = False,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            Classic("gru", memory_bias=check_memory_bias("GRU", memory_bias, bias)),
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
        self.memory_bias = float(memory_bias)

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        return super().extra_repr() + (f", memory_bias={self.memory_bias}" if self.memory_bias else "")


class LSTM(Recurrent):
    r"""Long short-term memory:

    .. math::
        i_t, f_t, o_t &= \sigma(W_{i*} x_t + b_{i*} + W_{h*} h_{t-1} + b_{h*}) \\
        g_t &= \tanh(W_{ig} x_t + b_{ig} + W_{hg} h_{t-1} + b_{hg}) \\
        c_t &= f_t \circ c_{t-1} + i_t \circ g_t \\
        h_t &= o_t \circ \tanh(c_t)

    Accepts the arguments and the state_dict of ``nn.LSTM``, and works in cases that ``nn.LSTM`` does not support: under
    ``torch.vmap`` over weights, with ``lengths=`` and ``resets=``, and with layers of different widths. The state is
    ``(h, c)``.

    >>> import torch, deepmemory as dm
    >>> theirs, ours = torch.nn.LSTM(4, 8), dm.LSTM(4, 8)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(5, 3, 4)
    >>> torch.allclose(theirs(x)[0], ours(x)[0], atol=1e-5)
    True

    Args:
        input_size: Number of features of x.
        hidden_size: Number of features of the state, or a list with one width per layer.
        num_layers: Number of stacked layers.
        bias: ``False`` leaves out all biases.
        batch_first: ``True`` for input and output of shape (batch, time, features).
        dropout: Probability of dropout on the output of every layer but the last.
        bidirectional: ``True`` adds a second direction, which reads the sequence backwards.
        proj_size: Number of features that h is projected to; 0 for no projection. With one, the plain engine runs.
        device: Device of the weights.
        dtype: Data type of the weights.
        memory_bias: Added to the bias of the forget gate at initialisation, as in :class:`deepmemory.DMU`; with 3, a
            new layer keeps most of its state. Loading a state_dict overwrites it.
        engine: ``"auto"`` or a name from :func:`deepmemory.engines`.
        recompute: ``True`` recomputes inner activations in the backward pass instead of storing them.
        recurrent_dropout: Probability of dropping a unit of the state on its way into the recurrent weights. A mask s
            is drawn once per call for each sequence, and the weights get s * h instead of h.

    Inputs and outputs are those of :class:`deepmemory.DMU`, except that the state is a pair ``(h, c)``. With a
    projection, h has proj_size features.
    """

    mode = "LSTM"

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        memory_bias: float = 0.0,
        engine: str = "auto",
        recompute: bool = False,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            Classic("lstm", proj_size=proj_size, memory_bias=check_memory_bias("LSTM", memory_bias, bias)),
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
        self.memory_bias = float(memory_bias)
        self.proj_size = proj_size

    def extra_repr(self) -> str:
        """The sizes, then the options that differ from their defaults."""
        return super().extra_repr() + (f", memory_bias={self.memory_bias}" if self.memory_bias else "")

    def get_expected_cell_size(self, input: Tensor, batch_sizes: Tensor | None) -> tuple[Any, ...]:
        """Shape of c for this batch; a tuple of one shape per layer if layers differ in width."""
        return self._expected_size(1, input, batch_sizes)
