"""What records of real data say, in numbers: our rows of the paper's tables.

Scores are taken at the epoch that was best on validation among those that the paper trains, by the measure that
``paper.EPOCH_BY`` names for the task, or else each by its own. A study stands in a table of the paper only if its
settings are the paper's and at least one run has had all epochs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from deepmemory.lab import paper
from deepmemory.lab.paper import Reading, Result, Spread
from deepmemory.lab.records import DIVERGED, REACHED, Run, Study
from deepmemory.lab.report.tables import figure_name
from deepmemory.lab.settings import LANGUAGES, PIXELS, REAL, Setting

TITLES = {
    "polymusic": "Music",
    "natlang": "Language",
    "translation": "Translation",
    "pixel-mnist": "Pixel by pixel MNIST",
}
SPLITS = ("train", "valid", "test")
CLOSE = 2.0  # standard deviations: a mean that is no further away, or better, counts as reproduced
REPRODUCED, NOT_REPRODUCED, NOT_RUN, NO_DATA = "reproduced", "not reproduced", "not run", "no data"


class Place(NamedTuple):
    """Where a study belongs in the paper's tables."""

    task: str
    cell: str  # dmu-c is one of its own
    size: int  # depth, or units of the DMU where the data is pixels
    part: str = ""  # language, or order of the pixels

    @property
    def words(self) -> str:
        """For people."""
        return ", ".join(filter(None, (self.cell.upper(), size_in_words(self.task, self.size), part_name(self.part))))

    @property
    def order(self) -> tuple[int, int, int]:
        """As in the paper's tables."""
        return ("", *LANGUAGES, *PIXELS).index(self.part), self.size, paper.KINDS.index(self.cell)


def size_in_words(task: str, size: int) -> str:
    """A depth, or for pixels a width."""
    return f"{size} units" if task == "pixel-mnist" else f"depth {size}"


def part_name(part: str) -> str:
    """Languages have a capital letter, orders of pixels have none."""
    return part.capitalize() if part in LANGUAGES else part


@dataclass(frozen=True)
class Trained:
    """A study of real data beside the setting of the paper that is nearest to it."""

    study: Study
    place: Place
    changes: tuple[tuple[str, object], ...]  # settings that differ from the paper's
    epochs: int  # that the paper trains; of pixels in another way than ours, those of the study

    @cached_property
    def complete(self) -> list[Run]:
        """Runs that have had all epochs, and diverged ones once the others have."""
        full = [run for run in self.begun if run.epochs >= self.epochs or run.state == REACHED]
        lost = [run for run in self.begun if run.state == DIVERGED and run not in full]
        return full + lost if full or len(lost) == len(self.begun) else []

    @cached_property
    def begun(self) -> list[Run]:
        """Runs with something recorded."""
        return [run for run in self.study.runs if run.epochs]

    @property
    def reached(self) -> int:
        """Epochs of the longest run."""
        return max(run.epochs for run in self.begun)

    @property
    def is_papers(self) -> bool:
        """May stand beside the paper's numbers. The paper searched for the rate of a DMU-C and does not give it."""
        free = {"lr"} if is_ablated(self.place) else set()
        return bool(self.complete) and {name for name, _ in self.changes} <= free

    @property
    def apart(self) -> str:
        """Why it is not drawn with the paper's settings of its part: another reading, or other settings."""
        if self.is_papers or not self.changes:
            return ""
        return self.changed if reading_of(self) else "other settings"

    @property
    def figure(self) -> str:
        """The name of the figure that shows it."""
        name = "-".join(filter(None, (self.place.task, self.place.part)))
        if not self.apart:
            return name
        return figure_name(name, self.changes) if reading_of(self) else f"{name}-other"

    @property
    def panel(self) -> tuple[str, int]:
        """Where it is in that figure: what was changed, and the size."""
        return ("" if self.is_papers else self.changed, self.place.size)

    @property
    def changed(self) -> str:
        """For people."""
        return ", ".join(f"{name} = {value}" for name, value in self.changes)

    @property
    def words(self) -> str:
        """What was changed or is still missing."""
        missing = [] if self.complete else [f"after {self.reached} of {self.epochs} epochs"]
        return "; ".join(filter(None, [self.changed, *missing]))

    @property
    def seconds(self) -> float:
        """That the study trained."""
        return sum(self.by_session.values())

    @property
    def by_session(self) -> dict[int, float]:
        """Seconds that the study trained in each session, whose runs trained side by side."""
        found: dict[int, float] = {}
        for run in self.study.runs:
            found[run.session] = max(run.seconds, found.get(run.session, 0.0))
        return found


