"""Experiments beyond the paper: the results of every study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepmemory.lab.beyond import EXPERIMENTS, Experiment, experiment_of
from deepmemory.lab.beyond.models import DEEP, kind_of, weights_of
from deepmemory.lab.beyond.rates import best_studies
from deepmemory.lab.paper import EPOCH_BY, Spread, depth_of, measure_of
from deepmemory.lab.records import DIVERGED, Run, Study
from deepmemory.lab.report import words
from deepmemory.lab.report.results.stats import seconds_by_session, spread
from deepmemory.lab.report.results.tables import best_of, best_scores, is_better, mean, p_value
from deepmemory.lab.report.table import Mark
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks.batch import SPLITS

KINDS = ("dmu", "residual", "rhn", "gru", "lstm", "rnn", "mingru")  # in the order of tables
SOLVED = 0.99  # accuracy from which on a run has solved a task
UNLIKELY = 0.05  # p-value below which two means differ clearly


@dataclass(frozen=True)
class Outcome:
    """The results of one study."""

    study: Study
    part: str  # of the experiment

    @property
    def setting(self) -> Setting:
        """The study's setting."""
        return self.study.setting

    @property
    def kind(self) -> str:
        """The kind of model."""
        return kind_of(self.setting)

    @property
    def depth(self) -> int | None:
        """Linear layers, or micro-layers of an RHN, per time step; None if a cell has no depth to choose."""
        return depth_of(self.setting) if self.kind in DEEP else None

    @property
    def title(self) -> str:
        """Kind and depth."""
        return words.joined(words.cell_title(self.kind), f"n = {self.depth}" if self.depth else "")

    @cached_property
    def weights(self) -> int:
        """Trained weights of one network."""
        return weights_of(self.setting)

    @property
    def epochs(self) -> int:
        """Epochs of the longest run."""
        return max(run.epochs for run in self.study.runs)

    @property
    def seconds(self) -> float:
        """Seconds of training, all runs together."""
        return sum(seconds_by_session(self.study).values())

    @property
    def diverged(self) -> int:
        """Runs whose loss became nan or inf."""
        return sum(run.state == DIVERGED for run in self.study.runs)

    @property
    def tested(self) -> list[Run]:
        """Runs that have finished, and had a finite loss before."""
        return [run for run in self.study.runs if run.test]

    def valid(self, measure: str = "loss", scale: Callable[[float], float] = float) -> Spread | None:
        """A measure on validation over the runs, at each run's best epoch."""
        return over_runs(
            [scale(run.at_epoch(run.best_epoch)[f"valid_{measure}"]) for run in self.study.runs if run.best_epoch]
        )

    def test(self, measure: str = "loss", scale: Callable[[float], float] = float) -> Spread | None:
        """A measure on the test set over the runs, with each run's best weights."""
        return over_runs([scale(run.test[measure]) for run in self.tested if run.test])

    @property
    def measure(self) -> str:
        """The measure of the paper's table of the task: loss, perplexity or accuracy."""
        return measure_of(self.setting.task)

    @cached_property
    def scores(self) -> dict[str, list[float]]:
        """Scores of the finished runs by split, at the epoch that the paper's tables take."""
        by = EPOCH_BY.get(self.setting.task, self.measure)
        found = [best_scores(run, self.measure, run.epochs, by) for run in self.tested]
        return {split: [of_run[place] for of_run in found] for place, split in SPLITS.items()}

    def score(self, split: str) -> Spread | None:
        """The scores of a split over the runs."""
        return over_runs(self.scores[split])

    def solved(self, measure: str) -> int:
        """Number of runs whose best weights solve the task on the test set, by an accuracy."""
        return sum(run.test[measure] >= SOLVED for run in self.tested if run.test)

    def solved_by_epoch(self, measure: str) -> list[int]:
        """Number of runs that had solved the task on validation by each epoch, from epoch 0."""
        curves = [run.curves[f"valid_{measure}"] for run in self.study.runs]
        firsts = [next((epoch for epoch, value in enumerate(of, 1) if value >= SOLVED), math.inf) for of in curves]
        return [sum(first <= epoch for first in firsts) for epoch in range(self.epochs + 1)]

    def as_data(self) -> dict[str, Any]:
        """Counts and means as plain data."""
        measures = [name.removeprefix("valid_") for name in self.study.series if name.startswith("valid_")]
        splits = {"valid": self.valid, "test": self.test}
        means = {f"{split}_{name}": mean_of(of(name)) for split, of in splits.items() for name in measures}
        names = ("part", "kind", "depth", "weights", "epochs", "diverged", "seconds")
        own = {name: getattr(self, name) for name in names}
        return {"study": self.setting.key, **own, "lr": self.setting.lr, "runs": len(self.study.runs), "means": means}


