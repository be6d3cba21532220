"""The page about gradients while training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from deepmemory.gradients import CANDIDATE_LIMIT, GATE_LIMIT
from deepmemory.lab.records import Run
from deepmemory.lab.report import figures, words
from deepmemory.lab.report.blocks import Block, Commands, Heading, Image, Items, Page, Section, Text
from deepmemory.lab.report.results.gradients import QUANTITIES, GradientResults, GradientStudy, Quantity
from deepmemory.lab.report.results.stats import median, rank_correlation
from deepmemory.lab.report.results.synthetic import is_under
from deepmemory.lab.report.sections import shared
from deepmemory.lab.report.table import Column, Table, number, text_columns
from deepmemory.lab.settings import SYNTHETIC, THRESHOLDS, threshold_label

ARROW = "→"


def gradients_page(results: Sequence[GradientResults], sessions: shared.Sessions, command: str) -> Page:
    """Figures and tables of what was observed; ``command`` is what writes the page."""
    introduction = (
        "`--watch gradients` observes every run before the first epoch, after it, and about ten times more: the "
        "spectral radii of the two products of condition (star), which should stay below "
        f"{GATE_LIMIT:g} and {CANDIDATE_LIMIT:g}, the gates, and the gradient that arrives at the first step. A run is "
        "“inside” where all its layers satisfy the condition. Of several layers, the one farthest outside counts, and "
        "the one that passes back least; gates are averaged."
    )
    guide = [
        f"a {ARROW} b: median over the runs of the first value and of the last one observed",
        f"learned: the validation loss got under {threshold_label(THRESHOLDS[0])}; loss: the median over the runs of "
        "each run's lowest validation loss",
        "excess: the larger of both radii, each divided by its limit; below 1 the condition is satisfied",
        "correlations are Spearman's; a positive one says that runs farther outside have larger losses. Over runs: the "
        "largest excess of a run and its lowest loss. Over epochs: excess and loss of the same epoch, for all runs and "
        "observed epochs from the first on. The rows “all” mix the settings of a depth, so differences between "
        "settings count too",
    ]
    studies = [one for of_task in results for one in of_task.studies]
    origin: list[Block] = [shared.machines([one.study for one in studies], sessions)]
    origin += [Commands([*(one.command for one in studies), command])]
    return Page(
        "gradients",
        "Gradients while training",
        [
            Section("", [Text(introduction)]),
            *map(task_section, results),
            Section("How to read the tables", [Items(guide)]),
            Section("Where the numbers come from", origin),
        ],
    )


def task_section(results: GradientResults) -> Section:
    """Figure, numbers and correlations."""
    caption = "Spectral radii, gates, gradients and validation loss by epoch: median and range of the runs."
    caption += shared.biases(one.setting for one in results.studies)
    image = Image(results.figure, caption, partial(figures.draw_gradients, results))
    blocks: list[Block] = [image, summary_table(results)]
    if any(one.setting.cell == "dmu" for one in results.studies):
        blocks += [Heading("Condition and success"), association_table(results)]
    return Section(results.title, blocks)


def summary_table(results: GradientResults) -> Table:
    """The results of the runs, and the observations."""

    def inside(decide: Callable[[list[bool]], bool], one: GradientStudy) -> str:
        if one.setting.cell != "dmu":
            return words.NOTHING
        by_run = [[value < 1 for value in one.excess(run.seed).values()] for run in one.runs]
        return str(sum(decide(of) for of in by_run if of))

    def loss(one: GradientStudy) -> str:
        losses = [lowest for run in one.runs if (lowest := one.lowest_loss(run)) is not None]
        return words.number(median(losses), "small loss")

    heads = ("radius z", "radius candidate", "gate", "saturated", "log10 first / last")
    columns = [
        Column("depth", lambda one: str(one.depth)),
        Column("cell", lambda one: words.cell_title(one.cell)),
        Column("rate", lambda one: one.rates),
        number("runs", lambda one: str(len(one.runs))),
        *([number("learned", lambda one: str(sum(map(learned, one.runs))))] if results.task in SYNTHETIC else []),
        number("loss", loss),
        number("inside first", partial(inside, lambda of: of[0])),
        number("inside last", partial(inside, lambda of: of[-1])),
        number("inside always", partial(inside, all)),
        *(number(head, partial(first_and_last, of)) for head, of in zip(heads, QUANTITIES, strict=True)),
    ]
    return Table(columns, results.studies)


def association_table(results: GradientResults) -> Table:
    """Whether the condition goes with success, study by study and for all runs of a depth."""
    synthetic, lines = results.task in SYNTHETIC, []
    by_name = {quantity.name: quantity for quantity in QUANTITIES}
    for depth, studies in results.by_depth.items():
        dmus = [one for one in studies if one.setting.cell == "dmu"]
        groups = [(words.cell_title(one.cell), one.rates, [one]) for one in dmus]
        for cell, rate, of in [*groups, ("all", "", dmus)] if len(dmus) > 1 else groups:
            runs = [(one, run, excess) for one in of for run in one.runs if (excess := one.excess(run.seed))]
            ends = [(list(excess.values())[-1] < 1, learned(run)) for _, run, excess in runs]
            success = [[learned for inside, learned in ends if inside is side] for side in (True, False)]
            over_runs = [(max(excess.values()), one.lowest_loss(run)) for one, run, excess in runs]
            over_epochs = [(v, one.losses(run).get(epoch)) for one, run, of in runs for epoch, v in of.items()]
            line = [str(depth), cell, rate]
            line += [f"{sum(side)} of {len(side)}" if side else words.NOTHING for side in success] if synthetic else []
            line += [correlation(over_runs), correlation(over_epochs)]
            if synthetic:
                pairs = [(one, run) for one, run, _ in runs]
                line += [by_success(by_name[name], pairs) for name in ("saturated", "flow")]
            lines.append(line)
    heads = ["inside last: learned", "outside last: learned"] if synthetic else []
    heads += ["correlation over runs", "over epochs"]
    heads += ["saturated last: learned / not", "log10 first / last: learned / not"] if synthetic else []
    return Table(text_columns(3, "depth", "cell", "rate", *heads), lines)


def correlation(pairs: Iterable[tuple[float, float | None]]) -> str:
    """The rank correlation of pairs whose second number is known."""
    return words.number(rank_correlation([(one, two) for one, two in pairs if two is not None]), "+.2f")


def by_success(quantity: Quantity, runs: Iterable[tuple[GradientStudy, Run]]) -> str:
    """Medians of the last value observed, over the runs that learned and over the others."""
    ends = [(learned(run), curve) for one, run in runs if (curve := one.observed(run.seed, quantity))]
    sides = [[list(curve.values())[-1] for success, curve in ends if success is side] for side in (True, False)]
    return " / ".join(words.number(median(side), ".2g") for side in sides)


def first_and_last(quantity: Quantity, one: GradientStudy) -> str:
    """Medians over the runs of the first and of the last value observed."""
    curves = [list(curve.values()) for curve in one.curves(quantity)]
    ends = [words.number(median(curve[place] for curve in curves), ".2g") for place in (0, -1)]
    return f" {ARROW} ".join(ends) if curves else words.NOTHING


def learned(run: Run) -> bool:
    """Whether a run got under the first threshold."""
    return is_under(run, 0)
