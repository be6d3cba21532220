"""Progress of studies while they train: a live table, lines for a log, or JSON for programs."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from deepmemory.lab.beyond.models import kind_of as kind_beyond
from deepmemory.lab.paper import depth_of
from deepmemory.lab.paper import kind_of as kind_in_paper
from deepmemory.lab.records import DIVERGED, REACHED, Run
from deepmemory.lab.settings import PAPER_TASKS, SYNTHETIC, THRESHOLDS, Setting, threshold_label
from deepmemory.lab.tasks import FORMATS, TASK_CLASSES, chance_level
from deepmemory.lab.training.stacks import is_large

if TYPE_CHECKING:
    from deepmemory.lab.training.loop import Epoch

PLAIN_EVERY = 5.0  # seconds between two lines of a log


class Display(Protocol):
    """Shows what happens while studies train."""

    def plan(self, settings: Sequence[Setting], seeds: Sequence[int], at_once: int = 1, parallel: bool = False) -> None:
        """Called with all studies that will be trained, ``at_once`` of them at a time.

        With ``parallel``, runs of large networks also train at the same time.
        """

    def say(self, text: str) -> None:
        """Show a message of one line."""

    def begin(self, setting: Setting, known: Sequence[Run]) -> None:
        """Called when a study starts; ``known`` are the runs that are already recorded."""

    def epoch(self, setting: Setting, epoch: Epoch, training: int) -> None:
        """Called when an epoch of some runs was recorded; ``training`` of them continue."""

    def end(self, setting: Setting, runs: Sequence[Run]) -> None:
        """Called when a study is finished."""

    def close(self) -> None:
        """Called when all studies are finished, or training was stopped."""


@dataclass
class StudyProgress:
    """The progress of one study."""

    setting: Setting
    seeds: Sequence[int]  # of the runs that are wanted
    under: list[set[int]] = field(default_factory=lambda: [set() for _ in THRESHOLDS])  # seeds, for each threshold
    epoch: int = 0
    training: int = 0
    loss: float = math.nan  # median on validation, like the score
    score: float = math.nan
    seconds: float = 0.0
    epochs_timed: int = 0
    finished: bool = False
    trained: dict[int, int] = field(default_factory=dict)  # epochs by seed; for a run that has ended, all of them
    stack: set[int] = field(default_factory=set)  # seeds of the last epoch
    parallel: bool = False  # whether all runs train at the same time, large networks too

    @property
    def wanted(self) -> int:
        """The number of runs."""
        return len(self.seeds)

    def add_recorded(self, runs: Sequence[Run]) -> None:
        """Add the runs that are already recorded."""
        for run in runs:
            self.trained[run.seed] = self.setting.epochs if run.state in (REACHED, DIVERGED) else run.epochs
            for seeds, first in zip(self.under, run.first_under, strict=False):
                if first is not None:
                    seeds.add(run.seed)
        self.take_medians([run.at_epoch(run.epochs) for run in runs if run.epochs])
        self.epoch = max((run.epochs for run in runs), default=0)

    def add_epoch(self, epoch: Epoch, training: int) -> None:
        """Add the numbers of one epoch."""
        self.trained |= dict.fromkeys(self.stack - epoch.values.keys(), self.setting.epochs)
        self.trained |= dict.fromkeys(epoch.values, epoch.number if training else self.setting.epochs)
        self.stack = set(epoch.values)
        for seed, values in epoch.values.items():
            for seeds, threshold in zip(self.under, THRESHOLDS, strict=True):
                if values["valid_loss"] < threshold:
                    seeds.add(seed)
        self.take_medians(list(epoch.values.values()))
        self.epoch, self.training = epoch.number, training
        self.seconds += epoch.seconds
        self.epochs_timed += 1

    def take_medians(self, values: Sequence[Mapping[str, float]]) -> None:
        """Set loss and score to the medians over the runs, from the values of one epoch."""
        self.loss = median([of_run["valid_loss"] for of_run in values])
        self.score = median([of_run[f"valid_{self.measure}"] for of_run in values])

    @property
    def synthetic(self) -> bool:
        """Whether runs under each threshold are counted; with real data there is a score instead."""
        return self.setting.task in SYNTHETIC

    @property
    def measure(self) -> str:
        """The measure of the score: the first that the task has besides the loss, as in the paper's tables."""
        measures = TASK_CLASSES[self.setting.task].measures
        return "loss" if self.synthetic or not measures else measures[0]

    @property
    def score_text(self) -> str:
        """The score with enough digits to tell epochs apart."""
        return format(self.score, FORMATS[self.measure])

    @property
    def chance(self) -> float | None:
        """The score of a network that ignores its input, if known."""
        level = chance_level(self.setting)
        return level.scores[self.measure] if level else None

    @property
    def chance_text(self) -> str:
        """The same as text; empty if unknown."""
        return "" if self.chance is None else f"{self.chance:.3g}"

    @property
    def part(self) -> str:
        """The part of the task: a language, an order of the pixels, or a group."""
        of = self.setting
        return {"translation": of.language, "pixel-mnist": of.pixels, "state-tracking": of.elements}.get(of.task, "")

    @property
    def label(self) -> tuple[str, str, str]:
        """The name of a study of real data: task and part of it, cell, size."""
        setting = self.setting
        size = f"{setting.hidden[-1]} units" if setting.task == "pixel-mnist" else f"depth {depth_of(setting)}"
        return f"{setting.task} {self.part}".strip(), self.kind, size

    @property
    def kind(self) -> str:
        """The name of the cell, such as ``dmu-c`` in the paper's studies and ``residual`` beyond them."""
        in_paper = self.setting.task in PAPER_TASKS and not self.setting.residual
        return (kind_in_paper if in_paper else kind_beyond)(self.setting)

    @property
    def testing(self) -> bool:
        """Whether the last epoch is over and the best weights are being tested."""
        over = self.training == 0 or self.epoch >= self.setting.epochs
        return over and self.epochs_timed > 0 and not self.finished

    @property
    def active(self) -> str:
        """The number of runs that still train, or the stage after training."""
        return "done" if self.finished else "testing" if self.testing else str(self.training)

    @property
    def counts(self) -> list[int]:
        """Runs under each threshold so far."""
        return [len(seeds) for seeds in self.under]

    @property
    def rate(self) -> float:
        """Epochs per second, all runs of a group together."""
        return self.epochs_timed / self.seconds if self.seconds else 0.0

    @property
    def epochs_left(self) -> int:
        """Epochs left in all stacks, if no run stops early; runs with equally many left count as one stack."""
        left = [max(0, self.setting.epochs - self.trained.get(seed, 0)) for seed in self.seeds]
        if self.parallel:
            return max(left)
        return sum(left if is_large(self.setting) else set(left))

    def seconds_left(self, typical_rate: float) -> float:
        """Seconds left at the rate so far, if no run stops early; nan while no rate is known."""
        rate = self.rate or typical_rate
        if self.finished:
            return 0.0
        return self.epochs_left / rate if rate else math.nan


