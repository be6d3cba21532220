"""Pixel-by-pixel MNIST in one fixed random order, with more weights than the paper's networks have.

The published number to compare with is that of LEM (arXiv:2110.04744): 96.6 % with 68 thousand weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from deepmemory.lab.beyond.models import MULTIPLES, SIZES, keeping, nearest, of_width
from deepmemory.lab.settings import Setting, check_choice

PUBLISHED = {"LEM": 0.966}  # test accuracy
RUNS = 5
SEARCH_RUNS = 2  # at every rate; the best one of each model is then trained with all runs
MODELS = (("dmu", 1), ("dmu", 2), ("residual", 3), ("gru", 1), ("lstm", 1))  # kind, depth
# The same for every model. With 100 thousand weights, transitions with hidden layers diverge at the two higher ones.
RATES = {"100k": (0.002, 0.005, 0.01), "1m": (0.001, 0.003)}
MEMORY = 4.0  # initial bias of the gate that keeps the state, as in the lab's recipe for the paper's table
TRAINING: dict[str, Any] = {
    "pixels": "permuted",
    "batch": 128,
    "epochs": 50,
    "cosine": 50,
    "warmup": 2,
    "clip": 1.0,
    "weight_decay": 1e-4,
    "precision": "bf16-mixed",  # states stay float32, so gradients over 784 steps are those of float32 except for noise
}
DROPOUT = {"100k": 0.1, "1m": 0.2}  # of the state and inside the transition; the output has twice as much


@cache
def setting(kind: str, depth: int = 1, size: str = "100k") -> Setting:
    """A model of a kind and depth with the number of weights of a size, at the size's first rate."""
    share = DROPOUT[check_choice("size", size, tuple(SIZES))]
    how = {**TRAINING, **keeping(kind, MEMORY), "lr": RATES[size][0]}
    how |= {"recurrent_dropout": share, "output_dropout": 2 * share}
    how |= {"transition_dropout": share} if depth > 1 else {}
    return nearest(lambda width: of_width("pixel-mnist", kind, depth, width, **how), SIZES[size], MULTIPLES[size])


def settings() -> list[Setting]:
    """Every model of every size, at every rate of the size."""
    return [
        replace(setting(kind, depth, size), lr=lr) for size in SIZES for kind, depth in MODELS for lr in RATES[size]
    ]


def owns(of: Setting) -> bool:
    """Permuted pixels with a cosine schedule, which no study of the paper's table has."""
    return of.task == "pixel-mnist" and of.pixels == "permuted" and of.cosine > 0


def sample() -> list[Setting]:
    """A plain and a residual DMU, and a GRU."""
    return [setting("dmu", 1), setting("residual", 3), setting("gru", 1)]


def quick(of: Setting) -> Setting:
    """A small version of a setting, which trains in about half a minute on two CPU cores."""
    widths: dict[str, Any] = {"hidden": (32,), "transition": (32,) * len(of.transition)}
    return replace(of, **widths, lr=0.01, limit=2000, batch=20, epochs=8, cosine=8, precision="32-true")
