"""Temporal order: classifies sequences by the order of three marks, X or Y, among distractors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import correct
from deepmemory.lab.tasks.synthetic import (
    Sequences,
    SyntheticTask,
    classification_losses,
    lengths_between,
    one_hot,
    positions,
)
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.random_streams import below, derive

START, END, X, Y, DISTRACTORS = 0, 1, 2, 3, 4  # symbols 4 to 7 are the distractors a, b, c, d
WINDOWS = (10, 33, 66)  # first step of the window of each mark
WINDOW = 10  # steps in a window


@dataclass(frozen=True)
class TemporalOrder(SyntheticTask):
    """One-hot symbols: E first, B last, X or Y once in steps 10-19, 33-42 and 66-75, else a, b, c or d.

    The class is the three marks read as a binary number, X as 0 and Y as 1, the first mark first.
    """

    title: ClassVar[str] = "Temporal order"
    shortest: int = 100
    longest: int = 110

    input_size = 8
    output_size = 8

    def __post_init__(self) -> None:
        needed = WINDOWS[-1] + WINDOW + 1
        if self.shortest < needed:
            raise ValueError(
                f"temporal-order: min_length should be at least {needed} to hold all marks, got {self.shortest}"
            )

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting; no data is read."""
        return cls(setting.min_length, setting.max_length)

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""
        return Level("eight equal classes", {"loss": math.log(8), "accuracy": 1 / 8})

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Sequences:
        """One sequence for each key (R, B)."""
        of_length, of_distractors = derive(keys, 0), derive(keys, 1)
        lengths = lengths_between(of_length, self.shortest, self.longest)
        time = positions(self.longest, keys)  # (1, T, 1); symbols are (R, T, B)
        symbols = DISTRACTORS + below(derive(of_distractors[:, None], time), 4)
        target = torch.zeros_like(keys)
        for mark, start in enumerate(WINDOWS):
            at = start + below(derive(keys, 2 + 2 * mark), WINDOW)
            is_y = below(derive(keys, 3 + 2 * mark), 2)
            symbols = torch.where(time == at[:, None], X + is_y[:, None], symbols)
            target = 2 * target + is_y
        symbols = torch.where(time == lengths[:, None] - 1, END, symbols)
        symbols = torch.where(time == 0, START, symbols)
        real = time < lengths[:, None]
        x = one_hot(symbols, 8, dtype) * real[..., None]
        return Sequences(x.transpose(1, 2), lengths, target)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The cross-entropy of each sequence."""
        return classification_losses(output, target)

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """1 where the class with the highest output is the target, else 0."""
        return correct(output, target)


TASK = TemporalOrder
