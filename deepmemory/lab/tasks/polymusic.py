"""Polyphonic music: predicts which of 88 keys sound next."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepmemory.lab.data.music import KEYS, load_music
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import SPLITS, WHOLE, Batch, Feed, Shape, Shard, Tally, counted
from deepmemory.lab.tasks.on_device import OnDevice
from deepmemory.lab.tasks.sequences import PADDING, OrderedFeed, ShuffledFeed
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.network import StepwiseNetwork
from deepmemory.lab.training.random_streams import TRAINING

# The loss of a model that knows only the key frequencies of the whole training set. tests/lab/tasks/test_chance.py
# computes the chance levels of all tasks again if the data is available. Limiting the data changes them little.
CHANCE = {"nottingham": 10.261, "jsb-chorales": 11.090, "musedata": 11.515, "piano-midi": 11.052}


class PolyMusic:
    """Piano-rolls: predicts the keys of the next frame from the frames so far.

    The loss is the cross-entropy of every key, summed over the keys and averaged over the frames of a batch or, in an
    evaluation, of all pieces.
    """

    title: ClassVar[str] = "Music"
    data_settings: ClassVar[tuple[str, ...]] = ("music", "limit")
    measures: ClassVar[tuple[str, ...]] = ()
    every_epoch: ClassVar[bool] = True
    input_size = output_size = KEYS

    def __init__(self, pieces: dict[str, list[Tensor]], limit: int = 0) -> None:
        """``limit`` is the number of pieces read from the start of each split; 0 reads all."""
        self.pieces = {split: of_split[: limit or None] for split, of_split in pieces.items()}
        self.rolls = OnDevice({split: torch.cat(of_split) for split, of_split in self.pieces.items()})
        self.starts = OnDevice({split: starts_of(of_split) for split, of_split in self.pieces.items()})

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting, with data from a folder, or from the user's cache."""
        return cls(load_music(setting.music, data), setting.limit)

    @classmethod
    def dataset(cls, setting: Setting) -> str | None:
        """The registry's name of the data that a setting reads."""
        return setting.music

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""
        return Level("the frequency of each key", {"loss": CHANCE[setting.music]})

    @cached_property
    def largest_tensor(self) -> int:
        """The size of the longest piece."""
        return KEYS * max(len(piece) for pieces in self.pieces.values() for piece in pieces)

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """A recurrent block and a linear layer at every step."""
        return StepwiseNetwork(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """The pieces of one split."""
        name = SPLITS[split]
        frames = torch.tensor([len(piece) - 1 for piece in self.pieces[name]])  # the last one is never an input
        rolls, starts = self.rolls.on(seeds.device)[name], self.starts.on(seeds.device)[name]

        def make(items: Tensor, shape: Shape) -> Batch:
            """Frames of pieces (R, B), and as targets the frames after them, (R, B, T, keys)."""
            lengths = torch.where(items == PADDING, 0, (starts[items + 1] - starts[items] - 1))
            time = torch.arange(shape[0] + 1, device=items.device)[:, None]
            at = starts[items.clamp(min=0)][:, None] + time  # [R, T + 1, B]
            sound = rolls[at.clamp(max=len(rolls) - 1)].to(dtype)
            real = time[:-1] < lengths[:, None]  # [R, T, B]
            x = sound[:, :-1] * real[..., None]
            return Batch((x.transpose(1, 2), lengths), sound[:, 1:].transpose(1, 2), real.transpose(1, 2))

        if split == TRAINING:
            return ShuffledFeed(
                make, torch.arange(len(frames))[None], [frames], seeds, batch_size, inputs=2, shard=shard
            )
        by_length = frames.argsort()[None]  # all frames count the same, so the order is free
        return OrderedFeed(make, by_length, [frames], seeds.device, setting.batch, inputs=2)

    def tally(self, output: tuple[Tensor, object], batch: Batch) -> Tally:
        """Each real frame counts once."""
        logits, _ = output
        target = batch.target.expand_as(logits)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1)
        return counted(losses, batch)


def starts_of(pieces: list[Tensor]) -> Tensor:
    """The index of each piece's first frame among the frames of all pieces, and the end of the last piece."""
    return torch.tensor([0] + [len(piece) for piece in pieces]).cumsum(0)


TASK = PolyMusic
