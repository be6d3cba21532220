"""The paper's settings and the paper's numbers: Deep Memory Update, arXiv 2105.14092."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from deepmemory.lab.settings import CELLS, LANGUAGES, PIXELS, SHARED_RATE, TASKS, Setting, check_choice
from deepmemory.lab.settings import REAL as REAL_TASKS
from deepmemory.lab.settings import SYNTHETIC as SYNTHETIC_TASKS
from deepmemory.lab.training.network import TRANSLATION_FEATURES, WORD_FEATURES

RUNS = 51  # of every cell in the synthetic tasks
EPOCHS = 100  # of every run, at most

# Recurrent block and learning rate of each cell. For rnn, lstm and gru a width per stacked layer; (4, 3) of an
# rhn is 4 units at recurrence depth 3; (5, 4) of a dmu is one hidden layer of 5 and 4 memory cells.
SYNTHETIC: dict[str, dict[str, tuple[tuple[int, ...], float]]] = {
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

# As printed. Adding's rhn and all of noisy-sequence leave the output layer out.
WEIGHT_COUNTS: dict[str, dict[str, int]] = {
    "adding": {"rnn": 111, "lstm": 99, "gru": 108, "rhn": 136, "dmu": 106},
    "temporal-order": {"rnn": 236, "lstm": 212, "gru": 208, "rhn": 224, "dmu": 203},
    "noisy-sequence": {"rnn": 595, "lstm": 880, "gru": 687, "rhn": 672, "dmu": 573},
}

LENGTHS = {"adding": (100, 110), "temporal-order": (100, 110), "noisy-sequence": (100, 100)}


@dataclass(frozen=True)
class Claim:
    """What the paper says of a figure; ``deepmemory.lab.report.results`` checks it against records."""

    text: str  # in few words
    check: str  # name of the rule that decides
    cells: tuple[str, ...]  # the cells it is about, in the order the rule wants
    thresholds: tuple[float, ...] = ()  # the thresholds it is about; none is all


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "adding": (
        Claim("DMU significantly outperforms all other modules", "ahead", ("dmu", "gru", "lstm", "rnn", "rhn")),
        Claim("GRU scores better than LSTM", "ahead", ("gru", "lstm")),
        Claim("RNN reaches no threshold", "never", ("rnn",)),
        Claim("RHN reaches no threshold", "never", ("rhn",)),
    ),
    "temporal-order": (
        Claim("DMU converges faster than GRU", "faster", ("dmu", "gru"), (1e-2, 1e-3, 1e-4)),
        Claim("DMU and GRU are similar down to 1e-4", "similar", ("dmu", "gru"), (1e-2, 1e-3, 1e-4)),
        Claim("DMU outperforms GRU at lower thresholds", "more", ("dmu", "gru"), (1e-5, 1e-6)),
        Claim("LSTM has partial success at higher thresholds", "partly", ("lstm",), (1e-2,)),
        Claim("LSTM fails at lower thresholds", "never", ("lstm",), (1e-5, 1e-6)),
        Claim("RNN reaches no threshold", "never", ("rnn",)),
        Claim("RHN reaches no threshold", "never", ("rhn",)),
    ),
    "noisy-sequence": (
        Claim("GRU reaches all thresholds in most cases", "mostly", ("gru",)),
        Claim("DMU reaches all thresholds in most cases", "mostly", ("dmu",)),
        Claim("GRU trains faster than DMU", "faster", ("gru", "dmu")),
        Claim("RHN reaches all thresholds in about half of the cases, else none", "half", ("rhn",)),
        Claim("RNN performs worse than RHN", "ahead", ("rhn", "rnn")),
        Claim("LSTM performs worse than RNN", "ahead", ("rnn", "lstm")),
    ),
}


@dataclass(frozen=True)
class Reading:
    """A setting that the paper leaves open: read one way in the main study, and open to be read another way."""

    name: str
    field: str  # of Setting; its default is the main study's reading
    other: str | int  # the value of the other reading
    labels: tuple[str, str]  # the main reading and the other one, in few words
    why: str
    command: str  # that trains the other reading
    tasks: tuple[str, ...] = SYNTHETIC_TASKS
    cells: tuple[str, ...] = CELLS


READINGS: tuple[Reading, ...] = (
    Reading(
        "Learning rate of the DMU module",
        "module_rate",
        "0.001",
        ("lr / 2n", "0.001"),
        "The text gives lr / 2n, with n the number of linear layers in the module. The launcher of the authors' "
        "published code sets the table's rate for the output layer alone and leaves the module at its default, 0.001.",
        "dmu paper --cells dmu --module-rate 0.001",
        cells=("dmu",),
    ),
    Reading(
        "Noise of the noisy sequence",
        "noise",
        "fixed",
        ("drawn for every sequence", "drawn once"),
        "The text has the symbols after the first one fixed before the experiment; the authors' published code draws "
        "them anew for every sequence.",
        "dmu paper noisy-sequence --noise fixed",
        tasks=("noisy-sequence",),
    ),
    Reading(
        "Epochs under 1e-6 before a run stops",
        "patience",
        1,
        ("5", "1"),
        "The text stops a run whose loss is under 1e-6; the authors' published code waits until it has stayed there "
        "for five epochs. No figure and no count can tell the two apart: at its first epoch under 1e-6 a run is under "
        "every threshold, and a run that was counted stays counted. What it changes is how long such runs go on, and "
        "with that their best weights and test loss.",
        "dmu paper --patience 1",
    ),
)


@dataclass(frozen=True)
class RealDataSetting:
    """One row of the paper's real-data tables: a cell at one depth."""

    width: int  # units of the RHN; neurons of each feedforward layer of the DMU
    lr: float
    weight_decay: float
    gamma: float  # of the learning rate, per epoch


