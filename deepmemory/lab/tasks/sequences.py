"""Data that is at hand: sequences in an order of each run's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmemory.lab.tasks.batch import WHOLE, Batch, Shape, Shard
from deepmemory.lab.training import random_streams

NOBODY = -1  # in the place of a sequence where the last batch is not full

Make = Callable[[Tensor, Shape], Batch]  # from the numbers of sequences (R, B), NOBODY among them


class ShuffledFeed:
    """Every sequence once per epoch, in a new order that follows from (seed of the run, epoch)."""

    def __init__(
        self,
        make: Make,
        items: Tensor,
        lengths: Sequence[Tensor],
        seeds: Tensor,
        at_once: int,
        inputs: int,
        shard: Shard = WHOLE,
    ) -> None:
        """``items`` (R or 1, N) are the runs' sequences, ``lengths`` (sequences,) their sizes, all on the CPU."""
        self.make, self.lengths, self.shard = make, lengths, shard
        self.seeds = seeds.cpu()
        self.items = items.expand(len(seeds), -1)
        self.in_dims: tuple[int | None, ...] = (0,) * inputs
        self.memory: list[Tensor] = []
        self.steps = -(-items.shape[1] // at_once)
        self.order = torch.empty(len(seeds), self.steps, at_once, dtype=torch.int64, device=seeds.device)

    def plan(self, epoch: int) -> list[Shape]:
        """Shuffle; a batch is as long as its longest sequence in any run, rounded up so that there are few shapes."""
        order = self.items.gather(
            1, random_streams.permutations(self.seeds, random_streams.ORDER, epoch, self.items.shape[1])
        )
        return lay_out(order, self.order, self.lengths, longest_first=True)

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """Every run's own sequences."""
        index = torch.as_tensor(step, device=self.order.device).view(1)
        first, step_of = self.shard
        return self.make(self.order.index_select(1, index)[:, 0, first::step_of], shape)

    def keep(self, output: Any) -> None:
        """Nothing depends on it."""


class OrderedFeed:
    """Every sequence once, in the order of the data; ``items`` (1, N) where all runs have the same, else (R, N)."""

    def __init__(
        self, make: Make, items: Tensor, lengths: Sequence[Tensor], device: torch.device, at_once: int, inputs: int
    ) -> None:
        self.make, self.items, self.lengths = make, items, lengths
        self.shared = len(items) == 1
        self.in_dims: tuple[int | None, ...] = ((None,) if self.shared else (0,)) * inputs
        self.memory: list[Tensor] = []
        self.at_once = min(at_once, items.shape[1])
        steps = -(-items.shape[1] // self.at_once)
        self.order = torch.empty(len(items), steps, self.at_once, dtype=torch.int64, device=device)

    def plan(self, epoch: int) -> list[Shape]:
        """The same in every epoch."""
        return lay_out(self.items, self.order, self.lengths)

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """A part of them; inputs that all runs share come without a dimension of runs."""
        inputs, target, real = self.make(self.order[:, int(step)], shape)
        return Batch(tuple(i if i is None else i[0] for i in inputs) if self.shared else inputs, target, real)

    def keep(self, output: Any) -> None:
        """Nothing depends on it."""


def lay_out(items: Tensor, order: Tensor, lengths: Sequence[Tensor], longest_first: bool = False) -> list[Shape]:
    """Put items (R, N) into batches, in place, and tell how long each batch is in each of the ``lengths``.

    With the longest first, rows that an engine takes through time together are of much the same length.
    """
    runs, steps, at_once = order.shape
    padded = torch.full((runs, steps * at_once), NOBODY)
    padded[:, : items.shape[1]] = items
    batches = padded.view(runs, steps, at_once)
    if longest_first:
        steps_of = torch.where(batches == NOBODY, -1, lengths[0][batches.clamp(min=0)])
        batches = batches.gather(2, steps_of.argsort(dim=2, descending=True, stable=True))
    order.copy_(batches, non_blocking=True)
    real = batches >= 0
    longest = [(of[batches.clamp(min=0)] * real).amax((0, 2)).tolist() for of in lengths]
    limits = [int(of.max()) for of in lengths]
    return [
        tuple(min(round_up(n), most) for n, most in zip(shape, limits, strict=True))
        for shape in zip(*longest, strict=True)
    ]


def round_up(length: int) -> int:
    """To a power of two or the middle between two of them.

    >>> [round_up(n) for n in (1, 5, 8, 9, 13, 100, 129)]
    [8, 8, 8, 12, 16, 128, 192]
    """
    power = 8
    while power < length:
        if 3 * power // 2 >= length:
            return 3 * power // 2
        power *= 2
    return power
