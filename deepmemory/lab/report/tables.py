"""What records of synthetic tasks say, in numbers: runs under each threshold, and the paper's claims checked."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepmemory.lab import paper
from deepmemory.lab.paper import Claim, Reading
from deepmemory.lab.records import DIVERGED, RUNNING, Run, Study
from deepmemory.lab.settings import CELLS, OWNERS, SYNTHETIC, TASKS, THRESHOLDS, threshold_label
from deepmemory.lab.writing import file_name

SIMILAR = 0.15  # shares of runs that differ by no more are called similar
ABOUT_HALF = (0.3, 0.7)
TITLES = {"adding": "Adding", "temporal-order": "Temporal order", "noisy-sequence": "Noisy sequence"}


@dataclass(frozen=True)
class Picture:
    """One figure: the cells of a task, all trained the paper's way or all with the same change to it."""

    task: str
    variant: tuple[tuple[str, object], ...]  # settings that differ from the paper's; none in the main picture
    studies: dict[str, Study]  # by cell

    @property
    def name(self) -> str:
        """For files."""
        return figure_name(self.task, self.variant)

    @property
    def changes(self) -> str:
        """For people."""
        return ", ".join(f"{name} = {value}" for name, value in self.variant)

    @property
    def title(self) -> str:
        """The task's name, and what was changed."""
        return TITLES[self.task] + (f", with {self.changes}" if self.variant else "")


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
    seconds: float  # that the study took to train
    test_loss: float | None  # median over the runs, of each run's best weights
    test_accuracy: float | None


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper beside what the records say."""

    claim: Claim
    seen: str
    agrees: bool | None  # None where a cell is missing or the claim cannot be decided


def figure_name(name: str, changes: Sequence[tuple[str, object]]) -> str:
    """Of a figure's files, with these changes to the paper's settings.

    >>> figure_name("adding", [("module_rate", "0.001"), ("hidden", (7,))])
    'adding-module_rate-0.001-hidden-_7__'
    """
    changed = "".join(f"-{name}-{value}" for name, value in changes)
    return file_name(name + re.sub("[(), +]", "_", changed))


def pictures(studies: Sequence[Study]) -> list[Picture]:
    """Sort studies into figures; a cell whose own settings were not varied stands in every figure of its kind."""
    found: dict[tuple[str, tuple, tuple], dict[str, Study]] = {}
    for study in studies:
        if study.setting.task in SYNTHETIC and any(run.epochs for run in study.runs):
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
    common = tuple(item for item in changed if OWNERS.get(item[0], ("", ()))[0] != "cell")
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
        median_epoch=tuple(median_of([e for e in epochs if e]) for epochs in reached),
        epochs=max((run.epochs for run in study.runs), default=0),
        seconds=max((run.seconds for run in study.runs), default=0.0),
        test_loss=median_of([run.test["loss"] for run in study.runs if run.test]),
        test_accuracy=median_of([run.test["accuracy"] for run in study.runs if run.test]),
    )


def median_of(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.median(values) if values else None


def under(run: Run, index: int) -> bool:
    """This run got under that threshold."""
    return index < len(run.first_under) and run.first_under[index] is not None


def counts_by_epoch(study: Study, index: int, epochs: int) -> list[int]:
    """Runs that got under a threshold in or before each epoch, from epoch 0."""
    firsts = [run.first_under[index] for run in study.runs if under(run, index)]
    return [sum(first <= epoch for first in firsts if first is not None) for epoch in range(epochs + 1)]


def longest(studies: dict[str, Study]) -> int:
    """Epochs the axis of a picture needs."""
    return max(max(run.epochs for run in study.runs) for study in studies.values())


# --- words ----------------------------------------------------------------------------------------


def agreement(found: Sequence[Picture]) -> str:
    """How many of the paper's statements hold, in one sentence."""
    decided = [v for picture in found if not picture.variant for v in verdicts(picture) if v.agrees is not None]
    if not decided:
        return "No study here has the paper's settings unchanged; each section says what was changed."
    agreed = sum(bool(v.agrees) for v in decided)
    return f"{agreed} of {len(decided)} of the paper's statements that these records can decide hold here."


def shortfall(picture: Picture) -> str:
    """Fewer runs or epochs than the paper's, in words; nothing where it is no shortfall."""
    runs = min(len(study.runs) for study in picture.studies.values())
    epochs = max(study.setting.epochs for study in picture.studies.values())
    if runs >= paper.RUNS and epochs >= paper.EPOCHS:
        return ""
    return (
        f"These are {runs} or more runs per cell of at most {epochs} epochs; the paper has {paper.RUNS} of "
        f"{paper.EPOCHS}. Read the comparison as a hint."
    )


def count_texts(numbers: Row | None) -> list[str]:
    """Runs under each threshold and their median epoch; nothing recorded is said to be so."""
    if numbers is None:
        return ["not run", *[""] * (len(THRESHOLDS) - 1)]
    return [
        f"{count}/{numbers.runs}" + (f" ({median:g})" if median is not None else "")
        for count, median in zip(numbers.under, numbers.median_epoch, strict=True)
    ]


def number(value: float | None, how: str) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else format(value, how)  # noqa: RUF001