DEPTHS = (1, 2, 5, 10)
REAL_EPOCHS = {"polymusic": 500, "natlang": 40, "translation": 50}
REAL_RUNS = 5
TEACHER_FORCING = 1.0  # translation; inverted in the authors' code, so their decoder runs freely
TRANSLATION_STATE = 200  # memory cells of the translation's DMU at every depth

REAL_DATA: dict[str, dict[str, dict[int, RealDataSetting]]] = {
    "polymusic": {
        "rhn": {depth: RealDataSetting(100, 0.005, 1e-3, 1.0) for depth in DEPTHS},
        "dmu": {
            1: RealDataSetting(100, 0.005, 1e-4, 1.0),
            2: RealDataSetting(122, 0.005, 1e-4, 1.0),
            5: RealDataSetting(131, 0.005, 1e-4, 1.0),
            10: RealDataSetting(136, 0.002, 1e-4, 1.0),
        },
    },
    "natlang": {
        "rhn": {depth: RealDataSetting(100, 0.02, 1e-4, 0.9) for depth in DEPTHS},
        "dmu": {
            1: RealDataSetting(100, 0.02, 1e-4, 0.9),
            2: RealDataSetting(122, 0.02, 1e-4, 0.9),
            5: RealDataSetting(131, 0.01, 1e-4, 0.98),
            10: RealDataSetting(136, 0.02, 1e-4, 0.98),
        },
    },
    "translation": {
        "rhn": {depth: RealDataSetting(200, 0.01, 1e-4, 0.9) for depth in DEPTHS},
        "dmu": {
            1: RealDataSetting(200, 0.005, 1e-4, 0.9),
            2: RealDataSetting(340, 0.01, 1e-4, 0.9),
            5: RealDataSetting(300, 0.003, 1e-4, 1.0),
            10: RealDataSetting(300, 0.003, 1e-4, 1.0),
        },
    },
}


# The paper gives no recipe for the pixels; this one is ours. Units are the DMU's, one linear layer each; the other
# cells get as many units as make their weights the nearest in number, and learn, decay and start like the DMU's module.
UNITS = (96, 128)
PIXEL_RECIPE: dict[str, Any] = {"lr": 0.02, "gamma": 0.9, "batch": 128, "epochs": 36}
PIXEL_DECAY = {"ordered": 1e-4, "permuted": 3e-4}  # of weights
PIXEL_MEMORY = 4.0  # 784 steps are a long time to remember: what the gate that keeps the state adds up to at the start
PIXEL_START: dict[str, dict[str, Any]] = {
    "dmu": {"memory_bias": PIXEL_MEMORY},
    "gru": {"update_bias": PIXEL_MEMORY},
    "lstm": {"forget_bias": PIXEL_MEMORY / 2, "input_bias": -PIXEL_MEMORY},  # the former in both of its bias vectors
}

