"""minGRU (arXiv:2410.01201): a linear recurrence, the control in experiments with nonlinear ones.

Gate and candidate are functions of the input alone, so that all time steps are computed at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 16  # steps; a scan is about 2 * CHUNK small operations at each of log(T) / log(CHUNK) levels


class MinGRU(nn.Module):
    """Stacked layers of h_t = k_t * h_(t-1) + (1 - k_t) * c_t, with k_t = sigmoid(W_k x_t + b_k), c_t = W_c x_t + b_c.

    The z of the minGRU paper is 1 - k. The interface is that of the library's layers.
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
        """x (B, T, features) to (B, T, width) and the state after the last real step; later outputs are undefined.

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
            x = Scan.apply(keep[:, 1:], added)
            states.append(last(x, lengths)[None])
        return x, torch.cat(states) if len(set(self.hidden)) == 1 else tuple(states)


def last(y: Tensor, lengths: Tensor | None) -> Tensor:
    """y (B, T, features) at the last real step."""
    if lengths is None:
        return y[:, -1]
    index = (lengths - 1).clamp(min=0)[:, None, None]
    return y.gather(1, index.expand(-1, 1, y.shape[2]))[:, 0]


def scan_(keep: Tensor, states: Tensor) -> None:
    """Add keep_t * states_(t-1) to states_t along dimension 1, in place; keep has no value for the first step.

    Time is cut into chunks. What each chunk carries into the first step of the next is computed step by step, for all
    chunks at the same time. These first steps are scanned in the same way, and every chunk continues from its own.
    This takes a few passes over memory for any T. With keep in [0, 1] nothing overflows.
    """
    chunks = keep.shape[1] // CHUNK  # number of chunks that are followed by another one
    if chunks:
        factors = keep[:, : chunks * CHUNK].unflatten(1, (chunks, CHUNK))
        carried = states[:, 1::CHUNK][:, :chunks]
        for step in range(1, CHUNK):
            carried = torch.addcmul(states[:, step + 1 :: CHUNK][:, :chunks], factors[:, :, step], carried)
        first = states[:, ::CHUNK]
        first[:, 1:] = carried
        scan_(factors.prod(2), first)
    for step in range(min(CHUNK - 1, keep.shape[1])):
        states[:, step + 1 :: CHUNK].addcmul_(keep[:, step::CHUNK], states[:, step:-1:CHUNK])


class Scan(torch.autograd.Function):
    """h_t = keep_t * h_(t-1) + added_t along dimension 1, where keep has no value for the first step.

    The backward pass is a scan too and needs only two saved tensors.
    """

    @staticmethod
    def forward(keep: Tensor, added: Tensor) -> Tensor:
        """Compute all states."""
        states = added.clone()
        scan_(keep, states)
        return states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save gates and states for the backward pass."""
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of h_t is its own and keep_(t+1) times that of h_(t+1)."""
        keep, states = ctx.saved_tensors
        of_states = Scan.apply(keep.flip(1), grad.flip(1)).flip(1)
        return of_states[:, 1:] * states[:, :-1], of_states

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], *tensors: Tensor) -> tuple[Tensor, int]:
        """Treat runs as sequences of one batch: torch has no batching rule for ``addcmul_``."""
        runs = info.batch_size
        stacked = [
            tensor.expand(runs, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        ]
        states = Scan.apply(*(tensor.flatten(0, 1) for tensor in stacked))
        return states.unflatten(0, (runs, -1)), 0
