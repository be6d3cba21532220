"""GRU and LSTM on the paper's music, language and translation, beside the paper's DMU and RHN.

The DMU and RHN have the paper's settings, so their studies are those of ``dmu paper``; ``dmu merge`` puts them
together with those here. GRU and LSTM have as many weights as the DMU with two linear layers and are trained like it,
but their learning rate is searched.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from deepmemory.lab.beyond.models import nearest, of_width, weights_of
from deepmemory.lab.settings import Setting

RUNS = 5
SEARCH_RUNS = 2  # at every rate; the best one of each cell is then trained with all runs
PARTS: dict[str, tuple[str, dict[str, Any]]] = {  # task and data
    "music": ("polymusic", {}),
    "language": ("natlang", {}),
    "spanish": ("translation", {"language": "spanish"}),
    "german": ("translation", {"language": "german"}),
}
CELLS = ("gru", "lstm")
DEPTHS = (1, 2)  # of the paper's DMU and RHN
RATES = {
    "polymusic": (0.001, 0.002, 0.005),
    "natlang": (0.002, 0.005, 0.01, 0.02),
    "translation": (0.001, 0.002, 0.005, 0.01),
}
START: dict[str, dict[str, Any]] = {"gru": {}, "lstm": {"forget_bias": 0.5}}  # of the LSTM in both bias vectors
QUICK: dict[str, dict[str, Any]] = {  # small data; its amount identifies these studies, as no other has the same
    "polymusic": {"limit": 90},
    "natlang": {"limit": 30_000},
    "translation": {"pairs": 1500},
}


def papers(part: str, cell: str, depth: int = 1) -> Setting:
    """The paper's setting of a DMU or RHN."""
    from deepmemory.lab import paper

    task, data = PARTS[part]
    return replace(paper.setting(task, cell, depth), **data)


@cache
def setting(kind: str, part: str = "music") -> Setting:
    """A GRU or LSTM with as many weights as the paper's DMU of two linear layers, at the first rate."""
    like = papers(part, "dmu", 2)
    same = {name: getattr(like, name) for name in ("gamma", "weight_decay", "epochs", *PARTS[part][1])}
    how = {**same, **START[kind], "lr": RATES[like.task][0]}
    return nearest(lambda width: of_width(like.task, kind, 1, width, **how), weights_of(like))


def settings() -> list[Setting]:
    """GRU and LSTM at every rate, and the paper's DMU and RHN, on all data."""
    found = []
    for part, (task, _) in PARTS.items():
        found += [papers(part, cell, depth) for cell in ("dmu", "rhn") for depth in DEPTHS]
        found += [replace(setting(cell, part), lr=lr) for cell in CELLS for lr in RATES[task]]
    return found


def part_of(of: Setting) -> str:
    """The data of a study."""
    return next(
        part
        for part, (task, data) in PARTS.items()
        if of.task == task and data.get("language", of.language) == of.language
    )


def owns(of: Setting) -> bool:
    """A GRU or LSTM as wide as those here, or any cell on the small data of :func:`quick`."""
    if of.task not in RATES or of.language not in ("spanish", "german"):
        return False
    return is_small(of) or (of.cell in CELLS and of.hidden == setting(of.cell, part_of(of)).hidden)


def is_small(of: Setting) -> bool:
    """Whether the data is that of :func:`quick`."""
    return all(getattr(of, name) == value for name, value in QUICK[of.task].items())


def sample() -> list[Setting]:
    """The paper's DMU with two linear layers, a GRU and an LSTM on music."""
    return [papers("music", "dmu", 2), *(replace(setting(cell), lr=RATES["polymusic"][-1]) for cell in CELLS)]


def quick(of: Setting) -> Setting:
    """The same network on a part of the data, which trains in less than a minute on two CPU cores."""
    return replace(of, **QUICK[of.task], batch=8, epochs=30 if of.task == "polymusic" else 3)
