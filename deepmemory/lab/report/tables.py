"""What the records say, in numbers: runs under each threshold, and the paper's claims checked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from deepmemory.lab import paper
from deepmemory.lab.paper import Claim
from deepmemory.lab.records import DIVERGED, RUNNING, Run, Study
from deepmemory.lab.settings import CELLS, OWNERS, TASKS, THRESHOLDS, threshold_label

SIMILAR = 0.15  # shares of runs that differ by no more are called similar
ABOUT_HALF = (0.3, 0.7)


@dataclass(frozen=True)
class Picture:
    """One figure: the cells of a task, all trained the paper's way or all with the same change to it."""

    task: str
    variant: tuple[tuple[str, object], ...]  # settings that differ from the paper's; none in the main picture
    studies: dict[str, Study]  # by cell

    @property
    def name(self) -> str:
        """For files."""
        changes = "".join(f"-{name}-{value}" for name, value in self.variant)
        return self.task + "".join(c if c.isalnum() or c in "-._" else "_" for c in changes)

    @property
    def changes(self) -> str:
        """For people."""
        return ", ".join(f"{name} = {value}" for name, value in self.variant)


@dataclass(frozen=True)
class Row:
    """One cell in a picture."""

    cell: str
    runs: int
    diverged: int
    training: int
    under: tuple[int, ...]  # runs, for each threshold
    median_epoch: tuple[float | None, ...]  # of the runs that got under it
    epochs: int  # the longest run's
    hours: float


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper beside what the records say."""

    claim: Claim
    seen: str
    agrees: bool | None  # None where a cell is missing or the claim cannot be decided


def pictures(studies: Sequence[Study]) -> list[Picture]:
    """Sort studies into figures; a cell whose own settings were not varied stands in every figure of its kind."""
    found: dict[tuple[str, tuple, tuple], dict[str, Study]] = {}
    for study in studies:
        if any(run.curves for run in study.runs):
            common, own = differences(study)
            found.setdefault((study.setting.task, common, own), {})[study.setting.cell] = study
    made = []
    for (task, common, own), cells in found.items():
        filled = {**found.get((task, common, ()), {}), **cells}
        ordered = {cell: filled[cell] for cell in CELLS if cell in filled}
        made.append(Picture(task, common + own, ordered))
    return sorted(made, key=lambda p: (TASKS.index(p.task), len(p.variant), p.changes))


def differences(study: Study) -> tuple[tuple, tuple]:
    """Settings that differ from the paper's: those that concern every cell, and those of this cell alone."""
    published = asdict(paper.setting(study.setting.task, study.setting.cell))
    changed = [
        (name, value) for name, value in asdict(study.setting).items() if value != published[name] and name != "epochs"
    ]
    common = tuple(item for item in changed if OWNERS.get(item[0], ("", ""))[0] != "cell")
    return common, tuple(item for item in changed if item not in common)


def row(study: Study) -> Row:
    """The numbers of one study."""
    reached = [[run.first_under[i] for run in study.runs if under(run, i)] for i in range(len(THRESHOLDS))]
    return Row(
        cell=study.setting.cell,
        runs=len(study.runs),
        diverged=sum(run.state == DIVERGED for run in study.runs),
        training=sum(run.state == RUNNING for run in study.runs),
        under=tuple(len(epochs) for epochs in reached),
        median_epoch=tuple(statistics.median(e for e in epochs if e) if epochs else None for epochs in reached),
        epochs=max((len(run.curves) for run in study.runs), default=0),
        hours=max((run.seconds for run in study.runs), default=0.0) / 3600,
    )


def under(run: Run, index: int) -> bool:
    """This run got under that threshold."""
    return index < len(run.first_under) and run.first_under[index] is not None


def counts_by_epoch(study: Study, index: int, epochs: int) -> list[int]:
    """Runs that got under a threshold in or before each epoch, from epoch 0."""
    firsts = [run.first_under[index] for run in study.runs if under(run, index)]
    return [sum(first <= epoch for first in firsts if first is not None) for epoch in range(epochs + 1)]


def longest(studies: dict[str, Study]) -> int:
    """Epochs the axis of a picture needs."""
    return max(max(len(run.curves) for run in study.runs) for study in studies.values())


