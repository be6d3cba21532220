"""The paper's statements about its tables, each held against the table it is about and against ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from deepmemory.lab import paper
from deepmemory.lab.paper import TableClaim
from deepmemory.lab.report.scores import (
    TITLES,
    Account,
    Score,
    higher_is_better,
    part_name,
    printed_rows,
    size_in_words,
    task_of_table,
)

SLIGHT = 0.05  # scores that differ by no more are close
HALF_A_POINT = 0.005
SHALLOW = (1, 2)


class Case(NamedTuple):
    """One place in a table, whatever the cell."""

    table: str
    part: str
    size: int

    def words(self, claim: TableClaim) -> str:
        """For people; the task is left out where a statement is about one table."""
        task = task_of_table(self.table)
        title = TITLES[task] if len(claim.tables) > 1 else ""
        return " ".join(filter(None, (title, part_name(self.part), size_in_words(task, self.size))))


Scores = Mapping[tuple[Case, str], Score]  # of each case and cell


@dataclass(frozen=True)
class TableVerdict:
    """A statement of the paper beside the paper's own table and the records."""

    claim: TableClaim
    printed: bool  # holds in the paper's table
    seen: str  # in ours
    agrees: bool | None  # None where something was not run


def printed_scores() -> Scores:
    """What the paper's tables say."""
    rows = [(name, row) for name in paper.MEASURES for row in printed_rows(name)]
    return {(Case(name, place.part, place.size), place.cell): Score.of(test) for name, (place, _, test) in rows if test}


def our_scores(found: Iterable[Account]) -> Scores:
    """What the records say."""
    return {
        (Case(board.name, line.place.part, line.place.size), line.place.cell): Score.of(
            line.outcome.test, line.outcome.runs
        )
        for account in found
        for board in account.boards
        for line in board.lines
        if line.outcome
    }


def table_verdicts(found: Sequence[Account]) -> list[TableVerdict]:
    """Every statement about a task that something was recorded of."""
    printed, ours = printed_scores(), our_scores(found)
    tasks = {account.task for account in found}
    about = [claim for claim in paper.TABLE_CLAIMS if tasks & {task_of_table(name) for name in claim.tables}]
    return [judge(claim, printed, ours) for claim in about]


def judge(claim: TableClaim, printed: Scores, ours: Scores) -> TableVerdict:
    """One statement; parts that there is no data of are left out, everything else has to be there."""
    rule = RULES[claim.check]
    cases = list(dict.fromkeys(case for case, _ in printed if belongs(case, claim)))
    holds, _ = rule(claim, cases, printed)
    wanted = [case for case in cases if case.part not in paper.NO_DATA or any((case, c) in ours for c in claim.cells)]
    missing = [case for case in wanted if any((case, cell) not in ours for cell in claim.cells)]
    if not wanted:
        return TableVerdict(claim, holds, f"no data: {', '.join({part_name(c.part) for c in cases})}", None)
    if missing:
        more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
        return TableVerdict(
            claim, holds, f"not run: {'; '.join(case.words(claim) for case in missing[:2])}{more}", None
        )
    agrees, seen = rule(claim, wanted, ours)
    left_out = sorted({part_name(case.part) for case in cases if case not in wanted})
    return TableVerdict(claim, holds, seen + (f"; without {', '.join(left_out)}" if left_out else ""), agrees)


def belongs(case: Case, claim: TableClaim) -> bool:
    """The statement is about this case."""
    return case.table in claim.tables and case.size in claim.sizes and (not claim.parts or case.part in claim.parts)


def is_better(one: Score, two: Score, table: str) -> bool:
    """By its mean; a score that is a number is better than one that is none."""
    if math.isnan(one.mean) or math.isnan(two.mean):
        return math.isnan(two.mean) and not math.isnan(one.mean)
    return one.mean > two.mean if higher_is_better(paper.MEASURES[table]) else one.mean < two.mean


def compared(one: Score, two: Score) -> str:
    """Two means, and how likely they are as far apart by chance."""
    chance = one.chance(two)
    return f"{one.mean:.4g} against {two.mean:.4g}" + ("" if chance is None else f", chance {chance:.2f}")


