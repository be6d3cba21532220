"""Adding: outputs the sum of two marked numbers in a long sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.synthetic import Sequences, SyntheticTask, lengths_between, positions
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.random_streams import below, derive, uniform

MEAN_LOSS = 0.039  # the variance of the target; a mark on the first step adds nothing
TOLERANCE = 0.04  # within which Hochreiter and Schmidhuber count an output as correct


@dataclass(frozen=True)
class Adding(SyntheticTask):
    """Pairs (a, b): a is uniform in [-1, 1), b is a marker that is 1 at the two numbers to add.

    The first mark is on one of the first ten steps, the second anywhere in the first half except its end. The
    marker is -1 at both ends of the sequence, so a mark on step 0 is invisible and adds nothing. The
    target is 0.5 + (a1 + a2) / 4.
    """

    title: ClassVar[str] = "Adding"
    shortest: int = 100
    longest: int = 110

    input_size = 2
    output_size = 1

    def __post_init__(self) -> None:
        if self.shortest < 24:
            raise ValueError(f"adding: min_length should be at least 24 to hold both marks, got {self.shortest}")

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting; no data is read."""
        return cls(setting.min_length, setting.max_length)

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""
        return Level("always the mean", {"loss": MEAN_LOSS})

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Sequences:
        """One sequence for each key (R, B)."""
        of_length, of_first, of_second, of_values = (derive(keys, index) for index in range(4))
        lengths = lengths_between(of_length, self.shortest, self.longest)
        first = below(of_first, 10)
        second = below(of_second, lengths // 2 - 2)
        second = second + (second >= first)  # every position except the first mark's, with equal probability

        time = positions(self.longest, keys)  # (1, T, 1); all below is (R, T, B)
        real = time < lengths[:, None]
        values = 2 * uniform(derive(of_values[:, None], time), dtype) - 1
        marked = (time == first[:, None]) | (time == second[:, None])
        ends = (time == 0) | (time == lengths[:, None] - 1)
        marker = (marked & ~ends).to(dtype) - ends.to(dtype)
        x = torch.stack((values, marker), -1) * real[..., None]
        target = 0.5 + (values * (marked & ~ends)).sum(1) / 4
        return Sequences(x.transpose(1, 2), lengths, target)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The squared error of each sequence."""
        return (output.squeeze(-1) - target) ** 2

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """1 for each output within 0.04 of its target, else 0."""
        return ((output.squeeze(-1) - target).abs() < TOLERANCE).to(output.dtype)


TASK = Adding