# --- claims ---------------------------------------------------------------------------------------


def verdicts(picture: Picture) -> list[Verdict]:
    """Every claim the paper makes about this task."""
    return [verdict(claim, picture.studies) for claim in paper.CLAIMS[picture.task]]


def verdict(claim: Claim, studies: dict[str, Study]) -> Verdict:
    """One claim against the records."""
    missing = [cell.upper() for cell in claim.cells if cell not in studies]
    if missing:
        return Verdict(claim, f"not run: {', '.join(missing)}", None)
    chosen = [studies[cell] for cell in claim.cells]
    indices = [THRESHOLDS.index(t) for t in claim.thresholds or THRESHOLDS]
    agrees, seen = RULES[claim.check](chosen, indices, longest(studies))
    return Verdict(claim, seen, agrees)


def share(study: Study, index: int) -> float:
    """Part of all runs that got under a threshold."""
    return row(study).under[index] / len(study.runs)


def score(study: Study, indices: Sequence[int], epochs: int) -> float:
    """Mean height of the curves, as a share of all runs: 1 is all runs at once, 0 is none ever."""
    total = sum(sum(counts_by_epoch(study, i, epochs)[1:]) for i in indices)
    return total / (len(indices) * epochs * len(study.runs))


def shares(studies: Sequence[Study], indices: Sequence[int]) -> str:
    """Runs under each threshold, in words."""
    return (
        "; ".join(
            f"{s.setting.cell.upper()} " + ", ".join(f"{row(s).under[i]}/{len(s.runs)}" for i in indices)
            for s in studies
        )
        + " under "
        + ", ".join(threshold_label(THRESHOLDS[i]) for i in indices)
    )


Rule = Callable[[Sequence[Study], Sequence[int], int], tuple[bool | None, str]]


def ahead(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """The first cell's curves lie higher, on the whole, than every other's."""
    scores = [score(study, indices, epochs) for study in studies]
    seen = "mean height of the curves: " + ", ".join(
        f"{study.setting.cell.upper()} {value:.1%}" for study, value in zip(studies, scores, strict=True)
    )
    return (all(scores[0] > other for other in scores[1:]) if any(scores) else None), seen


def more(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """A larger share of the first cell's runs at every threshold."""
    return all(share(studies[0], i) > share(studies[1], i) for i in indices), shares(studies, indices)


def similar(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """Shares of runs differ little at every threshold."""
    close = all(abs(share(studies[0], i) - share(studies[1], i)) <= SIMILAR for i in indices)
    return close, shares(studies, indices)


def faster(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """The first cell's runs that get there need fewer epochs, wherever both have such runs."""
    medians = [[row(study).median_epoch[i] for i in indices] for study in studies]
    pairs = [(a, b) for a, b in zip(*medians, strict=True) if a is not None and b is not None]
    seen = (
        "median epoch: "
        + "; ".join(
            f"{study.setting.cell.upper()} " + ", ".join("never" if m is None else f"{m:g}" for m in of_cell)
            for study, of_cell in zip(studies, medians, strict=True)
        )
        + " under "
        + ", ".join(threshold_label(THRESHOLDS[i]) for i in indices)
    )
    return (all(a < b for a, b in pairs) if pairs else None), seen


def never(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """No run, at any of the thresholds."""
    return all(share(studies[0], i) == 0 for i in indices), shares(studies, indices)


def partly(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """Some runs, not all."""
    return all(0 < share(studies[0], i) < 1 for i in indices), shares(studies, indices)


def mostly(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """More than half of the runs at every threshold."""
    return all(share(studies[0], i) > 0.5 for i in indices), shares(studies, indices)


def half(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """About half of the runs get under the first threshold, and most of those under the last."""
    first, last = share(studies[0], indices[0]), share(studies[0], indices[-1])
    return ABOUT_HALF[0] <= first <= ABOUT_HALF[1] and last >= 0.8 * first, shares(studies, indices)


RULES: dict[str, Rule] = {
    "ahead": ahead,
    "more": more,
    "similar": similar,
    "faster": faster,
    "never": never,
    "partly": partly,
    "mostly": mostly,
    "half": half,
}
