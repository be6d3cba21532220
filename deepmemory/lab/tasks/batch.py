"""What a task is to the training loop."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepmemory.lab import draws


class Batch(NamedTuple):
    """Sequences of R runs, B each."""

    x: Tensor  # (R, B, T, features), time before batch in memory, as the layers read it
    lengths: Tensor | None  # (R, B): real time steps of each sequence; None where all are T long
    target: Tensor  # (R, B)


class Task(Protocol):
    """Data, shape of the network, loss and metrics."""

    @property
    def input_size(self) -> int:
        """Features of x."""

    @property
    def output_size(self) -> int:
        """Features of the network's output."""

    @property
    def longest(self) -> int:
        """Time steps of x."""

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Batch:
        """One sequence for each key (R, B); equal keys give equal sequences."""

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of each sequence: output (..., output_size), target (...)."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Further measures of each sequence, each like the loss."""


def lengths_between(keys: Tensor, shortest: int, longest: int) -> Tensor:
    """A length for each key, both ends included."""
    return shortest + draws.below(keys, longest - shortest + 1)


def positions(steps: int, keys: Tensor) -> Tensor:
    """0 to steps - 1 along the time axis of (R, T, B)."""
    return torch.arange(steps, device=keys.device)[None, :, None]


def one_hot(symbols: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(...) to (..., count), straight in the network's dtype and without reading values back."""
    return (symbols[..., None] == torch.arange(count, device=symbols.device)).to(dtype)


def classification_losses(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each sequence."""
    return -output.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 where the likeliest class is the right one, else 0."""
    return (output.argmax(-1) == target).to(output.dtype)
