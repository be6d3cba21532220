"""Gradients while training: the gradient condition, gates and gradient flow by epoch, beside the loss."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from deepmemory.gradients import CANDIDATE_LIMIT, GATE_LIMIT
from deepmemory.lab import paper
from deepmemory.lab.records import Run, Study
from deepmemory.lab.report import words
from deepmemory.lab.report.results.tables import nearest
from deepmemory.lab.settings import PAPER_TASKS, SYNTHETIC, Setting

Observations = Mapping[int, Mapping[str, Mapping[int, float]]]  # by seed, by MODULE.LAYER.QUANTITY, by epoch
SHOWN_TOGETHER = ("hidden", "transition", "depth", "lr", "module_rate", "gamma", "epochs")  # may differ in a figure
FOLDS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "mean": statistics.fmean}


@dataclass(frozen=True)
class Quantity:
    """A quantity that was observed in every layer, and how a figure shows it."""

    name: str  # the last part of its name in the records
    label: str
    fold: str  # over layers: the largest, the smallest or the mean
    limit: float | None = None
    log: bool = False


QUANTITIES = (
    Quantity("z radius", "spectral radius\ntowards z", "max", GATE_LIMIT, log=True),
    Quantity("candidate radius", "spectral radius\nto the candidate", "max", CANDIDATE_LIMIT, log=True),
    Quantity("gate", "mean gate", "mean"),
    Quantity("saturated", "gates within 0.05\nof 0 or 1", "mean"),
    Quantity("flow", "log10 |dL/dh|,\nfirst / last step", "min", 0.0),
)
LOSS = Quantity("valid_loss", "validation loss", "mean", log=True)


@dataclass(frozen=True)
class GradientStudy:
    """A study and what was observed of its runs while they trained."""

    study: Study
    observations: Observations

    @property
    def setting(self) -> Setting:
        """The study's settings."""
        return self.study.setting

    @property
    def cell(self) -> str:
        """The cell's name in the paper: dmu, dmu-c, lstm, ..."""
        return paper.kind_of(self.setting)

    @property
    def depth(self) -> int:
        """Linear layers from one state to the next."""
        return paper.depth_of(self.setting)

    @property
    def rates(self) -> str:
        """Learning rate of the DMU, and of everything else if that differs."""
        setting = self.setting
        if setting.cell != "dmu" or self.cell == paper.DMU_C:
            return f"{setting.lr:g}"
        own = setting.lr / (2 * self.depth) if setting.module_rate == "formula" else float(setting.module_rate)
        return f"{own:g}, rest {setting.lr:g}"

    @property
    def runs(self) -> list[Run]:
        """The runs that were observed."""
        return [run for run in self.study.runs if run.seed in self.observations and run.epochs]

    def observed(self, seed: int, quantity: Quantity) -> dict[int, float]:
        """A quantity of a run by epoch, folded over the layers; epochs with a nan are left out."""
        by_epoch: dict[int, list[float]] = {}
        for name, values in self.observations[seed].items():
            if name.rpartition(".")[2] == quantity.name:
                for epoch, value in values.items():
                    by_epoch.setdefault(epoch, []).append(value)
        whole = {epoch: values for epoch, values in by_epoch.items() if not any(map(math.isnan, values))}
        return {epoch: FOLDS[quantity.fold](values) for epoch, values in sorted(whole.items())}

    def excess(self, seed: int) -> dict[int, float]:
        """The largest ratio of a radius to its limit by epoch; below 1 the run satisfies the condition."""
        by_limit = [(self.observed(seed, quantity), quantity.limit) for quantity in QUANTITIES if quantity.limit]
        return {epoch: max(of[epoch] / limit for of, limit in by_limit if limit) for epoch in by_limit[0][0]}

    def losses(self, run: Run) -> dict[int, float]:
        """Finite validation losses by epoch."""
        return {epoch: loss for epoch, loss in enumerate(run.curves[LOSS.name], 1) if math.isfinite(loss)}

    def lowest_loss(self, run: Run) -> float | None:
        """The lowest validation loss; None if it was never finite."""
        return min(self.losses(run).values(), default=None)

    def curves(self, quantity: Quantity) -> list[dict[int, float]]:
        """A quantity, or the loss, by epoch for every run."""
        if quantity is LOSS:
            return [self.losses(run) for run in self.runs]
        return [of for run in self.runs if (of := self.observed(run.seed, quantity))]

    @property
    def command(self) -> str:
        """The command that trains and observes such a study."""
        given = ["dmu", "train", self.setting.task, "--cell", self.cell]
        if self.setting.task not in SYNTHETIC and self.depth in paper.DEPTHS:
            given += ["--depth", str(self.depth)]
        for name, value in words.changes_between(published(self.setting), self.setting):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            given += [f"--{name.replace('_', '-')}", text]
        return shlex.join([*given, "--runs", str(len(self.study.runs)), "--watch", "gradients"])


@dataclass(frozen=True)
class GradientResults:
    """One figure: studies of a task that differ only in depth, learning rate and cell."""

    task: str
    changes: words.Changes  # to the paper's settings, in all of them
    studies: list[GradientStudy]  # by depth; the DMU first, and the largest rate of each cell

    @property
    def figure(self) -> str:
        """The name of the figure's files."""
        return words.figure_name(f"gradients-{self.task}", self.changes)

    @property
    def title(self) -> str:
        """The task's name, and what was changed."""
        return words.changed_title(self.task, self.changes)

    @property
    def by_depth(self) -> dict[int, list[GradientStudy]]:
        """The studies of each depth."""
        depths = dict.fromkeys(one.depth for one in self.studies)
        return {depth: [one for one in self.studies if one.depth == depth] for depth in depths}


def gradient_results(studies: Iterable[Study], observations: Mapping[str, Observations]) -> list[GradientResults]:
    """Group the observed studies into figures; ``observations`` are by the key of a study."""
    found: dict[tuple[str, words.Changes], list[GradientStudy]] = {}
    for study in studies:
        one = GradientStudy(study, observations.get(study.setting.key, {}))
        if one.runs:
            changes = words.changes_between(published(study.setting), study.setting, leave_out=SHOWN_TOGETHER)
            found.setdefault((study.setting.task, changes), []).append(one)
    cells = sorted(paper.KINDS, key=lambda cell: not cell.startswith("dmu"))
    made = [
        GradientResults(task, changes, sorted(of, key=lambda one: (one.depth, cells.index(one.cell), -one.setting.lr)))
        for (task, changes), of in found.items()
    ]
    return sorted(made, key=lambda one: (PAPER_TASKS.index(one.task), len(one.changes), one.title))


def published(setting: Setting) -> Setting:
    """The paper's setting of the same cell, at the same depth if it has one."""
    return paper.setting(setting.task, paper.kind_of(setting)) if setting.task in SYNTHETIC else nearest(setting)[1]
