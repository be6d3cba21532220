"""Translation of short sentences into English."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepmemory.lab.data.pairs import END, Pairs, load_pairs
from deepmemory.lab.settings import DEFAULTS, Setting
from deepmemory.lab.tasks.batch import WHOLE, Batch, Feed, Shape, Shard, Tally, correct, counted, cross_entropy
from deepmemory.lab.tasks.on_device import OnDevice
from deepmemory.lab.tasks.sequences import PADDING, OrderedFeed, ShuffledFeed
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.network import Translator
from deepmemory.lab.training.random_streams import SPLIT, TEST, TRAINING, VALIDATION, permutations

SHARES = (0.70, 0.15)  # of all pairs for training and validation; the rest is for the test

CHANCE: dict[tuple[str, int], tuple[float, float]] = {  # perplexity and accuracy, by language and number of pairs
    ("spanish", 5000): (71.17, 0.203),
    ("spanish", 30000): (129.79, 0.167),
    ("german", 30000): (109.12, 0.177),
}


class Translation:
    """Pairs of sentences, split at random for each run.

    Every word after the start counts, including the end. In evaluation the decoder is fed its own words, for as many
    steps as the correct translation has.
    """

    title: ClassVar[str] = "Translation"
    data_settings: ClassVar[tuple[str, ...]] = ("language", "release", "pairs", "min_count")
    measures: ClassVar[tuple[str, ...]] = ("perplexity", "accuracy")
    every_epoch: ClassVar[bool] = True

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.input_size, self.output_size = len(pairs.foreign.words), len(pairs.english.words)
        self.largest_tensor = self.output_size * pairs.english.ids.shape[1]
        self.sentences = OnDevice(
            {
                "foreign": pairs.foreign.ids,
                "foreign lengths": pairs.foreign.lengths,
                "english": pairs.english.ids,
                "english lengths": pairs.english.lengths,
            }
        )

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting, with data from a folder, or from the user's cache."""
        return cls(load_pairs(cls.dataset(setting), setting.pairs or None, data, setting.min_count))

    @classmethod
    def dataset(cls, setting: Setting) -> str:
        """The registry's name of the data that a setting reads."""
        release = "" if setting.release == DEFAULTS["release"] else f"-{setting.release}"
        return setting.language + release

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""
        known = CHANCE.get((setting.language, setting.pairs)) if setting.release == DEFAULTS["release"] else None
        if known is None:
            return None
        perplexity, accuracy = known
        scores = {"perplexity": perplexity, "loss": math.log(perplexity), "accuracy": accuracy}
        return Level("the frequency of each word", scores)

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """Encoder and decoder."""
        return Translator(setting, self.input_size, self.output_size, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """The pairs of one split, each run's own."""
        tensors = self.sentences.on(seeds.device)

        def make(items: Tensor, shape: Shape) -> Batch:
            """Foreign words (R, B, T) and English words (R, B, S) of pairs (R, B), the latter also as targets."""
            foreign_steps, english_steps = shape
            at = items.clamp(min=0)
            english = tensors["english"][:, :english_steps][at]
            lengths = torch.where(items == PADDING, 0, tensors["english lengths"][at])
            real = torch.arange(1, english_steps, device=items.device) < lengths[..., None]
            inputs = (tensors["foreign"][:, :foreign_steps][at], tensors["foreign lengths"][at], english)
            return Batch(inputs, english[..., 1:], real)

        items = self.split(seeds.cpu())[split]
        lengths = [self.pairs.foreign.lengths, self.pairs.english.lengths]
        if split == TRAINING:
            return ShuffledFeed(make, items, lengths, seeds, batch_size, inputs=3, shard=shard)
        return OrderedFeed(make, items, lengths, seeds.device, batch_size, inputs=3)

    def split(self, seeds: Tensor) -> dict[int, Tensor]:
        """The numbers of each run's pairs, (R, pairs), by split."""
        count = len(self.pairs.english.lengths)
        order = permutations(seeds, SPLIT, 0, count)
        train, valid = (round(share * count) for share in SHARES)
        parts = order.split([train, valid, count - train - valid], 1)
        return dict(zip((TRAINING, VALIDATION, TEST), parts, strict=True))

    def tally(self, output: Tensor, batch: Batch) -> Tally:
        """Each word counts once."""
        target = batch.target.expand(output.shape[:-1])
        return counted(cross_entropy(output, target), batch, correct(output, target))


def until_end(words: Tensor) -> list[int]:
    """The words of one sentence before its end."""
    said = words.tolist()
    return said[: said.index(END)] if END in said else said


TASK = Translation
