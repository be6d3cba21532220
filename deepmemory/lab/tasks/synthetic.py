"""The common part of the synthetic tasks: generated sequences, with one output after the last step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import WHOLE, Batch, Feed, Shape, Shard, Tally
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.network import LastStateNetwork
from deepmemory.lab.training.random_streams import TRAINING, VALIDATION, below, sequence_keys


class Sequences(NamedTuple):
    """Sequences of R runs, B each."""

    x: Tensor  # (R, B, T, features), time before batch in memory, as the layers read it
    lengths: Tensor | None  # (R, B): real time steps of each sequence; None if all are T long
    target: Tensor  # (R, B)


class SyntheticTask(Protocol):
    """A task whose sequences are generated from keys."""

    title: ClassVar[str]
    data_settings: ClassVar[tuple[str, ...]] = ()
    measures: ClassVar[tuple[str, ...]] = ("accuracy",)
    every_epoch: ClassVar[bool] = False

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting; no data is read."""

    @classmethod
    def dataset(cls, setting: Setting) -> str | None:
        """None: sequences are generated."""
        return None

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""

    @property
    def input_size(self) -> int:
        """Number of features of x."""

    @property
    def output_size(self) -> int:
        """Features of the network's output."""

    @property
    def longest(self) -> int:
        """Largest number of time steps of x."""

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Sequences:
        """One sequence for each key (R, B); equal keys give equal sequences."""

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of each sequence: output (..., output_size), target (...)."""

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """1 for each sequence whose output is correct, else 0."""

    @property
    def largest_tensor(self) -> int:
        """The size of the input."""
        return self.longest * self.input_size

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """A recurrent block and a linear layer on its last state."""
        return LastStateNetwork(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """New sequences at every step for training; for validation and test, the same for all runs and studies."""
        if split == TRAINING:
            return FreshFeed(self, seeds, setting.batch, setting.steps, dtype, shard)
        return FixedFeed(
            self,
            split,
            setting.validation if split == VALIDATION else setting.test,
            batch_size,
            seeds.device,
            dtype,
        )

    def tally(self, output: Tensor, batch: Batch) -> Tally:
        """Each sequence counts once."""
        target = batch.target.expand(output.shape[:-1])
        losses = self.losses(output, target)
        return Tally(losses, torch.ones_like(losses), self.correct(output, target))


@dataclass
class FreshFeed:
    """New sequences at every step, which follow from (seed of the run, number of the step)."""

    task: SyntheticTask
    seeds: Tensor
    batch_size: int
    steps: int
    dtype: torch.dtype
    shard: Shard
    in_dims: tuple[int | None, ...] = (0, 0)
    memory: list[Tensor] = field(default_factory=list)
    first: Tensor = field(init=False)  # number of the epoch's first step; a captured step reads it from memory

    def __post_init__(self) -> None:
        self.first = torch.zeros((), dtype=torch.int64, device=self.seeds.device)

    def plan(self, epoch: int) -> list[Shape]:
        """Start an epoch; all batches have one shape."""
        self.first.fill_(epoch * self.steps)
        return [(self.task.longest,)] * self.steps

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """The sequences of one step, each run's own."""
        keys = sequence_keys(self.seeds, TRAINING, self.first + step, self.batch_size)
        x, lengths, target = self.task.make(keys[:, self.shard[0] :: self.shard[1]], self.dtype)
        return Batch((x, lengths), target)

    def carry(self, output: Any) -> None:
        """Do nothing: no input depends on an output."""


@dataclass
class FixedFeed:
    """The same sequences for all runs and studies."""

    task: SyntheticTask
    split: int
    count: int
    batch_size: int
    device: torch.device
    dtype: torch.dtype
    in_dims: tuple[int | None, ...] = (None, None)
    memory: list[Tensor] = field(default_factory=list)

    def plan(self, epoch: int) -> list[Shape]:
        """All sequences, ``batch_size`` at a time."""
        return [(self.task.longest,)] * -(-self.count // self.batch_size)

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """The sequences of one batch."""
        anyone = torch.zeros(1, dtype=torch.int64, device=self.device)
        first = int(step) * self.batch_size
        keys = sequence_keys(anyone, self.split, 0, min(self.batch_size, self.count - first), first)
        x, lengths, target = self.task.make(keys, self.dtype)
        return Batch((x[0], None if lengths is None else lengths[0]), target)

    def carry(self, output: Any) -> None:
        """Do nothing: no input depends on an output."""


def lengths_between(keys: Tensor, shortest: int, longest: int) -> Tensor:
    """A random length for each key, from ``shortest`` to ``longest``."""
    return shortest + below(keys, longest - shortest + 1)


def positions(steps: int, keys: Tensor) -> Tensor:
    """The numbers 0 to steps - 1 along the time axis of (R, T, B)."""
    return torch.arange(steps, device=keys.device)[None, :, None]


def one_hot(symbols: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """One-hot vectors (..., count) of symbols (...), in the network's dtype and without waiting for the device."""
    return (symbols[..., None] == torch.arange(count, device=symbols.device)).to(dtype)


def classification_losses(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each sequence."""
    return -output.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