class PlannedStudies:
    """The progress of all planned studies; each display below shows it in its own way."""

    def __init__(self) -> None:
        self.studies: dict[str, StudyProgress] = {}
        self.at_once = 1

    def plan(self, settings: Sequence[Setting], seeds: Sequence[int], at_once: int = 1, parallel: bool = False) -> None:
        """See :class:`Display`."""
        self.at_once = at_once
        self.studies = {setting.key: StudyProgress(setting, seeds, parallel=parallel) for setting in settings}

    def begin(self, setting: Setting, known: Sequence[Run]) -> None:
        """See :class:`Display`."""
        self.studies[setting.key].add_recorded(known)

    def epoch(self, setting: Setting, epoch: Epoch, training: int) -> None:
        """See :class:`Display`."""
        self.studies[setting.key].add_epoch(epoch, training)

    def end(self, setting: Setting, runs: Sequence[Run]) -> None:
        """See :class:`Display`."""
        study = self.studies[setting.key]
        study.add_recorded(runs)
        study.training, study.finished = 0, True

    def close(self) -> None:
        """See :class:`Display`."""

    def seconds_left(self) -> float:
        """Seconds left for all studies; one that has not begun is taken to run at the :meth:`typical_rate`."""
        left = [study.seconds_left(self.typical_rate(study.setting.task)) for study in self.studies.values()]
        return max([sum(left) / self.at_once, *left])

    def typical_rate(self, task: str) -> float:
        """Mean epochs per second of the studies of a task, or of any task if none has begun; 0 if nothing is known."""
        known = [study for study in self.studies.values() if study.rate]
        of_task = [study for study in known if study.setting.task == task]
        return statistics.mean(study.rate for study in of_task or known) if known else 0.0


