"""Zoneout and dropout inside the recurrence: what may be asked for, and masks."""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Zoneout = float | tuple[float, float]  # of h, or of h and c where they differ


def check_probability(name: str, option: str, meaning: str, value: Any) -> float:
    """A number between 0 and 1, or torch's error for dropout."""
    if not isinstance(value, numbers.Number) or isinstance(value, bool) or not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(
            f"{name}: {option} should be a number in range [0, 1] representing the probability of {meaning}, "
            f"got {value!r}"
        )
    return float(value)  # type: ignore[arg-type]


def check_zoneout(name: str, zoneout: Any, parts: int) -> Zoneout:
    """One probability, or one for each of the state's two tensors; 0.0 where nothing is ever kept."""
    meaning = "a unit keeping its state for a step"
    if parts == 2 and isinstance(zoneout, tuple | list):
        if len(zoneout) != parts:
            raise ValueError(f"{name}: zoneout should be one number, or two for h and c, got {zoneout!r}")
        of_h, of_c = (check_probability(name, "zoneout", meaning, rate) for rate in zoneout)
        return (of_h, of_c) if of_h or of_c else 0.0
    return check_probability(name, "zoneout", meaning, zoneout)


def zoneout_rates(zoneout: Zoneout, parts: int) -> tuple[float, ...]:
    """One for each tensor of the state; none if there is no zoneout."""
    if isinstance(zoneout, tuple):
        return zoneout
    return (zoneout,) * parts if zoneout else ()


def draw_mask(shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """Zero with probability p, else 1 / (1 - p); of no run, so that vmap's ``randomness`` decides."""
    return F.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p)