def by_part(cases: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
    """Cases of one table and part; their depths rise, as printed."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        found.setdefault((case.table, case.part), []).append(case)
    return found


Rule = Callable[[TableClaim, Sequence[Case], Scores], tuple[bool, str]]


def won(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[list[Case], str]:
    """Cases in which the first cell is better than the second, and the other ones in words."""
    one, two = claim.cells
    lost = [case for case in cases if not is_better(scores[case, one], scores[case, two], case.table)]
    seen = f"{one.upper()} better in {len(cases) - len(lost)} of {len(cases)}"
    but = ", ".join(f"{case.words(claim)} ({compared(scores[case, one], scores[case, two])})" for case in lost)
    return [case for case in cases if case not in lost], seen + (f"; not: {but}" if but else "")


def better(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Its mean test score is better in every case."""
    cases_won, seen = won(claim, cases, scores)
    return len(cases_won) == len(cases), seen


def most(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Its mean test score is better in at least three of four cases."""
    cases_won, seen = won(claim, cases, scores)
    return 4 * len(cases_won) >= 3 * len(cases), seen


def slightly(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Its mean test score is better, by at most 5 %."""
    cases_won, seen = won(claim, cases, scores)
    apart = [gap(scores[case, claim.cells[0]], scores[case, claim.cells[1]]) for case in cases]
    return len(cases_won) == len(cases) and max(apart) <= SLIGHT, f"{seen}; {max(apart):.1%} apart"


def competitive(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Where its mean test score is not better, it is worse by at most 5 %."""
    cases_won, _ = won(claim, cases, scores)
    behind = {case: gap(scores[case, claim.cells[0]], scores[case, claim.cells[1]]) for case in cases}
    lost = [f"{case.words(claim)} {behind[case]:.1%}" for case in cases if case not in cases_won]
    close = all(behind[case] <= SLIGHT for case in cases if case not in cases_won)
    return close, f"behind: {', '.join(lost)}" if lost else "behind nowhere"


def gap(one: Score, two: Score) -> float:
    """How far apart two means are, as a share of the second; infinitely far from nan."""
    return math.inf if math.isnan(one.mean) or math.isnan(two.mean) else abs(one.mean - two.mean) / two.mean


def shallow(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """The best mean test score of each network is that of depth 1 or 2."""
    best: list[tuple[int, str]] = []
    for group in by_part(cases).values():
        for cell in claim.cells:
            first = group[0]
            for case in group[1:]:
                if is_better(scores[case, cell], scores[first, cell], case.table):
                    first = case
            best.append((first.size, f"{cell.upper()} {first.words(claim)}"))
    return all(size in SHALLOW for size, _ in best), "best: " + ", ".join(words for _, words in best)


def worsens(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """The mean test score is worse at depth 10 than at depth 1, and at most one step in between makes it better."""
    holds, seen = True, []
    for (_, part), group in by_part(cases).items():
        for cell in claim.cells:
            by_depth = [scores[case, cell] for case in group]
            worse = [is_better(a, b, group[0].table) for a, b in pairwise(by_depth)]
            holds &= is_better(by_depth[0], by_depth[-1], group[0].table) and worse.count(False) <= 1
            seen.append(f"{cell.upper()} {part_name(part)} " + ", ".join(f"{score.mean:.4g}" for score in by_depth))
    return holds, "; ".join(seen)


def steeper(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """From depth 1 to depth 10 its mean test score grows by the larger factor, in every language."""
    holds, seen = True, []
    for (_, part), group in by_part(cases).items():
        one, two = (scores[group[-1], cell].mean / scores[group[0], cell].mean for cell in claim.cells)
        holds &= one > two or math.isnan(one)
        names = [cell.upper() for cell in claim.cells]
        seen.append(f"{part_name(part)} {names[0]} {one:.3g} times, {names[1]} {two:.3g} times")
    return holds, "; ".join(seen)


def reaches(claim: TableClaim, cases: Sequence[Case], scores: Scores) -> tuple[bool, str]:
    """Its mean test accuracy is at most half a point below the paper's number."""
    printed = printed_scores()
    pairs = [(scores[case, claim.cells[0]].mean, printed[case, claim.cells[0]].mean, case.size) for case in cases]
    seen = ", ".join(f"{ours:.1%} with {units} units (paper {theirs:.1%})" for ours, theirs, units in pairs)
    return all(ours >= theirs - HALF_A_POINT for ours, theirs, _ in pairs), seen


RULES: dict[str, Rule] = {
    "better": better,
    "most": most,
    "slightly": slightly,
    "competitive": competitive,
    "shallow": shallow,
    "worsens": worsens,
    "steeper": steeper,
    "reaches": reaches,
}


def table_rules_in_words() -> list[str]:
    """Every statement with the rule that decides it, in the words of the function that applies it."""
    lines = []
    for check, rule in RULES.items():
        said = "; ".join(f"“{claim.text}”" for claim in paper.TABLE_CLAIMS if claim.check == check)
        words = str(rule.__doc__)
        lines.append(f"{said}: {words[0].lower()}{words[1:]}")
    return lines
