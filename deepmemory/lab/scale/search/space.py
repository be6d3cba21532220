"""What a search may change: ranges and choices for the settings of a study."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, get_type_hints

from deepmemory.lab.settings import Setting

if TYPE_CHECKING:
    from optuna.trial import Trial

# The paper's settings were "selected based on the random and grid searches and then fine-tuned manually"; it does not
# print the spaces. All rates, decays and gammas of its tables lie on these grids; the random ones span a little more.
SPACES = {
    "paper-grid": "lr=0.001|0.002|0.005|0.01|0.02|0.05",
    "paper-random": "lr=log:1e-4..1e-1",
    "paper-grid-data": "lr=0.002|0.005|0.01|0.02,weight_decay=0.0001|0.001,gamma=0.9|0.98|1.0",
    "paper-random-data": "lr=log:1e-3..1e-1,weight_decay=log:1e-5..1e-2,gamma=0.9..1.0",
    "paper-ablation": "lr=0.001|0.002|0.005|0.01|0.02|0.05,module_rate=formula|same",  # DMU and DMU-C
}


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    log: bool = False  # uniform in the logarithm
    whole: bool = False  # whole numbers only


Space = dict[str, Range | tuple[str, ...]]  # by field of Setting: a range, or choices as they are written


def parse_space(text: str) -> Space:
    """Parse a space: the name of a shipped one, or fields with their values.

    >>> parse_space("lr=log:1e-4..1e-1,batch=16|32")
    {'lr': Range(low=0.0001, high=0.1, log=True, whole=False), 'batch': ('16', '32')}
    """
    space: Space = {}
    kinds = get_type_hints(Setting)
    for part in re.split(r",(?=\s*[A-Za-z_-]+\s*=)", SPACES.get(text.strip(), text)):
        name, equals, values = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not equals or not values:
            raise ValueError(
                f"a space is NAME=LOW..HIGH, NAME=log:LOW..HIGH or NAME=A|B|C, separated by commas, or one of "
                f"{', '.join(SPACES)}; got {part!r}"
            )
        if name not in kinds or name in ("task", "cell", "epochs") or name in space:
            why = "is given twice" if name in space else "cannot be searched"
            choices = ", ".join(field for field in kinds if field not in ("task", "cell", "epochs"))
            raise ValueError(f"space: {name!r} {why}; choose from {choices}")
        space[name] = parse_range(name, values, kinds[name]) if ".." in values else parse_choices(name, values)
    return space


def parse_range(name: str, text: str, kind: Any) -> Range:
    """Parse a range, written as LOW..HIGH or log:LOW..HIGH."""
    log = text.startswith("log:")
    try:
        low, high = (float(end) for end in text.removeprefix("log:").split(".."))
    except ValueError:
        low = high = math.nan
    whole = kind is int
    if kind not in (int, float) or not (math.isfinite(high - low) and low < high) or (log and low <= 0):
        raise ValueError(
            f"space: {name}={text} is not a range of numbers; expected LOW..HIGH with LOW below HIGH, "
            "and above 0 after log:, for a setting that is a number"
        )
    if whole and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"space: {name} takes whole numbers, got {text}")
    return Range(low, high, log, whole)


def parse_choices(name: str, text: str) -> tuple[str, ...]:
    """Parse choices, written as A|B|C."""
    choices = tuple(dict.fromkeys(choice.strip() for choice in text.split("|")))
    if "" in choices:
        raise ValueError(f"space: {name}={text} has an empty choice")
    return choices


def grid_points(space: Space) -> list[dict[str, str]]:
    """Every combination of choices, the last field fastest."""
    choices = {name: values for name, values in space.items() if isinstance(values, tuple)}
    for name in space.keys() - choices.keys():
        raise ValueError(f"a grid needs choices: give {name}=A|B|C instead of a range, or --sampler random")
    return [dict(zip(choices, point, strict=True)) for point in product(*choices.values())]


def suggest(trial: Trial, name: str, values: Range | tuple[str, ...]) -> Any:
    """Ask Optuna for a value of one setting."""
    if isinstance(values, tuple):
        return trial.suggest_categorical(name, values)
    if values.whole:
        return trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
    return trial.suggest_float(name, values.low, values.high, log=values.log)