def minutes(found: Sequence[Picture]) -> str:
    """How long all studies trained, each counted once."""
    studies = {study.setting.key: study for picture in found for study in picture.studies.values()}
    whole, rest = divmod(round(sum(row(study).seconds for study in studies.values())), 60)
    return f"{whole} min {rest} s"


def machines(studies: Iterable[Study], sessions: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Machine, versions and commit of every session that trained these studies, each combination once."""
    used = [sessions[number] for number in {run.session for study in studies for run in study.runs}]
    seen: dict[str, str] = {}
    for session in sorted(used, key=lambda session: session["started"]):
        own = {name: value for name, value in session.items() if name != "started" and value is not None}
        if own.get("deepmemory") == "not installed":
            own["deepmemory"] = "from source"
        seen.setdefault(", ".join(f"{name} {value}" for name, value in own.items()), session["started"])
    return [f"from {started[:16].replace('T', ' ')} UTC: {text}" for text, started in seen.items()]


# --- readings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One setting that the paper leaves open, both readings of it side by side."""

    reading: Reading
    rows: list[tuple[str, str, Row | None, Row | None]]  # task, cell, main reading, other reading
    pictures: list[tuple[Picture, Picture]]  # main and other, of the tasks that have both

    @property
    def recorded(self) -> bool:
        """Something was trained with the other reading."""
        return any(other for *_, other in self.rows)


def compare_readings(found: Sequence[Picture]) -> list[Comparison]:
    """Every setting left open in the tasks recorded, with what came out of its two readings."""
    compared = [compare(reading, found) for reading in paper.READINGS]
    return [comparison for comparison in compared if comparison.rows]


def compare(reading: Reading, found: Sequence[Picture]) -> Comparison:
    """One open setting, task by task and cell by cell."""
    by_task = {picture.task: picture for picture in found if not picture.variant}
    others = {picture.task: picture for picture in found if picture.variant == ((reading.field, reading.other),)}
    recorded = {picture.task for picture in found}
    rows = []
    for task in [task for task in reading.tasks if task in recorded]:
        for cell in reading.cells:
            pair = [
                row(picture.studies[cell]) if picture and cell in picture.studies else None
                for picture in (by_task.get(task), others.get(task))
            ]
            rows.append((task, cell, pair[0], pair[1]))
    both = [(by_task[task], others[task]) for task in reading.tasks if task in by_task and task in others]
    return Comparison(reading, rows, both)


def is_reading(picture: Picture) -> bool:
    """The picture differs from the paper's in one open setting and nothing else."""
    return any(picture.variant == ((reading.field, reading.other),) for reading in paper.READINGS)


def patience_note(found: Sequence[Picture]) -> str:
    """What stopping at once would have saved, read off the runs that were patient."""
    trained, needed = epochs_with_patience(found)
    return f"The runs of the main study trained {trained:,} epochs; with a patience of 1 the same runs take {needed:,}."


def epochs_with_patience(found: Sequence[Picture]) -> tuple[int, int]:
    """Epochs that the runs of the main pictures took, and that they would take if the last threshold stopped them."""
    runs = [run for picture in found if not picture.variant for study in picture.studies.values() for run in study.runs]
    return sum(run.epochs for run in runs), sum(run.first_under[-1] or run.epochs for run in runs)


# --- claims ---------------------------------------------------------------------------------------


def verdicts(picture: Picture) -> list[Verdict]:
    """Every claim the paper makes about this task."""
    return [verdict(claim, picture.studies) for claim in paper.CLAIMS[picture.task]]


def verdict_pairs(reading: Reading, main: Picture, other: Picture) -> list[tuple[Verdict, Verdict]]:
    """Both readings' verdicts on every claim that the reading can change."""
    pairs = zip(verdicts(main), verdicts(other), strict=True)
    return [(one, two) for one, two in pairs if set(one.claim.cells) & set(reading.cells)]


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
    """The curves of the cell said to be better lie higher, on average over epochs and thresholds."""
    scores = [score(study, indices, epochs) for study in studies]
    seen = "mean height of the curves: " + ", ".join(
        f"{study.setting.cell.upper()} {value:.1%}" for study, value in zip(studies, scores, strict=True)
    )
    return (all(scores[0] > other for other in scores[1:]) if any(scores) else None), seen


def more(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """A larger share of its runs at every threshold."""
    return all(share(studies[0], i) > share(studies[1], i) for i in indices), shares(studies, indices)


def similar(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """Shares of runs differ by at most 15 points at every threshold."""
    widest = max(abs(share(studies[0], i) - share(studies[1], i)) for i in indices)
    return widest <= SIMILAR, f"{shares(studies, indices)}; at most {100 * widest:.1f} points apart"


def faster(studies: Sequence[Study], indices: Sequence[int], epochs: int) -> tuple[bool | None, str]:
    """Its runs that get there need fewer epochs in the median, wherever both cells have such runs."""
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
    """30 to 70 % of the runs get under the first threshold, and at least 80 % of those under the last."""
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


def rules_in_words() -> list[str]:
    """Every statement of the paper with the rule that decides it, in the words of the function that applies it."""
    lines = []
    for check, rule in RULES.items():
        said = sorted({claim.text for claims in paper.CLAIMS.values() for claim in claims if claim.check == check})
        words = str(rule.__doc__)
        lines.append(f"{'; '.join(f'“{text}”' for text in said)}: {words[0].lower()}{words[1:]}")
    return lines
