"""What one layer computes in one direction, without its tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CELLS = ("dmu", "rhn", "rnn", "gru", "lstm")
ACTIVATIONS = ("leaky_relu", "relu", "tanh", "silu", "gelu")
LEAKY_SLOPE = 0.01


class Recurrence(NamedTuple):
    """The cell and every choice that is no tensor.

    Shapes below: T steps, B sequences, m inputs, d states, w_k outputs of the k-th linear layer.
    The weights of a layer travel as one flat list:

    ======  ===================================================================================
    cell    weights
    ======  ===================================================================================
    dmu     W_x (w_1, m), W_h (w_1, d), [b_1], W_2 (w_2, w_1), [b_2], ..., W_n (2d, w_n-1), [b_n]
    rhn     W_x (2d, m), R_1 (2d, d), [b_1], R_2 (2d, d), [b_2], ...
    rnn     W_ih (d, m), W_hh (d, d), [b_ih, b_hh]
    gru     W_ih (3d, m), W_hh (3d, d), [b_ih, b_hh]
    lstm    W_ih (4d, m), W_hh (4d, d), [b_ih, b_hh], [W_hr (p, d) where the state is projected to p]
    ======  ===================================================================================

    A DMU with n = 1 has w_1 = 2d and no further layers. Row order of the last DMU layer is z, then
    candidate; of an RHN layer candidate, then transform; of the others torch's own.
    """

    cell: str
    activation: str = "tanh"  # of the hidden layers (dmu) or of the state (rnn); the rest ignore it
    bias: bool = True
    reverse: bool = False  # step from the last time to the first

    @property
    def states(self) -> int:
        """How many tensors make up the state: h, or h and c."""
        return 2 if self.cell == "lstm" else 1

    def input_weights(self, weights: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The part that acts on x alone and needs no recurrence."""
        return weights[0], weights[2] if self.bias else None

    def deeper(self, weights: list[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Second and later linear layers of a dmu or rhn transition, as (weight, bias)."""
        if self.bias:
            return list(zip(weights[3::2], weights[4::2], strict=True))
        return [(weight, None) for weight in weights[2:]]
