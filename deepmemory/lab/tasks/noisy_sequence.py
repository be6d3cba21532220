"""Noisy sequence: recalls the first of a hundred symbols, after which there is only noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import correct
from deepmemory.lab.tasks.synthetic import Sequences, SyntheticTask, classification_losses, one_hot, positions
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.random_streams import NOISE, below, derive

RESERVED = 2  # symbols 0 and 1 are at the start, and only there


@dataclass(frozen=True)
class NoisySequence(SyntheticTask):
    """One-hot symbols, as many different ones as time steps: one of two reserved symbols, then noise from the others.

    The target is the first symbol. With ``fixed``, the noise is drawn once, before the experiment, as in the paper's
    text; otherwise every sequence has its own, as in the authors' code.
    """

    title: ClassVar[str] = "Noisy sequence"
    longest: int = 100
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.longest < RESERVED + 1:
            raise ValueError(f"noisy-sequence: min_length should be at least {RESERVED + 1}, got {self.longest}")

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting; no data is read."""
        return cls(setting.min_length, setting.noise == "fixed")

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""
        return Level("two equal symbols", {"loss": math.log(2), "accuracy": 1 / 2})

    @property
    def input_size(self) -> int:
        """The number of symbols, which is also the number of time steps."""
        return self.longest

    @property
    def output_size(self) -> int:
        """The number of symbols."""
        return self.longest

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Sequences:
        """One sequence for each key (R, B)."""
        target = below(derive(keys, 0), RESERVED)
        of_noise = derive_fixed(keys) if self.fixed else derive(keys, 1)
        time = positions(self.longest, keys)  # (1, T, 1); symbols are (R, T, B)
        noise = RESERVED + below(derive(of_noise[:, None], time), self.longest - RESERVED)
        symbols = torch.where(time == 0, target[:, None], noise)
        x = one_hot(symbols, self.longest, dtype)
        return Sequences(x.transpose(1, 2), None, target)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The cross-entropy of each sequence."""
        return classification_losses(output, target)

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """1 where the symbol with the highest output is the target, else 0."""
        return correct(output, target)


def derive_fixed(keys: Tensor) -> Tensor:
    """The key of the fixed noise, the same for every sequence."""
    return derive(torch.zeros_like(keys), NOISE)


TASK = NoisySequence