class Score(NamedTuple):
    """What some runs have on the test."""

    mean: float  # nan where one diverged
    deviation: float | None
    runs: int

    @classmethod
    def of(cls, spread: Spread, runs: int = paper.REAL_RUNS) -> Score:
        """Without the best one; of as many runs as the paper has, if not told otherwise."""
        return cls(value(spread.mean), spread.std, runs)

    def chance(self, other: Score) -> float | None:
        """How likely two means are at least this far apart if both come from the same scores; None: not known."""
        if not (self.deviation and other.deviation):
            return None
        return welch(self.mean - other.mean, (self.deviation, self.runs), (other.deviation, other.runs))


@dataclass(frozen=True)
class Outcome:
    """What the runs of a study came to, for one measure."""

    train: Spread
    valid: Spread
    test: Spread
    tests: tuple[float, ...]  # of each run
    diverged: int
    training: int  # runs left out because they are not finished

    @property
    def runs(self) -> int:
        """That count."""
        return len(self.tests)


@dataclass(frozen=True)
class Line:
    """One row of a table: what the paper prints and what we have."""

    place: Place
    train: Spread | None  # the paper's; none where it prints nothing
    test: Spread | None
    measure: str
    ours: Trained | None

    @property
    def task(self) -> str:
        """What was learnt."""
        return self.place.task

    @cached_property
    def outcome(self) -> Outcome | None:
        """Ours."""
        return outcome(self.ours, self.measure) if self.ours else None

    @cached_property
    def usual(self) -> Outcome | None:
        """Ours as the usual perplexity: exp of the mean cross-entropy."""
        return outcome(self.ours, "loss", exp) if self.ours and self.measure == "perplexity" else None

    @property
    def our_train(self) -> Spread | None:
        """Beside ``train``."""
        return self.outcome.train if self.outcome else None

    @property
    def our_test(self) -> Spread | None:
        """Beside ``test``."""
        return self.outcome.test if self.outcome else None

    @property
    def excess(self) -> float | None:
        """Our mean test score less the paper's; nan where runs diverged."""
        if self.our_test is None or self.test is None or self.test.mean is None:
            return None
        return value(self.our_test.mean) - self.test.mean

    @property
    def deviations(self) -> float | None:
        """The same in standard deviations of the paper."""
        return None if self.excess is None or not (self.test and self.test.std) else self.excess / self.test.std

    @property
    def at_least_as_good(self) -> int:
        """Runs of ours that reach the paper's mean test score."""
        wanted, sign = value(self.test.mean if self.test else None), -1 if higher_is_better(self.measure) else 1
        return sum(sign * test <= sign * wanted for test in self.outcome.tests) if self.outcome else 0

    @property
    def chance(self) -> float | None:
        """Of our mean and the paper's."""
        if self.outcome is None or self.test is None:
            return None
        return Score.of(self.outcome.test, self.outcome.runs).chance(Score.of(self.test))

    @property
    def verdict(self) -> str:
        """Within two standard deviations of the paper's mean, or better; our own deviation where it prints none."""
        if self.outcome is None:
            return NO_DATA if self.place.part in paper.NO_DATA else NOT_RUN
        if self.excess is None:
            return ""
        allowed = CLOSE * ((self.test and self.test.std) or self.outcome.test.std or 0.0)
        worse = -self.excess if higher_is_better(self.measure) else self.excess
        return REPRODUCED if worse <= allowed else NOT_REPRODUCED


