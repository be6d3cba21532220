"""What a task is to the training loop."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deepmemory.lab.settings import Setting
from deepmemory.lab.training import random_streams

SPLITS = {random_streams.TRAINING: "train", random_streams.VALIDATION: "valid", random_streams.TEST: "test"}
Shard = tuple[int, int]  # this process and how many there are: each takes its part of the sequences of every batch
WHOLE: Shard = (0, 1)
Shape = tuple[int, ...]  # time steps of a batch; batches of one shape are made by the same operations


class Batch(NamedTuple):
    """What R runs read at one step, B sequences each, and what their answers are held against."""

    inputs: tuple[Any, ...]  # of the network; Feed.in_dims tells which ones every run has for itself
    target: Tensor  # (R, B, ...), or (1, B, ...) where all runs have the same
    real: Tensor | None = None  # like target without its features: what counts; None is everything


class Tally(NamedTuple):
    """Sums over what counts, for each run and sequence: (R, B)."""

    loss: Tensor
    counts: Tensor
    correct: Tensor | None = None  # answers that are right


class Feed(Protocol):
    """One split of the data for some runs, batch by batch."""

    in_dims: tuple[int | None, ...]  # of the inputs under vmap: 0 where runs differ, None where they share

    memory: list[Tensor]  # what ``keep`` changes

    def plan(self, epoch: int) -> list[Shape]:
        """Lay everything out for an epoch (from 0) and tell the shape of each of its batches."""

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """One batch, by its number in the epoch; asks the device for nothing that the host would wait for."""

    def keep(self, output: Any) -> None:
        """What the network gave for the last batch, for feeds whose next input depends on it."""


class Task(Protocol):
    """Data, network, loss and measures."""

    measures: ClassVar[tuple[str, ...]]  # beside the loss: perplexity, accuracy
    every_epoch: ClassVar[bool]  # whether an epoch is measured on all splits, as for the tables, or on validation alone

    @property
    def numbers(self) -> int:
        """Numbers in the largest tensor that one sequence needs; more sequences at once need more memory."""

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """One run's network with fresh weights."""

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, at_once: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """``random_streams.TRAINING``, ``VALIDATION`` or ``TEST`` for the runs of these seeds, on the seeds' device."""

    def tally(self, output: Any, batch: Batch) -> Tally:
        """Loss and right answers of what the network gave, (R, B, ...)."""


def counted(losses: Tensor, batch: Batch, right: Tensor | None = None) -> Tally:
    """Sums over time of what counts: everything (R, B, T)."""
    real = torch.ones_like(losses) if batch.real is None else batch.real.to(losses.dtype).expand_as(losses)
    return Tally((losses * real).sum(-1), real.sum(-1), None if right is None else (right * real).sum(-1))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of each answer: output (..., classes), target (...)."""
    flat = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
    return flat.view(target.shape)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 where the likeliest class is the right one, else 0."""
    return (output.argmax(-1) == target).to(output.dtype)
