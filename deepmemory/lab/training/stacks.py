"""Which runs of a study train side by side, in one stack: all of them, unless one alone fills a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from deepmemory.lab.settings import Setting
from deepmemory.lab.training.network import recurrent_block

# Weights of a recurrent block. In docs/depth-study, where large networks have 8 to 15 million, two runs in a stack took
# 2 % (residual, n = 3), 20 % (residual, n = 5) and 30 % (LSTM) longer than two single ones. Weights for words do not
# count: the paper's translators have 10 million of them, and at most 1 million in a recurrent block.
LARGE_NETWORK = 5_000_000


@cache
def recurrent_weights(setting: Setting) -> int:
    """Number of weights in a setting's recurrent block, for an input as wide as its first layer; reads no data."""
    with torch.device("meta"):
        block = recurrent_block(setting, setting.hidden[0])
    return sum(weight.numel() for weight in block.parameters())


def is_large(setting: Setting) -> bool:
    """Whether runs of a setting train one after another."""
    return recurrent_weights(setting) >= LARGE_NETWORK


def stacks(setting: Setting, seeds: Sequence[int]) -> list[Sequence[int]]:
    """The seeds that are trained side by side: all of them, or each large network alone."""
    if is_large(setting):
        return [[seed] for seed in seeds]
    return [seeds] if seeds else []
