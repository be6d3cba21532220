"""Real data: our rows of the paper's tables.

Scores are taken at the epoch that was best on validation among those that the paper trains, by the measure that
``paper.EPOCH_BY`` names for the task or, if it names none, each by its own measure. A study appears in a table of the
paper only if its settings are the paper's and at least one run has had all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from deepmemory.lab import paper
from deepmemory.lab.paper import Reading, Spread
from deepmemory.lab.records import DIVERGED, REACHED, Run, Study
from deepmemory.lab.report import words
from deepmemory.lab.report.results.stats import perplexity, spread, welch
from deepmemory.lab.report.table import Mark
from deepmemory.lab.settings import LANGUAGES, PIXELS, REAL, Setting

CLOSE = 2.0  # standard deviations: a mean that is no farther away is reproduced
COORDINATES = ("epochs", "language", "pixels")  # settings that an experiment includes, or that the records show better


class Experiment(NamedTuple):
    """A row of the paper's tables, or one like it: a cell of some size on some data."""

    task: str
    cell: str  # one of paper.KINDS, where dmu-c is a cell of its own
    size: int  # the depth; for pixels the units of the DMU
    dataset: str = ""  # the language translated from, or the order of the pixels

    @property
    def title(self) -> str:
        """Cell, size and data."""
        size, dataset = words.size_title(self.task, self.size), words.dataset_title(self.dataset)
        return words.joined(words.cell_title(self.cell), size, dataset)

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts experiments of one task as the paper's tables do."""
        return ("", *LANGUAGES, *PIXELS).index(self.dataset), self.size, paper.KINDS.index(self.cell)

    @property
    def has_searched_rate(self) -> bool:
        """Whether this is a DMU-C of the paper's tables, whose learning rate the paper searched and does not print."""
        return self.cell == paper.DMU_C and rate_table(self.task) in paper.MEASURES


def rate_table(task: str) -> str:
    """The table of the paper, if there is one, that compares DMU-C and DMU."""
    return f"{task}_lr_ablation"


@dataclass(frozen=True)
class Scores:
    """The scores of a study's runs by one measure."""

    train: Spread
    valid: Spread
    test: Spread
    tests: tuple[float, ...]  # of each run that counts
    diverged: int
    unfinished: int  # runs that do not count yet


@dataclass(frozen=True)
class StudyResult:
    """A study of real data, compared with the nearest setting of the paper."""

    study: Study
    experiment: Experiment
    changes: words.Changes  # settings that differ from the paper's
    epochs: int  # that the paper trains; for pixels with another recipe than ours, those of the study

    @cached_property
    def begun(self) -> list[Run]:
        """Runs with at least one epoch."""
        return [run for run in self.study.runs if run.epochs]

    @cached_property
    def complete(self) -> list[Run]:
        """Runs that have had all epochs, and the diverged ones if there are such runs or if all runs diverged."""
        full = [run for run in self.begun if run.epochs >= self.epochs or run.state == REACHED]
        lost = [run for run in self.begun if run.state == DIVERGED and run not in full]
        return full + lost if full or len(lost) == len(self.begun) else []

    @property
    def is_papers(self) -> bool:
        """Whether the study may be compared with the paper's numbers."""
        free = {"lr"} if self.experiment.has_searched_rate else set()
        return bool(self.complete) and {name for name, _ in self.changes} <= free

    @property
    def reading(self) -> Reading | None:
        """The open setting that this study reads the other way, if it differs from the paper in nothing else."""
        return next((one for one in paper.TABLE_READINGS if self.changes == ((one.field, one.other),)), None)

    @property
    def unfinished(self) -> str:
        """How far an incomplete study got; empty for a complete one."""
        reached = max(run.epochs for run in self.begun)
        return "" if self.complete else f"after {reached} of {self.epochs} epochs"

    @property
    def title(self) -> str:
        """What was changed, and what is still missing."""
        return words.joined(words.changes_title(self.changes), self.unfinished, by="; ")

    @property
    def drawn_with(self) -> str:
        """What distinguishes its figure from that of the paper's settings: the other reading, or other settings."""
        if self.is_papers or not self.changes:
            return ""
        return words.changes_title(self.changes) if self.reading else "other settings"

    @property
    def figure(self) -> str:
        """The name of the figure that shows it."""
        name = words.joined(self.experiment.task, self.experiment.dataset, by="-")
        return words.figure_name(name, self.changes) if self.reading else name + "-other" * bool(self.drawn_with)

    def scores(self, measure: str, scale: Callable[[float], float] = float, by: str | None = None) -> Scores:
        """Scores of the complete runs, or of all if none is; ``by`` is the measure that chooses the epoch, if given."""
        runs, by = self.complete or self.begun, by or paper.EPOCH_BY.get(self.experiment.task, measure)
        at_best = [tuple(map(scale, best_scores(run, measure, self.epochs, by))) for run in runs]
        tests = tuple(test for *_, test in at_best)
        finite = [place for place, test in enumerate(tests) if math.isfinite(test)]
        best = best_of(measure)(finite, key=lambda place: tests[place]) if finite else 0
        train, valid, test = (spread(values, best) for values in zip(*at_best, strict=True))
        diverged = sum(run.state == DIVERGED for run in runs)
        return Scores(train, valid, test, tests, diverged, len(self.begun) - len(runs))

    def final_validation(self, measure: str) -> Spread:
        """Validation scores after the last of the paper's epochs."""
        values = [run.curves[f"valid_{measure}"][: self.epochs][-1] for run in self.complete or self.begun]
        return spread(values, values.index(best_of(measure)(values)))


