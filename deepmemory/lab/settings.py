"""What can be chosen: one frozen dataclass for a study, one for the machine it runs on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_type_hints

CELLS = ("rnn", "lstm", "gru", "rhn", "dmu")
SYNTHETIC = ("adding", "temporal-order", "noisy-sequence")
REAL = ("polymusic", "natlang", "translation", "pixel-mnist")
TASKS = SYNTHETIC + REAL
ACTIVATIONS = ("leaky_relu", "relu", "tanh", "silu", "gelu")
NOISES = ("random", "fixed")
CONDITIONS = ("free", "kept")
MUSIC = ("nottingham", "jsb-chorales", "musedata", "piano-midi")
LANGUAGES = ("spanish", "portuguese", "german")
RELEASES = ("2020", "2018")
FEEDBACKS = ("own", "teacher")
PIXELS = ("ordered", "permuted")
SHARED_RATE = "same"  # value of module_rate: the paper's DMU-C
PRECISIONS = ("32-true", "64-true", "bf16-mixed")
LARGEST = 2**31 - 1  # of any whole number
THRESHOLDS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the validation loss, in the paper's figures


def threshold_label(threshold: float) -> str:
    """1e-2, not 1e-02."""
    return f"{threshold:.0e}".replace("e-0", "e-")


def option(default: Any, help: str) -> Any:
    """A dataclass field with one line of help, shown by the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Setting:
    """One study: what is trained on what, and how. Runs of a study differ in their seed alone."""

    task: str = option("adding", f"what to learn: {', '.join(TASKS)}")
    cell: str = option("dmu", f"kind of recurrent layer: {', '.join(CELLS)}")
    hidden: tuple[int, ...] = option((5,), "state size of each stacked layer, e.g. 5 or 3,2")
    transition: tuple[int, ...] = option((), "DMU: widths of the hidden layers of its network, e.g. 5,5; none is n = 1")
    depth: int = option(1, "RHN: micro-layers per time step")
    activation: str = option("leaky_relu", f"DMU: of the hidden layers: {', '.join(ACTIVATIONS)}")
    memory_bias: float = option(3.0, "DMU: added to the bias of z at the start")
    forget_bias: float = option(2.0, "LSTM: the forget gate's bias at the start, in both bias vectors")
    lr: float = option(0.01, "Adam's learning rate")
    module_rate: str = option(
        "formula", "DMU: learning rate of the module: formula (lr / 2n), same (as everything else: DMU-C) or a number"
    )
    weight_decay: float = option(0.0, "L2 penalty, the way Adam (not AdamW) applies it")
    gamma: float = option(1.0, "the learning rate is multiplied by this after every epoch")
    batch: int = option(32, "sequences per optimiser step")
    steps: int = option(200, "synthetic tasks: optimiser steps per epoch")
    epochs: int = option(100, "train at most this long; a finished study goes on when this grows")
    stop_below: float = option(1e-6, "a run stops when its validation loss stays under this")
    patience: int = option(5, "epochs in a row under stop_below before a run stops")
    validation: int = option(1000, "synthetic tasks: fixed sequences measured after every epoch")
    test: int = option(10000, "synthetic tasks: fixed sequences measured once, with the best weights")
    min_length: int = option(100, "synthetic tasks: time steps of the shortest sequence")
    max_length: int = option(110, "synthetic tasks: time steps of the longest sequence")
    noise: str = option(
        "random", "noisy-sequence: symbols after the first are drawn each time (random) or once (fixed)"
    )
    precision: str = option("32-true", f"of weights and arithmetic: {', '.join(PRECISIONS)}")
    music: str = option("nottingham", f"polymusic: which pieces: {', '.join(MUSIC)}")
    window: int = option(100, "natlang: words between two optimiser steps")
    language: str = option("spanish", f"translation: into English, from: {', '.join(LANGUAGES)}")
    release: str = option("2020", f"translation from German: release of the sentence pairs: {', '.join(RELEASES)}")
    pairs: int = option(
        30000, "translation: the first so many pairs of sentences, which are the shortest; 0 or all: all of them"
    )
    feedback: str = option("own", "translation: the decoder is fed its own words (own) or the right ones (teacher)")
    pixels: str = option("ordered", "pixel-mnist: row by row (ordered), or mixed in one fixed way (permuted)")
    condition: str = option(
        "free", "DMU: the gradient condition is left to training (free) or enforced after every step (kept)"
    )
    update_bias: float = option(0.0, "GRU: added to the bias of its update gate at the start")
    input_bias: float = option(0.0, "LSTM: added to the bias of its input gate at the start")
    limit: int = option(0, "music, text, pixels: the first so many pieces, words or images of each split; 0 is all")

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASKS)
        check_choice("cell", self.cell, CELLS)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("noise", self.noise, NOISES)
        check_choice("condition", self.condition, CONDITIONS)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("music", self.music, MUSIC)
        check_choice("language", self.language, LANGUAGES)
        check_choice("release", self.release, RELEASES)
        check_choice("feedback", self.feedback, FEEDBACKS)
        check_choice("pixels", self.pixels, PIXELS)
        if self.module_rate not in ("formula", SHARED_RATE):
            try:
                rate = float(self.module_rate)
            except ValueError:
                rate = -1.0
            if not rate > 0:
                raise ValueError(f"module_rate should be formula, same or a positive number, got {self.module_rate!r}")
            object.__setattr__(self, "module_rate", repr(rate))  # 1e-3 and 0.001 are one setting
        if not self.hidden or min(self.hidden) < 1 or any(width < 1 for width in self.transition):
            raise ValueError(
                f"hidden and transition should list positive widths, got {self.hidden} and {self.transition}"
            )
        for name in ("depth", "batch", "steps", "epochs", "patience", "validation", "test", "min_length", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} should be at least 1, got {getattr(self, name)}")
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} should be a finite number, got {value}")
            numbers, most = value if isinstance(value, tuple) else (value,), MOST.get(name, LARGEST)
            if any(isinstance(number, int) and number > most for number in numbers):
                raise ValueError(f"{name} should be at most {most}, got {value}")
        for name in ("hidden", "transition"):
            if len(getattr(self, name)) > MOST_LAYERS:
                raise ValueError(f"{name} should list at most {MOST_LAYERS} layers, got {len(getattr(self, name))}")
        for name in ("lr", "gamma", "stop_below"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} should be positive, got {getattr(self, name)}")
        for name in ("weight_decay", "pairs", "limit"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} should not be negative, got {getattr(self, name)}")
        if self.max_length < self.min_length:
            raise ValueError(f"max_length {self.max_length} is shorter than min_length {self.min_length}")
        if self.task == "noisy-sequence" and self.max_length != self.min_length:
            raise ValueError(
                "noisy-sequence has one length: give min_length and max_length the same value, "
                f"got {self.min_length} and {self.max_length}"
            )
        for name, (owner, belongs) in OWNERS.items():
            if getattr(self, owner) not in belongs and getattr(self, name) != DEFAULTS[name]:
                raise ValueError(
                    f"{name} belongs to the {owner} {' or '.join(belongs)}; leave it out for the {owner} "
                    f"{getattr(self, owner)}"
                )

    @property
    def key(self) -> str:
        """Name of the study: equal for equal settings; how long it trains is left out, so a study can go on."""
        content = {name: value for name, value in asdict(self).items() if name != "epochs"}
        for name in LATER:
            if content[name] == DEFAULTS[name]:
                del content[name]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """All fields, in their order."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Machine:
    """Where and how a study is computed; none of it is part of what is studied."""

    device: str = option("auto", "cpu, cuda, cuda:1, mps, or auto for the best one there is")
    engine: str = option("auto", "of the recurrent layers, from deepmemory.engines()")
    graph: bool = option(True, "on a GPU, capture one training step and replay it")
    threads: int = option(0, "CPU threads; 0 chooses by the number of runs")
    devices: int = option(1, "processes on each machine, with a GPU each or on the CPU: they share every batch")
    nodes: int = option(1, "machines that share every batch; see the page on more than one machine")
    recompute: bool = option(False, "compute inner values again going back instead of keeping them: less memory")
    data: str | None = option(None, "folder of local copies of the data; default: $DEEPMEMORY_DATA")


def setting_from_json(text: str) -> Setting:
    """The reverse of :meth:`Setting.to_json`."""
    fields_of = json.loads(text)
    if not isinstance(fields_of, dict):
        raise ValueError(f"settings should be a JSON object, got {text[:40]!r}")
    return change(Setting(), fields_of)


def change(setting: Setting, changes: Mapping[str, Any]) -> Setting:
    """The same setting with some fields changed; values may be given as text."""
    hints = get_type_hints(Setting)
    parsed = {}
    for name, value in changes.items():
        if name not in hints:
            raise ValueError(f"unknown setting {name!r}; choose from {', '.join(hints)}")
        parsed[name] = parse(name, hints[name], value)
    return replace(setting, **parsed)


def parse(name: str, kind: Any, value: Any) -> Any:
    """One field's value from text or JSON."""
    try:
        if kind == tuple[int, ...]:
            if isinstance(value, str):
                value = [part for part in value.strip("()[] ").split(",") if part.strip()]
            return tuple(int(width) for width in value)
        if name == "pairs" and value == "all":
            return 0
        if kind is int and isinstance(value, float) and value != int(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        expected = "whole numbers separated by commas" if kind == tuple[int, ...] else f"of type {kind.__name__}"
        raise ValueError(f"{name} should be {expected}, got {value!r}") from None


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The value, or an error that names the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")
    return value


# What no study needs and no machine holds: a mistake, or records that somebody made to exhaust whoever reads them.
MOST_LAYERS = 256
MOST = {
    "hidden": 2**16,
    "transition": 2**16,
    "depth": 2**10,
    "batch": 2**20,
    "steps": 2**24,
    "epochs": 2**20,
    "patience": 2**20,
    "validation": 2**24,
    "test": 2**24,
    "min_length": 2**16,
    "max_length": 2**16,
    "window": 2**16,
    "pairs": 2**31,
    "limit": 2**31,
}

# Settings that mean something to some cells, tasks or languages alone.
OWNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "transition": ("cell", ("dmu",)),
    "activation": ("cell", ("dmu",)),
    "memory_bias": ("cell", ("dmu",)),
    "module_rate": ("cell", ("dmu",)),
    "condition": ("cell", ("dmu",)),
    "forget_bias": ("cell", ("lstm",)),
    "input_bias": ("cell", ("lstm",)),
    "update_bias": ("cell", ("gru",)),
    "depth": ("cell", ("rhn",)),
    "steps": ("task", SYNTHETIC),
    "validation": ("task", SYNTHETIC),
    "test": ("task", SYNTHETIC),
    "min_length": ("task", SYNTHETIC),
    "max_length": ("task", SYNTHETIC),
    "noise": ("task", ("noisy-sequence",)),
    "music": ("task", ("polymusic",)),
    "window": ("task", ("natlang",)),
    "language": ("task", ("translation",)),
    "release": ("language", ("german",)),
    "pairs": ("task", ("translation",)),
    "feedback": ("task", ("translation",)),
    "pixels": ("task", ("pixel-mnist",)),
    "limit": ("task", ("polymusic", "natlang", "pixel-mnist")),
}
# Settings that came after the first studies: they are part of a study's name where they differ from the default.
LATER = (
    "music",
    "window",
    "language",
    "release",
    "pairs",
    "feedback",
    "pixels",
    "limit",
    "condition",
    "update_bias",
    "input_bias",
)
DEFAULTS = {f.name: f.default for f in fields(Setting)}
HELP = {f.name: f.metadata["help"] for cls in (Setting, Machine) for f in fields(cls)}
