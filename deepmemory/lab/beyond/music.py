"""Nottingham with dropout and up to a million weights.

The published numbers to compare with are those of TCN and LSTM (arXiv:1803.01271): 3.07 and 3.29 nats per frame, each
with about a million weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from deepmemory.lab.beyond.models import MULTIPLES, SIZES, nearest, of_width
from deepmemory.lab.settings import Setting, check_choice

PUBLISHED = {"TCN": 3.07, "LSTM, same paper": 3.29}  # test loss
RUNS = 5
SEARCH_RUNS = 1  # at every rate; the best one of each model is then trained with all runs
MODELS = (*(("dmu", n) for n in (1, 2)), *(("residual", n) for n in (3, 5)), ("gru", 1), ("lstm", 1))  # kind, depth
# Of every model; a DMU's module has lr / 2n.
RATES = {"100k": (0.004, 0.008, 0.016, 0.032, 0.064), "1m": (0.004, 0.008, 0.016)}
TRAINING: dict[str, Any] = {
    "music": "nottingham",
    "batch": 16,
    "epochs": 150,
    "cosine": 150,
    "warmup": 2,
    "clip": 1.0,
    "beta2": 0.99,
    "weight_decay": 1e-5,
}
PRECISION = {"100k": "32-true", "1m": "bf16-mixed"}  # faster for large models; states stay float32
DROPOUT: dict[str, dict[str, float]] = {  # with 0.2 inside the recurrence, deep and wide models hardly begin to learn
    "100k": {"input_dropout": 0.05, "recurrent_dropout": 0.05, "output_dropout": 0.2},
    "1m": {"input_dropout": 0.1, "recurrent_dropout": 0.1, "output_dropout": 0.5},
}
START: dict[str, dict[str, Any]] = {  # gates that keep most of the state from one eighth note to the next
    "dmu": {"memory_bias": 1.0, "module_rate": "formula"},
    "residual": {"memory_bias": 1.0, "module_rate": "formula"},
    "gru": {"update_bias": 1.0},
    "lstm": {"forget_bias": 0.5},  # in both of its bias vectors
}


@cache
def setting(kind: str, depth: int = 1, size: str = "100k") -> Setting:
    """A model of a kind and depth with the number of weights of a size, at the size's highest rate."""
    share = DROPOUT[check_choice("size", size, tuple(SIZES))]
    how = {**TRAINING, **START[kind], **share, "lr": RATES[size][-1], "precision": PRECISION[size]}
    how |= {"transition_dropout": share["recurrent_dropout"]} if depth > 1 else {}
    return nearest(lambda width: of_width("polymusic", kind, depth, width, **how), SIZES[size], MULTIPLES[size])


def settings() -> list[Setting]:
    """Every model of every size, at every rate of the size."""
    return [
        replace(setting(kind, depth, size), lr=lr) for size in SIZES for kind, depth in MODELS for lr in RATES[size]
    ]


def owns(of: Setting) -> bool:
    """Nottingham with a cosine schedule, which no study of the paper's tables has."""
    return of.task == "polymusic" and of.music == "nottingham" and of.cosine > 0


def sample() -> list[Setting]:
    """A plain and a residual DMU, and a GRU."""
    return [setting("dmu", 2), setting("residual", 3), setting("gru", 1)]


def quick(of: Setting) -> Setting:
    """A small version of a setting, which trains in less than a minute on two CPU cores."""
    widths: dict[str, Any] = {"hidden": (48,), "transition": (48,) * len(of.transition)}
    return replace(of, **widths, lr=0.016, limit=100, batch=8, epochs=30, cosine=30)
