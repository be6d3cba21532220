"""The paper's settings: what it trains, with which network, learning rate and length of training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

import deepmemory as dm
from deepmemory.lab.settings import (
    CELLS,
    LANGUAGES,
    PAPER_TASKS,
    PIXELS,
    REAL,
    SHARED_RATE,
    SYNTHETIC,
    Setting,
    check_choice,
)
from deepmemory.lab.training.network import WORD_FEATURES

RUNS = 51  # of every cell in the synthetic tasks
EPOCHS = 100  # of every run in the synthetic tasks, at most
REAL_RUNS = 5
REAL_EPOCHS = {"polymusic": 500, "natlang": 40, "translation": 50}
DEPTHS = (1, 2, 5, 10)  # of RHN and DMU, with music, language and translation

DMU_C = "dmu-c"  # the paper's name for a DMU whose module has the learning rate of everything else
KINDS = (*CELLS, DMU_C)
COMPARED = ("rhn", "dmu", DMU_C)  # the cells of the tables
PAPER_CELLS = {
    **dict.fromkeys(SYNTHETIC, CELLS),
    **dict.fromkeys(REAL, COMPARED),
    "pixel-mnist": ("dmu", "gru", "lstm"),
}

# Recurrent block and learning rate of each cell. For rnn, lstm and gru a width per stacked layer; (4, 3) of an
# rhn is 4 units at recurrence depth 3; (5, 4) of a dmu is one hidden layer of 5 and 4 memory cells.
SYNTHETIC_RECIPES: dict[str, dict[str, tuple[tuple[int, ...], float]]] = {
    "adding": {
        "rnn": ((5, 5), 0.01),
        "lstm": ((2, 2), 0.001),
        "gru": ((3, 2), 0.05),
        "rhn": ((4, 3), 0.02),
        "dmu": ((5, 5), 0.02),
    },
    "temporal-order": {
        "rnn": ((6, 6), 0.01),
        "lstm": ((2, 3), 0.005),
        "gru": ((2, 4), 0.02),
        "rhn": ((4, 3), 0.02),
        "dmu": ((5, 6), 0.05),
    },
    "noisy-sequence": {
        "rnn": ((5, 5), 0.01),
        "lstm": ((2, 2), 0.002),
        "gru": ((2, 3), 0.05),
        "rhn": ((3, 3), 0.05),
        "dmu": ((5, 4), 0.02),
    },
}
LENGTHS = {"adding": (100, 110), "temporal-order": (100, 110), "noisy-sequence": (100, 100)}  # shortest, longest


class Recipe(NamedTuple):
    """How a cell is trained at one depth, with real data."""

    width: int  # units of the RHN; neurons of each feedforward layer of the DMU
    lr: float
    weight_decay: float
    gamma: float  # factor of the learning rate, per epoch


REAL_RECIPES: dict[str, dict[str, dict[int, Recipe]]] = {
    "polymusic": {
        "rhn": {depth: Recipe(100, 0.005, 1e-3, 1.0) for depth in DEPTHS},
        "dmu": {
            1: Recipe(100, 0.005, 1e-4, 1.0),
            2: Recipe(122, 0.005, 1e-4, 1.0),
            5: Recipe(131, 0.005, 1e-4, 1.0),
            10: Recipe(136, 0.002, 1e-4, 1.0),
        },
    },
    "natlang": {
        "rhn": {depth: Recipe(100, 0.02, 1e-4, 0.9) for depth in DEPTHS},
        "dmu": {
            1: Recipe(100, 0.02, 1e-4, 0.9),
            2: Recipe(122, 0.02, 1e-4, 0.9),
            5: Recipe(131, 0.01, 1e-4, 0.98),
            10: Recipe(136, 0.02, 1e-4, 0.98),
        },
    },
    "translation": {
        "rhn": {depth: Recipe(200, 0.01, 1e-4, 0.9) for depth in DEPTHS},
        "dmu": {
            1: Recipe(200, 0.005, 1e-4, 0.9),
            2: Recipe(340, 0.01, 1e-4, 0.9),
            5: Recipe(300, 0.003, 1e-4, 1.0),
            10: Recipe(300, 0.003, 1e-4, 1.0),
        },
    },
}
TRANSLATION_STATE = 200  # memory cells of the translation's DMU at every depth

# The paper gives no recipe for the pixels; this one is ours. The DMU has one linear layer. The other cells have the
# number of units that comes closest to its number of weights, and the learning rate, weight decay and initial memory of
# its module.
UNITS = (96, 128)  # of the DMU
PIXEL_RECIPE: dict[str, Any] = {"lr": 0.02, "gamma": 0.9, "batch": 128, "epochs": 36}
PIXEL_DECAY = {"ordered": 1e-4, "permuted": 3e-4}  # of weights
PIXEL_MEMORY = 4.0  # total initial bias of the gate that keeps the state, which has to last for 784 steps
PIXEL_START: dict[str, dict[str, Any]] = {
    "dmu": {"memory_bias": PIXEL_MEMORY},
    "gru": {"update_bias": PIXEL_MEMORY},
    "lstm": {"forget_bias": PIXEL_MEMORY / 2, "input_bias": -PIXEL_MEMORY},  # the former in both of its bias vectors
}

FEATURES = {"polymusic": 88, "natlang": WORD_FEATURES, "translation": Setting.features, "pixel-mnist": 1}

# Small versions that show something within two minutes on two CPU cores; they are not comparable with the paper.
QUICK: dict[str, dict[str, Any]] = {
    **{task: {"epochs": 20} for task in SYNTHETIC},
    "polymusic": {"limit": 200, "batch": 8, "epochs": 40},
    "natlang": {"limit": 100_000, "batch": 16, "window": 50, "gamma": 0.5, "epochs": 3},
    "translation": {"pairs": 5000, "epochs": 9},
    "pixel-mnist": {"limit": 4000, "batch": 40, "epochs": 6},
}
QUICK_RUNS = 1


def setting(task: str, cell: str, depth: int = 1, units: int = UNITS[-1], pixels: str = PIXELS[0]) -> Setting:
    """The paper's setting of a task for one cell; ``dmu-c`` is one of the cells.

    ``depth`` is the number of linear layers of a DMU or RHN on real data, ``units`` the size of a DMU on pixels in the
    order ``pixels``. Cells that the paper did not train (RNN, LSTM and GRU on music and language) have the recipe of
    its RHN and as many weights.
    """
    check_choice("task", task, PAPER_TASKS)
    check_choice("cell", cell, KINDS)
    check_choice("pixels", pixels, PIXELS)
    kind = cell.removesuffix("-c")
    if task in SYNTHETIC:
        made = synthetic_setting(task, kind)
    elif task == "pixel-mnist":
        made = pixel_setting(kind, units, pixels)
    else:
        made = table_setting(task, kind, depth)
    return replace(made, module_rate=SHARED_RATE) if cell == DMU_C else made


def settings(
    tasks: Iterable[str] = PAPER_TASKS,
    cells: Iterable[str] | None = None,
    depths: Iterable[int] = DEPTHS,
    units: Iterable[int] = UNITS,
) -> list[Setting]:
    """The paper's settings, task by task; without ``cells``, those that the paper compares in each task."""
    chosen = None if cells is None else list(cells)
    found: list[Setting] = []
    for task in tasks:
        of_task = chosen or PAPER_CELLS[task]
        if task in SYNTHETIC:
            found += [setting(task, cell) for cell in of_task]
        elif task == "pixel-mnist":
            found += [setting(task, c, units=d, pixels=p) for p in PIXELS for d in units for c in of_task]
        else:
            each = [setting(task, c, depth) for depth in depths for c in of_task if depth == 1 or c in COMPARED]
            languages = LANGUAGES if task == "translation" else LANGUAGES[:1]
            found += [replace(one, language=language) for language in languages for one in each]
    return found


