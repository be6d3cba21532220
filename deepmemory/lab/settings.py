"""The settings: frozen dataclasses for a study, the machine it runs on, and how several studies are launched.

Every field has its help, its limits and the cells or tasks it belongs to; the options of the command line are made
from the fields (:mod:`deepmemory.lab.cli.options`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, get_type_hints

CELLS = ("rnn", "lstm", "gru", "rhn", "dmu")
CONTROLS = ("mingru",)  # cells that the paper does not have, for experiments beyond it
SYNTHETIC = ("adding", "temporal-order", "noisy-sequence")
REAL = ("polymusic", "natlang", "translation", "pixel-mnist")
PAPER_TASKS = SYNTHETIC + REAL
MORE_REAL = ("ptb",)  # tasks beyond the paper: with real data,
MORE_GENERATED = ("state-tracking",)  # and with generated sequences
TASKS = PAPER_TASKS + MORE_REAL + MORE_GENERATED
GENERATED = SYNTHETIC + MORE_GENERATED
ACTIVATIONS = ("leaky_relu", "relu", "tanh", "silu", "gelu")
NOISES = ("random", "fixed")
CONDITIONS = ("free", "kept")
MUSIC = ("nottingham", "jsb-chorales", "musedata", "piano-midi")
LANGUAGES = ("spanish", "portuguese", "german")
RELEASES = ("2020", "2018")
FEEDBACKS = ("own", "teacher")
GROUPS = ("parity", "z60", "s3", "s4", "a5", "s5")  # parity is the group of two elements
PIXELS = ("ordered", "permuted")
SHARED_RATE = "same"  # value of module_rate: the paper's DMU-C
DROPPING = ("polymusic", "translation", "pixel-mnist", "ptb")  # tasks with dropout around the recurrent block
PRECISIONS = ("32-true", "64-true", "bf16-mixed")
LAUNCHERS = ("local", "ray")
LARGEST = 2**31 - 1  # of any whole number
MOST_LAYERS = 256  # in hidden and in transition
ALIKE = 0.7  # from 0 to 1: how similar an unknown name has to be to the one that is suggested instead
THRESHOLDS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the validation loss, in the paper's figures

# The groups of options in the help of a command.
NETWORK, OPTIMISATION, DATA = "Network", "Optimisation", "Task and data"
MACHINE, LAUNCHING = "Machine", "Several studies or machines"


def threshold_label(threshold: float) -> str:
    """A threshold as people write it: 1e-2, not 1e-02."""
    return f"{threshold:.0e}".replace("e-0", "e-")


def option(
    default: Any,
    help: str,
    panel: str,
    *,
    choices: tuple[str, ...] = (),
    least: int | None = None,
    most: int | None = None,
    positive: bool = False,
    cells: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    languages: tuple[str, ...] = (),
    later: bool = False,
) -> Any:
    """A dataclass field that is also an option of the command line.

    ``most`` is more than any study needs or any machine can hold: a larger value is a mistake, or a record made to
    exhaust the machine that reads it. ``cells``, ``tasks`` and ``languages`` list those that a setting belongs to, if
    it does not belong to all. ``later`` marks settings that were added after the first studies were recorded: see
    :attr:`Setting.key`.
    """
    owners = {"cell": cells, "task": tasks, "language": languages}
    owner = next(((name, belongs) for name, belongs in owners.items() if belongs), None)
    limits = {"choices": choices, "least": least, "most": most, "positive": positive}
    return field(default=default, metadata={"help": help, "panel": panel, "owner": owner, "later": later, **limits})


def share(help: str, panel: str, *, cells: tuple[str, ...] = (), tasks: tuple[str, ...] = ()) -> Any:
    """A field for a dropout probability, 0 by default."""
    return option(0.0, help, panel, least=0, most=1, cells=cells, tasks=tasks, later=True)


@dataclass(frozen=True)
class Setting:
    """One study: what is trained on what, and how. The runs of a study differ only in their seed."""

    task: str = option("adding", f"task to learn: {', '.join(TASKS)}", DATA, choices=TASKS)
    cell: str = option(
        "dmu",
        f"recurrent layer: {', '.join(CELLS)}; state-tracking: also {', '.join(CONTROLS)}",
        NETWORK,
        choices=CELLS + CONTROLS,
    )
    hidden: tuple[int, ...] = option((5,), "state size of each stacked layer, e.g. 5 or 3,2", NETWORK, most=2**16)
    transition: tuple[int, ...] = option(
        (),
        "DMU: widths of the transition's hidden layers, e.g. 5,5; an empty string for none",
        NETWORK,
        most=2**16,
        cells=("dmu",),
    )
    depth: int = option(
        1,
        "RHN: micro-layers per time step; with real data: linear layers of an RHN or DMU",
        NETWORK,
        least=1,
        most=2**10,
        cells=("rhn",),
    )
    activation: str = option(
        "leaky_relu",
        f"DMU: activation of the hidden layers: {', '.join(ACTIVATIONS)}",
        NETWORK,
        choices=ACTIVATIONS,
        cells=("dmu",),
    )
    memory_bias: float = option(3.0, "DMU: initial gate bias, added to the bias of z", NETWORK, cells=("dmu",))
    forget_bias: float = option(
        2.0, "LSTM: initial bias of the forget gate, in both bias vectors", NETWORK, cells=("lstm",)
    )
    lr: float = option(0.01, "learning rate of Adam", OPTIMISATION, positive=True)
    module_rate: str = option(
        "formula",
        "learning rate of the DMU: formula (lr / 2n), same (lr, the paper's DMU-C) or a number",
        OPTIMISATION,
        cells=("dmu",),
    )
    weight_decay: float = option(0.0, "L2 penalty, as in Adam (not decoupled, as in AdamW)", OPTIMISATION, least=0)
    gamma: float = option(
        1.0, "factor by which the learning rate is multiplied after every epoch", OPTIMISATION, positive=True
    )
    batch: int = option(32, "sequences per optimiser step", OPTIMISATION, least=1, most=2**20)
    steps: int = option(
        200, "synthetic tasks: optimiser steps per epoch", OPTIMISATION, least=1, most=2**24, tasks=GENERATED
    )
    epochs: int = option(
        100, "maximum number of epochs; increase it to resume a finished study", OPTIMISATION, least=1, most=2**20
    )
    stop_below: float = option(
        1e-6, "a run stops when its validation loss stays below this", OPTIMISATION, positive=True
    )
    patience: int = option(5, "epochs in a row below stop_below before a run stops", OPTIMISATION, least=1, most=2**20)
    validation: int = option(
        1000, "synthetic tasks: sequences in the validation set", DATA, least=1, most=2**24, tasks=GENERATED
    )
    test: int = option(
        10000,
        "synthetic tasks: sequences in the test set, measured once with the best weights",
        DATA,
        least=1,
        most=2**24,
        tasks=GENERATED,
    )
    min_length: int = option(
        100, "synthetic tasks: time steps of the shortest sequence", DATA, least=1, most=2**16, tasks=GENERATED
    )
    max_length: int = option(
        110, "synthetic tasks: time steps of the longest sequence", DATA, most=2**16, tasks=GENERATED
    )
    noise: str = option(
        "random",
        "noisy-sequence: symbols after the first are drawn for every sequence (random) or once (fixed)",
        DATA,
        choices=NOISES,
        tasks=("noisy-sequence",),
    )
    precision: str = option(
        "32-true", f"precision of weights and arithmetic: {', '.join(PRECISIONS)}", OPTIMISATION, choices=PRECISIONS
    )
    music: str = option(
        "nottingham",
        f"polymusic: dataset: {', '.join(MUSIC)}",
        DATA,
        choices=MUSIC,
        tasks=("polymusic",),
        later=True,
    )
    window: int = option(
        100, "natlang, ptb: words per optimiser step", DATA, least=1, most=2**16, tasks=("natlang", "ptb"), later=True
    )
    language: str = option(
        "spanish",
        f"translation: language to translate into English: {', '.join(LANGUAGES)}",
        DATA,
        choices=LANGUAGES,
        tasks=("translation",),
        later=True,
    )
    release: str = option(
        "2020",
        f"translation from German: release of the sentence pairs: {', '.join(RELEASES)}",
        DATA,
        choices=RELEASES,
        languages=("german",),
        later=True,
    )
    pairs: int = option(
        30000,
        "translation: number of sentence pairs, shortest first; 0 or all for all of them",
        DATA,
        least=0,
        most=2**31,
        tasks=("translation",),
        later=True,
    )
    feedback: str = option(
        "own",
        "translation: the decoder is fed its own words (own) or the correct ones (teacher)",
        DATA,
        choices=FEEDBACKS,
        tasks=("translation",),
        later=True,
    )
    pixels: str = option(
        "ordered",
        "pixel-mnist: pixels row by row (ordered) or in one fixed random order (permuted)",
        DATA,
        choices=PIXELS,
        tasks=("pixel-mnist",),
        later=True,
    )
    condition: str = option(
        "free",
        "DMU: the gradient condition is not enforced (free) or enforced after every step (kept)",
        OPTIMISATION,
        choices=CONDITIONS,
        cells=("dmu",),
        later=True,
    )
    update_bias: float = option(
        0.0,
        "GRU, minGRU: added to the initial bias of the gate that keeps the state",
        NETWORK,
        cells=("gru", "mingru"),
        later=True,
    )
    input_bias: float = option(
        0.0, "LSTM: added to the initial bias of the input gate", NETWORK, cells=("lstm",), later=True
    )
    limit: int = option(
        0,
        "polymusic, natlang, ptb, pixel-mnist: use only this many pieces, words or images of each split; 0 for all",
        DATA,
        least=0,
        most=2**31,
        tasks=("polymusic", "natlang", "ptb", "pixel-mnist"),
        later=True,
    )
    residual: bool = option(
        False,
        "DMU: skip connections around the transition's hidden layers from the second on",
        NETWORK,
        cells=("dmu",),
        later=True,
    )
    transform_bias: float = option(
        0.0, "RHN: added to the initial bias of the transform gates", NETWORK, cells=("rhn",), later=True
    )
    recurrent_dropout: float = share(
        "dropout probability of the state on its way into the recurrent weights; one mask for each sequence", NETWORK
    )
    transition_dropout: float = share(
        "DMU: dropout probability in the hidden layers; one mask for each sequence", NETWORK, cells=("dmu",)
    )
    input_dropout: float = share(
        "dropout probability of the recurrent block's input; one mask for each sequence", NETWORK, tasks=DROPPING
    )
    output_dropout: float = share(
        "dropout probability of the recurrent block's output; one mask for each sequence", NETWORK, tasks=DROPPING
    )
    word_dropout: float = share("ptb: probability of dropping a word from the input", NETWORK, tasks=("ptb",))
    embedding_rate: float = option(
        0.0, "ptb: learning rate of the embedding; 0 for lr", OPTIMISATION, least=0, tasks=("ptb",), later=True
    )
    cosine: int = option(
        0,
        "epochs of cosine decay of the learning rate to zero; 0 for none",
        OPTIMISATION,
        least=0,
        most=2**20,
        later=True,
    )
    warmup: int = option(
        0,
        "epochs of linear warm-up of the learning rate; 0 for none",
        OPTIMISATION,
        least=0,
        most=2**20,
        later=True,
    )
    clip: float = option(
        0.0,
        "maximum norm of a run's gradient; larger gradients are scaled down; 0 for none",
        OPTIMISATION,
        least=0,
        later=True,
    )
    beta2: float = option(
        0.999, "Adam's decay rate of the mean squared gradient", OPTIMISATION, least=0, most=1, later=True
    )
    elements: str = option(
        "s5",
        f"state-tracking: group whose elements are multiplied: {', '.join(GROUPS)}",
        DATA,
        choices=GROUPS,
        tasks=("state-tracking",),
        later=True,
    )
    features: int = option(
        650, "translation: size of word embeddings", NETWORK, least=1, most=2**16, tasks=("translation",), later=True
    )
    min_count: int = option(
        1,
        "translation: leave out pairs with a word that occurs fewer times than this",
        DATA,
        least=1,
        most=2**31,
        tasks=("translation",),
        later=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "module_rate", parse_module_rate(self.module_rate))
        for of in fields(self):
            check_limits(of, getattr(self, of.name))
        for name in ("hidden", "transition"):
            if len(getattr(self, name)) > MOST_LAYERS:
                raise ValueError(f"{name} should list at most {MOST_LAYERS} layers, got {len(getattr(self, name))}")
        if not self.hidden or min(self.hidden) < 1 or any(width < 1 for width in self.transition):
            raise ValueError(
                f"hidden and transition should list positive widths, got {self.hidden} and {self.transition}"
            )
        if self.max_length < self.min_length:
            raise ValueError(f"max_length {self.max_length} is shorter than min_length {self.min_length}")
        if self.task in ("noisy-sequence", "state-tracking") and self.max_length != self.min_length:
            raise ValueError(
                f"{self.task} has one length: give min_length and max_length the same value, "
                f"got {self.min_length} and {self.max_length}"
            )
        if self.residual and self.condition == "kept":
            raise ValueError("the gradient condition is not defined for a residual transition; leave one of them out")
        if self.cell == "mingru" and self.recurrent_dropout:
            raise ValueError("mingru has no dropout inside its recurrence; leave out recurrent_dropout")
        self.check_has(name for name in OWNERS if getattr(self, name) != DEFAULTS[name])

    def has(self, name: str) -> bool:
        """Whether a setting applies to this cell and task."""
        if name not in OWNERS:
            return True
        owner, belongs = OWNERS[name]
        return getattr(self, owner) in belongs

    def check_has(self, names: Iterable[str]) -> None:
        """Raise if one of these settings does not apply to this cell and task."""
        for name in names:
            if not self.has(name):
                owner, belongs = OWNERS[name]
                raise ValueError(
                    f"{name} belongs to the {owner} {' or '.join(belongs)}; leave it out for the {owner} "
                    f"{getattr(self, owner)}"
                )

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
        return any(getattr(self, of.name) for of in fields(self) if of.name.endswith("_dropout"))

    @property
    def key(self) -> str:
        """Name of the study: a hash of the settings that is equal for equal settings.

        The number of epochs is left out, so that a study can be trained further. Settings added later count only if
        they differ from their default, so that studies recorded before keep their names.
        """
        content = {name: value for name, value in asdict(self).items() if name != "epochs"}
        for of in fields(self):
            if of.metadata["later"] and content[of.name] == of.default:
                del content[of.name]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """All fields as JSON, in their order."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Machine:
    """The machine that runs a study, and how it is used; not part of the study's identity."""

    device: str = option("auto", "cpu, cuda, cuda:1, mps, or auto for the best one available", MACHINE)
    engine: str = option("auto", "engine of the recurrent layers: auto, or a name from deepmemory.engines()", MACHINE)
    graph: bool = option(True, "on a GPU, capture one training step as a CUDA graph and replay it", MACHINE)
    threads: int = option(0, "CPU threads; 0 chooses by the number of runs", MACHINE, least=0, most=10_000)
    devices: int = option(
        1,
        "processes per machine that share every batch, each with its own GPU or on the CPU",
        MACHINE,
        least=1,
        most=1000,
    )
    nodes: int = option(1, "machines that share every batch; see docs/machines.md", MACHINE, least=1, most=10_000)
    recompute: bool = option(
        False, "recompute activations in the backward pass instead of storing them: less memory", MACHINE
    )
    data: str | None = option(None, "folder with local copies of the data; default: $DEEPMEMORY_DATA", MACHINE)


