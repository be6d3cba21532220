"""The paper's statements about its tables, each checked against the paper's own table and against ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from deepmemory.lab import paper
from deepmemory.lab.paper import Claim, Spread, TableClaim
from deepmemory.lab.report import words
from deepmemory.lab.report.results import tables
from deepmemory.lab.report.results.claims import Rule, Verdict
from deepmemory.lab.report.results.tables import Experiment, RealResults

SLIGHT = 0.05  # scores whose relative difference is at most this are close


class RunScores(NamedTuple):
    """Test scores of some runs."""

    spread: Spread
    runs: int

    @property
    def mean(self) -> float:
        """The mean; nan if a run diverged."""
        return tables.mean(self.spread)


Scores = Mapping[Experiment, RunScores]


class Case(NamedTuple):
    """One place in a table that a statement is about: its cells, of one size, on one dataset."""

    claim: TableClaim
    experiments: list[Experiment]  # one for each of the claim's cells

    @property
    def dataset(self) -> str:
        """The dataset of all its experiments."""
        return self.experiments[0].dataset

    @property
    def title(self) -> str:
        """Dataset and size; also the task, if the statement is about several tables."""
        task, _, size, dataset = self.experiments[0]
        title = words.TITLES[task] if len(self.claim.tables) > 1 else ""
        return words.joined(title, words.dataset_title(dataset), words.size_title(task, size), by=" ")

    def is_better(self, one: RunScores, two: RunScores) -> bool:
        """Whether the first mean is better than the second."""
        measures = {tables.task_of_table(name): paper.MEASURES[name] for name in self.claim.tables}
        return tables.is_better(one.mean, two.mean, measures[self.experiments[0].task])

    def is_won(self, scores: Scores) -> bool:
        """Whether the first cell is better than the second."""
        return self.is_better(*(scores[one] for one in self.experiments))

    def gap(self, scores: Scores) -> float:
        """The difference of both cells' means as a share of the second; infinite if one is nan."""
        one, two = (scores[experiment].mean for experiment in self.experiments)
        return math.inf if math.isnan(one) or math.isnan(two) else abs(one - two) / two


def printed_scores(names: Iterable[str]) -> Scores:
    """Test scores that the paper prints in these tables."""
    rows = [row for name in names for row in tables.printed_rows(name).items()]
    return {experiment: RunScores(test, paper.REAL_RUNS) for experiment, (_, test) in rows}


def our_scores(names: Iterable[str], results: Iterable[RealResults]) -> Scores:
    """Test scores that the records have for the rows of these tables."""
    rows = [row for one in results for table in one.tables if table.name in names for row in table.rows]
    return {row.experiment: RunScores(row.scores.test, len(row.scores.tests)) for row in rows if row.scores}


def table_verdicts(results: Sequence[RealResults]) -> list[Verdict]:
    """Verdicts on all statements about the tasks that have results."""
    claims = [claim for claim in paper.TABLE_CLAIMS if tasks_of(claim) & {one.task for one in results}]
    return [judge(claim, our_scores(claim.tables, results)) for claim in claims]


def tasks_of(claim: Claim | TableClaim) -> set[str]:
    """The tasks that a statement about tables is about."""
    return {tables.task_of_table(name) for name in claim.tables} if isinstance(claim, TableClaim) else set()


def judge(claim: TableClaim, ours: Scores) -> Verdict:
    """Judge one statement; data that is not available is left out, everything else must have been run."""
    decide, printed = RULES[claim.check].decide, printed_scores(claim.tables)
    firsts = [one for one in printed if one.cell == claim.cells[0] and one.size in claim.sizes]
    firsts = [one for one in firsts if not claim.parts or one.dataset in claim.parts]
    cases = [Case(claim, [first._replace(cell=cell) for cell in claim.cells]) for first in firsts]
    holds, _ = decide(cases, printed)
    wanted = [case for case in cases if case.dataset not in paper.NO_DATA or set(case.experiments) & set(ours)]
    left_out = sorted({words.dataset_title(case.dataset) for case in cases if case not in wanted})
    if not wanted:
        return Verdict(claim, f"no data: {words.listed(left_out)}", None, in_paper=holds)
    missing = [case.title for case in wanted if not set(case.experiments) <= set(ours)]
    if missing:
        more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
        return Verdict(claim, f"not run: {'; '.join(missing[:2])}{more}", None, in_paper=holds)
    agrees, seen = decide(wanted, ours)
    runs = min(ours[one].runs for case in wanted for one in case.experiments)
    return Verdict(claim, words.joined(seen, words.listed(left_out), by="; without "), agrees, runs, in_paper=holds)


