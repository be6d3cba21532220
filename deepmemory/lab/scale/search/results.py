"""The results of a search: a line for each trial, a table, a figure and a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.trial import TrialState

from deepmemory.lab.writing import file_name, put

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

MOST_PANELS = 20  # of a figure: it shows at most this many of the searched settings


def describe(trial: FrozenTrial, study: optuna.Study) -> str:
    """One line about a finished trial and the best one so far."""
    shown = ", ".join(f"{name} {short(value)}" for name, value in trial.params.items())
    cut = f", stopped early at epoch {trial.last_step}" if trial.state == TrialState.PRUNED else ""
    complete = [t for t in finished(study) if t.state == TrialState.COMPLETE]
    best = min(complete, key=lambda t: (loss_of(t), t.number), default=trial)
    return (
        f"trial {trial.number}: {shown}; loss {loss_of(trial):.2e}{cut}; best {loss_of(best):.2e} (trial {best.number})"
    )


def short(value: Any) -> str:
    """A number with three digits; anything else as it is."""
    return f"{value:.3g}" if isinstance(value, float) else "none" if value is None else str(value)


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that are complete or were stopped early."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def loss_of(trial: FrozenTrial) -> float:
    """The final loss of a trial, or the last one it reported."""
    last = trial.intermediate_values.get(trial.last_step) if trial.last_step is not None else None
    value = trial.values[0] if trial.state == TrialState.COMPLETE and trial.values else last
    return math.inf if value is None or math.isnan(value) else float(value)


def table(study: optuna.Study) -> list[dict[str, Any]]:
    """Trials, best first: number, state, loss, epochs, parameters."""
    rows = [
        {
            "trial": trial.number,
            "state": "cut short" if trial.state == TrialState.PRUNED else "complete",
            "loss": loss_of(trial) if math.isfinite(loss_of(trial)) else None,  # JSON has no inf
            "epochs": trial.last_step or 0,
            **trial.params,
        }
        for trial in finished(study)
    ]
    return sorted(rows, key=lambda row: (row["state"] != "complete", math.inf if row["loss"] is None else row["loss"]))


def draw(study: optuna.Study) -> Any:
    """Plot the loss of every trial in order, and against each setting that was searched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trials = [trial for trial in finished(study) if math.isfinite(loss_of(trial))]
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))[:MOST_PANELS]
    figure = Figure(figsize=(3.2 * (1 + len(names)), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    first, *others = figure.subplots(1, 1 + len(names), sharey=True, squeeze=False)[0]
    lowest = [min((loss_of(t) for t in trials[: n + 1] if t.values), default=math.nan) for n in range(len(trials))]
    first.step([t.number for t in trials], lowest, where="post", color="#0072B2", linewidth=1.2, label="best so far")
    first.set_xlabel("trial")
    first.xaxis.get_major_locator().set_params(integer=True)
    first.set_ylabel("validation loss")
    if trials:
        first.set_yscale("log")
    for panel, name in zip((first, *others), (None, *names), strict=True):
        for state, look in (
            (TrialState.COMPLETE, {"color": "#D55E00", "marker": "o", "label": "complete"}),
            (TrialState.PRUNED, {"color": "#777777", "marker": "x", "label": "cut short"}),
        ):
            chosen = [t for t in trials if t.state == state and (name is None or name in t.params)]
            places = [t.number if name is None else as_number(t.params[name]) for t in chosen]
            panel.plot(places, [loss_of(t) for t in chosen], linestyle="", markersize=4, **look)
        if name is not None:
            panel.set_xlabel(name, parse_math=False)
            values = [as_number(t.params[name]) for t in trials if name in t.params]
            numbers = [value for value in values if isinstance(value, float)]
            if len(numbers) == len(values) and min(numbers) > 0 and max(numbers) > 20 * min(numbers):
                panel.set_xscale("log")
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    first.legend(frameon=False, fontsize=8)
    return figure


def as_number(value: Any) -> float | str:
    """A choice, which is text, as a number if it is one, so that it is drawn as a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value).replace("$", r"\$")  # matplotlib would read a formula


def write_page(studies: Sequence[optuna.Study], folder: Path) -> Path:
    """Write one page with a figure and a table for each search, and each figure as a file."""
    from deepmemory.lab.report import figures
    from deepmemory.lab.report.blocks import Block, Details, Image, Page, Section, Text
    from deepmemory.lab.report.render import html
    from deepmemory.lab.report.table import Column, Table

    sections, drawn = [], {}
    for study in studies:
        name, rows = file_name(study.study_name), table(study)
        drawn[name] = figures.render(draw(study), "svg")
        put(folder / f"{name}.svg", drawn[name])
        titles = dict.fromkeys(title for row in rows for title in row)
        columns = [Column(title, partial(cell, title)) for title in titles]
        sampler, seeds, setting = (study.user_attrs.get(name) for name in ("sampler", "seeds", "setting"))
        caption = "The validation loss of every trial in turn, and against each setting that was searched."
        blocks: list[Block] = [
            Text(f"{len(rows)} trials, sampler {sampler}, seeds {seeds}."),
            Image(name, caption, partial(draw, study)),
            Table(columns, rows),
            Details("Settings", [Text(str(setting))]),
        ]
        sections.append(Section(study.study_name, blocks))
    page = folder / "sweeps.html"
    put(page, html.render("Searches", [Page("searches", "Searches", sections)], drawn).encode())
    return page


def cell(title: str, row: dict[str, Any]) -> str:
    """The text of a row in one column of the table."""
    return short(row.get(title, ""))
