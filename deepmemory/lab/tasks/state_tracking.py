"""State tracking: outputs the product of all elements of a group so far, at every step."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepmemory.lab.settings import GROUPS, Setting, check_choice
from deepmemory.lab.tasks.batch import WHOLE, Batch, Feed, Shape, Shard, Tally, correct, counted, cross_entropy
from deepmemory.lab.tasks.on_device import OnDevice
from deepmemory.lab.tasks.synthetic import FixedFeed, Sequences, SyntheticTask, one_hot, positions
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.network import StepwiseNetwork
from deepmemory.lab.training.random_streams import TEST, TRAINING, below, derive

LONGER = (8, 64)  # multiples of the training length that are measured besides it
STATE = 128  # typical width of a network's states, which may take more memory than its inputs


class StateTracking(SyntheticTask):
    """Elements of a group, uniform and one-hot; the target is the product, from the left, of those so far.

    Each element is a class, so a guess is right with probability 1 / (number of elements). The loss, by which a run's
    best weights are chosen, is that of sequences as long as those in training. The accuracy is the share of all
    positions whose product is right, at that length and at its multiples in ``LONGER``.
    """

    title: ClassVar[str] = "State tracking"
    measures: ClassVar[tuple[str, ...]] = ("accuracy", *(f"accuracy_{times}" for times in LONGER))

    def __init__(self, group: str, longest: int = 16) -> None:
        self.group, self.length = group, longest
        self.size, self.products = product_table(group)

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting; no data is read."""
        return cls(setting.elements, setting.max_length)

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""
        size, _ = product_table(setting.elements)
        return Level(f"{size} equal elements", {"loss": math.log(size), "accuracy": 1 / size})

    @property
    def longest(self) -> int:
        """Number of time steps in training."""
        return self.length

    @property
    def input_size(self) -> int:
        """Number of elements of the group."""
        return self.size

    output_size = input_size

    @property
    def largest_tensor(self) -> int:
        """The size of the longest input, or of the states."""
        return self.length * max(LONGER) * max(self.size, STATE)

    def make(self, keys: Tensor, dtype: torch.dtype = torch.float32) -> Sequences:
        """One sequence for each key (R, B); the target is (R, B, T)."""
        elements = below(derive(keys[:, None], positions(self.longest, keys)), self.size)  # [R, T, B]
        x = one_hot(elements, self.size, dtype)
        return Sequences(x.transpose(1, 2), None, self.running_products(elements).transpose(1, 2))

    def running_products(self, elements: Tensor) -> Tensor:
        """The product of all elements up to each step along dimension 1, in log(T) steps, as it is associative."""
        products = self.products.on(elements.device)["products"]
        span = 1
        while span < elements.shape[1]:
            joined = products[elements[:, :-span] * self.size + elements[:, span:]]
            elements = torch.cat((elements[:, :span], joined), 1)
            span *= 2
        return elements

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """A recurrent block and a linear layer at every step."""
        return StepwiseNetwork(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """New sequences at every step for training; otherwise the same for all runs and studies, at several lengths."""
        feed = super().feed(split, setting, seeds, batch_size, dtype, shard)
        if split == TRAINING:
            return feed
        assert isinstance(feed, FixedFeed)
        feeds = [feed]
        for times in LONGER:
            task = StateTracking(self.group, self.length * times)
            # After an epoch, longer lengths have equally many positions; else the longest would take most of the time.
            count = feed.count if split == TEST else max(1, feed.count * LONGER[0] // times)
            feeds.append(FixedFeed(task, split, count, batch_size, seeds.device, dtype))
        return SeveralLengths(feeds)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy at each step."""
        return cross_entropy(output, target)

    def correct(self, output: Tensor, target: Tensor) -> Tensor:
        """1 for each step whose product is right, else 0."""
        return correct(output, target)

    def tally(self, output: tuple[Tensor, Any], batch: Batch) -> Tally:  # type: ignore[override]
        """Each step counts once, for the accuracy of its length."""
        logits, _ = output
        target = batch.target.expand(logits.shape[:-1])
        sums = counted(self.losses(logits, target), batch, self.correct(logits, target))
        times = logits.shape[2] // self.length
        return sums if times == 1 else sums._replace(only=f"accuracy_{times}")


class SeveralLengths:
    """The batches of several feeds, one feed after the other."""

    def __init__(self, feeds: list[FixedFeed]) -> None:
        self.feeds = feeds
        self.in_dims = feeds[0].in_dims
        self.memory: list[Tensor] = []
        self.batches: list[tuple[FixedFeed, int]] = []

    def plan(self, epoch: int) -> list[Shape]:
        """The shapes of all batches."""
        shapes = [(feed, place, shape) for feed in self.feeds for place, shape in enumerate(feed.plan(epoch))]
        self.batches = [(feed, place) for feed, place, _ in shapes]
        return [shape for *_, shape in shapes]

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """A batch of the feed that this step belongs to."""
        feed, place = self.batches[int(step)]
        return feed.batch(place, shape)

    def carry(self, output: Any) -> None:
        """Do nothing: no input depends on an output."""


@lru_cache
def product_table(group: str) -> tuple[int, OnDevice]:
    """The number of a group's elements and, for each pair a, b of them, their product at a * number + b.

    Elements are numbered from the identity, 0. Permutations are multiplied as functions: b is applied first.
    """
    check_choice("group", group, GROUPS)
    cyclic = {"parity": 2, "z60": 60}.get(group)
    if cyclic:
        products = [(a + b) % cyclic for a in range(cyclic) for b in range(cyclic)]
        return cyclic, OnDevice({"products": torch.tensor(products)})
    kind, degree = group[0], int(group[1:])
    elements = [p for p in permutations(range(degree)) if kind == "s" or is_even(p)]
    numbers = {p: number for number, p in enumerate(elements)}
    products = [numbers[tuple(a[b[i]] for i in range(degree))] for a in elements for b in elements]
    return len(elements), OnDevice({"products": torch.tensor(products)})


def is_even(permutation: tuple[int, ...]) -> bool:
    """Whether a permutation is a product of an even number of swaps.

    >>> is_even((0, 1, 2)), is_even((1, 0, 2)), is_even((1, 2, 0))
    (True, False, True)
    """
    places = range(len(permutation))
    return sum(permutation[i] > permutation[j] for j in places for i in range(j)) % 2 == 0


TASK = StateTracking