@dataclass(frozen=True)
class Board:
    """One table of the paper."""

    name: str  # a key of paper.METRICS
    lines: list[Line]

    @property
    def task(self) -> str:
        """What was learnt."""
        return task_of_table(self.name)

    @property
    def measure(self) -> str:
        """What its numbers are."""
        return paper.MEASURES[self.name]

    @property
    def title(self) -> str:
        """With the measure."""
        ablation = ": one learning rate for all (DMU-C) or two (DMU)"
        return f"{TITLES[self.task]}, {self.measure}" + (ablation if self.name.endswith("ablation") else "")

    @property
    def ours(self) -> list[Trained]:
        """The studies in it."""
        return [line.ours for line in self.lines if line.ours]


@dataclass(frozen=True)
class Account:
    """Everything recorded of one task with real data."""

    task: str
    trained: list[Trained]

    @cached_property
    def chosen(self) -> dict[Place, Trained]:
        """The study that stands in the paper's tables at each place."""
        found: dict[Place, Trained] = {}
        for one in self.trained:
            if one.is_papers:
                found[one.place] = better_rate(found[one.place], one) if one.place in found else one
        return found

    @cached_property
    def boards(self) -> list[Board]:
        """The paper's tables about this task, the main one first and with what else was trained."""
        boards = []
        for name, measure in paper.MEASURES.items():
            if task_of_table(name) == self.task:
                lines = [Line(*row, measure, self.chosen.get(row[0])) for row in printed_rows(name)]
                places = {line.place for line in lines}
                more = [place for place in self.chosen if place not in places and not is_ablated(place)]
                if not name.endswith("ablation"):
                    lines += [
                        Line(place, None, None, measure, self.chosen[place])
                        for place in sorted(more, key=lambda p: p.order)
                    ]
                boards.append(Board(name, lines))
        return boards

    def judged(self, *parts: str) -> list[str]:
        """Verdicts of the rows that can be compared, of these parts or of all; a row in two tables counts once."""
        rows = {(line.place, line.measure): line.verdict for board in self.boards for line in board.lines}
        wanted = [verdict for (place, _), verdict in rows.items() if not parts or place.part in parts]
        return [verdict for verdict in wanted if verdict in (REPRODUCED, NOT_REPRODUCED)]

    @property
    def others(self) -> list[Trained]:
        """Studies that are neither the paper's nor another reading of it: shortened, unfinished or changed ones."""
        return [one for one in self.trained if not one.is_papers and reading_of(one) is None]

    def curves(self) -> dict[str, dict[tuple[str, int], list[Trained]]]:
        """Studies by figure and panel; of the paper's settings one for each place, finished if there is such a one."""
        drawn: dict[str, dict[tuple[str, int], list[Trained]]] = {}
        for one in sorted(self.trained, key=lambda one: one.place.order):
            if one.apart or one is self.chosen.get(one.place, one):
                drawn.setdefault(one.figure, {}).setdefault(one.panel, []).append(one)
        return drawn


def accounts(studies: Sequence[Study]) -> list[Account]:
    """Sort studies by task; those without a finished epoch are left out."""
    begun = [trained(study) for study in studies if study.setting.task in REAL and any(r.epochs for r in study.runs)]
    return [Account(task, of_task) for task in REAL if (of_task := [one for one in begun if one.place.task == task])]


def trained(study: Study) -> Trained:
    """A study with the place it has in the paper, and how it differs from what the paper did there."""
    place, published = nearest(study.setting)
    theirs, own = asdict(published), asdict(study.setting)
    changes = tuple((name, own[name]) for name in own if own[name] != theirs[name] and name not in COORDINATES)
    if place.task != "pixel-mnist" or not changes:
        return Trained(study, place, changes, published.epochs)
    # The paper trains pixels for no number of epochs that we know of: it is a part of the recipe.
    longer = [("epochs", own["epochs"])] if own["epochs"] != theirs["epochs"] else []
    return Trained(study, place, (*changes, *longer), own["epochs"])