DMU_C = "dmu-c"  # the paper's name for a DMU whose module learns at the rate of everything else
KINDS = (*CELLS, DMU_C)
COMPARED = ("rhn", "dmu", DMU_C)
PAPER_CELLS = {
    **dict.fromkeys(SYNTHETIC_TASKS, CELLS),
    **dict.fromkeys(REAL_TASKS, COMPARED),
    "pixel-mnist": ("dmu", "gru", "lstm"),
}


def setting(task: str, cell: str, depth: int = 1, units: int = UNITS[-1], pixels: str = PIXELS[0]) -> Setting:
    """The paper's setting of a task for one cell, ``dmu-c`` among them.

    ``depth`` is the number of linear layers of a DMU or RHN where data is real, ``units`` the size of a DMU for
    ``pixels`` in that order. What the paper did not train (RNN, LSTM and GRU on music and language) learns like its
    RHN, with as many weights.
    """
    check_choice("task", task, TASKS)
    check_choice("cell", cell, KINDS)
    check_choice("pixels", pixels, PIXELS)
    made = synthetic(task, cell) if task in SYNTHETIC_TASKS else real(task, cell, depth, units, pixels)
    return replace(made, module_rate=SHARED_RATE) if cell == DMU_C else made


def settings(
    tasks: Iterable[str] = TASKS, cells: Iterable[str] | None = None, depths: Iterable[int] = DEPTHS
) -> list[Setting]:
    """The paper's settings, task by task; cells that are left out are those the paper compares in each task."""
    chosen = None if cells is None else list(cells)
    found: list[Setting] = []
    for task in tasks:
        of_task = chosen or PAPER_CELLS[task]
        if task in SYNTHETIC_TASKS:
            found += [setting(task, cell) for cell in of_task]
        elif task == "pixel-mnist":
            found += [setting(task, c, units=units, pixels=p) for p in PIXELS for units in UNITS for c in of_task]
        else:
            each = [setting(task, c, depth) for depth in depths for c in of_task if depth == 1 or c in COMPARED]
            languages = LANGUAGES if task == "translation" else ("spanish",)
            found += [replace(one, language=language) for language in languages for one in each]
    return found


def synthetic(task: str, cell: str) -> Setting:
    """Small networks."""
    kind = cell.removesuffix("-c")
    block, lr = SYNTHETIC[task][kind]
    shortest, longest = LENGTHS[task]
    hidden: tuple[int, ...] = block
    transition: tuple[int, ...] = ()
    depth = 1
    if kind == "rhn":
        hidden, depth = block[:1], block[1]
    elif kind == "dmu":
        hidden, transition = block[-1:], block[:-1]
    return Setting(task, kind, hidden, transition, depth, lr=lr, min_length=shortest, max_length=longest)


def real(task: str, cell: str, depth: int, units: int, pixels: str) -> Setting:
    """Larger ones."""
    kind = cell.removesuffix("-c")
    how: dict[str, Any]
    if task == "pixel-mnist":
        width = units if kind == "dmu" else equal_width(kind, FEATURES[task], 2 * units * (FEATURES[task] + units + 1))
        how = {"pixels": pixels, "weight_decay": PIXEL_DECAY[pixels], **PIXEL_RECIPE, **PIXEL_START.get(kind, {})}
        if kind != "dmu":
            how |= {"lr": how["lr"] / 2, "weight_decay": how["weight_decay"] / 2}
        return Setting(task, kind, (width,), **how)
    if depth not in DEPTHS:
        raise ValueError(f"{task}: the paper has depths {', '.join(map(str, DEPTHS))}, got {depth}; see dmu train")
    row = REAL_DATA[task]["dmu" if kind == "dmu" else "rhn"][depth]
    how = {
        "lr": row.lr,
        "weight_decay": row.weight_decay,
        "gamma": row.gamma,
        "epochs": REAL_EPOCHS[task],
    }
    if kind == "dmu":
        state = TRANSLATION_STATE if task == "translation" else row.width
        return Setting(task, kind, (state,), (row.width,) * (depth - 1), memory_bias=0.0, **how)
    if kind == "rhn":
        return Setting(task, kind, (row.width,), depth=depth, **how)
    if depth != 1:
        raise ValueError(f"{task}: {kind} has no depth; give 1, got {depth}")
    weights = 2 * row.width * (FEATURES[task] + row.width + 1)
    return Setting(task, kind, (equal_width(kind, FEATURES[task], weights),), **how)


