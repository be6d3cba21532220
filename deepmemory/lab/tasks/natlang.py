"""Language: which word comes next in the Penn Treebank?"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepmemory.lab.data.text import Corpus
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import SPLITS, WHOLE, Batch, Feed, Shape, Shard, Tally, counted, cross_entropy
from deepmemory.lab.tasks.on_device import OnDevice
from deepmemory.lab.training.network import WordNetwork, tensors_in, zero_state


class NatLang:
    """A text cut into as many streams as a batch has rows, read side by side in windows.

    The state goes on from window to window, without gradients, and starts at zero in every epoch and evaluation.
    All words of a split but its very first are predicted, each once. A perplexity is the mean over windows of
    exp(cross-entropy), as the authors take it; exp(loss) is the usual one.
    """

    measures: ClassVar[tuple[str, ...]] = ("perplexity",)
    every_epoch: ClassVar[bool] = True

    def __init__(self, corpus: Corpus, limit: int = 0) -> None:
        """``limit``: the first so many words of each split; 0 is all."""
        self.words = corpus.words
        self.input_size = self.output_size = len(corpus.words)
        self.numbers = 1  # windows have one size
        texts = {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}
        self.texts = OnDevice({split: text[: limit or None] for split, text in texts.items()})

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """Embedding, recurrent block, a dense layer and the words."""
        return WordNetwork(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, at_once: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """The same text for every run."""
        return WindowFeed(self.texts.on(seeds.device)[SPLITS[split]], setting, len(seeds), dtype, shard)

    def tally(self, output: tuple[Tensor, Any], batch: Batch) -> Tally:
        """Every word counts once."""
        logits, _ = output
        return counted(cross_entropy(logits, batch.target.expand(logits.shape[:-1])), batch)


class WindowFeed:
    """Windows of a text, in their order, with the state that the one before ended with."""

    in_dims: tuple[int | None, ...] = (None, 0)

    def __init__(self, text: Tensor, setting: Setting, runs: int, dtype: torch.dtype, shard: Shard = WHOLE) -> None:
        self.text, self.window = text, setting.window
        self.length = -(-(len(text) - 1) // setting.batch)  # words to predict in a stream; the last may have fewer
        streams = torch.arange(setting.batch, device=text.device)[shard[0] :: shard[1], None]
        self.starts = self.length * streams
        self.state = zero_state(setting, (runs,), len(streams), text.device, dtype)
        self.memory = tensors_in(self.state)

    def plan(self, epoch: int) -> list[Shape]:
        """From the beginning, where the state is zero."""
        for tensor in self.memory:
            tensor.zero_()
        return [(self.window,)] * -(-self.length // self.window)

    def batch(self, step: Tensor | int, shape: Shape) -> Batch:
        """Words (B, T) and the words after them."""
        at = step * self.window + torch.arange(self.window + 1, device=self.text.device)
        words = self.text[(self.starts + at).clamp(max=len(self.text) - 1)]
        real = (at[:-1] < self.length) & (self.starts + at[:-1] < len(self.text) - 1)
        return Batch((words[:, :-1], self.state), words[None, :, 1:], real[None])

    def keep(self, output: Any) -> None:
        """The state, in the memory of the one before."""
        _, state = output
        for old, new in zip(self.memory, tensors_in(state), strict=True):
            old.copy_(new.detach())