class PlainLines(PlannedStudies):
    """A line every few seconds, for logs."""

    def __init__(self) -> None:
        super().__init__()
        self.printed = 0.0

    def say(self, text: str) -> None:
        """See :class:`Display`."""
        print(text, flush=True)

    def epoch(self, setting: Setting, epoch: Epoch, training: int) -> None:
        """See :class:`Display`."""
        super().epoch(setting, epoch, training)
        study = self.studies[setting.key]
        if study.testing or time.monotonic() - self.printed >= PLAIN_EVERY:
            self.printed = time.monotonic()
            self.line(study)

    def end(self, setting: Setting, runs: Sequence[Run]) -> None:
        """See :class:`Display`."""
        super().end(setting, runs)
        self.line(self.studies[setting.key])

    def line(self, study: StudyProgress) -> None:
        """Print the progress of a study."""
        chance = f" (chance {study.chance_text})" if study.chance_text else ""
        over = study.finished or study.testing
        if study.synthetic:
            counts = " ".join(f"{threshold_label(t)}:{n}" for t, n in zip(THRESHOLDS, study.counts, strict=True))
            name = f"{study.setting.task} {study.setting.cell}"
            news = f"runs under {counts} of {study.wanted}  median loss {study.loss:.2e}{chance}"
        else:
            name = " ".join(study.label)
            runs = (
                f"{study.wanted} run{'s' if study.wanted > 1 else ''}"
                if over
                else f"{study.training} of {study.wanted} runs training"
            )
            news = f"median valid {study.measure} {study.score_text}{chance}  {runs}"
        pace = f"  {study.rate:.2g} epochs/s" if study.rate else ""
        now = study.active if over else f"left {duration(self.seconds_left())}"
        print(f"{name}  epoch {study.epoch}/{study.setting.epochs}  {news}{pace}  {now}", flush=True)


class JsonLines(PlannedStudies):
    """One JSON object per line, for programs."""

    def say(self, text: str) -> None:
        """See :class:`Display`."""
        print(json.dumps({"event": "message", "text": text}), flush=True)

    def epoch(self, setting: Setting, epoch: Epoch, training: int) -> None:
        """See :class:`Display`."""
        super().epoch(setting, epoch, training)
        self.event("epoch", self.studies[setting.key])

    def end(self, setting: Setting, runs: Sequence[Run]) -> None:
        """See :class:`Display`."""
        super().end(setting, runs)
        self.event("study", self.studies[setting.key])

    def event(self, kind: str, study: StudyProgress) -> None:
        """Print the progress of a study."""
        if study.synthetic:
            names: dict[str, Any] = {"task": study.setting.task, "cell": study.setting.cell}
            news: dict[str, Any] = {
                "under": {threshold_label(t): n for t, n in zip(THRESHOLDS, study.counts, strict=True)},
                "median_valid_loss": finite(study.loss),
            }
        else:
            names = {"task": study.setting.task, "cell": study.kind, "depth": depth_of(study.setting)}
            names |= {"part": study.part, "hidden": study.setting.hidden}
            news = {"median_valid_loss": finite(study.loss), f"median_valid_{study.measure}": finite(study.score)}
        news["chance"] = study.chance
        told = {
            "event": kind,
            "study": study.setting.key,
            **names,
            "epoch": study.epoch,
            "epochs": study.setting.epochs,
            "training": study.training,
            **news,
            "epochs_per_second": study.rate,
            "seconds_left": finite(self.seconds_left()),
        }
        print(json.dumps(told), flush=True)