# What the recurrent block of each task reads.
FEATURES = {"polymusic": 88, "natlang": WORD_FEATURES, "translation": TRANSLATION_FEATURES, "pixel-mnist": 1}
GATES = {"rnn": 1, "gru": 3, "lstm": 4, "rhn": 2, "dmu": 2}


def equal_width(cell: str, features: int, weights: int) -> int:
    """Units of a one-layer cell that has as nearly as many weights as this.

    >>> equal_width("rhn", 88, 2 * 100 * (88 + 100 + 1))
    100
    """
    biases = 2 if cell in ("rnn", "gru", "lstm") else 1
    counts = {d: GATES[cell] * d * (features + d + biases) for d in range(1, weights)}
    return min(counts, key=lambda d: abs(counts[d] - weights))


# Sizes that show something within two minutes on two CPU cores; nobody should compare them with the paper.
QUICK: dict[str, dict[str, Any]] = {
    **{task: {"epochs": 20} for task in SYNTHETIC_TASKS},
    "polymusic": {"limit": 64, "epochs": 30},
    "natlang": {"limit": 12_000, "batch": 8, "window": 50, "epochs": 6},
    "translation": {"pairs": 2000, "epochs": 8},
    "pixel-mnist": {"limit": 1500, "epochs": 4},
}
QUICK_RUNS = 1


def quick(setting: Setting) -> Setting:
    """A small version of a setting."""
    return replace(setting, **QUICK[setting.task])


class Spread(NamedTuple):
    """Best, mean and standard deviation over five runs; None is the paper's nan."""

    best: float
    mean: float | None
    std: float | None


class Result(NamedTuple):
    """One row of a published table."""

    cell: str
    depth: int
    train: Spread
    test: Spread
    pair: str | None = None  # of languages


class Pixels(NamedTuple):
    """One row of the pixel-by-pixel MNIST table: test accuracy in percent."""

    cell: str
    ordered: float
    permuted: float
    units: int
    params: str


# The measure that chooses the epoch: the weights that were best on validation by it give all scores of a task. The
# launcher of the authors' published code sets these; elsewhere every score is taken at its own best epoch.
EPOCH_BY = {"natlang": "loss", "translation": "accuracy"}

