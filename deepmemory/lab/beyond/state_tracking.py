"""State tracking: which recurrences learn to multiply the elements of a group, also beyond the training length.

A linear recurrence whose gates lie between 0 and 1 cannot do it at every length, not even for parity (Unlocking
State-Tracking in Linear RNNs, arXiv:2411.12537). A5 and S5 are not solvable: no network of fixed depth without a
nonlinear recurrence is expected to multiply their elements (The Illusion of State in State-Space Models,
arXiv:2404.08819).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from deepmemory.lab.beyond.models import MODELS, nearest, of_width
from deepmemory.lab.settings import GROUPS, Setting

RUNS = 51
SEARCH_RUNS = 8  # at every rate; the best one of each model is then trained with all runs
WEIGHTS = 18_000  # of every network, whatever the group
RATES = (0.001, 0.003, 0.01)  # the same for every model
TRAINING: dict[str, Any] = {
    "min_length": 16,
    "max_length": 16,
    "batch": 64,
    "steps": 100,
    "epochs": 100,
    "clip": 1.0,
    "validation": 64,
    "test": 512,
}
START: dict[str, dict[str, Any]] = {  # gates that neither keep nor overwrite: every step changes what is tracked
    "dmu": {"memory_bias": 0.0},
    "residual": {"memory_bias": 0.0},
    "lstm": {"forget_bias": 0.5},  # in both of its bias vectors
}


@cache
def setting(kind: str, depth: int = 1, group: str = "s5", lr: float = RATES[1]) -> Setting:
    """A model of a kind and depth on products of a group, with the experiment's number of weights."""
    how = {"elements": group, "lr": lr, **TRAINING, **START.get(kind, {})}
    return nearest(lambda width: of_width("state-tracking", kind, depth, width, **how), WEIGHTS)


def settings() -> list[Setting]:
    """Every model on every group, at every rate."""
    chosen = [setting(kind, depth, group) for group in GROUPS for kind, depth in MODELS]
    return [replace(one, lr=lr) for one in chosen for lr in RATES]


def sample() -> list[Setting]:
    """Two DMUs, a GRU and the linear control on S3."""
    return [setting(kind, depth, "s3") for kind, depth in (("dmu", 1), ("dmu", 2), ("gru", 1), ("mingru", 1))]


def quick(of: Setting) -> Setting:
    """A small version of a setting, which trains in about a minute on two CPU cores."""
    hidden, transition = (16,) * len(of.hidden), (16,) * len(of.transition)
    small: dict[str, Any] = {"min_length": 8, "max_length": 8, "epochs": 10, "validation": 8, "test": 8}
    return replace(of, hidden=hidden, transition=transition, **small)