class LiveTable(PlannedStudies):
    """A table that is redrawn in place, for a terminal."""

    def __init__(self) -> None:
        super().__init__()
        from rich.live import Live

        self.live = Live(get_renderable=self.table, refresh_per_second=4)

    def plan(self, settings: Sequence[Setting], seeds: Sequence[int], at_once: int = 1, parallel: bool = False) -> None:
        """See :class:`Display`."""
        super().plan(settings, seeds, at_once, parallel)
        self.live.start()

    def say(self, text: str) -> None:
        """See :class:`Display`."""
        self.live.console.print(text)

    def close(self) -> None:
        """See :class:`Display`."""
        self.live.stop()

    def table(self) -> Any:
        """The tables at this moment: counts for synthetic tasks, scores for real data."""
        from rich.console import Group

        synthetic = [study for study in self.studies.values() if study.synthetic]
        real = [study for study in self.studies.values() if not study.synthetic]
        tables = [self.counts(synthetic)] if synthetic else []
        if real:
            tables.append(self.scores(real))
        if tables and (left := self.seconds_left()):
            tables[-1].caption = f"time left {duration(left)}"
        return Group(*tables)

    def counts(self, studies: Sequence[StudyProgress]) -> Any:
        """A table of runs under each threshold."""
        wanted = max(study.wanted for study in studies)
        heads = (*(threshold_label(threshold) for threshold in THRESHOLDS), "active", "median", "ep/s")
        table = small_table(f"how many of {wanted} runs are under each loss", ("task", "cell", "epoch"), heads)
        for study in studies:
            label = [study.setting.task, study.setting.cell.upper()]
            self.add(table, study, label, [*map(str, study.counts), study.active, f"{study.loss:.1e}"])
        return table

    def scores(self, studies: Sequence[StudyProgress]) -> Any:
        """A table of median validation scores, with as many studies as fit into the terminal."""
        room = max(4, self.live.console.height - 8)
        first = next((place for place, study in enumerate(studies) if not study.finished), len(studies))
        first = max(0, min(first - 1, len(studies) - room))
        shown = studies[first : first + room]
        title = "median validation score of the runs"
        if len(shown) < len(studies):
            title += f"; {sum(study.finished for study in studies)} of {len(studies)} studies done"
        table = small_table(title, ("task", "cell", "size", "epoch"), ("score", "", "chance", "active", "ep/s"))
        for study in shown:
            task, cell, size = study.label
            news = [study.score_text, study.measure, study.chance_text, study.active]
            self.add(table, study, [task, cell.upper(), size], news)
        return table

    def add(self, table: Any, study: StudyProgress, label: Sequence[str], news: Sequence[str]) -> None:
        """Add the row of one study, which has only a name until the study begins."""
        begun = study.epoch > 0
        table.add_row(
            *label,
            f"{study.epoch}/{study.setting.epochs}" if begun else "",
            *(news if begun else [""] * len(news)),
            f"{study.rate:.2g}" if study.rate else "",
            style=None if begun else "dim",
        )


def small_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Any:
    """A compact table with columns of words and columns of numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    look: dict[str, Any] = {"title_justify": "left", "caption_justify": "left", "padding": 0, "pad_edge": False}
    table = Table(title=title, box=SIMPLE_HEAD, **look)
    for head in words:
        table.add_column(head, no_wrap=True)
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def choose_display(as_json: bool) -> Display:
    """A live table in a terminal, lines elsewhere, or JSON if asked for."""
    if as_json:
        return JsonLines()
    return LiveTable() if sys.stdout.isatty() else PlainLines()


def median(losses: Sequence[float]) -> float:
    """The median of the finite losses; nan if there are none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.median(finite) if finite else math.nan


def finite(number: float) -> float | None:
    """The number, or None for nan and infinity, which JSON does not have."""
    return number if math.isfinite(number) else None


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds, such as 1:05:09."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