# Published results.
RESULTS: dict[str, tuple[Result, ...]] = {
    "polymusic": (
        Result("RHN", 1, Spread(3.344, 3.375, 0.078), Spread(3.552, 3.598, 0.037)),
        Result("DMU", 1, Spread(2.942, 2.959, 0.042), Spread(3.567, 3.631, 0.05)),
        Result("RHN", 2, Spread(3.39, 3.414, 0.098), Spread(3.553, 3.607, 0.063)),
        Result("DMU", 2, Spread(3.022, 3.094, 0.067), Spread(3.487, 3.551, 0.041)),
        Result("RHN", 5, Spread(3.443, 3.682, 0.163), Spread(3.734, 3.851, 0.106)),
        Result("DMU", 5, Spread(3.215, 3.208, 0.064), Spread(3.63, 3.685, 0.032)),
        Result("RHN", 10, Spread(3.701, 3.927, 0.143), Spread(3.903, 4.075, 0.118)),
        Result("DMU", 10, Spread(3.523, 3.537, 0.149), Spread(3.951, 4.044, 0.087)),
    ),
    "natlang": (
        Result("RHN", 1, Spread(61.102, 66.531, 6.071), Spread(106.105, 110.394, 4.363)),
        Result("DMU", 1, Spread(56.625, 59.422, 3.137), Spread(105.354, 106.129, 0.475)),
        Result("RHN", 2, Spread(62.895, 66.317, 4.232), Spread(104.888, 109.833, 4.04)),
        Result("DMU", 2, Spread(64.421, 64.861, 1.434), Spread(109.601, 110.128, 0.465)),
        Result("RHN", 5, Spread(82.325, 86.097, 3.832), Spread(123.158, 124.971, 1.923)),
        Result("DMU", 5, Spread(92.395, 94.063, 1.114), Spread(117.924, 120.368, 1.456)),
        Result("RHN", 10, Spread(85.972, 149.43, 86.869), Spread(124.458, 171.598, 60.383)),
        Result("DMU", 10, Spread(118.199, 119.475, 1.526), Spread(130.054, 131.827, 1.44)),
    ),
    "translation": (
        Result("RHN", 1, Spread(8.257, 7.72, 0.285), Spread(5.804, 6.31, 0.357), "Spa2Eng"),
        Result("DMU", 1, Spread(7.128, 7.242, 0.171), Spread(5.886, 6.045, 0.137), "Spa2Eng"),
        Result("RHN", 2, Spread(8.818, 8.498, 0.222), Spread(6.532, 7.101, 0.358), "Spa2Eng"),
        Result("DMU", 2, Spread(9.072, 8.515, 0.375), Spread(6.913, 7.181, 0.316), "Spa2Eng"),
        Result("RHN", 5, Spread(12.379, 24.678, 12.479), Spread(12.337, 47.599, 41.679), "Spa2Eng"),
        Result("DMU", 5, Spread(7.738, 7.909, 0.347), Spread(7.503, 8.016, 0.345), "Spa2Eng"),
        Result("RHN", 10, Spread(58.744, 58.73, 0.924), Spread(110.535, 141.766, 56.012), "Spa2Eng"),
        Result("DMU", 10, Spread(8.781, 8.837, 0.264), Spread(7.988, 8.395, 0.234), "Spa2Eng"),
        Result("RHN", 1, Spread(3.949, 3.977, 0.09), Spread(3.652, 3.801, 0.157), "Por2Eng"),
        Result("DMU", 1, Spread(3.908, 3.932, 0.108), Spread(3.541, 3.68, 0.104), "Por2Eng"),
        Result("RHN", 2, Spread(4.29, 4.328, 0.058), Spread(3.669, 3.932, 0.176), "Por2Eng"),
        Result("DMU", 2, Spread(4.626, 4.448, 0.141), Spread(3.744, 3.967, 0.137), "Por2Eng"),
        Result("RHN", 5, Spread(6.25, 7.5, 0.833), Spread(6.553, 7.616, 0.849), "Por2Eng"),
        Result("DMU", 5, Spread(4.65, 4.74, 0.088), Spread(4.56, 4.692, 0.096), "Por2Eng"),
        Result("RHN", 10, Spread(48.578, 48.348, 0.374), Spread(79.098, 99.863, 23.798), "Por2Eng"),
        Result("DMU", 10, Spread(5.117, 5.287, 0.184), Spread(4.921, 5.06, 0.115), "Por2Eng"),
        Result("RHN", 1, Spread(4.661, 4.633, 0.162), Spread(4.272, 4.347, 0.064), "Ger2Eng"),
        Result("DMU", 1, Spread(4.277, 4.504, 0.12), Spread(4.104, 4.207, 0.076), "Ger2Eng"),
        Result("RHN", 2, Spread(5.26, 5.1, 0.113), Spread(4.41, 4.594, 0.103), "Ger2Eng"),
        Result("DMU", 2, Spread(5.377, 5.283, 0.068), Spread(4.562, 4.793, 0.19), "Ger2Eng"),
        Result("RHN", 5, Spread(8.132, 9.242, 1.237), Spread(7.93, 9.179, 1.275), "Ger2Eng"),
        Result("DMU", 5, Spread(5.326, 5.415, 0.121), Spread(5.212, 5.331, 0.116), "Ger2Eng"),
        Result("RHN", 10, Spread(47.994, 48.407, 0.291), Spread(83.47, 134.791, 92.367), "Ger2Eng"),
        Result("DMU", 10, Spread(5.912, 5.824, 0.231), Spread(5.631, 5.738, 0.073), "Ger2Eng"),
    ),
    "polymusic_lr_ablation": (
        Result("DMU-C", 1, Spread(2.717, 2.813, 0.082), Spread(3.342, 3.382, 0.035)),
        Result("DMU", 1, Spread(2.942, 2.959, 0.042), Spread(3.567, 3.631, 0.05)),
        Result("DMU-C", 2, Spread(2.991, 3.034, 0.197), Spread(3.43, 3.486, 0.041)),
        Result("DMU", 2, Spread(3.022, 3.094, 0.067), Spread(3.487, 3.551, 0.041)),
        Result("DMU-C", 5, Spread(3.251, 3.308, 0.236), Spread(3.902, 3.993, 0.114)),
        Result("DMU", 5, Spread(3.215, 3.208, 0.064), Spread(3.63, 3.685, 0.032)),
        Result("DMU-C", 10, Spread(3.752, None, None), Spread(4.262, 5.032, 0.632)),
        Result("DMU", 10, Spread(3.523, 3.537, 0.149), Spread(3.951, 4.044, 0.087)),
    ),
    "natlang_lr_ablation": (
        Result("DMU-C", 1, Spread(68.988, 71.116, 1.779), Spread(109.23, 111.195, 1.424)),
        Result("DMU", 1, Spread(56.625, 59.422, 3.137), Spread(105.354, 106.129, 0.475)),
        Result("DMU-C", 2, Spread(81.311, 81.014, 1.691), Spread(117.555, 118.166, 0.647)),
        Result("DMU", 2, Spread(64.421, 64.861, 1.434), Spread(109.601, 110.128, 0.465)),
        Result("DMU-C", 5, Spread(108.896, 579.677, 235.391), Spread(138.133, 542.204, 202.036)),
        Result("DMU", 5, Spread(92.395, 94.063, 1.114), Spread(117.924, 120.368, 1.456)),
        Result("DMU-C", 10, Spread(696.302, 697.572, 0.688), Spread(642.178, 642.914, 0.436)),
        Result("DMU", 10, Spread(118.199, 119.475, 1.526), Spread(130.054, 131.827, 1.44)),
    ),
    "translation_lr_ablation": (
        Result("DMU-C", 1, Spread(0.91, 0.851, 0.14), Spread(0.698, 0.671, 0.044), "Spa2Eng"),
        Result("DMU", 1, Spread(0.93, 0.927, 0.003), Spread(0.697, 0.692, 0.005), "Spa2Eng"),
        Result("DMU-C", 2, Spread(0.844, 0.762, 0.196), Spread(0.66, 0.6, 0.106), "Spa2Eng"),
        Result("DMU", 2, Spread(0.938, 0.937, 0.009), Spread(0.691, 0.686, 0.005), "Spa2Eng"),
        Result("DMU-C", 5, Spread(0.71, 0.66, 0.055), Spread(0.617, 0.586, 0.033), "Spa2Eng"),
        Result("DMU", 5, Spread(0.837, 0.829, 0.007), Spread(0.661, 0.653, 0.005), "Spa2Eng"),
        Result("DMU-C", 10, Spread(0.336, 0.299, 0.019), Spread(0.352, 0.305, 0.024), "Spa2Eng"),
        Result("DMU", 10, Spread(0.76, 0.749, 0.009), Spread(0.629, 0.625, 0.003), "Spa2Eng"),
        Result("DMU-C", 1, Spread(0.941, 0.929, 0.019), Spread(0.777, 0.771, 0.005), "Por2Eng"),
        Result("DMU", 1, Spread(0.926, 0.941, 0.008), Spread(0.776, 0.773, 0.003), "Por2Eng"),
        Result("DMU-C", 2, Spread(0.937, 0.925, 0.021), Spread(0.754, 0.745, 0.013), "Por2Eng"),
        Result("DMU", 2, Spread(0.955, 0.952, 0.006), Spread(0.775, 0.768, 0.004), "Por2Eng"),
        Result("DMU-C", 5, Spread(0.766, 0.625, 0.203), Spread(0.699, 0.59, 0.164), "Por2Eng"),
        Result("DMU", 5, Spread(0.861, 0.861, 0.004), Spread(0.731, 0.725, 0.005), "Por2Eng"),
        Result("DMU-C", 10, Spread(0.315, 0.316, 0.001), Spread(0.322, 0.32, 0.002), "Por2Eng"),
        Result("DMU", 10, Spread(0.807, 0.803, 0.012), Spread(0.709, 0.706, 0.003), "Por2Eng"),
        Result("DMU-C", 1, Spread(0.923, 0.915, 0.017), Spread(0.749, 0.748, 0.001), "Ger2Eng"),
        Result("DMU", 1, Spread(0.924, 0.925, 0.006), Spread(0.753, 0.749, 0.003), "Ger2Eng"),
        Result("DMU-C", 2, Spread(0.884, 0.898, 0.009), Spread(0.73, 0.722, 0.005), "Ger2Eng"),
        Result("DMU", 2, Spread(0.935, 0.938, 0.005), Spread(0.749, 0.743, 0.004), "Ger2Eng"),
        Result("DMU-C", 5, Spread(0.724, 0.702, 0.019), Spread(0.662, 0.647, 0.014), "Ger2Eng"),
        Result("DMU", 5, Spread(0.845, 0.843, 0.01), Spread(0.711, 0.703, 0.006), "Ger2Eng"),
        Result("DMU-C", 10, Spread(0.443, 0.336, 0.055), Spread(0.446, 0.344, 0.053), "Ger2Eng"),
        Result("DMU", 10, Spread(0.797, 0.782, 0.011), Spread(0.684, 0.679, 0.004), "Ger2Eng"),
    ),
}

