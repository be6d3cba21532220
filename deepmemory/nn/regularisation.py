"""Dropout inside the recurrence: checks of the probabilities, and masks."""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def check_probability(name: str, option: str, meaning: str, value: Any) -> float:
    """Return a number between 0 and 1 as a float; otherwise raise torch's dropout error."""
    if not isinstance(value, numbers.Number) or isinstance(value, bool) or not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(
            f"{name}: {option} should be a number in range [0, 1] representing the probability of {meaning}, "
            f"got {value!r}"
        )
    return float(value)  # type: ignore[arg-type]


def draw_mask(shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """Zero with probability p, else 1 / (1 - p); drawn from unbatched ones, so that vmap's ``randomness`` applies."""
    return F.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p)