def best_scores(run: Run, measure: str, epochs: int, by: str) -> tuple[float, float, float]:
    """Train, validation and test score at the epoch whose ``by`` was best on validation; nan if none was finite."""
    curve = enumerate(run.curves[f"valid_{by}"][:epochs], 1)
    finite = {epoch: value for epoch, value in curve if math.isfinite(value)}
    if not finite:
        return math.nan, math.nan, math.nan
    best = run.at_epoch(best_of(by)(finite, key=lambda epoch: finite[epoch]))
    return best[f"train_{measure}"], best[f"valid_{measure}"], best[f"test_{measure}"]


def best_of(measure: str) -> Callable[..., Any]:
    """``max`` for accuracies, ``min`` for losses and perplexities."""
    return max if measure == "accuracy" else min


@dataclass(frozen=True)
class TableRow:
    """One row of a table: the paper's numbers and ours."""

    experiment: Experiment
    measure: str
    paper_train: Spread | None  # None if the paper prints nothing
    paper_test: Spread | None
    result: StudyResult | None  # None if nothing was run

    @cached_property
    def scores(self) -> Scores | None:
        """Our scores; None if nothing was run."""
        return self.result.scores(self.measure) if self.result else None

    @cached_property
    def usual_perplexity(self) -> Scores | None:
        """Our scores as the usual perplexity: exp of the mean cross-entropy."""
        return self.result.scores("loss", perplexity) if self.result and self.measure == "perplexity" else None

    @property
    def format(self) -> str:
        """How the scores of this row are written."""
        return "percent" if self.experiment.task == "pixel-mnist" else self.measure

    @property
    def difference(self) -> float | None:
        """Our mean test score minus the paper's; nan if runs diverged."""
        if self.scores is None or self.paper_test is None or self.paper_test.mean is None:
            return None
        return mean(self.scores.test) - self.paper_test.mean

    @property
    def deviations(self) -> float | None:
        """The difference in standard deviations of the paper; None if it prints none."""
        deviation = self.paper_test and self.paper_test.std
        return self.difference / deviation if self.difference is not None and deviation else None

    @property
    def verdict(self) -> str:
        """Reproduced within two standard deviations of the paper, or of ours if it prints none."""
        if self.scores is None:
            return words.NO_DATA if self.experiment.dataset in paper.NO_DATA else words.NOT_RUN
        if self.difference is None:
            return ""
        deviation = (self.paper_test and self.paper_test.std) or self.scores.test.std or 0.0
        if abs(self.difference) <= CLOSE * deviation:
            return words.REPRODUCED
        better = is_better(mean(self.scores.test), mean(self.paper_test), self.measure)
        return words.BETTER if better else words.WORSE

    @property
    def mark(self) -> Mark:
        """The verdict, marked as a hint if there are few runs."""
        if self.scores is None or self.verdict not in words.VERDICTS:
            return Mark(self.verdict, None)
        return words.with_hint(self.verdict, self.verdict != words.WORSE, len(self.scores.tests), paper.REAL_RUNS)

    @property
    def at_least_as_good(self) -> int:
        """How many of our runs reach the paper's mean test score."""
        tests, wanted = self.scores.tests if self.scores else (), mean(self.paper_test)
        return sum(test == wanted or is_better(test, wanted, self.measure) for test in tests)

    @property
    def p_value(self) -> float | None:
        """Welch's p-value of our mean and the paper's."""
        ours, theirs = self.scores, self.paper_test
        return p_value(ours.test, len(ours.tests), theirs, paper.REAL_RUNS) if ours and theirs else None

    def as_data(self) -> dict[str, Any]:
        """The row as plain data."""
        ours = self.scores and {"train": as_dict(self.scores.train), "test": as_dict(self.scores.test)}
        return {
            **self.experiment._asdict(),
            "paper": {"train": as_dict(self.paper_train), "test": as_dict(self.paper_test)},
            "ours": ours,
            "runs": len(self.scores.tests) if self.scores else 0,
            "diverged": self.scores.diverged if self.scores else 0,
            "deviations": finite(self.deviations),
            "verdict": self.verdict,
            "study": self.result and self.result.study.setting.key,
        }


