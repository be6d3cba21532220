"""The page about experiments beyond the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from deepmemory.lab.beyond import long_adding
from deepmemory.lab.report import beyond_figures, words
from deepmemory.lab.report.blocks import Block, Commands, Details, Image, Page, Section, Text
from deepmemory.lab.report.results.beyond import SOLVED, BeyondResults, Comparison, Outcome
from deepmemory.lab.report.results.stats import perplexity
from deepmemory.lab.report.results.tables import is_better, mean
from deepmemory.lab.report.sections import shared
from deepmemory.lab.report.table import Column, Mark, Table, number
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
    runs, all_runs = [len(one.study.runs) for one in results.shown], results.experiment.runs
    notes = [f"So far there are {trained} of {wanted} studies."] if trained < wanted else []
    if min(runs) < all_runs:
        complete = sum(count >= all_runs for count in runs)
        notes += [
            f"All {all_runs} runs are there for {complete} of the {len(runs)} models in the table, and at least "
            f"{min(runs)} for the others."
        ]
    return Text(words.joined(text, *notes, by=" "))


def experiment_blocks(results: BeyondResults) -> list[Block]:
    """Figure, description and tables of an experiment."""
    layout = LAYOUTS[results.name]
    lengths = words.listed([str(length) for length in sorted({one.setting.max_length for one in results.shown})])
    image = Image(f"beyond-{results.name}", layout.caption, partial(layout.draw, results))
    search_runs = results.experiment.search_runs
    searched = "one run each" if search_runs == 1 else f"{search_runs} runs each"
    text = layout.text.format(lengths=lengths, searched=searched)
    compared = [compared_table(results)] if layout.compared and results.comparisons() else []
    return [image, what_was_run(results, text), *compared, table(results.name, results.shown)]


def compared_table(results: BeyondResults) -> Table:
    """Where the DMU wins and where it does not: the best DMU, the best other cell, and published numbers."""

    def against(score: float, of: Comparison) -> Mark:
        better = is_better(mean(of.dmu.score("test")), score, of.dmu.measure)
        return Mark("DMU better" if better else "DMU worse", better)

    published = results.experiment.published.items()
    return Table(
        [
            Column(LAYOUTS[results.name].part, lambda of: of.dmu.part),
            Column("best DMU", lambda of: of.dmu.title),
            number("test", lambda of: score_text("test", of.dmu)),
            Column("best other", lambda of: of.other.title),
            number("test", lambda of: score_text("test", of.other)),
            number("p", lambda of: words.number(of.p_value, ".2g"), brief=False),
            Column("verdict", lambda of: of.verdict(results.experiment.runs)),
            *(Column(f"{model}: {score:g}", partial(against, score)) for model, score in published),
        ],
        results.comparisons(),
    )


def score_columns(measure: str = "") -> list[Column]:
    """Scores on validation and test, by the measure of the paper's table."""
    return [number(words.joined(split, measure, by=" "), partial(score_text, split)) for split in ("valid", "test")]


def score_text(split: str, one: Outcome) -> str:
    """Mean and standard deviation of the scores on a split."""
    return words.mean_text(one.score(split), ".2%" if one.measure == "accuracy" else one.measure)


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
    took = duration(sum(one.seconds for one in outcomes))
    return [
        Text(
            f"Training took {took}, all studies together; where several shared a GPU, each counts its part of the time:"
        ),
        shared.machines([one.study for one in outcomes], sessions),
        Text("“Runs” in the tables are those that have finished, of all that were begun."),
        Commands([*(f"dmu beyond {of.name}" for of in results), command]),
    ]


def accuracy_columns() -> list[Column]:
    """For each length, the accuracy and the number of runs that have solved the task."""
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
    """What the page shows of an experiment, besides the columns that all tables have."""

    part: str  # what its parts are
    text: str  # with {lengths} of the sequences in training, and the runs {searched} at each learning rate
    caption: str
    draw: Callable[[BeyondResults], Any]
    columns: Sequence[Column]
    compared: bool = False  # whether the best DMU is compared with the best other cell


COMPARED = (
    "The first table shows the DMU and the other cell that were best on validation. p is the p-value of Welch's t-test "
    "on their test scores; from 0.05 on there is no clear difference."
)
RATE = number("rate", lambda one: f"{one.setting.lr:g}", brief=False)
LAYOUTS: dict[str, Layout] = {
    "depth": Layout(
        "part",
        "Language models on the words of the Penn Treebank, with the same number of weights at every depth. The state "
        "passes n linear layers at every time step; in a residual DMU every hidden layer from the second on adds to "
        "the one before it, so up to n = 2 it is a plain one. The perplexity is exp(loss), as mean and standard "
        "deviation over the runs, each with the weights that were best on validation. Models called long have the size "
        "of the large ones, three times as many epochs, and twice the weight decay. Every large model is tried at "
        "several learning rates, {searched}; the one with the lowest validation loss is trained with all runs and is "
        "shown.",
        "Test perplexity by depth of the transition: mean and range of the runs.",
        beyond_figures.draw_depth,
        [
            RATE,
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
        "with the same learning rates, {searched}; the one with the lowest mean validation loss was "
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
        "128 units, 30,000 optimiser steps of 50 sequences) would be 6e-6. Here a run has "
        f"{long_adding.STEPS:,} steps of {long_adding.TRAINING['batch']} sequences. "
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
    "pixels": Layout(
        "size",
        "MNIST read pixel by pixel in one fixed random order, with dropout and about 100 thousand or a million weights "
        "in every model. Scores are accuracies, as mean and standard deviation over the runs, each at the epoch with "
        "the best validation accuracy. The published number to compare with is LEM's 96.6% (arXiv:2110.04744, 68 "
        "thousand weights). Every model was trained with the same learning rates, {searched}; the one with the lowest "
        "mean validation loss was trained with all runs and is shown. " + COMPARED,
        "Permuted MNIST: test accuracy of every run, and their mean.",
        beyond_figures.draw_scores,
        [RATE, *score_columns("accuracy")],
        compared=True,
    ),
    "music": Layout(
        "size",
        "The paper's music, the piano-rolls of Nottingham, with dropout and about 100 thousand or a million weights in "
        "every model. Scores are losses in nats per frame, summed over the 88 keys, as mean and standard deviation "
        "over the runs, each at the epoch with the lowest validation loss. Published numbers to compare with are the "
        "3.07 of TCN and the 3.29 of an LSTM, both with about a million weights (arXiv:1803.01271). Every model was "
        "trained with the same learning rates, {searched}; the one with the lowest mean validation loss was trained "
        "with all runs and is shown. " + COMPARED,
        "Nottingham: test loss of every run in nats per frame, and their mean.",
        beyond_figures.draw_scores,
        [RATE, *score_columns("loss")],
        compared=True,
    ),
    "cells": Layout(
        "data",
        "GRU and LSTM on the paper's music, language and translation. They have as many weights as the paper's DMU at "
        "n = 2, and its weight decay, schedule and number of epochs; their learning rate is the best of several on "
        "validation, tried with {searched}. DMU and RHN are the paper's own studies with its settings; at "
        "n = 1 they have fewer weights. The measure is that of the paper's tables: the loss in nats per frame of "
        "music, else the perplexity as the authors take it, at the epoch that those tables take. " + COMPARED,
        "The paper's data: test score of every run, and their mean; lower is better.",
        beyond_figures.draw_scores,
        [RATE, Column("measure", lambda one: one.measure), *score_columns()],
        compared=True,
    ),
}
