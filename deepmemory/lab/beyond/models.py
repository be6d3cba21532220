"""Models of equal size: DMUs by depth, plain and residual, other cells, and a linear recurrence as control."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from deepmemory.lab.settings import MUSIC, SHARED_RATE, Setting, check_choice

MODELS = (  # kind, depth
    *(("dmu", depth) for depth in (1, 2, 3, 5)),
    *(("residual", depth) for depth in (3, 5)),  # up to depth 2 there is no skip connection
    ("rhn", 3),
    ("gru", 1),
    ("lstm", 1),
    ("mingru", 1),
)
KINDS = tuple(dict.fromkeys(kind for kind, _ in MODELS))
DEEP = ("dmu", "residual", "rhn")
SIZES = {"100k": 100_000, "1m": 1_000_000}  # weights, of experiments that have these two parts
MULTIPLES = {"100k": 4, "1m": 8}  # of which widths are multiples, to suit tensor cores
# Input and output sizes of a network by dataset, so that weights are counted without reading the data. Those of
# translation are the vocabularies of the 30,000 pairs that the paper takes.
ENDS = {
    "mnist": (1, 10),
    **dict.fromkeys(MUSIC, (88, 88)),
    "ptb": (10_000, 10_000),
    "spanish": (9413, 4934),
    "german": (7220, 4548),
    "german-2018": (7526, 4673),
}
LINEAR_LAYERS = 2  # that are stacked, as in the minGRU paper: the gates of the second see the state of the first


def of_width(task: str, kind: str, depth: int, width: int, **settings: Any) -> Setting:
    """A model whose states and hidden layers all have one width. A DMU has the learning rate of everything else."""
    check_choice("kind", kind, KINDS)
    if kind not in DEEP and depth != 1:
        raise ValueError(f"{task}: {kind} has no depth; give 1, got {depth}")
    own: dict[str, Any] = {}
    if kind in ("dmu", "residual"):
        own = {"transition": (width,) * (depth - 1), "residual": kind == "residual" and depth > 2}
        own["module_rate"] = SHARED_RATE
    elif kind == "rhn":
        own = {"depth": depth}
    layers = LINEAR_LAYERS if kind == "mingru" else 1
    return Setting(task, "dmu" if kind == "residual" else kind, (width,) * layers, **own | settings)


def kind_of(setting: Setting) -> str:
    """The name of a setting's model: its cell, or ``residual`` for a DMU with a residual transition."""
    return "residual" if setting.residual else setting.cell


def keeping(kind: str, bias: float) -> dict[str, Any]:
    """Initial biases with which all cells keep their state equally long, for about exp(bias) steps."""
    return {
        "rhn": {"transform_bias": -bias},
        "gru": {"update_bias": bias},
        "mingru": {"update_bias": bias},
        "lstm": {"forget_bias": bias / 2, "input_bias": -bias},  # the former in both of its bias vectors
    }.get(kind, {"memory_bias": bias})


@cache
def weights_of(setting: Setting) -> int:
    """Number of trained weights in a setting's network; reads no data."""
    from deepmemory.lab.tasks import TASK_CLASSES, data_of, task_of
    from deepmemory.lab.training.network import weight_count

    data = data_of(setting)
    task: Any = task_of(setting) if data is None else SimpleNamespace()
    if data is not None:
        task.input_size, task.output_size = ENDS[data]
        task.network = partial(TASK_CLASSES[setting.task].network, task)
    return weight_count(setting, task)


def nearest(make: Callable[[int], Setting], weights: int, multiple: int = 1) -> Setting:
    """The setting whose number of weights is nearest to ``weights``, among widths that are such a multiple."""

    def count(units: int) -> int:
        return weights_of(make(units * multiple))

    low, high = 1, 2
    while count(high) < weights:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < weights else (low, middle)
    return make(multiple * min((low, high), key=lambda units: abs(count(units) - weights)))


def size_of(setting: Setting, sizes: Mapping[str, int] = SIZES) -> str:
    """The size that is nearest to a setting's number of weights."""
    return min(sizes, key=lambda size: abs(math.log(weights_of(setting) / sizes[size])))
