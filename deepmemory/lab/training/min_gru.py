"""minGRU (arXiv:2410.01201): a linear recurrence, the control of experiments about nonlinear ones.

Gate and candidate are functions of the input alone, so that all time steps are computed at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MinGRU(nn.Module):
    """Stacked layers of h_t = k_t * h_(t-1) + (1 - k_t) * c_t, with k_t = sigmoid(W_k x_t + b_k), c_t = W_c x_t + b_c.

    What the minGRU's paper calls z is 1 - k. Called like the layers of the library.
    """

    def __init__(self, input_size: int, hidden: tuple[int, ...], keep_bias: float = 0.0) -> None:
        super().__init__()
        self.hidden = hidden
        sizes = zip((input_size, *hidden), hidden, strict=False)
        layers = [nn.Linear(size, 2 * width) for size, width in sizes]
        with torch.no_grad():
            for layer, width in zip(layers, hidden, strict=True):
                layer.bias[:width] += keep_bias
        self.layers = nn.ModuleList(layers)

    def forward(
        self, x: Tensor, state: Any = None, *, lengths: Tensor | None = None, masks: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Any]:
        """x (B, T, features) to (B, T, width) and the state after the last real step; after it, outputs mean nothing.

        There is no dropout inside the recurrence, so ``masks`` is empty.
        """
        assert not masks
        states = []
        for place, layer in enumerate(self.layers):
            rows = layer(x.flatten(0, 1))  # without flattening, vmap would copy the weights B times
            gate, candidate = rows.unflatten(0, x.shape[:2]).chunk(2, -1)
            keep = gate.sigmoid()
            added = (1 - keep) * candidate
            if state is not None:
                before = state[place].view_as(added[:, 0])
                added = torch.cat((added[:, :1] + keep[:, :1] * before[:, None], added[:, 1:]), 1)
            x = Scan.apply(keep, added)
            states.append(last(x, lengths)[None])
        return x, torch.cat(states) if len(set(self.hidden)) == 1 else tuple(states)


def last(y: Tensor, lengths: Tensor | None) -> Tensor:
    """y (B, T, features) at the last real step."""
    if lengths is None:
        return y[:, -1]
    index = (lengths - 1).clamp(min=0)[:, None, None]
    return y.gather(1, index.expand(-1, 1, y.shape[2]))[:, 0]


def scan(keep: Tensor, added: Tensor) -> Tensor:
    """h_t = keep_t * h_(t-1) + added_t from zero along dimension 1, in log(T) steps; keep in [0, 1] cannot overflow."""
    span = 1
    while span < added.shape[1]:
        head, tail = added[:, :span], added[:, span:] + keep[:, span:] * added[:, :-span]
        keep = torch.cat((keep[:, :span], keep[:, span:] * keep[:, :-span]), 1)
        added = torch.cat((head, tail), 1)
        span *= 2
    return added


class Scan(torch.autograd.Function):
    """:func:`scan` whose backward pass is a scan too: it keeps two tensors, not two for each doubling."""

    generate_vmap_rule = True

    @staticmethod
    def forward(keep: Tensor, added: Tensor) -> Tensor:
        """Compute all states."""
        return scan(keep, added) if added.shape[1] > 1 else added.clone()  # never what was given itself

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save gates and states for the backward pass."""
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of h_t is its own and keep_(t+1) times that of h_(t+1)."""
        keep, states = ctx.saved_tensors
        following = torch.cat((keep[:, 1:], torch.zeros_like(keep[:, :1])), 1)
        of_states = scan(following.flip(1), grad.flip(1)).flip(1)
        before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), 1)
        return of_states * before, of_states