@dataclass(frozen=True)
class Launcher:
    """How several studies are trained: one after another, at the same time, or on a Ray cluster."""

    on: str = option("local", "where to train: local, or ray for a Ray cluster", LAUNCHING)
    at_once: int = option(
        1, "studies that train at the same time on one device, each in its own process", LAUNCHING, least=1
    )
    address: str | None = option(
        None, "ray: address of the cluster, or auto; default: Ray on this machine only", LAUNCHING
    )
    group: int = option(
        0, "ray: maximum number of runs per task; 0: all on a GPU, 16 per CPU, 1 large network", LAUNCHING, least=0
    )
    cpus: float = option(1.0, "ray: CPUs per task", LAUNCHING, least=0)
    gpus: float = option(
        0.0, "ray: GPUs per task, 0.5 for two tasks on one GPU; 0 for one with --device cuda", LAUNCHING, least=0
    )

    def __post_init__(self) -> None:
        check_choice("--on", self.on, LAUNCHERS)
        for of in fields(self):
            check_limits(of, getattr(self, of.name))


def check_limits(of: Field[Any], value: Any) -> None:
    """Raise if a field's value is not one of its choices, not finite, or outside its limits."""
    if of.metadata["choices"]:
        check_choice(of.name, value, of.metadata["choices"])
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{of.name} should be a finite number, got {value}")
        most = LARGEST if of.metadata["most"] is None and isinstance(number, int) else of.metadata["most"]
        if most is not None and number > most:
            raise ValueError(f"{of.name} should be at most {most}, got {value}")
        if of.metadata["positive"] and not number > 0:
            raise ValueError(f"{of.name} should be positive, got {value}")
        if (least := of.metadata["least"]) is not None and number < least:
            raise ValueError(f"{of.name} should be at least {least}, got {value}")