COORDINATES = ("epochs", "language", "pixels")  # settings that a place tells, or that the records tell better


def nearest(setting: Setting) -> tuple[Place, Setting]:
    """The place of a setting, and the paper's setting there; for sizes the paper has not, that of the first size."""
    cell = paper.kind_of(setting)
    if setting.task == "pixel-mnist":
        of_units = {u: published(setting.task, cell, units=u, pixels=setting.pixels) for u in paper.UNITS}
        units = next((u for u, made in of_units.items() if made.hidden == setting.hidden), setting.hidden[0])
        return Place(setting.task, cell, units, setting.pixels), of_units.get(units, of_units[paper.UNITS[0]])
    depth = paper.depth_of(setting)
    part = setting.language if setting.task == "translation" else ""
    known = depth if depth in paper.DEPTHS and cell in paper.COMPARED else paper.DEPTHS[0]
    return Place(setting.task, cell, depth, part), published(setting.task, cell, depth=known)


published = lru_cache(paper.setting)


def task_of_table(name: str) -> str:
    """The task that a table is about.

    >>> task_of_table("pixel_mnist"), task_of_table("natlang_lr_ablation")
    ('pixel-mnist', 'natlang')
    """
    return name.removesuffix("_lr_ablation").replace("_", "-")


def board_of_rates(place: Place) -> str:
    """The table of the paper, if there is one, that compares DMU-C and DMU in what was learnt there."""
    return f"{place.task}_lr_ablation"


def is_ablated(place: Place) -> bool:
    """A DMU-C that stands in such a table."""
    return place.cell == paper.DMU_C and board_of_rates(place) in paper.MEASURES


def printed_rows(name: str) -> list[tuple[Place, Spread | None, Spread | None]]:
    """The rows of a table of the paper: place, train, test."""
    task = task_of_table(name)
    if name == "pixel_mnist":
        own = [row for row in paper.PIXEL_MNIST if row.cell.startswith("DMU")]
        percent = {Place(task, "dmu", row.units, order): getattr(row, order) for order in PIXELS for row in own}
        return [(place, None, Spread(p / 100, p / 100, None)) for place, p in percent.items()]

    def place(row: Result) -> Place:
        return Place(task, row.cell.lower(), row.depth, paper.PAIRS[row.pair] if row.pair else "")

    return [(place(row), row.train, row.test) for row in paper.RESULTS[name]]


def better_rate(one: Trained, two: Trained) -> Trained:
    """Of two rates of a DMU-C the one with more runs, then the one that is better on validation, as in a search.

    Better in what its table is about.
    """
    measure = paper.MEASURES[board_of_rates(one.place)]
    sign = -1 if higher_is_better(measure) else 1

    def rank(of: Trained) -> tuple[int, float]:
        mean = outcome(of, measure).valid.mean
        return -len(of.complete), math.inf if mean is None else sign * mean

    return min(one, two, key=rank)


# --- from runs to numbers -------------------------------------------------------------------------


def outcome(of: Trained, measure: str, scale: Callable[[float], float] = float, by: str | None = None) -> Outcome:
    """Best, mean and deviation over the complete runs, or over all where none is; of scores on a ``scale``.

    ``by`` is the measure that chooses the epoch, if not the usual one.
    """
    runs, by = of.complete or of.begun, by or paper.EPOCH_BY.get(of.place.task, measure)
    at_best = [tuple(map(scale, scores(run, measure, of.epochs, by))) for run in runs]
    tests = tuple(test for *_, test in at_best)
    finite = [run for run, test in enumerate(tests) if math.isfinite(test)]
    choose = max if higher_is_better(measure) else min
    best = choose(finite, key=lambda run: tests[run]) if finite else 0
    train, valid, test = (spread(values, best) for values in zip(*at_best, strict=True))
    diverged = sum(run.state == DIVERGED for run in runs)
    return Outcome(train, valid, test, tests, diverged, len(of.begun) - len(runs))


