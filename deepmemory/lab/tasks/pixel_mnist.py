"""Pixel-by-pixel MNIST: classifies handwritten digits that are read one pixel at a time."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepmemory.lab.data.digits import Digits, load_digits
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import SPLITS, WHOLE, Batch, Feed, Shape, Shard, Tally, correct, cross_entropy
from deepmemory.lab.tasks.on_device import OnDevice
from deepmemory.lab.tasks.sequences import PADDING, OrderedFeed, ShuffledFeed
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.network import LastStateNetwork
from deepmemory.lab.training.random_streams import ORDER, TRAINING, permutations

VALIDATION = 5000  # images, the last of the training set; at most a sixth of it
PERMUTATION_SEED = 0  # of the order of pixels that all permuted runs share


class PixelMNIST:
    """The pixels of a digit row by row, or in one fixed random order; the class is the digit."""

    title: ClassVar[str] = "Pixel-by-pixel MNIST"
    data_settings: ClassVar[tuple[str, ...]] = ("pixels", "limit")
    measures: ClassVar[tuple[str, ...]] = ("accuracy",)
    every_epoch: ClassVar[bool] = True
    input_size, output_size = 1, 10

    def __init__(self, digits: dict[str, Digits], permuted: bool = False, limit: int = 0) -> None:
        """``limit`` is the number of images read from the start of each split; 0 reads all."""
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
        self.largest_tensor = self.steps * 256  # the states of every step, for layers of up to this width

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting, with data from a folder, or from the user's cache."""
        return cls(load_digits(data), setting.pixels == "permuted", setting.limit)

    @classmethod
    def dataset(cls, setting: Setting) -> str | None:
        """The registry's name of the data that a setting reads."""
        return "mnist"

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""
        return Level("ten equal classes", {"loss": math.log(10), "accuracy": 1 / 10})

    def order(self, permuted: bool) -> Tensor:
        """The pixel that is read at each step."""
        if not permuted:
            return torch.arange(self.steps)
        return permutations(torch.tensor([PERMUTATION_SEED]), ORDER, 0, self.steps)[0]

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """A recurrent block and a linear layer on its last state."""
        return LastStateNetwork(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """The images of one split, from 0 (paper) to 1 (ink)."""
        name = SPLITS[split]
        images, labels = self.images.on(seeds.device)[name], self.labels.on(seeds.device)[name]

        def make(items: Tensor, shape: Shape) -> Batch:
            """The pixels (R, B, T, 1) of images (R, B)."""
            at = items.clamp(min=0)
            x = images[at].to(dtype).div(255).permute(0, 2, 1).contiguous()[..., None]  # time before batch in memory
            return Batch((x.transpose(1, 2),), labels[at], items != PADDING)

        everything, lengths = torch.arange(len(labels))[None], torch.full((len(labels),), self.steps)
        if split == TRAINING:
            return ShuffledFeed(make, everything, [lengths], seeds, batch_size, inputs=1, shard=shard)
        return OrderedFeed(make, everything, [lengths], seeds.device, batch_size, inputs=1)

    def tally(self, output: Tensor, batch: Batch) -> Tally:
        """Each image counts once."""
        target = batch.target.expand(output.shape[:-1])
        assert batch.real is not None
        real = batch.real.to(output.dtype).expand(target.shape)
        return Tally(cross_entropy(output, target) * real, real, correct(output, target) * real)


TASK = PixelMNIST