def parse_module_rate(text: str) -> str:
    """The learning rate of a DMU in a canonical form: 1e-3 and 0.001 are the same setting."""
    if text in ("formula", SHARED_RATE):
        return text
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not rate > 0:
        raise ValueError(f"module_rate should be formula, same or a positive number, got {text!r}")
    return repr(rate)


def setting_from_json(text: str) -> Setting:
    """The reverse of :meth:`Setting.to_json`."""
    fields_of = json.loads(text)
    if not isinstance(fields_of, dict):
        raise ValueError(f"settings should be a JSON object, got {text[:40]!r}")
    return change(Setting(), fields_of)


def change(setting: Setting, changes: Mapping[str, Any]) -> Setting:
    """Return the setting with some fields changed; values may be given as text."""
    hints = get_type_hints(Setting)
    parsed = {}
    for name, value in changes.items():
        check_choice("setting", name, tuple(hints))
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
        if kind is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
        if kind is int and isinstance(value, float) and value != int(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError, KeyError):
        expected = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(
            kind, "whole numbers separated by commas"
        )
        raise ValueError(f"{name} should be {expected}, got {value!r}") from None


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The value, or an error that names the choices."""
    if value not in choices:
        near = get_close_matches(str(value)[:100].lower(), choices, n=1, cutoff=ALIKE)
        hint = f". Did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(choices)}{hint}")
    return value


DEFAULTS = {of.name: of.default for of in fields(Setting)}
MOST = {of.name: of.metadata["most"] for of in fields(Setting) if of.metadata["most"] is not None}
# Settings that apply only to some cells, tasks or languages, and to which.
OWNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    of.name: of.metadata["owner"] for of in fields(Setting) if of.metadata["owner"] is not None
}
