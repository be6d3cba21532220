"""Noisy sequence: which of two symbols stood at the start, a hundred steps of noise ago?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepmemory.lab.tasks.batch import correct
from deepmemory.lab.tasks.synthetic import Drawn, Sequences, classification_losses, one_hot, positions
from deepmemory.lab.training import random_streams

RESERVED = 2  # symbols 0 and 1 stand at the start, and only there


@dataclass(frozen=True)
class NoisySequence(Drawn):
    """One-hot symbols, as many as time steps: one of two reserved ones, then noise from all the others.

    The target is the first symbol. ``fixed`` draws the noise once, before the experiment, as the paper's text
    has it; otherwise every sequence has its own, as in the authors' code.
    """

    longest: int = 100
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.longest < RESERVED + 1:
            raise ValueError(f"noisy-sequence: min_length should be at least {RESERVED + 1}, got {self.longest}")

    @property
    def input_size(self) -> int:
        """One symbol for each time step."""
        return self.longest

    @property
    def output_size(self) -> int:
        """Any symbol may be answered."""
        return self.longest

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Sequences:
        """One sequence for each key (R, B)."""
        target = random_streams.below(random_streams.derive(keys, 0), RESERVED)
        of_noise = derive_fixed(keys) if self.fixed else random_streams.derive(keys, 1)
        time = positions(self.longest, keys)  # (1, T, 1); symbols are (R, T, B)
        noise = RESERVED + random_streams.below(random_streams.derive(of_noise[:, None], time), self.longest - RESERVED)
        symbols = torch.where(time == 0, target[:, None], noise)
        x = one_hot(symbols, self.longest, dtype)
        return Sequences(x.transpose(1, 2), None, target)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of each sequence."""
        return classification_losses(output, target)

    def right(self, output: Tensor, target: Tensor) -> Tensor:
        """Accuracy of the likeliest symbol."""
        return correct(output, target)


def derive_fixed(keys: Tensor) -> Tensor:
    """The one key of the fixed noise, in the place of every sequence's own."""
    return random_streams.derive(torch.zeros_like(keys), random_streams.NOISE)