@dataclass(frozen=True)
class Comparison:
    """The DMU of a part that was best on validation, and the best of the other cells."""

    dmu: Outcome
    other: Outcome

    @property
    def p_value(self) -> float | None:
        """Welch's p-value of their test scores; None if there are too few runs."""
        one, two = self.dmu.score("test"), self.other.score("test")
        return p_value(one, len(self.dmu.tested), two, len(self.other.tested)) if one and two else None

    def verdict(self, enough: int) -> Mark:
        """Which of them has the better mean test score; a hint if there are not ``enough`` runs of both."""
        if self.p_value is not None and self.p_value >= UNLIKELY:
            return Mark("no clear difference", None)
        better = is_better(mean(self.dmu.score("test")), mean(self.other.score("test")), self.dmu.measure)
        runs = min(len(self.dmu.tested), len(self.other.tested))
        return words.with_hint("DMU better" if better else "DMU worse", better, runs, enough)


@dataclass(frozen=True)
class BeyondResults:
    """One experiment: its studies, and others of the same kind with changed settings."""

    name: str
    outcomes: list[Outcome]  # with the experiment's settings
    changed: list[Outcome]  # with other settings

    @property
    def experiment(self) -> Experiment:
        """The definition of the experiment."""
        return EXPERIMENTS[self.name]

    @cached_property
    def shown(self) -> list[Outcome]:
        """Each model at its best rate on validation: the experiment's studies or, if there are none, changed ones."""
        outcomes = {one.setting.key: one for one in self.outcomes or self.changed}
        best = best_studies((one.study for one in outcomes.values()), self.experiment.part_of)
        return [outcomes[study.setting.key] for study in best]

    @property
    def rest(self) -> list[Outcome]:
        """Studies at rates that were not the best, or with changed settings."""
        return [one for one in (*self.outcomes, *self.changed) if one not in self.shown]

    def by_part(self) -> dict[str, list[Outcome]]:
        """The shown studies, part by part."""
        parts = dict.fromkeys(one.part for one in self.shown)
        return {part: [one for one in self.shown if one.part == part] for part in parts}

    def comparisons(self) -> list[Comparison]:
        """The best DMU and other cell of each part with both, chosen on validation: the test would flatter them."""
        found = []
        for outcomes in self.by_part().values():
            tested = [one for one in outcomes if one.tested]
            sides = [[one for one in tested if (one.setting.cell == "dmu") is is_dmu] for is_dmu in (True, False)]
            if all(sides):
                best = best_of(tested[0].measure)
                found.append(Comparison(*(best(side, key=lambda one: mean(one.score("valid"))) for side in sides)))
        return found

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "experiment": self.name,
            "studies": [one.as_data() for one in self.outcomes],
            "changed": [one.as_data() for one in self.changed],
        }


def beyond_results(studies: Sequence[Study]) -> list[BeyondResults]:
    """Group studies by experiment; those of the paper appear only in an experiment that has studies of its own."""
    begun = [study for study in studies if any(run.epochs for run in study.runs)]
    owners = {study.setting.key: experiment_of(study.setting) for study in begun}
    made = []
    for name, one in EXPERIMENTS.items():
        if name not in owners.values():
            continue
        own = {setting.key for setting in one.settings()}
        shown = [s for s in begun if owners[s.setting.key] in ((name, None) if s.setting.key in own else (name,))]

        def order(of: Outcome, parts: tuple[str, ...] = one.parts) -> tuple[int, int, int, float]:
            place = parts.index(of.part) if of.part in parts else len(parts)
            return place, KINDS.index(of.kind), of.depth or 0, of.setting.lr

        ordered = sorted((Outcome(study, one.part_of(study.setting)) for study in shown), key=order)
        main = [of for of in ordered if of.setting.key in own]
        made.append(BeyondResults(name, main, [of for of in ordered if of not in main]))
    return made


def over_runs(values: list[float]) -> Spread | None:
    """Best, mean and deviation; None if there are no values."""
    return spread(values, min(range(len(values)), key=lambda place: values[place])) if values else None


def mean_of(of: Spread | None) -> float | None:
    """The mean; None if there is none."""
    return None if of is None else of.mean