METRICS: dict[str, str] = {
    "polymusic": "negative log-likelihood per time step",
    "natlang": "perplexity",
    "translation": "perplexity",
    "polymusic_lr_ablation": "negative log-likelihood per time step",
    "natlang_lr_ablation": "perplexity",
    "translation_lr_ablation": "accuracy",
    "pixel_mnist": "test accuracy, percent",
}

PIXEL_MNIST: tuple[Pixels, ...] = (
    Pixels("LSTM (Arjovsky et al. 2016)", 97.3, 92.7, 128, "68K"),
    Pixels("MomentumLSTM", 99.1, 94.7, 256, "270K"),
    Pixels("Unitary RNN", 95.1, 91.4, 512, "9K"),
    Pixels("Full Capacity Unitary RNN", 96.9, 94.1, 512, "270K"),
    Pixels("Soft orth. RNN", 94.1, 91.4, 128, "18K"),
    Pixels("Kronecker RNN", 96.4, 94.5, 512, "11K"),
    Pixels("Antisymmetric RNN", 98.0, 95.8, 128, "10K"),
    Pixels("Incremental RNN", 98.1, 95.6, 128, "4K/8K"),
    Pixels("Exponential RNN", 98.4, 96.2, 360, "69K"),
    Pixels("Sequential NAIS-Net", 94.3, 90.8, 128, "18K"),
    Pixels("Lipschitz RNN", 99.4, 96.3, 128, "34K"),
    Pixels("DMU (ours)", 98.5, 93.4, 96, "20K"),
    Pixels("DMU (ours)", 98.7, 93.4, 128, "34K"),
)

