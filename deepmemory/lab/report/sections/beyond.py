"""The page about experiments beyond the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from deepmemory.lab.report import beyond_figures, words
from deepmemory.lab.report.blocks import Block, Commands, Details, Image, Page, Section, Text
from deepmemory.lab.report.results.beyond import SOLVED, BeyondResults, Outcome
from deepmemory.lab.report.results.stats import perplexity
from deepmemory.lab.report.sections import shared
from deepmemory.lab.report.table import Column, Table, number
from deepmemory.lab.tasks.state_tracking import LONGER
from deepmemory.lab.training.progress import duration


def beyond_page(results: Sequence[BeyondResults], sessions: shared.Sessions, command: str) -> Page:
    """One section for each experiment; ``command`` is what writes the page."""
    sections = [
        Section("", [Text("Experiments that the paper does not have. What they show is told as it came out.")]),
        *map(experiment_section, results),
        Section("Where the numbers come from", provenance(results, sessions, command)),
    ]
    return Page("beyond", "Experiments beyond the paper", sections)


def experiment_section(results: BeyondResults) -> Section:
    """Figure, table and settings of one experiment."""
    blocks: list[Block] = experiment_blocks(results)
    if results.rest:
        blocks.append(Details("Studies at other rates, or with other settings", [table(results.name, results.rest)]))
    named = {words.joined(one.title, one.part): one.setting for one in results.shown}
    weights = {words.joined(one.title, one.part): one.weights for one in results.shown}
    blocks.append(shared.settings_table(named, weights))
    return Section(results.experiment.title, blocks, (results.name,))


def what_was_run(results: BeyondResults, text: str) -> Text:
    """What an experiment is, and whether these are its own settings and runs."""
    if not results.outcomes:
        return Text(f"{text} No study here has the settings of the experiment unchanged: read the numbers as a trial.")
    wanted, trained = len({one.key for one in results.experiment.settings()}), len(results.outcomes)
    runs, all_runs = min(len(one.study.runs) for one in results.shown), results.experiment.runs
    notes = [f"{trained} of {wanted} studies"] if trained < wanted else []
    notes += [f"at least {runs} of {all_runs} runs of each"] if runs < all_runs else []
    return Text(words.joined(text, f"So far there are {', '.join(notes)}." if notes else "", by=" "))


def experiment_blocks(results: BeyondResults) -> list[Block]:
    """Figure and table of an experiment, and what it is."""
    layout = LAYOUTS[results.name]
    lengths = words.listed([str(length) for length in sorted({one.setting.max_length for one in results.shown})])
    image = Image(f"beyond-{results.name}", layout.caption, partial(layout.draw, results))
    text = layout.text.format(lengths=lengths, search_runs=results.experiment.search_runs)
    return [image, what_was_run(results, text), table(results.name, results.shown)]


def table(name: str, outcomes: Sequence[Outcome]) -> Table:
    """The studies of an experiment, with its measures."""
    diverged = any(one.diverged for one in outcomes)
    return Table(
        [
            Column(LAYOUTS[name].part, lambda one: one.part),
            Column("model", lambda one: words.cell_title(one.kind)),
            number("n", lambda one: str(one.depth or words.NOTHING)),
            number("weights", lambda one: f"{one.weights:,}", brief=False),
            *LAYOUTS[name].columns,
            number("runs", lambda one: f"{len(one.tested)}/{len(one.study.runs)}", brief=False),
            *([number("diverged", lambda one: str(one.diverged))] if diverged else []),
            number("epochs", lambda one: str(one.epochs), brief=False),
            number("training time", lambda one: duration(one.seconds), brief=False),
        ],
        outcomes,
    )


def provenance(results: Sequence[BeyondResults], sessions: shared.Sessions, command: str) -> list[Block]:
    """Time, machines and commands."""
    outcomes = [one for of in results for one in (*of.outcomes, *of.changed)]
    return [
        Text(f"Training took {duration(sum(one.seconds for one in outcomes))}, all studies together:"),
        shared.machines([one.study for one in outcomes], sessions),
        Text("“Runs” in the tables are those that have finished, of all that were begun."),
        Commands([*(f"dmu beyond {of.name}" for of in results), command]),
    ]


def accuracy_columns() -> list[Column]:
    """Accuracies at each length, and runs that have nearly all of it at the longer ones."""
    lengths = {"accuracy": "T"} | {f"accuracy_{times}": f"{times} T" for times in LONGER}

    def accuracy(measure: str, one: Outcome) -> str:
        return words.mean_text(one.test(measure), "accuracy")

    def solved(measure: str, one: Outcome) -> str:
        return f"{one.solved(measure)}/{len(one.study.runs)}"

    return [
        number(f"{name}{title}", partial(text, measure), brief=measure != "accuracy")
        for name, text in (("accuracy, ", accuracy), (f"{SOLVED:.0%}, ", solved))
        for measure, title in lengths.items()
    ]


class Layout(NamedTuple):
    """What the page has of an experiment beside the columns of every table."""

    part: str  # what its parts are
    text: str  # with {lengths} of the sequences in training, and {search_runs} for each learning rate
    caption: str
    draw: Callable[[BeyondResults], Any]
    columns: Sequence[Column]


RATE = number("rate", lambda one: f"{one.setting.lr:g}", brief=False)
LAYOUTS: dict[str, Layout] = {
    "depth": Layout(
        "size",
        "Language models on the words of the Penn Treebank, with the same number of weights at every depth. The state "
        "passes n linear layers at every time step; in a residual DMU every hidden layer from the second on adds to "
        "the one before it, so up to n = 2 it is a plain one. The perplexity is exp(loss), as mean and standard "
        "deviation over the runs, each with the weights that were best on validation.",
        "Test perplexity by depth of the transition: mean and range of the runs.",
        beyond_figures.draw_depth,
        [
            number("valid perplexity", lambda one: words.mean_text(one.valid(scale=perplexity), "perplexity")),
            number("test perplexity", lambda one: words.mean_text(one.test(scale=perplexity), "perplexity")),
        ],
    ),
    "state-tracking": Layout(
        "group",
        "The input is a sequence of elements of a group, the output at every step their product so far. Sequences in "
        "training have T = {lengths} steps. Accuracies are shares of all positions, for new sequences of T, 8 T and "
        "64 T steps, as mean and standard deviation over the runs, each with the weights that had the lowest "
        f"validation loss at T steps; “{SOLVED:.0%}” counts runs with at least that accuracy. Every model was trained "
        "with the same learning rates, {search_runs} runs each; the one with the lowest mean validation loss was "
        "trained with all runs and is shown. The minGRU is a linear recurrence.",
        f"State tracking: share of runs that have had an accuracy of {SOLVED:.0%} on validation sequences 8 times as "
        "long as those in training, by optimiser step.",
        beyond_figures.draw_state_tracking,
        [RATE, *accuracy_columns()],
    ),
    "long-adding": Layout(
        "length",
        "The Adding problem of the paper at lengths of thousands of steps; every cell begins with gates that keep the "
        "state for about as long. Always giving the mean has a loss of about 0.04. Losses of targets that are the sum "
        "itself, as in other papers, are four times those here: the 2.4e-5 of LEM at 10,000 steps (arXiv:2110.04744, "
        "128 units, 30,000 optimiser steps of 50 sequences) would be 6e-6. Here a run has 2,500 steps of 50 sequences. "
        "At the shortest length every model was trained with the same learning rates, and the one with the lowest mean "
        "validation loss is shown; at the other lengths all models have one rate.",
        "Long memory: test loss of the Adding problem by length, mean and range of the runs.",
        beyond_figures.draw_long_adding,
        [
            RATE,
            number("valid loss", lambda one: words.mean_text(one.valid(), "small loss")),
            number("test loss, best; mean", lambda one: words.spread_text(one.test(), "small loss")),
            number("within 0.04", lambda one: words.mean_text(one.test("accuracy"), "percent")),
        ],
    ),
}
