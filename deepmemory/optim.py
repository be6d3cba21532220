"""The learning-rate rule: lr / 2n for a DMU with n linear layers; a residual transition counts as at most two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from deepmemory.nn.dmu import DMU, DMUCell

DIVISOR = "lr_divisor"  # key of a parameter group: 2n, or 1 for parameters outside of DMUs
RESIDUAL_LAYERS = 2  # the rule counts a residual transition as at most two: see docs/depth-and-rate.md


def parameter_groups(
    model: nn.Module,
    lr: float | Tensor,
    weight_decay: float | None = None,
    *,
    groups: Iterable[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimiser: lr / 2n for every DMU inside the model, lr for everything else.

    n is the number of linear layers in the transition of each DMU. With ``residual=True`` it counts as at most 2: only
    the first and the last layer have no skip connection around them. Every parameter is in exactly one group. A weight
    shared between a DMU and another module, or between two DMUs, gets the smaller rate. Each group stores its divisor
    as ``lr_divisor``.

    >>> import torch, deepmemory as dm
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), dm.DMUCell(8, 16))
    >>> groups = dm.parameter_groups(model, lr=0.02)
    >>> [(group["lr"], len(group["params"])) for group in groups]
    [(0.02, 2), (0.005, 5)]
    >>> optimiser = torch.optim.AdamW(groups, weight_decay=0.1)

    Args:
        model: Any module. It may be a DMU itself or contain any number of them, which may share weights.
        lr: Learning rate of all parameters outside of DMUs.
        weight_decay: Weight decay of all parameters outside of DMUs; for a DMU it is divided by 2n, like the rate.
            ``None`` uses the optimiser's own weight decay.
        groups: Your own parameter groups, for instance one with and one without weight decay. Each is split by the
            rule. If a group has its own ``lr`` or ``weight_decay``, that value is used. The default is one group of all
            parameters.
    """
    check_model("parameter_groups", model, "parameter_groups(model, lr)")
    if not isinstance(lr, Real | Tensor):
        raise TypeError(f"parameter_groups: lr should be a number, got: {type(lr).__name__}")
    if not lr >= 0:  # torch's optimisers do not check the rates of groups
        raise ValueError(f"parameter_groups: lr should be 0 or more, got {lr}")
    divisors = lr_divisors(model)
    given = [{"params": list(model.parameters())}] if groups is None else groups
    defaults = {"lr": lr} | ({} if weight_decay is None else {"weight_decay": weight_decay})
    split = [part for group in given for part in split_by_divisor(defaults | dict(group), divisors)]
    for group in split:
        for rate in ("lr", "weight_decay"):
            if rate in group:
                group[rate] = group[rate] / group[DIVISOR]
    return split


def divide_rates(optimiser: Optimizer, model: nn.Module) -> Optimizer:
    """Make an optimiser apply lr / 2n to the DMUs of a model, no matter what sets its learning rate.

    The parameter groups keep the undivided rate, so that schedulers, ``group["lr"] = ...`` and logs work as they do
    without a DMU. The division happens inside ``optimiser.step()``. Call this function before you create a scheduler or
    load the optimiser's state. The groups' ``weight_decay`` is not changed.

    >>> import torch, deepmemory as dm
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), dm.DMUCell(8, 16))
    >>> optimiser = dm.divide_rates(torch.optim.AdamW(model.parameters(), lr=0.02), model)
    >>> schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.1, total_steps=100)

    Args:
        optimiser: Any torch optimiser of the model's parameters except LBFGS, which has one rate for all of them.
        model: Any module. It may be a DMU itself or contain any number of them, which may share weights.
    """
    if not isinstance(optimiser, Optimizer):
        raise TypeError(
            f"divide_rates: optimiser should be a torch optimiser, got: {type(optimiser).__name__}; "
            "call it as divide_rates(optimiser, model)"
        )
    check_model("divide_rates", model, "divide_rates(optimiser, model)")
    if isinstance(optimiser, LBFGS):
        raise ValueError(
            "divide_rates: LBFGS has one rate for all parameters, which cannot be divided; use it without the rule, "
            'as in LBFGS(model.parameters(), line_search_fn="strong_wolfe"), or choose another optimiser'
        )
    if any(DIVISOR in group for group in optimiser.param_groups):
        raise ValueError(
            "divide_rates: the rates of this optimiser are already divided, by parameter_groups or divide_rates; "
            "create the optimiser from model.parameters() and call divide_rates once"
        )
    if any("initial_lr" in group for group in optimiser.param_groups):
        raise ValueError(
            "divide_rates: this optimiser already has a scheduler; call divide_rates before creating the scheduler"
        )
    divisors = lr_divisors(model)
    optimiser.param_groups[:] = [part for group in optimiser.param_groups for part in split_by_divisor(group, divisors)]
    rates: list[tuple[Any, Any]] = []  # of each group during a step: undivided and divided

    def divide(optimiser: Optimizer, *_: object) -> None:
        restore(optimiser)
        for group in optimiser.param_groups:
            rates.append((group["lr"], group["lr"] / group.get(DIVISOR, 1)))
            group["lr"] = rates[-1][1]

    def restore(optimiser: Optimizer, *_: object) -> None:
        for group, (undivided, divided) in zip(optimiser.param_groups, rates, strict=False):
            if group["lr"] is divided:  # not if it was set again, after a step that Ctrl-C or an error ended
                group["lr"] = undivided
        rates.clear()

    optimiser.register_step_pre_hook(divide)
    optimiser.register_step_post_hook(restore)
    optimiser.register_state_dict_pre_hook(restore)
    return optimiser


def check_model(name: str, model: nn.Module, call: str) -> None:
    """Raise if ``model`` is not an ``nn.Module``."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name}: model should be an nn.Module, not its parameters, got: {type(model).__name__}; "
            f"pass the model itself, as in {call}"
        )


def lr_divisors(model: nn.Module) -> dict[nn.Parameter, int]:
    """2n for every parameter of a DMU; the largest 2n if several DMUs share the parameter."""
    divisors: dict[nn.Parameter, int] = {}
    for module in model.modules():
        if isinstance(module, DMU | DMUCell):
            layers = min(module.depth, RESIDUAL_LAYERS) if module.residual else module.depth
            for parameter in module.parameters():
                divisors[parameter] = max(2 * layers, divisors.get(parameter, 1))
    return divisors


def split_by_divisor(group: Mapping[str, Any], divisors: Mapping[nn.Parameter, int]) -> list[dict[str, Any]]:
    """Split a group into one for each divisor among its parameters; all keep its options."""
    parameters = group["params"] if isinstance(group["params"], Sequence) else list(group["params"])
    found = sorted({divisors.get(parameter, 1) for parameter in parameters})
    return [
        {**group, "params": [p for p in parameters if divisors.get(p, 1) == divisor], DIVISOR: divisor}
        for divisor in found
    ]