def welch(difference: float, *samples: tuple[float, int]) -> float:
    """The probability of Welch's t-test, two-sided, for two samples of (standard deviation, runs).

    >>> round(welch(1.55, (1.74, 5), (0.47, 5)), 3)
    0.118
    """
    parts = [deviation**2 / runs for deviation, runs in samples]
    freedom = sum(parts) ** 2 / sum(part**2 / (runs - 1) for part, (_, runs) in zip(parts, samples, strict=True))
    t = abs(difference) / math.sqrt(sum(parts))
    # Student's density between -t and t. With x = sqrt(freedom) tan(angle) it is a power of the cosine, and smooth.
    steps, end = 1000, math.atan(t / math.sqrt(freedom))
    heights = [math.cos(end * step / steps) ** (freedom - 1) for step in range(steps + 1)]
    area = (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])) * end / steps / 3
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return max(0.0, 1 - 2 * scale * area)


def scores(run: Run, measure: str, epochs: int, by: str) -> tuple[float, float, float]:
    """Train, validation and test score at the epoch whose ``by`` was best on validation; nan if none was finite."""
    finite = {epoch: value for epoch, value in enumerate(run.curves[f"valid_{by}"][:epochs], 1) if math.isfinite(value)}
    if not finite:
        return math.nan, math.nan, math.nan
    best = run.at_epoch((max if higher_is_better(by) else min)(finite, key=lambda epoch: finite[epoch]))
    train, valid, test = (best[f"{split}_{measure}"] for split in SPLITS)
    return train, valid, test


def in_the_end(of: Trained, measure: str) -> Spread:
    """Best, mean and deviation of the runs' validation scores after the last of the paper's epochs."""
    values = [run.curves[f"valid_{measure}"][: of.epochs][-1] for run in of.complete or of.begun]
    best = (max if higher_is_better(measure) else min)(values)
    return spread(values, values.index(best))


def spread(values: Sequence[float], best: int) -> Spread:
    """The chosen one, mean and standard deviation (of a sample); as in the paper, one run of nan makes both nan."""
    if not all(map(math.isfinite, values)):
        return Spread(values[best], None, None)
    return Spread(values[best], statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def exp(loss: float) -> float:
    """The perplexity of a cross-entropy; inf where it is too large for a number."""
    return math.exp(loss) if not loss > 700 else math.inf


def higher_is_better(measure: str) -> bool:
    """Losses and perplexities are better when low."""
    return measure == "accuracy"


def value(mean: float | None) -> float:
    """The paper's nan as a number."""
    return math.nan if mean is None else mean


# --- readings -------------------------------------------------------------------------------------


def reading_of(one: Trained) -> Reading | None:
    """The open setting that this study reads the other way and in which alone it differs from the paper."""
    return next((r for r in paper.TABLE_READINGS if one.changes == ((r.field, r.other),)), None)


def both_readings(reading: Reading, found: Iterable[Account]) -> list[tuple[Line, Trained]]:
    """Rows of the paper's main tables where the other reading was trained, with it."""
    pairs = []
    for account in found:
        others = {one.place: one for one in account.trained if reading_of(one) is reading}
        lines = {line.place: line for board in reversed(account.boards) for line in board.lines}
        pairs += [(lines[place], others[place]) for place in sorted(others, key=lambda p: p.order) if place in lines]
    return pairs


def rates(found: Iterable[Account]) -> list[Trained]:
    """Every learning rate of a DMU-C that was tried, where there is more than one."""
    tried: dict[Place, list[Trained]] = {}
    for account in found:
        for one in account.trained:
            if is_ablated(one.place) and one.is_papers:
                tried.setdefault(one.place, []).append(one)
    several = [sorted(of_place, key=lambda one: one.study.setting.lr) for of_place in tried.values()]
    return [one for of_place in several if len(of_place) > 1 for one in of_place]