@dataclass(frozen=True)
class ResultTable:
    """One table of the paper."""

    name: str  # a key of paper.MEASURES
    rows: list[TableRow]

    @property
    def measure(self) -> str:
        """The measure of its numbers."""
        return paper.MEASURES[self.name]

    @property
    def title(self) -> str:
        """Task and measure, and what the table compares."""
        ablation = "one learning rate for all (DMU-C) or two (DMU)" if self.name.endswith("ablation") else ""
        return words.joined(f"{words.TITLES[task_of_table(self.name)]}, {self.measure}", ablation, by=": ")


@dataclass(frozen=True)
class RealResults:
    """Everything recorded of one task with real data."""

    task: str
    studies: list[StudyResult]

    @cached_property
    def chosen(self) -> dict[Experiment, StudyResult]:
        """The study that is shown in the paper's tables for each experiment."""
        found: dict[Experiment, StudyResult] = {}
        for one in self.studies:
            if one.is_papers:
                found[one.experiment] = better_rate(found[one.experiment], one) if one.experiment in found else one
        return found

    @cached_property
    def tables(self) -> list[ResultTable]:
        """The paper's tables about this task; the main one also has the cells that the paper did not train."""
        tables = []
        for name in (name for name in paper.MEASURES if task_of_table(name) == self.task):
            printed: dict[Experiment, tuple[Spread | None, Spread | None]] = {**printed_rows(name)}
            if name != rate_table(self.task):
                more = [one for one in self.chosen if one not in printed and not one.has_searched_rate]
                printed |= dict.fromkeys(sorted(more, key=lambda one: one.order), (None, None))
            measure = paper.MEASURES[name]
            rows = [TableRow(one, measure, *spreads, self.chosen.get(one)) for one, spreads in printed.items()]
            tables.append(ResultTable(name, rows))
        return tables

    @cached_property
    def rows(self) -> dict[tuple[Experiment, str], TableRow]:
        """The rows of all tables by experiment and measure: a row that appears in two tables counts once."""
        return {(row.experiment, row.measure): row for table in self.tables for row in table.rows}

    def verdicts(self, *datasets: str) -> list[str]:
        """Verdicts of the rows that can be compared with the paper, on these data or on all."""
        rows = [row for row in self.rows.values() if not datasets or row.experiment.dataset in datasets]
        return [row.verdict for row in rows if row.verdict in words.VERDICTS]

    @property
    def others(self) -> list[StudyResult]:
        """Studies that are neither the paper's nor another reading of it: shortened, unfinished or changed ones."""
        return [one for one in self.studies if not one.is_papers and one.reading is None]

    def figures(self) -> dict[str, dict[tuple[str, int], list[StudyResult]]]:
        """Studies by figure and panel (changes and size); with the paper's settings the chosen one, or all if none."""
        drawn: dict[str, dict[tuple[str, int], list[StudyResult]]] = {}
        for one in sorted(self.studies, key=lambda one: one.experiment.order):
            if one.drawn_with or one is self.chosen.get(one.experiment, one):
                panel = "" if one.is_papers else words.changes_title(one.changes), one.experiment.size
                drawn.setdefault(one.figure, {}).setdefault(panel, []).append(one)
        return drawn

    def as_data(self) -> dict[str, Any]:
        """Tables and other studies as plain data; nan and inf are None."""
        measure = self.tables[0].measure
        tables = [{"table": table.name, "rows": [row.as_data() for row in table.rows]} for table in self.tables]
        other = [(one.experiment.title, one.title, as_dict(one.scores(measure).test)) for one in self.others]
        others = [dict(zip(("study", "changed", "test"), one, strict=True)) for one in other]
        return {"task": self.task, "tables": tables, "other": others}


def real_results(studies: Sequence[Study]) -> list[RealResults]:
    """Sort studies by task; those without a finished epoch are left out."""
    begun = [study for study in studies if any(run.epochs for run in study.runs)]
    by_task = {task: [study_result(one) for one in begun if one.setting.task == task] for task in REAL}
    return [RealResults(task, of_task) for task, of_task in by_task.items() if of_task]


