"""Long memory: the Adding problem at lengths of 1,000 to 10,000 time steps.

The published number to compare with is that of LEM (arXiv:2110.04744): 2.4e-5 at 10,000 steps, with 128 units and
30,000 optimiser steps of 50 sequences. Its target is the sum of two numbers between 0 and 1; the target here is half of
that, so its losses are four times as large. Its second mark is in the second half of a sequence; here both are in the
first half, so that the numbers must be kept for at least half of the sequence.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

from deepmemory.lab.beyond.models import MODELS, keeping, nearest, of_width
from deepmemory.lab.settings import Setting

RUNS = 3
LENGTHS = (1000, 5000, 10_000)
LONG = LENGTHS[0]  # shortest length of this experiment's studies; the paper's sequences have about 100 steps
WEIGHTS = 33_700  # of every network: a DMU of 128 units with one linear layer, and its output
RATES = (0.001, 0.003, 0.01)  # at the shortest length; the report shows the best of each model on validation
USUAL_RATE = 0.003  # of every model at the other lengths, where a search would take hours
TRAINING: dict[str, Any] = {
    "batch": 50,
    "steps": 100,
    "epochs": 20,
    "cosine": 20,
    "clip": 1.0,
    "validation": 100,
    "test": 250,
}
STEPS = TRAINING["steps"] * TRAINING["epochs"]  # of the optimiser


@cache
def setting(kind: str, depth: int = 1, length: int = LENGTHS[0]) -> Setting:
    """A model of a kind and depth at one length, with the experiment's number of weights."""
    how = {"min_length": length, "max_length": length, "lr": USUAL_RATE, **TRAINING}
    how |= keeping(kind, round(math.log(length), 1))  # for about as long as a sequence is
    return nearest(lambda width: of_width("adding", kind, depth, width, **how), WEIGHTS)


def settings() -> list[Setting]:
    """Every model at every length; at the shortest one with every rate."""
    shortest = [replace(setting(kind, depth), lr=lr) for kind, depth in MODELS for lr in RATES]
    return [*shortest, *(setting(kind, depth, length) for length in LENGTHS[1:] for kind, depth in MODELS)]


def sample() -> list[Setting]:
    """Two DMUs, a GRU and the linear control at the shortest length."""
    return [setting(kind, depth) for kind, depth in (("dmu", 1), ("dmu", 2), ("gru", 1), ("mingru", 1))]


def quick(of: Setting) -> Setting:
    """A small version of a setting, which trains in about a minute on two CPU cores."""
    hidden, transition = (8,) * len(of.hidden), (8,) * len(of.transition)
    return replace(of, hidden=hidden, transition=transition, batch=8, steps=10, epochs=4, validation=8, test=8)
