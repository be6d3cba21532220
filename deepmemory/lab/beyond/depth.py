"""The benefit of depth: language models of equal size on the Penn Treebank, with transitions of several depths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from deepmemory.lab.beyond.models import DEEP, kind_of
from deepmemory.lab.settings import Setting, check_choice

WORDS = 10_000  # in the Penn Treebank; they determine the embedding's share of the weights
SIZES = {"small": 5_000_000, "large": 23_000_000, "long": 23_000_000}  # weights in all, by part of the experiment
DEPTHS = (1, 2, 3, 5, 10)
KINDS = ("residual", "dmu", "rhn", "gru", "lstm")  # a DMU with residual transition, and as in the paper
LONG = (("residual", 5), ("rhn", 5), ("gru", 1), ("lstm", 1))  # kinds and depths that are also trained for longer
# Widths are multiples of 8, which suits tensor cores, or of 128, which 16 multiprocessors share evenly, if the number
# of weights is then within 1 %.
MULTIPLE, EVEN_MULTIPLE, FEW_WEIGHTS = 8, 128, 0.01
RUNS, SEARCH_RUNS = 3, 1  # of a model at its best rate on validation, and of each model at every rate
SEARCHED = 0.5, 1.0, 2.0  # factors of the rate in `setting`, for large models; for small ones, see search.json

# All models share these. The rates, the settings that a part shares, and a DMU's transition dropout and initial gate
# bias were searched on validation with one run each (docs/depth-study/search.json, and the studies at other rates in
# docs/depth-study/beyond.md).
TRAINING: dict[str, Any] = {
    "batch": 64,
    "window": 70,
    "precision": "bf16-mixed",
    "beta2": 0.99,
    "clip": 0.5,
    "warmup": 2,
    "word_dropout": 0.2,
    "recurrent_dropout": 0.25,
}
LARGE = {"input_dropout": 0.65, "output_dropout": 0.65, "lr": 0.001, "embedding_rate": 0.003}
OF_PART: dict[str, dict[str, Any]] = {
    "small": {
        "input_dropout": 0.4,
        "output_dropout": 0.5,
        "lr": 0.004,
        "embedding_rate": 0.01,
        "weight_decay": 1.2e-6,
        "epochs": 22,
    },
    "large": {**LARGE, "weight_decay": 1e-5, "epochs": 50},
    "long": {**LARGE, "weight_decay": 2e-5, "epochs": 150},
}
OF_KIND: dict[str, dict[str, Any]] = {
    "residual": {"memory_bias": 0.0, "module_rate": "same"},
    "dmu": {"memory_bias": 0.0, "module_rate": "same"},
    "rhn": {"transform_bias": -2.0},
    "gru": {},
    "lstm": {"forget_bias": 0.0},
}
LARGE_MEMORY_BIAS, LARGE_TRANSITION_DROPOUT = 2.0, 0.1  # of a DMU in all parts but the small one
# Relative to lr, by kind and depth; 1 for all other models.
PLAIN_RATES = {("dmu", 3): 0.5, ("dmu", 5): 0.5, ("dmu", 10): 0.25}
SMALL_RATES = {**PLAIN_RATES, ("residual", 10): 0.5, ("gru", 1): 2.0}
LARGE_RATES = {**PLAIN_RATES, **{("rhn", depth): 2.0 for depth in DEPTHS}, ("gru", 1): 4.0, ("lstm", 1): 3.0}
EMBEDDING_RATES = {"lstm": 2.0}  # relative to embedding_rate


def setting(kind: str, depth: int = 1, part: str = "large") -> Setting:
    """A language model of a kind and depth whose number of weights is nearest to that of a part."""
    check_choice("kind", kind, KINDS)
    check_choice("part", part, tuple(SIZES))
    if kind not in DEEP and depth != 1:
        raise ValueError(f"ptb: {kind} has no depth; give 1, got {depth}")
    width = width_for(kind, depth, SIZES[part])
    cell = "dmu" if kind == "residual" else kind
    own = OF_PART[part] | OF_KIND[kind]
    if cell == "dmu":
        own |= {"transition": (width,) * (depth - 1), "residual": kind == "residual" and depth > 2}
        if part != "small":
            own |= {
                "memory_bias": LARGE_MEMORY_BIAS,
                "transition_dropout": LARGE_TRANSITION_DROPOUT if depth > 1 else 0.0,
            }
    if cell == "rhn":
        own |= {"depth": depth}
    made = Setting("ptb", cell, (width,), **TRAINING | own)
    rates = SMALL_RATES if part == "small" else LARGE_RATES
    lr, embedding_rate = made.lr * rates.get((kind, depth), 1.0), made.embedding_rate * EMBEDDING_RATES.get(kind, 1.0)
    return replace(made, cosine=made.epochs, lr=lr, embedding_rate=embedding_rate)


def settings(part: str = "large") -> list[Setting]:
    """The models that are compared; up to depth 2 there is no skip connection, so a residual DMU is a plain one."""
    if part == "long":
        return [setting(kind, depth, part) for kind, depth in LONG]
    found = [setting(kind, depth, part) for kind in KINDS for depth in (DEPTHS if kind in DEEP else (1,))]
    factors = SEARCHED if part == "large" else (1.0,)
    return [replace(model, lr=factor * model.lr) for model in dict.fromkeys(found) for factor in factors]


def width_for(kind: str, depth: int, weights: int) -> int:
    """The width of both embedding and state that comes nearest to a number of weights.

    >>> width_for("residual", 10, 23_000_000), width_for("rhn", 10, 23_000_000), width_for("lstm", 1, 23_000_000)
    (1024, 824, 1184)
    """
    squares = {"dmu": depth + 2 if depth > 1 else 4, "rhn": 2 * depth + 2, "gru": 6, "lstm": 8}
    of_matrix = squares["dmu" if kind == "residual" else kind]
    exact = (math.sqrt(WORDS**2 + 4 * of_matrix * weights) - WORDS) / (2 * of_matrix)
    even = round(exact / EVEN_MULTIPLE) * EVEN_MULTIPLE
    if abs(even * (WORDS + of_matrix * even) - weights) <= FEW_WEIGHTS * weights:
        return even
    return max(1, round(exact / MULTIPLE)) * MULTIPLE


def all_settings() -> list[Setting]:
    """The models of all parts."""
    return [one for part in SIZES for one in settings(part)]


def part_of(of: Setting) -> str:
    """The part whose models are nearest to a setting in width and, if that is equal, in training time."""
    from deepmemory.lab.paper import depth_of

    kind = kind_of(of)

    def apart(part: str) -> tuple[float, float]:
        own = setting(kind, depth_of(of), part)
        return abs(math.log(of.hidden[-1] / own.hidden[-1])), abs(math.log(max(of.cosine, 1) / own.cosine))

    return min(SIZES, key=apart) if kind in KINDS else next(iter(SIZES))


def sample() -> list[Setting]:
    """A plain and a residual DMU, and a GRU."""
    return [setting("dmu", 2, "small"), setting("residual", 3, "small"), setting("gru", 1, "small")]


def quick(of: Setting) -> Setting:
    """A small version of a setting, which trains in about a minute on two CPU cores."""
    widths = {"hidden": (32,), "transition": (32,) * len(of.transition)}
    small: dict[str, Any] = {"limit": 12_000, "batch": 8, "window": 50, "epochs": 4, "cosine": 4, **widths}
    return replace(of, **small, precision="32-true")