def study_result(study: Study) -> StudyResult:
    """A study with the experiment it belongs to, and how it differs from the paper's setting."""
    experiment, published = nearest(study.setting)
    changes = words.changes_between(published, study.setting, leave_out=COORDINATES)
    if experiment.task != "pixel-mnist" or not changes:
        return StudyResult(study, experiment, changes, published.epochs)
    # The paper does not say for how many epochs it trains pixels: the number is a part of the recipe.
    longer = (("epochs", study.setting.epochs),) if study.setting.epochs != published.epochs else ()
    return StudyResult(study, experiment, changes + longer, study.setting.epochs)


published = lru_cache(paper.setting)


def nearest(setting: Setting) -> tuple[Experiment, Setting]:
    """The experiment of a setting, and the paper's setting for it: at its first size if it does not have this one."""
    cell = paper.kind_of(setting)
    if setting.task == "pixel-mnist":
        of_units = {u: published(setting.task, cell, units=u, pixels=setting.pixels) for u in paper.UNITS}
        units = next((u for u, made in of_units.items() if made.hidden == setting.hidden), setting.hidden[0])
        return Experiment(setting.task, cell, units, setting.pixels), of_units.get(units, of_units[paper.UNITS[0]])
    depth = paper.depth_of(setting)
    dataset = setting.language if setting.task == "translation" else ""
    known = depth if depth in paper.DEPTHS and cell in paper.COMPARED else paper.DEPTHS[0]
    return Experiment(setting.task, cell, depth, dataset), published(setting.task, cell, depth=known)


def task_of_table(name: str) -> str:
    """The task that a table is about.

    >>> task_of_table("pixel_mnist"), task_of_table("natlang_lr_ablation")
    ('pixel-mnist', 'natlang')
    """
    return name.removesuffix("_lr_ablation").replace("_", "-")


def printed_rows(name: str) -> dict[Experiment, tuple[Spread | None, Spread]]:
    """Train and test scores in a table of the paper."""
    task = task_of_table(name)
    if name == "pixel_mnist":
        own = [row for row in paper.PIXEL_MNIST if row.cell.startswith("DMU")]
        percent = {Experiment(task, "dmu", row.units, order): getattr(row, order) for order in PIXELS for row in own}
        return {experiment: (None, Spread(p / 100, p / 100, None)) for experiment, p in percent.items()}
    return {
        Experiment(task, row.cell.lower(), row.depth, paper.PAIRS[row.pair] if row.pair else ""): (row.train, row.test)
        for row in paper.RESULTS[name]
    }


def better_rate(one: StudyResult, two: StudyResult) -> StudyResult:
    """Choose between two rates of a DMU-C: the one with more runs, else the better one on validation, as in a search.

    The measure is that of the table that compares DMU-C and DMU.
    """
    measure = paper.MEASURES[rate_table(one.experiment.task)]
    sign = 1 if best_of(measure) is min else -1

    def rank(of: StudyResult) -> tuple[int, float]:
        valid = of.scores(measure).valid.mean
        return -len(of.complete), math.inf if valid is None else sign * valid

    return min(one, two, key=rank)


def tried_rates(results: Iterable[RealResults]) -> list[StudyResult]:
    """Every learning rate of a DMU-C that was tried, if there is more than one."""
    tried: dict[Experiment, list[StudyResult]] = {}
    for one in (one for of_task in results for one in of_task.studies):
        if one.experiment.has_searched_rate and one.is_papers:
            tried.setdefault(one.experiment, []).append(one)
    several = [sorted(of, key=lambda one: one.study.setting.lr) for of in tried.values() if len(of) > 1]
    return [one for of in several for one in of]


def is_better(one: float, two: float, measure: str) -> bool:
    """Whether one score is better than another by this measure; any number is better than nan."""
    if math.isnan(one) or math.isnan(two):
        return math.isnan(two) and not math.isnan(one)
    return one != two and best_of(measure)(one, two) == one


def mean(of: Spread | None) -> float:
    """The mean as a number; nan if the paper prints nan or a run diverged."""
    return math.nan if of is None or of.mean is None else of.mean


def p_value(one: Spread, runs: int, two: Spread, other_runs: int) -> float | None:
    """How likely two means are at least this far apart if both come from the same distribution; None if unknown."""
    return welch(mean(one) - mean(two), (one.std, runs), (two.std, other_runs)) if one.std and two.std else None


def as_dict(of: Spread | None) -> dict[str, float | None] | None:
    """A spread as plain numbers for JSON."""
    return of and {name: finite(value) for name, value in of._asdict().items()}


def finite(value: float | None) -> float | None:
    """The number, or None for nan and inf, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
