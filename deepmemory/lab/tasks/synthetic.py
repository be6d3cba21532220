"""What the three synthetic tasks share: sequences are drawn, never stored, and answered once, at their end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import WHOLE, Batch, Feed, Shape, Shard, Tally
from deepmemory.lab.training import random_streams
from deepmemory.lab.training.network import Network


class Sequences(NamedTuple):
    """Sequences of R runs, B each."""

    x: Tensor  # (R, B, T, features), time before batch in memory, as the layers read it
    lengths: Tensor | None  # (R, B): real time steps of each sequence; None where all are T long
    target: Tensor  # (R, B)


class Drawn(Protocol):
    """A task whose sequences follow from keys."""

    measures: ClassVar[tuple[str, ...]] = ("accuracy",)
    every_epoch: ClassVar[bool] = False

    @property
    def input_size(self) -> int:
        """Features of x."""

    @property
    def output_size(self) -> int:
        """Features of the network's output."""

    @property
    def longest(self) -> int:
        """Time steps of x."""

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Sequences:
        """One sequence for each key (R, B); equal keys give equal sequences."""

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of each sequence: output (..., output_size), target (...)."""

    def right(self, output: Tensor, target: Tensor) -> Tensor:
        """1 for each sequence that was answered right, else 0."""

    @property
    def numbers(self) -> int:
        """The input is the largest tensor."""
        return self.longest * self.input_size

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """A recurrent block and a linear layer on its last state."""
        return Network(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, at_once: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """Fresh sequences at every step for training; for validation and test those that all runs and studies share."""
        if split == random_streams.TRAINING:
            return FreshFeed(self, seeds, setting.batch, setting.steps, dtype, shard)
        return FixedFeed(
            self,
            split,
            setting.validation if split == random_streams.VALIDATION else setting.test,
            at_once,
            seeds.device,
            dtype,
        )

    def tally(self, output: Tensor, batch: Batch) -> Tally:
        """Every sequence counts once."""
        target = batch.target.expand(output.shape[:-1])
        losses = self.losses(output, target)
        return Tally(losses, torch.ones_like(losses), self.right(output, target))


@dataclass
class FreshFeed:
    """Sequences that nobody has seen, by (seed of the run, number of the step)."""

    task: Drawn
    seeds: Tensor
    at_once: int
    steps: int
    dtype: torch.dtype
    shard: Shard
    in_dims: tuple[int | None, ...] = (0, 0)
    memory: list[Tensor] = field(default_factory=list)
    first: Tensor = field(init=False)  # number of the epoch's first step; a captured step reads it from memory

    def __post_init__(self) -> None:
        self.first = torch.zeros((), dtype=torch.int64, device=self.seeds.device)

    def plan(self, epoch: int) -> list[Shape]:
        """All batches have one shape."""
        self.first.fill_(epoch * self.steps)
        return [(self.task.longest,)] * self.steps

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """Every run's own sequences."""
        keys = random_streams.sequence_keys(self.seeds, random_streams.TRAINING, self.first + step, self.at_once)
        x, lengths, target = self.task.make(keys[:, self.shard[0] :: self.shard[1]], self.dtype)
        return Batch((x, lengths), target)

    def keep(self, output: Any) -> None:
        """Nothing depends on it."""


@dataclass
class FixedFeed:
    """The same sequences for every run and study."""

    task: Drawn
    split: int
    count: int
    at_once: int
    device: torch.device
    dtype: torch.dtype
    in_dims: tuple[int | None, ...] = (None, None)
    memory: list[Tensor] = field(default_factory=list)

    def plan(self, epoch: int) -> list[Shape]:
        """As many at once as fit."""
        return [(self.task.longest,)] * -(-self.count // self.at_once)

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """A part of them."""
        anyone = torch.zeros(1, dtype=torch.int64, device=self.device)
        first = int(step) * self.at_once
        keys = random_streams.sequence_keys(anyone, self.split, 0, min(self.at_once, self.count - first), first)
        x, lengths, target = self.task.make(keys, self.dtype)
        return Batch((x[0], None if lengths is None else lengths[0]), target)

    def keep(self, output: Any) -> None:
        """Nothing depends on it."""


def lengths_between(keys: Tensor, shortest: int, longest: int) -> Tensor:
    """A length for each key, both ends included."""
    return shortest + random_streams.below(keys, longest - shortest + 1)


def positions(steps: int, keys: Tensor) -> Tensor:
    """0 to steps - 1 along the time axis of (R, T, B)."""
    return torch.arange(steps, device=keys.device)[None, :, None]


def one_hot(symbols: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(...) to (..., count), straight in the network's dtype and without reading values back."""
    return (symbols[..., None] == torch.arange(count, device=symbols.device)).to(dtype)


def classification_losses(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each sequence."""
    return -output.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