def wins(cases: Sequence[Case], scores: Scores) -> str:
    """The number of cases in which the first cell is better, and the others with their means and p-values."""
    lost = []
    for case in cases:
        one, two = (scores[experiment] for experiment in case.experiments)
        if not case.is_won(scores):
            p_value = tables.p_value(one.spread, one.runs, two.spread, two.runs)
            likely = "" if p_value is None else f"p = {p_value:.2f}"
            lost.append(f"{case.title} ({words.joined(f'{one.mean:.4g} against {two.mean:.4g}', likely)})")
    seen = f"{words.cell_title(cases[0].claim.cells[0])} better in {len(cases) - len(lost)} of {len(cases)}"
    return words.joined(seen, ", ".join(lost), by="; not: ")


def better(cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Its mean test score is better in every case."""
    return all(case.is_won(scores) for case in cases), wins(cases, scores)


def most(cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Its mean test score is better in at least three of four cases."""
    return 4 * sum(case.is_won(scores) for case in cases) >= 3 * len(cases), wins(cases, scores)


def slightly(cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Its mean test score is better, by at most 5 %."""
    widest = max(case.gap(scores) for case in cases)
    agrees = all(case.is_won(scores) for case in cases) and widest <= SLIGHT
    return agrees, f"{wins(cases, scores)}; {widest:.1%} apart"


def competitive(cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Where its mean test score is not better, it is worse by at most 5 %."""
    behind = {case.title: case.gap(scores) for case in cases if not case.is_won(scores)}
    seen = ", ".join(f"{title} {share:.1%}" for title, share in behind.items())
    return all(share <= SLIGHT for share in behind.values()), f"behind: {seen}" if seen else "behind nowhere"


def by_depth(cases: Sequence[Case]) -> Iterable[tuple[str, str, list[Case], list[Experiment]]]:
    """For each cell and dataset, yield their names, the cases and the experiments, by rising depth as printed."""
    for (_, dataset), group in groupby(cases, lambda case: (case.experiments[0].task, case.dataset)):
        rows = list(group)
        for place, cell in enumerate(rows[0].claim.cells):
            yield words.cell_title(cell), words.dataset_title(dataset), rows, [of.experiments[place] for of in rows]


def shallow(cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """The best mean test score of each network is that of depth 1 or 2."""
    best: list[tuple[int, str]] = []
    for cell, _, rows, experiments in by_depth(cases):
        first = 0
        for place in range(1, len(rows)):
            if rows[0].is_better(scores[experiments[place]], scores[experiments[first]]):
                first = place
        best.append((experiments[first].size, f"{cell} {rows[first].title}"))
    return all(size in (1, 2) for size, _ in best), "best: " + ", ".join(title for _, title in best)


def worsens(cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """The mean test score is worse at depth 10 than at depth 1, and at most one step in between makes it better."""
    holds, seen = True, []
    for cell, dataset, rows, experiments in by_depth(cases):
        found = [scores[experiment] for experiment in experiments]
        worse = [rows[0].is_better(one, two) for one, two in pairwise(found)]
        holds &= rows[0].is_better(found[0], found[-1]) and worse.count(False) <= 1
        seen.append(f"{cell} {dataset} " + ", ".join(f"{of.mean:.4g}" for of in found))
    return holds, "; ".join(seen)


def steeper(cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """From depth 1 to depth 10 its mean test score grows by the larger factor, in every language."""
    growth: dict[str, list[tuple[str, float]]] = {}
    for cell, dataset, _, experiments in by_depth(cases):
        factor = scores[experiments[-1]].mean / scores[experiments[0]].mean
        growth.setdefault(dataset, []).append((cell, factor))
    holds = all(one > two or math.isnan(one) for (_, one), (_, two) in growth.values())
    texts = {dataset: [f"{cell} {factor:.3g} times" for cell, factor in of] for dataset, of in growth.items()}
    return holds, "; ".join(f"{dataset} {', '.join(of)}" for dataset, of in texts.items())


def reaches(cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Its mean test accuracy is at most half a point below the paper's number."""
    printed, holds, seen = printed_scores(cases[0].claim.tables), True, []
    for experiment in (case.experiments[0] for case in cases):
        ours, theirs = scores[experiment].mean, printed[experiment].mean
        holds &= ours >= theirs - 0.005
        seen.append(f"{ours:.1%} with {experiment.size} units (paper {theirs:.1%})")
    return holds, ", ".join(seen)


RULES = {
    rule.__name__: Rule.of(rule) for rule in (better, most, slightly, competitive, shallow, worsens, steeper, reaches)
}
