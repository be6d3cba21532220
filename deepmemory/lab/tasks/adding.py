"""Adding: two marked numbers far apart in a long sequence of numbers; what is their sum?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepmemory.lab.tasks.synthetic import Drawn, Sequences, lengths_between, positions
from deepmemory.lab.training import random_streams

TOLERANCE = 0.04  # Hochreiter and Schmidhuber count an answer as right within this


@dataclass(frozen=True)
class Adding(Drawn):
    """Pairs (a, b): a evenly from [-1, 1), b a marker that is 1 at the two numbers to add.

    The first mark falls on one of the first ten steps, the second anywhere in the first half but its end. The
    marker is -1 at both ends of the sequence, so a mark on step 0 is invisible and adds nothing. The
    target is 0.5 + (a1 + a2) / 4.
    """

    shortest: int = 100
    longest: int = 110

    input_size = 2
    output_size = 1

    def __post_init__(self) -> None:
        if self.shortest < 24:
            raise ValueError(f"adding: min_length should be at least 24 to hold both marks, got {self.shortest}")

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Sequences:
        """One sequence for each key (R, B)."""
        of_length, of_first, of_second, of_values = (random_streams.derive(keys, index) for index in range(4))
        lengths = lengths_between(of_length, self.shortest, self.longest)
        first = random_streams.below(of_first, 10)
        second = random_streams.below(of_second, lengths // 2 - 2)
        second = second + (second >= first)  # every position but the first mark's, each as likely

        time = positions(self.longest, keys)  # (1, T, 1); all below is (R, T, B)
        real = time < lengths[:, None]
        values = 2 * random_streams.uniform(random_streams.derive(of_values[:, None], time), dtype) - 1
        marked = (time == first[:, None]) | (time == second[:, None])
        ends = (time == 0) | (time == lengths[:, None] - 1)
        marker = (marked & ~ends).to(dtype) - ends.to(dtype)
        x = torch.stack((values, marker), -1) * real[..., None]
        target = 0.5 + (values * (marked & ~ends)).sum(1) / 4
        return Sequences(x.transpose(1, 2), lengths, target)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Squared error of each sequence."""
        return (output.squeeze(-1) - target) ** 2

    def right(self, output: Tensor, target: Tensor) -> Tensor:
        """Accuracy: the share of answers within 0.04."""
        return ((output.squeeze(-1) - target).abs() < TOLERANCE).to(output.dtype)
