"""The learning-rate rule: a DMU of n linear layers learns at lr / 2n."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepmemory.nn.dmu import DMU, DMUCell


def parameter_groups(model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Groups for any torch optimiser: lr / 2n and weight_decay / 2n for every DMU inside, the plain rates elsewhere.

    n is each module's own count of linear layers. Every parameter stands in exactly one group; a weight
    shared between a DMU and another module, or between two DMUs, follows the smaller rate.

    >>> import torch, deepmemory as dm
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), dm.DMUCell(8, 16))
    >>> groups = dm.parameter_groups(model, lr=0.02)
    >>> [(group["lr"], len(group["params"])) for group in groups]
    [(0.02, 2), (0.005, 5)]
    >>> optimiser = torch.optim.Adam(groups)

    Args:
        model: Any module; it may be, contain or share DMUs.
        lr: Learning rate of everything that is no DMU.
        weight_decay: Weight decay of everything that is no DMU.
    """
    depths: dict[nn.Parameter, int] = {}
    for module in model.modules():
        if isinstance(module, DMU | DMUCell):
            for parameter in module.parameters():
                depths[parameter] = max(module.depth, depths.get(parameter, 0))

    by_depth: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_depth.setdefault(depths.get(parameter, 0), []).append(parameter)
    groups = []
    for depth, parameters in sorted(by_depth.items()):
        divisor = 2 * depth or 1
        groups.append({"params": parameters, "lr": lr / divisor, "weight_decay": weight_decay / divisor})
    return groups
