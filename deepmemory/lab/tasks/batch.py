"""The batches of a task, and sums over their outputs."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deepmemory.lab.training.random_streams import TEST, TRAINING, VALIDATION

SPLITS = {TRAINING: "train", VALIDATION: "valid", TEST: "test"}
FORMATS = {"loss": ".4f", "perplexity": ".2f", "accuracy": ".4f"}  # of measures, with digits to tell epochs apart
Shard = tuple[int, int]  # index of this process, and the number of processes: each takes its part of every batch
WHOLE: Shard = (0, 1)
Shape = tuple[int, ...]  # time steps of a batch; batches of one shape are made by the same operations


class Batch(NamedTuple):
    """The inputs of R runs at one step, B sequences each, and the targets of their outputs."""

    inputs: tuple[Any, ...]  # of the network; Feed.in_dims says which of them differ between runs
    target: Tensor  # (R, B, ...), or (1, B, ...) if it is the same for all runs
    real: Tensor | None = None  # like target without its features: true where it counts; None for everywhere


class Tally(NamedTuple):
    """Sums over all outputs that count, for each run and sequence: (R, B)."""

    loss: Tensor
    counts: Tensor
    correct: Tensor | None = None  # outputs that are correct
    only: str | None = None  # the one measure that these sequences count for; None for the loss and all other measures


class Feed(Protocol):
    """One split of the data for some runs, batch by batch."""

    in_dims: tuple[int | None, ...]  # of the inputs under vmap: 0 where runs differ, None where they share

    memory: list[Tensor]  # the tensors that ``carry`` changes

    def plan(self, epoch: int) -> list[Shape]:
        """Prepare an epoch (from 0) and return the shape of each of its batches."""

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """One batch, by its number in the epoch; never makes the host wait for the device."""

    def carry(self, output: Any) -> None:
        """Store what the next batch needs of the output for the last one, such as the state."""


def counted(losses: Tensor, batch: Batch, hits: Tensor | None = None) -> Tally:
    """Sums over the time steps that count, from losses and ``hits`` (1 where an output is correct), (R, B, T)."""
    real = torch.ones_like(losses) if batch.real is None else batch.real.to(losses.dtype).expand_as(losses)
    return Tally((losses * real).sum(-1), real.sum(-1), None if hits is None else (hits * real).sum(-1))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of each output (..., classes) for its target (...), in float32 at least."""
    logits = output.flatten(0, -2).to(torch.promote_types(output.dtype, torch.float32))
    flat = nn.functional.cross_entropy(logits, target.flatten(), reduction="none")
    return flat.view(target.shape)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 where the class with the highest output is the target, else 0."""
    return (output.argmax(-1) == target).to(output.dtype)