# The series of a study that each table is about.
MEASURES: dict[str, str] = {
    "polymusic": "loss",
    "natlang": "perplexity",
    "translation": "perplexity",
    "pixel_mnist": "accuracy",
    "polymusic_lr_ablation": "loss",
    "natlang_lr_ablation": "perplexity",
    "translation_lr_ablation": "accuracy",
}
PAIRS = {"Spa2Eng": "spanish", "Por2Eng": "portuguese", "Ger2Eng": "german"}  # the tables' names and ours
NO_DATA = ("portuguese",)  # its file was not at hand; see deepmemory.lab.data.registry


def measure_of(task: str) -> str:
    """What the task's own table is about."""
    return MEASURES[task.replace("-", "_")]


def kind_of(setting: Setting) -> str:
    """The cell's name in the paper: a DMU whose module learns like everything else is ``dmu-c``."""
    return DMU_C if setting.cell == "dmu" and setting.module_rate == SHARED_RATE else setting.cell


def depth_of(setting: Setting) -> int:
    """Linear layers that a state goes through in one step.

    >>> depth_of(setting("natlang", "dmu", 5)), depth_of(setting("natlang", "rhn", 5))
    (5, 5)
    """
    return len(setting.transition) + 1 if setting.cell == "dmu" else setting.depth


@dataclass(frozen=True)
class TableClaim:
    """What the paper says of tables; ``deepmemory.lab.report.results`` checks it against them and against records."""

    text: str  # in few words
    check: str  # name of the rule that decides
    tables: tuple[str, ...]
    cells: tuple[str, ...] = ("dmu", "rhn")  # in the order the rule wants
    sizes: tuple[int, ...] = DEPTHS  # depths, or units where the data is pixels
    parts: tuple[str, ...] = ()  # languages or orders of pixels; none is all
    note: str = ""  # where the paper's text and table disagree, and the like


