"""Random numbers without a state: each depends only on its keys.

SplitMix64 in integer tensor operations: the same bits on every device, alone or among other runs,
and nothing to synchronise, so a captured graph makes new data at every replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's constants as signed 64-bit numbers
FACTOR_1 = 0xBF58476D1CE4E5B9 - 2**64
FACTOR_2 = 0x94D049BB133111EB - 2**64

# What a run's seed is used for; numbers of different streams are independent.
TRAINING, VALIDATION, TEST, WEIGHTS, NOISE, ORDER, SPLIT, DROPOUT = range(8)


def shift(bits: Tensor, places: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def mix(bits: Tensor) -> Tensor:
    """SplitMix64's output function: every bit of the result depends on every bit of the input."""
    bits = (bits ^ shift(bits, 30)) * FACTOR_1
    bits = (bits ^ shift(bits, 27)) * FACTOR_2
    return bits ^ shift(bits, 31)


def derive(keys: Tensor, index: Tensor | int) -> Tensor:
    """The ``index``-th key derived from each key; int64, broadcast."""
    return mix(keys + (index + 1) * torch.full_like(keys, GOLDEN))


def sequence_keys(seeds: Tensor, stream: int, step: Tensor | int, count: int, first: int = 0) -> Tensor:
    """A key for each of ``count`` sequences of each run at one step: seeds (R,) to (R, count)."""
    of_step = derive(derive(mix(seeds), stream), step)
    return derive(of_step[:, None], torch.arange(first, first + count, device=seeds.device))


def permutations(seeds: Tensor, stream: int, step: int, count: int) -> Tensor:
    """Each run's own order of 0 to count - 1: seeds (R,) to (R, count)."""
    return sequence_keys(seeds, stream, step, count).argsort(dim=1, stable=True)


def uniform(keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform in [0, 1), in steps of 2^-24."""
    return shift(keys, 40).to(dtype) * 2.0**-24


def below(keys: Tensor, limit: Tensor | int) -> Tensor:
    """Uniform integers from 0 to limit - 1, for limits far below 2^31."""
    return shift(shift(keys, 33) * limit, 31)
