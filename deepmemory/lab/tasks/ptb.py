"""The Penn Treebank in the usual form of a benchmark: tied embedding, dropout, perplexity of the whole text."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import SPLITS, WHOLE, Feed, Shard
from deepmemory.lab.tasks.natlang import NatLang, WindowFeed
from deepmemory.lab.training.network import TiedWordNetwork
from deepmemory.lab.training.random_streams import TEST


class PTB(NatLang):
    """The text of ``natlang`` with a larger network, which embeds words and predicts them with the same matrix.

    The perplexity is exp(loss). The test text is read from beginning to end as one stream. The validation text, which
    is measured after every epoch, is cut into as many streams as a batch has rows.
    """

    title: ClassVar[str] = "Penn Treebank"
    measures: ClassVar[tuple[str, ...]] = ()
    every_epoch: ClassVar[bool] = False

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """Embedding, recurrent block, and the embedding again for the output."""
        return TiedWordNetwork(setting, self, engine)

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """The same text for every run."""
        if split != TEST:
            return super().feed(split, setting, seeds, batch_size, dtype, shard)
        text = self.texts.on(seeds.device)[SPLITS[split]]
        return WindowFeed(text, setting, len(seeds), dtype, 1, setting.batch * setting.window)


TASK = PTB
