"""Models of equal size: DMUs by depth, plain and residual, other cells, and a linear recurrence as control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepmemory.lab.settings import SHARED_RATE, Setting, check_choice

MODELS = (  # kind, depth
    *(("dmu", depth) for depth in (1, 2, 3, 5)),
    *(("residual", depth) for depth in (3, 5)),  # up to depth 2 there is nothing to add: it is a plain one
    ("rhn", 3),
    ("gru", 1),
    ("lstm", 1),
    ("mingru", 1),
)
KINDS = tuple(dict.fromkeys(kind for kind, _ in MODELS))
DEEP = ("dmu", "residual", "rhn")
LINEAR_LAYERS = 2  # that are stacked, as in the minGRU's paper: the gates of the second see the state of the first


def of_width(task: str, kind: str, depth: int, width: int, **settings: Any) -> Setting:
    """A model whose states and hidden layers all have one width. Every DMU's module has the rate of everything else."""
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


def nearest(make: Callable[[int], Setting], weights: int) -> Setting:
    """The setting whose network comes nearest to a number of weights, among all widths."""
    from deepmemory.lab.tasks import task_of
    from deepmemory.lab.training.network import weight_count

    def count(width: int) -> int:
        return weight_count(make(width), task_of(make(width)))

    low, high = 1, 2
    while count(high) < weights:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < weights else (low, middle)
    return make(min((low, high), key=lambda width: abs(count(width) - weights)))