TEXT_AND_TABLE = "In the paper's table it is at depth 2 that the RHN is ahead, for all three pairs, and nowhere else."

TABLE_CLAIMS: tuple[TableClaim, ...] = (
    TableClaim("DMU outperforms RHN at 3 of 4 depths in mean test loss", "most", ("polymusic",)),
    TableClaim("DMU is better than RHN at depths 1, 5 and 10", "better", ("natlang",), sizes=(1, 5, 10)),
    TableClaim("RHN is slightly better than DMU at depth 2", "slightly", ("natlang",), ("rhn", "dmu"), (2,)),
    TableClaim(
        "DMU is better than RHN at every depth for Spanish and German",
        "better",
        ("translation",),
        parts=("spanish", "german"),
        note=TEXT_AND_TABLE,
    ),
    TableClaim(
        "DMU is better than RHN at every depth but 1 for Portuguese",
        "better",
        ("translation",),
        sizes=(2, 5, 10),
        parts=("portuguese",),
        note=TEXT_AND_TABLE,
    ),
    TableClaim("Both networks are best at depth 1 or 2", "shallow", ("translation",)),
    TableClaim("Greater depth makes both networks worse", "worsens", ("translation",)),
    TableClaim("Depth costs the RHN more than the DMU", "steeper", ("translation",), ("rhn", "dmu")),
    TableClaim("DMU outperforms RHN in 15 of 20 mean test scores", "most", ("polymusic", "natlang", "translation")),
    TableClaim("DMU stays competitive in the other five", "competitive", ("polymusic", "natlang", "translation")),
    TableClaim("Depth did not yield better results", "shallow", ("polymusic", "natlang", "translation")),
    TableClaim(
        "Reducing the module's learning rate helps in music",
        "better",
        ("polymusic_lr_ablation",),
        ("dmu", DMU_C),
        note="The text makes no exception; in the paper's table it helps at depths 5 and 10 alone.",
    ),
    TableClaim(
        "It helps in music at depths 5 and 10", "better", ("polymusic_lr_ablation",), ("dmu", DMU_C), sizes=(5, 10)
    ),
    TableClaim(
        "Reducing the module's learning rate helps in language", "better", ("natlang_lr_ablation",), ("dmu", DMU_C)
    ),
    TableClaim(
        "Reducing the module's learning rate helps in translation",
        "better",
        ("translation_lr_ablation",),
        ("dmu", DMU_C),
    ),
    TableClaim("DMU classifies 98.5 to 98.7 % in order", "reaches", ("pixel_mnist",), ("dmu",), UNITS, ("ordered",)),
    TableClaim("DMU classifies 93.4 % when permuted", "reaches", ("pixel_mnist",), ("dmu",), UNITS, ("permuted",)),
)

TABLE_READINGS: tuple[Reading, ...] = (
    Reading(
        "What the decoder is fed while it learns",
        "feedback",
        "teacher",
        ("its own words", "the right words"),
        "The paper gives a teacher forcing ratio of 1.0, which reads as if the decoder were always fed the right "
        "words. In the authors' published code the ratio works the other way round: at 1.0 it is fed its own.",
        "dmu paper translation --feedback teacher",
        tasks=("translation",),
        cells=COMPARED,
    ),
    Reading(
        "How many pairs of sentences",
        "pairs",
        0,
        ("the first 30,000", "all"),
        "The paper's numbers of weights are those of the vocabularies of whole files. The authors' published code "
        "reads the first 30,000 lines of each, which are its shortest sentences.",
        "dmu paper translation --pairs all",
        tasks=("translation",),
        cells=COMPARED,
    ),
    Reading(
        "Which release of the German sentences",
        "release",
        "2018",
        ("December 2020", "May 2018"),
        "The paper does not name the release. The sizes of the vocabularies in the authors' published code fit a file "
        "of about 210,000 pairs. The release of May 2018 has 169,813; that of December 2020 has about 220,000, of "
        "which the first 50,001 are available.",
        "dmu paper translation --pair german --release 2018",
        tasks=("translation",),
        cells=COMPARED,
    ),
)
