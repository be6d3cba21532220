"""A task as the training loop sees it: its data, its network, and how outputs are measured."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import WHOLE, Batch, Feed, Shard, Tally


class Level(NamedTuple):
    """The scores of the best answer that ignores the input: a network that scores no better has learnt nothing."""

    answer: str  # in words
    scores: dict[str, float]  # by measure


class Task(Protocol):
    """Data, network, loss and measures. A new task implements this, and its file names the class ``TASK``."""

    title: ClassVar[str]  # in reports
    data_settings: ClassVar[tuple[str, ...]] = ()  # the fields of a setting that choose the data that is read
    measures: ClassVar[tuple[str, ...]]  # besides the loss: perplexity, accuracy
    every_epoch: ClassVar[bool]  # whether an epoch is measured on all splits, as for the tables, or only on validation

    @classmethod
    def of(cls, setting: Setting, data: str | None) -> Task:
        """The task of a setting; ``data`` is the folder to read from, None for the user's cache."""

    @classmethod
    def dataset(cls, setting: Setting) -> str | None:
        """The registry's name of the data that a setting reads; None if sequences are generated."""

    @classmethod
    def chance(cls, setting: Setting) -> Level | None:
        """The scores of the best answer that ignores the input; None if they are not known."""

    @property
    def largest_tensor(self) -> int:
        """Size of the largest tensor that one sequence needs; it limits how many sequences are evaluated at once."""

    def network(self, setting: Setting, engine: str = "auto") -> nn.Module:
        """The network of one run, with new weights."""

    def feed(
        self, split: int, setting: Setting, seeds: Tensor, batch_size: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> Feed:
        """The split ``TRAINING``, ``VALIDATION`` or ``TEST`` for the runs of these seeds, on the seeds' device."""

    def tally(self, output: Any, batch: Batch) -> Tally:
        """Loss and correct outputs, from the network's output (R, B, ...)."""
