"""What one layer computes in one direction: its options, and the lengths, resets and masks of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CELLS = ("dmu", "rhn", "rnn", "gru", "lstm")
ACTIVATIONS = ("leaky_relu", "relu", "tanh", "silu", "gelu")
LEAKY_SLOPE = 0.01


class Recurrence(NamedTuple):
    """The cell and all options that are not tensors.

    Shapes below: T steps, B sequences, m inputs, d states, w_k outputs of the k-th linear layer.
    The weights of a layer are passed as one flat list:

    ======  ===================================================================================
    cell    weights
    ======  ===================================================================================
    dmu     W_x (w_1, m), W_h (w_1, d), [b_1], W_2 (w_2, w_1), [b_2], ..., W_n (2d, w_n-1), [b_n]
    rhn     W_x (2d, m), R_1 (2d, d), [b_1], R_2 (2d, d), [b_2], ...
    rnn     W_ih (d, m), W_hh (d, d), [b_ih, b_hh]
    gru     W_ih (3d, m), W_hh (3d, d), [b_ih, b_hh]
    lstm    W_ih (4d, m), W_hh (4d, d), [b_ih, b_hh], [W_hr (p, d) where the state is projected to p]
    ======  ===================================================================================

    A DMU with n = 1 has w_1 = 2d and no further layers. The rows of the last DMU layer are z, then
    candidate; those of an RHN layer candidate, then transform; those of the others are in torch's order.
    """

    cell: str
    activation: str = "tanh"  # of the hidden layers (dmu) or of the state (rnn); the rest ignore it
    bias: bool = True
    reverse: bool = False  # step from the last time to the first
    residual: bool = False  # hidden layers of a dmu from the second on have skip connections
    masked: bool = False  # the hidden layers of a dmu go through a mask; ``ops.scan`` sets it

    @property
    def classic(self) -> bool:
        """Whether this is one of torch's own cells: one linear layer, with a bias for x and one for the state."""
        return self.cell in ("rnn", "gru", "lstm")

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

    def projects(self, weights: Sequence[Tensor]) -> bool:
        """Whether an LSTM's state is projected, which means that there is a weight for it."""
        return self.cell == "lstm" and len(weights) == (5 if self.bias else 3)

    def hidden_widths(self, weights: Sequence[Tensor]) -> list[int]:
        """Widths of a dmu's hidden layers; the other cells have none."""
        return [weight.shape[-1] for weight, _ in self.deeper(list(weights))] if self.cell == "dmu" else []

    def between(self, weights: Sequence[Tensor]) -> Sequence[int]:
        """Indices of the weights whose columns are units of the state or of a hidden layer."""
        if self.classic:
            return range(1, min(2, len(weights)))
        return [1, *range(3, len(weights), 2)][: len(weights) // 2] if self.bias else range(1, len(weights))


class Zeros(NamedTuple):
    """An initial state that was not given: zeros."""

    widths: tuple[int, ...]  # features of h, or of h and c


class Sequences(NamedTuple):
    """Lengths, resets and masks of the sequences in a batch. None of them is differentiable.

    With R runs every tensor has a leading dimension R, like x.
    """

    lengths: Tensor | None = None  # (B,) int64: step t is real while t < lengths[b]; past it the state stays and y is 0
    resets: Tensor | None = (
        None  # (T, B) bool: the state is zero before step t is taken; as ``resets_of_sweep`` returns it
    )
    state_mask: Tensor | None = None  # (B, d) in x's dtype: multiplies h on its way into the weights
    hidden_mask: Tensor | None = None  # (B, w_1 + ... + w_n-1) in x's dtype: multiplies a dmu's hidden layers

    def piece(self, start: int, stop: int) -> Sequences:
        """The same for the steps from ``start`` to ``stop``."""
        lengths, resets, *masks = self
        if lengths is not None:
            lengths = (lengths - start).clamp(0, stop - start)
        return Sequences(lengths, None if resets is None else resets[..., start:stop, :], *masks)

    def with_run(self) -> Sequences:
        """The same with a leading dimension of one run."""
        return Sequences(*(None if t is None else t[None] for t in self))


FULL_LENGTH = Sequences()  # as long as the batch, without resets and masks


def resets_of_sweep(resets: Tensor, lengths: Tensor | None, reverse: bool) -> Tensor:
    """Return, as a new tensor (T, B), the steps before which a sweep sets the state to zero.

    ``resets`` marks the steps at which a new sequence begins. A sequence that begins at step t is cut between t - 1 and
    t: a backward sweep sets the state to zero before step t - 1. Resets in the padding are ignored.
    """
    if lengths is None and not reverse:
        return resets.clone()
    steps = resets.shape[0]
    begins = torch.arange(steps, device=resets.device)[:, None]
    if reverse:
        resets, begins = resets.roll(-1, 0), begins + 1
    return resets & (begins < (steps if lengths is None else lengths))
