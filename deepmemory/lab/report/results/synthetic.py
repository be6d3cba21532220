"""Synthetic tasks: how many runs got under each threshold of the validation loss, and the paper's claims about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from deepmemory.lab import paper
from deepmemory.lab.paper import Claim, Reading
from deepmemory.lab.records import DIVERGED, RUNNING, Run, Study
from deepmemory.lab.report import words
from deepmemory.lab.report.results.claims import Rule, Verdict
from deepmemory.lab.report.results.stats import median, seconds_by_session
from deepmemory.lab.settings import CELLS, OWNERS, SYNTHETIC, THRESHOLDS, threshold_label


@dataclass(frozen=True)
class CellResults:
    """The results of one cell's runs on one task."""

    study: Study
    runs: int
    diverged: int
    unfinished: int
    under: tuple[int, ...]  # runs that got under each threshold
    median_epoch: tuple[float | None, ...]  # at which they did
    epochs: int  # of the longest run
    seconds: float  # of training
    test_loss: float | None  # median over the runs, with each run's best weights
    test_accuracy: float | None

    @property
    def name(self) -> str:
        """The cell's name."""
        return words.cell_title(self.study.setting.cell)

    def by_epoch(self, threshold: int, epochs: int) -> list[int]:
        """Number of runs that got under a threshold (given by its index) by each epoch, from epoch 0."""
        firsts = [run.first_under[threshold] for run in self.study.runs if is_under(run, threshold)]
        return [sum(first <= epoch for first in firsts if first is not None) for epoch in range(epochs + 1)]


@dataclass(frozen=True)
class SyntheticResults:
    """One figure: the cells on one task, all with the paper's settings or all with the same change to them."""

    task: str
    changes: words.Changes
    studies: dict[str, Study]  # by cell

    @cached_property
    def cells(self) -> dict[str, CellResults]:
        """The results of each cell."""
        return {cell: cell_results(study) for cell, study in self.studies.items()}

    @property
    def title(self) -> str:
        """The task's name, and what was changed."""
        return words.changed_title(self.task, self.changes)

    @property
    def epochs(self) -> int:
        """Epochs of the longest run."""
        return max(cell.epochs for cell in self.cells.values())

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Every claim of the paper about this task."""
        return [judge(claim, self) for claim in paper.CLAIMS[self.task]]

    def is_reading(self, reading: Reading) -> bool:
        """Whether these studies differ from the paper's settings only in this open setting."""
        return self.changes == ((reading.field, reading.other),)

    def as_data(self) -> dict[str, Any]:
        """Counts and claims as plain data."""
        names = [field.name for field in fields(CellResults) if field.name != "study"]
        cells = [{"cell": cell, **{name: getattr(of, name) for name in names}} for cell, of in self.cells.items()]
        claims = [verdict.as_data() for verdict in self.verdicts]
        return {"task": self.task, "changes": dict(self.changes), "cells": cells, "claims": claims}


def synthetic_results(studies: Sequence[Study]) -> list[SyntheticResults]:
    """Group studies into figures; a cell whose own settings were not changed appears in every figure of its kind."""
    found: dict[tuple[str, words.Changes, words.Changes], dict[str, Study]] = {}
    for study in studies:
        if study.setting.task in SYNTHETIC and any(run.epochs for run in study.runs):
            task, cell = study.setting.task, study.setting.cell
            changed = words.changes_between(paper.setting(task, cell), study.setting, leave_out=["epochs"])
            common = tuple(item for item in changed if OWNERS.get(item[0], ("", ()))[0] != "cell")
            own = tuple(item for item in changed if item not in common)
            found.setdefault((task, common, own), {})[cell] = study
    made = []
    for (task, common, own), cells in found.items():
        filled = {**found.get((task, common, ()), {}), **cells}
        made.append(SyntheticResults(task, common + own, {cell: filled[cell] for cell in CELLS if cell in filled}))
    return sorted(made, key=lambda one: (SYNTHETIC.index(one.task), len(one.changes), words.changes_title(one.changes)))


def cell_results(study: Study) -> CellResults:
    """Count the runs of one study."""
    firsts = [[run.first_under[i] for run in study.runs if is_under(run, i)] for i in range(len(THRESHOLDS))]
    return CellResults(
        study=study,
        runs=len(study.runs),
        diverged=sum(run.state == DIVERGED for run in study.runs),
        unfinished=sum(run.state == RUNNING for run in study.runs),
        under=tuple(map(len, firsts)),
        median_epoch=tuple(median(first for first in of_threshold if first) for of_threshold in firsts),
        epochs=max(run.epochs for run in study.runs),
        seconds=sum(seconds_by_session(study).values()),
        test_loss=median(run.test["loss"] for run in study.runs if run.test),
        test_accuracy=median(run.test["accuracy"] for run in study.runs if run.test),
    )


