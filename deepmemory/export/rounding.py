"""Eight-bit weights: integers from -127 to 127, and one scale for each row of a matrix."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

MOST = 127


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers (rows, columns) as int8, and the scales (rows,) that restore the weight.

    The largest entry of a row becomes 127 or -127. No entry changes by more than half a step: 1/254 of the largest.
    """
    scale = weight.abs().amax(-1) / MOST
    steps = torch.where(scale > 0, scale, 1)[:, None]  # a row of zeros has the scale 0
    return (weight / steps).round().clamp(-MOST, MOST).to(torch.int8), scale


@torch.no_grad()
def rounded(model: nn.Module) -> nn.Module:
    """A copy of the model with the weights that :func:`c` writes as int8, to measure the effect of rounding.

    >>> import torch, deepmemory as dm
    >>> from deepmemory import export
    >>> layer = dm.DMU(3, 5)
    >>> x = torch.randn(30, 1, 3)
    >>> bool((export.rounded(layer)(x)[0] - layer(x)[0]).abs().max() < 0.05)
    True
    """
    model = deepcopy(model)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            whole, scale = round_rows(parameter.float())
            parameter.copy_(whole * scale[:, None])
    return model
