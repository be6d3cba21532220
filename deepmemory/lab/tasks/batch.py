"""What a task is to the training loop: its network, its batches, and how outputs are measured."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deepmemory.lab.settings import Setting
from deepmemory.lab.training.random_streams import TEST, TRAINING, VALIDATION

SPLITS = {TRAINING: "train", VALIDATION: "valid", TEST: "test"}
FORMATS = {"loss": ".4f", "perplexity": ".2f", "accuracy": ".4f"}  # of measures, with digits that tell epochs apart
Shard = tuple[int, int]  # this process, and how many there are: each takes its part of the sequences of every batch
WHOLE: Shard = (0, 1)
Shape = tuple[int, ...]  # time steps of a batch; batches of one shape are made by the same operations


class Batch(NamedTuple):
    """The inputs of R runs at one step, B sequences each, and the targets of their outputs."""

    inputs: tuple[Any, ...]  # of the network; Feed.in_dims says which of them differ between runs
    target: Tensor  # (R, B, ...), or (1, B, ...) where it is the same for all runs
    real: Tensor | None = None  # like target without its features: true where it counts; None is everywhere


class Tally(NamedTuple):
    """Sums over everything that counts, for each run and sequence: (R, B)."""

    loss: Tensor
    counts: Tensor
    correct: Tensor | None = None  # outputs that are correct
    only: str | None = None  # the one measure that these sequences count for; None is the loss and all other measures


class Level(NamedTuple):
    """The scores of the best answer that ignores the input: a network that scores no better has learnt nothing."""

    answer: str  # what it is
    scores: dict[str, float]  # by measure


class Feed(Protocol):
    """One split of the data for some runs, batch by batch."""

    in_dims: tuple[int | None, ...]  # of the inputs under vmap: 0 where runs differ, None where they share

    memory: list[Tensor]  # what ``carry`` changes

    def plan(self, epoch: int) -> list[Shape]:
        """Prepare an epoch (from 0) and return the shape of each of its batches."""

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """One batch, by its number in the epoch; never makes the host wait for the device."""

    def carry(self, output: Any) -> None:
        """Take over the output for the last batch, where the next input depends on it."""


class Task(Protocol):
    """Data, network, loss and measures. A new task implements this, and its file names the class ``TASK``."""

    title: ClassVar[str]  # in reports
    data_settings: ClassVar[tuple[str, ...]] = ()  # the fields of a setting that choose the data that is read
    measures: ClassVar[tuple[str, ...]]  # besides the loss: perplexity, accuracy
    every_epoch: ClassVar[bool]  # whether an epoch is measured on all splits, as for the tables, or on validation only

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting; ``data`` is the folder to read from, None for the user's cache."""

    @classmethod
    def dataset(cls, setting: Setting) -> str | None:
        """The registry's name of the data that a setting reads; None where sequences are generated."""

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input; None where they are not known."""

    @property
    def largest_tensor(self) -> int:
        """How many numbers the largest tensor has that one sequence needs; it limits how many are evaluated at once."""

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """The network of one run, with new weights."""

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """The split ``TRAINING``, ``VALIDATION`` or ``TEST`` for the runs of these seeds, on the seeds' device."""

    def tally(self, output: Any, batch: Batch) -> Tally:
        """Loss and correct outputs, from the network's output (R, B, ...)."""


def counted(losses: Tensor, batch: Batch, hits: Tensor | None = None) -> Tally:
    """Sums over time of everything that counts, from losses and ``hits`` (1 where an output is correct), (R, B, T)."""
    real = torch.ones_like(losses) if batch.real is None else batch.real.to(losses.dtype).expand_as(losses)
    return Tally((losses * real).sum(-1), real.sum(-1), None if hits is None else (hits * real).sum(-1))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of each output (..., classes) for its target (...)."""
    flat = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
    return flat.view(target.shape)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 where the class with the highest output is the target, else 0."""
    return (output.argmax(-1) == target).to(output.dtype)