def is_under(run: Run, threshold: int) -> bool:
    """Whether a run got under the threshold with this index."""
    return threshold < len(run.first_under) and run.first_under[threshold] is not None


def epochs_with_patience(results: Sequence[SyntheticResults]) -> tuple[int, int]:
    """Epochs that the runs with the paper's settings took, and that they would take with a patience of 1."""
    runs = [run for one in results if not one.changes for study in one.studies.values() for run in study.runs]
    return sum(run.epochs for run in runs), sum(run.first_under[-1] or run.epochs for run in runs)


def judge(claim: Claim, results: SyntheticResults) -> Verdict:
    """Judge one claim by the records. "Better than all others" is judged among the cells that were run."""
    cells = [results.cells[cell] for cell in claim.cells if cell in results.cells]
    missing = tuple(cell for cell in claim.cells if cell not in results.cells)
    if missing and not (claim.check == "ahead" and claim.cells[0] not in missing and len(cells) > 1):
        return Verdict(claim, f"not run: {', '.join(map(words.cell_title, missing))}", None)
    places = [THRESHOLDS.index(threshold) for threshold in claim.thresholds or THRESHOLDS]
    agrees, seen = RULES[claim.check].decide(cells, places, results.epochs)
    return Verdict(claim, seen, agrees, min(cell.runs for cell in cells), missing if agrees else ())


def ahead(cells: Sequence[CellResults], places: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """The curves of the better cell are higher, on average over epochs and thresholds."""
    heights = [
        sum(sum(cell.by_epoch(place, epochs)[1:]) for place in places) / (len(places) * epochs * cell.runs)
        for cell in cells
    ]
    seen = ", ".join(f"{cell.name} {height:.1%}" for cell, height in zip(cells, heights, strict=True))
    agrees = all(heights[0] > other for other in heights[1:]) if any(heights) else None
    return agrees, f"mean height of the curves: {seen}"


def faster(cells: Sequence[CellResults], places: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """Its successful runs need fewer epochs in the median, wherever both cells have successful runs."""
    medians = [[cell.median_epoch[place] for place in places] for cell in cells]
    pairs = [(a, b) for a, b in zip(*medians, strict=True) if a is not None and b is not None]
    texts = [", ".join("never" if m is None else f"{m:g}" for m in of_cell) for of_cell in medians]
    seen = "; ".join(f"{cell.name} {text}" for cell, text in zip(cells, texts, strict=True))
    return (all(a < b for a, b in pairs) if pairs else None), f"median epoch: {seen} under {labels(places)}"


def labels(places: Sequence[int]) -> str:
    """The thresholds at these places."""
    return ", ".join(threshold_label(THRESHOLDS[place]) for place in places)


def by_shares(text: str, agrees: Callable[..., bool]) -> Rule:
    """A rule about the shares of runs that got under each threshold: ``agrees`` takes a list for each cell."""

    def decide(cells: Sequence[CellResults], places: Sequence[int], epochs: int) -> tuple[bool | None, str]:
        counts = [f"{cell.name} " + ", ".join(f"{cell.under[i]}/{cell.runs}" for i in places) for cell in cells]
        shares = [[cell.under[place] / cell.runs for place in places] for cell in cells]
        apart = max(abs(one - two) for one, two in zip(shares[0], shares[-1], strict=True))
        widest = f"; at most {100 * apart:.1f} points apart" if len(cells) > 1 else ""
        return agrees(*shares), f"{'; '.join(counts)} under {labels(places)}{widest}"

    return Rule(text, decide)


RULES: dict[str, Rule] = {
    "ahead": Rule.of(ahead),
    "more": by_shares(
        "a larger share of its runs at every threshold",
        lambda one, two: all(a > b for a, b in zip(one, two, strict=True)),
    ),
    "similar": by_shares(
        "shares of runs differ by at most 15 points at every threshold",
        lambda one, two: all(abs(a - b) <= 0.15 for a, b in zip(one, two, strict=True)),
    ),
    "faster": Rule.of(faster),
    "never": by_shares("no run, at any of the thresholds", lambda one: not any(one)),
    "partly": by_shares("some runs, but not all", lambda one: all(0 < share < 1 for share in one)),
    "mostly": by_shares("more than half of the runs at every threshold", lambda one: all(s > 0.5 for s in one)),
    "half": by_shares(
        "30 to 70 % of the runs get under the first threshold, and at least 80 % of those under the last",
        lambda one: 0.3 <= one[0] <= 0.7 and one[-1] >= 0.8 * one[0],
    ),
}
