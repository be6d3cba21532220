"""Handwritten digits, one pixel at a time."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from deepmemory.lab.data.digits import Digits
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import SPLITS, WHOLE, Batch, Feed, Shape, Shard, Tally, correct, cross_entropy
from deepmemory.lab.tasks.on_device import OnDevice
from deepmemory.lab.tasks.sequences import NOBODY, OrderedFeed, ShuffledFeed
from deepmemory.lab.training import random_streams
from deepmemory.lab.training.network import Network

VALIDATION = 5000  # of the training images, the last ones; fewer where there are few
PERMUTATION_SEED = 0  # of the one order of pixels that every permuted run reads, by random_streams.permutations


class PixelMNIST:
    """The pixels of a digit row by row, or in one fixed order that mixes them; which digit was it?"""

    measures: ClassVar[tuple[str, ...]] = ("accuracy",)
    every_epoch: ClassVar[bool] = True
    input_size, output_size = 1, 10

    def __init__(self, digits: dict[str, Digits], permuted: bool = False, limit: int = 0) -> None:
        """``limit``: the first so many images of each split; 0 is all."""
        images, labels = digits["train"]
        valid = min(VALIDATION, len(labels) // 6)
        parts = {
            "train": Digits(images[:-valid], labels[:-valid]),
            "valid": Digits(images[-valid:], labels[-valid:]),
            "test": digits["test"],
        }
        self.steps = images[0].numel()
        order = self.order(permuted)
        self.images = OnDevice({k: part.images[: limit or None].flatten(1)[:, order] for k, part in parts.items()})
        self.labels = OnDevice({k: part.labels[: limit or None] for k, part in parts.items()})
        self.numbers = self.steps * 256  # the states of every step, for layers of up to this width

    def order(self, permuted: bool) -> Tensor:
        """Which pixel comes when."""
        if not permuted:
            return torch.arange(self.steps)
        return random_streams.permutations(torch.tensor([PERMUTATION_SEED]), random_streams.ORDER, 0, self.steps)[0]

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """A recurrent block and a linear layer on its last state."""
        return Network(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, at_once: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """Images of one split, 0 paper and 1 ink."""
        name = SPLITS[split]
        images, labels = self.images.on(seeds.device)[name], self.labels.on(seeds.device)[name]

        def make(items: Tensor, shape: Shape) -> Batch:
            """Images (R, B) as pixels (R, B, T, 1)."""
            at = items.clamp(min=0)
            x = images[at].to(dtype).div(255).permute(0, 2, 1).contiguous()[..., None]  # time before batch in memory
            return Batch((x.transpose(1, 2),), labels[at], items != NOBODY)

        everything, lengths = torch.arange(len(labels))[None], torch.full((len(labels),), self.steps)
        if split == random_streams.TRAINING:
            return ShuffledFeed(make, everything, [lengths], seeds, at_once, inputs=1, shard=shard)
        return OrderedFeed(make, everything, [lengths], seeds.device, at_once, inputs=1)

    def tally(self, output: Tensor, batch: Batch) -> Tally:
        """Every image counts once."""
        target = batch.target.expand(output.shape[:-1])
        assert batch.real is not None
        real = batch.real.to(output.dtype).expand(target.shape)
        return Tally(cross_entropy(output, target) * real, real, correct(output, target) * real)
