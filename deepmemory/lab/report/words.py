"""The report's words: titles of tasks and cells, verdicts, changes of settings, and how numbers are written."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict

from deepmemory.lab.paper import Spread
from deepmemory.lab.report.table import Mark
from deepmemory.lab.settings import LANGUAGES, Setting
from deepmemory.lab.tasks import TASK_CLASSES, chance_level
from deepmemory.lab.writing import file_name

TITLES = {name: kind.title for name, kind in TASK_CLASSES.items()}
CELL_TITLES = {"residual": "residual DMU", "mingru": "minGRU"}  # that are not the cell's name in capitals
NOTHING = "–"  # noqa: RUF001
NOT_RUN, NO_DATA = "not run", "no data"
REPRODUCED, BETTER, WORSE = VERDICTS = "reproduced", "better", "worse"  # our mean beside the paper's
FORMATS = {"loss": ".3f", "perplexity": ".2f", "accuracy": ".3f", "small loss": ".1e", "percent": ".1%"}

Changes = tuple[tuple[str, object], ...]  # settings that differ from the paper's, with their values


def cell_title(cell: str) -> str:
    """A cell's name as the paper writes it: DMU-C for ``dmu-c``."""
    return CELL_TITLES.get(cell, cell.upper())


def dataset_title(dataset: str) -> str:
    """The name of a dataset: with a capital letter for languages, without one for orders of pixels."""
    return dataset.capitalize() if dataset in LANGUAGES else dataset


def size_title(task: str, size: int) -> str:
    """A depth, or for pixels a width."""
    return f"{size} units" if task == "pixel-mnist" else f"depth {size}"


def changes_between(published: Setting, own: Setting, leave_out: Collection[str] = ()) -> Changes:
    """The settings of a study that differ from the paper's."""
    theirs, values = asdict(published), asdict(own)
    return tuple((name, of) for name, of in values.items() if of != theirs[name] and name not in leave_out)


def changes_title(changes: Changes) -> str:
    """Changed settings as ``name = value``."""
    return ", ".join(f"{name} = {value}" for name, value in changes)


def changed_title(task: str, changes: Changes) -> str:
    """The task's name, and what was changed."""
    return joined(TITLES[task], changes_title(changes), by=", with ")


def figure_name(name: str, changes: Changes) -> str:
    """The name of a figure's files, including the settings that were changed.

    >>> figure_name("adding", (("module_rate", "0.001"), ("hidden", (7,))))
    'adding-module_rate-0.001-hidden-_7__'
    """
    changed = "".join(f"-{name}-{value}" for name, value in changes)
    return file_name(name + re.sub("[(), +]", "_", changed))


def initial_bias(setting: Setting) -> str:
    """The initial biases of the gates that keep the state, as text; an LSTM has two bias vectors.

    >>> initial_bias(Setting(cell="dmu", memory_bias=3)), initial_bias(Setting(cell="lstm", forget_bias=2))
    ('memory bias 3', 'forget bias 2 + 2')
    >>> initial_bias(Setting(cell="mingru", update_bias=3))
    'update bias 3'
    """
    inputs = f"input bias {setting.input_bias:g}" if setting.input_bias else ""
    update = f"update bias {setting.update_bias:g}"
    of_cell = {
        "dmu": f"memory bias {setting.memory_bias:g}",
        "gru": update,
        "mingru": update,
        "lstm": joined(f"forget bias {setting.forget_bias:g} + {setting.forget_bias:g}", inputs),
        "rhn": f"transform bias {setting.transform_bias:g}" if setting.transform_bias else "",
    }
    return of_cell.get(setting.cell, "")


def chance_text(setting: Setting) -> str:
    """The loss of the best answer that ignores the input, in a sentence; empty if it is not known.

    >>> chance_text(Setting("noisy-sequence", min_length=100, max_length=100))
    'Chance (two equal symbols) is a loss of 0.693.'
    """
    level = chance_level(setting)
    return f"Chance ({level.answer}) is a loss of {number(level.scores['loss'], 'loss')}." if level else ""


def joined(*texts: str, by: str = ", ") -> str:
    """Join the texts that are not empty."""
    return by.join(filter(None, texts))


def listed(texts: Sequence[str]) -> str:
    """Some texts in a sentence.

    >>> listed(["RNN", "RHN", "GRU"])
    'RNN, RHN and GRU'
    """
    return joined(", ".join(texts[:-1]), *texts[-1:], by=" and ")


def count(number: int, noun: str) -> str:
    """A number of things: 1 run, 3 runs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def number(value: float | None, how: str) -> str:
    """A number in one of the ``FORMATS`` or another format; a dash for None.

    >>> number(0.5, "percent"), number(math.nan, "percent"), number(None, "percent") == NOTHING
    ('50.0%', 'nan', True)
    """
    if value is None:
        return NOTHING
    return "nan" if math.isnan(value) else format(value, FORMATS.get(how, how))


def mean_text(spread: Spread | None, how: str) -> str:
    """Mean and standard deviation."""
    if spread is None:
        return NOTHING
    deviation = "" if spread.std is None else f" ± {number(spread.std, how).removesuffix('%')}"
    return number(math.nan if spread.mean is None else spread.mean, how) + deviation


def spread_text(spread: Spread | None, how: str) -> str:
    """Best, mean and standard deviation; for one run, a single number."""
    if spread is None or (spread.std is None and spread.mean == spread.best):
        return mean_text(spread, how)
    return f"{number(spread.best, how)}; {mean_text(spread, how)}"


def with_hint(verdict: str, good: bool | None, runs: int, enough: int) -> Mark:
    """A verdict, marked as a hint if it is based on fewer runs than the paper's.

    >>> with_hint("agrees", True, 3, 51).text, with_hint("agrees", True, 51, 51).text
    ('agrees (a hint: 3 runs)', 'agrees')
    """
    return Mark(f"{verdict} (a hint: {count(runs, 'run')})" if 0 < runs < enough else verdict, good)