def synthetic_setting(task: str, cell: str) -> Setting:
    """The paper's setting of a synthetic task."""
    block, lr = SYNTHETIC_RECIPES[task][cell]
    shortest, longest = LENGTHS[task]
    hidden: tuple[int, ...] = block
    transition: tuple[int, ...] = ()
    depth = 1
    if cell == "rhn":
        hidden, depth = block[:1], block[1]
    elif cell == "dmu":
        hidden, transition = block[-1:], block[:-1]
    return Setting(task, cell, hidden, transition, depth, lr=lr, min_length=shortest, max_length=longest)


def table_setting(task: str, cell: str, depth: int) -> Setting:
    """The paper's setting of music, language or translation."""
    if depth not in DEPTHS:
        raise ValueError(f"{task}: the paper has depths {', '.join(map(str, DEPTHS))}, got {depth}; see dmu train")
    width, lr, weight_decay, gamma = REAL_RECIPES[task]["dmu" if cell == "dmu" else "rhn"][depth]
    how: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "gamma": gamma, "epochs": REAL_EPOCHS[task]}
    if cell == "dmu":
        state = TRANSLATION_STATE if task == "translation" else width
        return Setting(task, cell, (state,), (width,) * (depth - 1), memory_bias=0.0, **how)
    if cell == "rhn":
        return Setting(task, cell, (width,), depth=depth, **how)
    if depth != 1:
        raise ValueError(f"{task}: {cell} has no depth; give 1, got {depth}")
    return Setting(task, cell, (equal_width(cell, dm.RHN(FEATURES[task], width, device="meta")),), **how)


def pixel_setting(cell: str, units: int, pixels: str) -> Setting:
    """Our setting for the paper's table of pixel-by-pixel MNIST."""
    how = {"pixels": pixels, "weight_decay": PIXEL_DECAY[pixels], **PIXEL_RECIPE, **PIXEL_START.get(cell, {})}
    if cell == "dmu":
        return Setting("pixel-mnist", cell, (units,), **how)
    width = equal_width(cell, dm.DMU(FEATURES["pixel-mnist"], units, transition=[], device="meta"))
    return Setting(
        "pixel-mnist", cell, (width,), **how | {"lr": how["lr"] / 2, "weight_decay": how["weight_decay"] / 2}
    )


def equal_width(cell: str, like: nn.Module) -> int:
    """Number of units with which a cell's number of weights is nearest to a layer's."""
    return dm.matched_hidden_size(getattr(dm, cell.upper()), like)


def quick(setting: Setting) -> Setting:
    """A small version of a setting."""
    return replace(setting, **QUICK[setting.task])


def kind_of(setting: Setting) -> str:
    """The name of a setting's cell in the paper: ``dmu-c`` for a DMU with one learning rate for everything."""
    return DMU_C if setting.cell == "dmu" and setting.module_rate == SHARED_RATE else setting.cell


def depth_of(setting: Setting) -> int:
    """The number of linear layers that a state passes in one time step.

    >>> depth_of(setting("natlang", "dmu", 5)), depth_of(setting("natlang", "rhn", 5))
    (5, 5)
    """
    return len(setting.transition) + 1 if setting.cell == "dmu" else setting.depth
