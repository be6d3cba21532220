"""Language: predicts the next word of the Penn Treebank."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepmemory.lab.data.text import Corpus, load_text
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import SPLITS, WHOLE, Batch, Feed, Shape, Shard, Tally, counted, cross_entropy
from deepmemory.lab.tasks.on_device import OnDevice
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.training.network import WordNetwork, tensors_in, zero_state

CHANCE = 639.30  # perplexity of a model that knows only the word frequencies of the whole training text


class NatLang:
    """A text cut into as many streams as a batch has rows, read side by side in windows.

    The state is carried from window to window, without gradients, and starts at zero in every epoch and evaluation.
    All words of a split except its first are predicted, each once. The perplexity is the mean over windows of
    exp(cross-entropy), as in the authors' code; exp(loss) is the usual perplexity.
    """

    title: ClassVar[str] = "Language"
    data_settings: ClassVar[tuple[str, ...]] = ("limit",)
    measures: ClassVar[tuple[str, ...]] = ("perplexity",)
    every_epoch: ClassVar[bool] = True

    def __init__(self, corpus: Corpus, limit: int = 0) -> None:
        """``limit`` is the number of words read from the start of each split; 0 reads all."""
        self.words = corpus.words
        self.input_size = self.output_size = len(corpus.words)
        self.largest_tensor = 1  # windows have one size
        texts = {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}
        self.texts = OnDevice({split: text[: limit or None] for split, text in texts.items()})

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting, with data from a folder, or from the user's cache."""
        return cls(load_text(data), setting.limit)

    @classmethod
    def dataset(cls, setting: Setting) -> str | None:
        """The registry's name of the data that a setting reads."""
        return "ptb"

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input."""
        return Level("the frequency of each word", {"perplexity": CHANCE, "loss": math.log(CHANCE)})

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """Embedding, recurrent block, a dense layer and an output for each word."""
        return WordNetwork(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """The same text for every run."""
        text = self.texts.on(seeds.device)[SPLITS[split]]
        return WindowFeed(text, setting, len(seeds), dtype, setting.batch, setting.window, shard)

    def tally(self, output: tuple[Tensor, Any], batch: Batch) -> Tally:
        """Every word counts once."""
        logits, _ = output
        return counted(cross_entropy(logits, batch.target.expand(logits.shape[:-1])), batch)


class WindowFeed:
    """Windows of a text, in order, each with the state at the end of the previous one."""

    in_dims: tuple[int | None, ...] = (None, 0)

    def __init__(
        self,
        text: Tensor,
        setting: Setting,
        runs: int,
        dtype: torch.dtype,
        streams: int,
        window: int,
        shard: Shard = WHOLE,
    ) -> None:
        self.text, self.window = text, window
        self.length = -(-(len(text) - 1) // streams)  # words to predict in a stream; the last may have fewer
        numbers = torch.arange(streams, device=text.device)[shard[0] :: shard[1], None]
        self.starts = self.length * numbers
        self.state = zero_state(setting, (runs,), len(numbers), text.device, dtype)
        self.memory = tensors_in(self.state)

    def plan(self, epoch: int) -> list[Shape]:
        """Start again from the beginning, with a zero state."""
        for tensor in self.memory:
            tensor.zero_()
        return [(self.window,)] * -(-self.length // self.window)

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """Words (B, T), and as targets the words after them."""
        at = step * self.window + torch.arange(self.window + 1, device=self.text.device)
        words = self.text[(self.starts + at).clamp(max=len(self.text) - 1)]
        real = (at[:-1] < self.length) & (self.starts + at[:-1] < len(self.text) - 1)
        return Batch((words[:, :-1], self.state), words[None, :, 1:], real[None])

    def carry(self, output: Any) -> None:
        """Copy the state to where the next batch reads it."""
        _, state = output
        for old, new in zip(self.memory, tensors_in(state), strict=True):
            old.copy_(new.detach())


TASK = NatLang
