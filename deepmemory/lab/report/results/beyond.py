"""Experiments beyond the paper: what became of the runs of every study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from deepmemory.lab.beyond import EXPERIMENTS, Experiment, experiment_of
from deepmemory.lab.beyond.depth import WORDS
from deepmemory.lab.beyond.models import DEEP, kind_of
from deepmemory.lab.beyond.rates import best_studies
from deepmemory.lab.paper import Spread, depth_of
from deepmemory.lab.records import DIVERGED, Run, Study
from deepmemory.lab.report import words
from deepmemory.lab.report.results.stats import spread
from deepmemory.lab.settings import Setting
from deepmemory.lab.tasks import task_of
from deepmemory.lab.training.network import TiedWordNetwork, weight_count

KINDS = ("dmu", "residual", "rhn", "gru", "lstm", "rnn", "mingru")  # in the order of tables
SOLVED = 0.99  # accuracy from which on a run has solved a task


@dataclass(frozen=True)
class Outcome:
    """What became of the runs of one study."""

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
        """Linear layers, or micro-layers of an RHN, per time step; None where a cell has no depth to choose."""
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
        """Seconds of training."""
        return max(run.seconds for run in self.study.runs)

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

    def solved(self, measure: str) -> int:
        """Runs whose best weights solve the task on the test set, by an accuracy."""
        return sum(run.test[measure] >= SOLVED for run in self.tested if run.test)

    def solved_by_epoch(self, measure: str) -> list[int]:
        """Runs that had solved the task on validation by each epoch, from epoch 0."""
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
class BeyondResults:
    """One experiment: its studies, and others of the same kind with changed settings."""

    name: str
    outcomes: list[Outcome]  # with the experiment's settings
    changed: list[Outcome]  # with other settings

    @property
    def experiment(self) -> Experiment:
        """What was to be trained."""
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

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "experiment": self.name,
            "studies": [one.as_data() for one in self.outcomes],
            "changed": [one.as_data() for one in self.changed],
        }


def beyond_results(studies: Sequence[Study]) -> list[BeyondResults]:
    """Sort studies into experiments; those of the paper are left out."""
    found: dict[str, list[Outcome]] = {name: [] for name in EXPERIMENTS}
    for study in studies:
        name = experiment_of(study.setting)
        if name and any(run.epochs for run in study.runs):
            found[name].append(Outcome(study, EXPERIMENTS[name].part_of(study.setting)))
    made = []
    for name, outcomes in found.items():
        one = EXPERIMENTS[name]
        own = {setting.key for setting in one.settings()} if outcomes else set()

        def order(of: Outcome, parts: tuple[str, ...] = one.parts) -> tuple[int, int, int, float]:
            place = parts.index(of.part) if of.part in parts else len(parts)
            return place, KINDS.index(of.kind), of.depth or 0, of.setting.lr

        ordered = sorted(outcomes, key=order)
        if ordered:
            main = [of for of in ordered if of.setting.key in own]
            made.append(BeyondResults(name, main, [of for of in ordered if of not in main]))
    return made


def over_runs(values: list[float]) -> Spread | None:
    """Best, mean and deviation; None of nothing."""
    return spread(values, min(range(len(values)), key=lambda place: values[place])) if values else None


def mean_of(of: Spread | None) -> float | None:
    """The mean, where there is one."""
    return None if of is None else of.mean


def weights_of(setting: Setting) -> int:
    """Trained weights of a setting's network; no data is read."""
    if setting.task != "ptb":
        return weight_count(setting, task_of(setting))
    with torch.device("meta"):
        network = TiedWordNetwork(setting, SimpleNamespace(input_size=WORDS, output_size=WORDS))
    return sum(parameter.numel() for parameter in network.parameters())
