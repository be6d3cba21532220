"""Stored data: batches of sequences, shuffled for each run or in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmemory.lab.tasks.batch import WHOLE, Batch, Shape, Shard
from deepmemory.lab.training.random_streams import ORDER, permutations

PADDING = -1  # in place of a sequence if the last batch is not full

Make = Callable[[Tensor, Shape], Batch]  # from the numbers of sequences (R, B), which may include PADDING


class ShuffledFeed:
    """Every sequence once per epoch, in a new order that follows from (seed of the run, epoch)."""

    def __init__(
        self,
        make: Make,
        items: Tensor,
        lengths: Sequence[Tensor],
        seeds: Tensor,
        batch_size: int,
        inputs: int,
        shard: Shard = WHOLE,
    ) -> None:
        """``items`` (R or 1, N) are the runs' sequences, ``lengths`` (sequences,) their sizes, all on the CPU."""
        self.make, self.lengths, self.shard = make, lengths, shard
        self.seeds = seeds.cpu()
        self.items = items.expand(len(seeds), -1)
        self.in_dims: tuple[int | None, ...] = (0,) * inputs
        self.memory: list[Tensor] = []
        self.steps = -(-items.shape[1] // batch_size)
        self.order = torch.empty(len(seeds), self.steps, batch_size, dtype=torch.int64, device=seeds.device)

    def plan(self, epoch: int) -> list[Shape]:
        """Shuffle; a batch is as long as its longest sequence in any run, rounded up so that there are few shapes."""
        order = self.items.gather(1, permutations(self.seeds, ORDER, epoch, self.items.shape[1]))
        return lay_out(order, self.order, self.lengths, longest_first=True)

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """The sequences of one batch, each run's own."""
        index = torch.as_tensor(step, device=self.order.device).view(1)
        first, step_of = self.shard
        return self.make(self.order.index_select(1, index)[:, 0, first::step_of], shape)

    def carry(self, output: Any) -> None:
        """Do nothing: no input depends on an output."""


class OrderedFeed:
    """Every sequence once, in the order of the data; ``items`` is (1, N) if all runs have the same, else (R, N)."""

    def __init__(
        self, make: Make, items: Tensor, lengths: Sequence[Tensor], device: torch.device, batch_size: int, inputs: int
    ) -> None:
        self.make, self.items, self.lengths = make, items, lengths
        self.shared = len(items) == 1
        self.in_dims: tuple[int | None, ...] = ((None,) if self.shared else (0,)) * inputs
        self.memory: list[Tensor] = []
        self.batch_size = min(batch_size, items.shape[1])
        steps = -(-items.shape[1] // self.batch_size)
        self.order = torch.empty(len(items), steps, self.batch_size, dtype=torch.int64, device=device)

    def plan(self, epoch: int) -> list[Shape]:
        """Put the sequences into batches, the same in every epoch."""
        return lay_out(self.items, self.order, self.lengths)

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """The sequences of one batch; inputs that all runs share have no dimension of runs."""
        inputs, target, real = self.make(self.order[:, int(step)], shape)
        return Batch(tuple(i if i is None else i[0] for i in inputs) if self.shared else inputs, target, real)

    def carry(self, output: Any) -> None:
        """Do nothing: no input depends on an output."""


def lay_out(items: Tensor, order: Tensor, lengths: Sequence[Tensor], longest_first: bool = False) -> list[Shape]:
    """Write items (R, N) into ``order`` as batches, and return how long each batch is in each of the ``lengths``.

    ``longest_first`` sorts each batch, so that rows which an engine processes together have similar lengths.
    """
    runs, steps, batch_size = order.shape
    padded = torch.full((runs, steps * batch_size), PADDING)
    padded[:, : items.shape[1]] = items
    batches = padded.view(runs, steps, batch_size)
    if longest_first:
        steps_of = torch.where(batches == PADDING, -1, lengths[0][batches.clamp(min=0)])
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
    """Round up to a power of two or the middle between two of them.

    >>> [round_up(n) for n in (1, 5, 8, 9, 13, 100, 129)]
    [8, 8, 8, 12, 16, 128, 192]
    """
    power = 8
    while power < length:
        if 3 * power // 2 >= length:
            return 3 * power // 2
        power *= 2
    return power
