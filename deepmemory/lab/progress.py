"""What a person, a log file or a machine sees while studies train."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepmemory.lab.records import Run
from deepmemory.lab.settings import THRESHOLDS, Setting, threshold_label
from deepmemory.lab.training import Epoch

PLAIN_EVERY = 5.0  # seconds between two lines of one study where output is no terminal


class Display(Protocol):
    """Told what happens; shows it in its own way."""

    def plan(self, settings: Sequence[Setting], seeds: Sequence[int]) -> None:
        """Everything that is going to be trained."""

    def say(self, text: str) -> None:
        """One line worth reading."""

    def begin(self, setting: Setting, known: Sequence[Run]) -> None:
        """A study starts; ``known`` runs are in the records already."""

    def epoch(self, setting: Setting, epoch: Epoch, training: int) -> None:
        """An epoch of some runs was recorded; ``training`` of them go on."""

    def end(self, setting: Setting, runs: Sequence[Run]) -> None:
        """A study is finished."""

    def close(self) -> None:
        """Nothing more will come."""


@dataclass
class StudyProgress:
    """How far one study has come."""

    setting: Setting
    wanted: int
    under: list[set[int]] = field(default_factory=lambda: [set() for _ in THRESHOLDS])  # seeds, for each threshold
    epoch: int = 0
    training: int = 0
    loss: float = math.nan
    seconds: float = 0.0
    epochs_timed: int = 0
    finished: bool = False

    def learn(self, runs: Sequence[Run]) -> None:
        """Take over what the records say."""
        for run in runs:
            for seeds, first in zip(self.under, run.first_under, strict=False):
                if first is not None:
                    seeds.add(run.seed)
        losses = [run.curves[-1][1] for run in runs if run.curves]
        self.loss = median(losses)
        self.epoch = max((len(run.curves) for run in runs), default=0)

    def add(self, epoch: Epoch, training: int) -> None:
        """Take over one epoch."""
        for seed, values in epoch.values.items():
            for seeds, threshold in zip(self.under, THRESHOLDS, strict=True):
                if values[1] < threshold:
                    seeds.add(seed)
        self.loss = median([values[1] for values in epoch.values.values()])
        self.epoch, self.training = epoch.number, training
        self.seconds += epoch.seconds
        self.epochs_timed += 1

    @property
    def counts(self) -> list[int]:
        """Runs under each threshold so far."""
        return [len(seeds) for seeds in self.under]

    @property
    def rate(self) -> float:
        """Epochs per second, all runs of a group together."""
        return self.epochs_timed / self.seconds if self.seconds else 0.0

    def seconds_left(self, typical_rate: float) -> float:
        """At the pace so far, if no run stops early; nan while no pace is known."""
        rate = self.rate or typical_rate
        if self.finished:
            return 0.0
        return (self.setting.epochs - self.epoch) / rate if rate else math.nan


class Studies:
    """Keeps the progress of all planned studies; what the three displays have in common."""

    def __init__(self) -> None:
        self.studies: dict[str, StudyProgress] = {}

    def plan(self, settings: Sequence[Setting], seeds: Sequence[int]) -> None:
        """See :class:`Display`."""
        self.studies = {setting.key: StudyProgress(setting, len(seeds)) for setting in settings}

    def begin(self, setting: Setting, known: Sequence[Run]) -> None:
        """See :class:`Display`."""
        self.studies[setting.key].learn(known)

    def epoch(self, setting: Setting, epoch: Epoch, training: int) -> None:
        """See :class:`Display`."""
        self.studies[setting.key].add(epoch, training)

    def end(self, setting: Setting, runs: Sequence[Run]) -> None:
        """See :class:`Display`."""
        study = self.studies[setting.key]
        study.learn(runs)
        study.training, study.finished = 0, True

    def close(self) -> None:
        """See :class:`Display`."""

    def seconds_left(self) -> float:
        """Of everything planned."""
        rates = [study.rate for study in self.studies.values() if study.rate]
        typical = statistics.mean(rates) if rates else 0.0
        return sum(study.seconds_left(typical) for study in self.studies.values())


class PlainLines(Studies):
    """A line now and then, for logs."""

    def __init__(self) -> None:
        super().__init__()
        self.printed = 0.0

    def say(self, text: str) -> None:
        """See :class:`Display`."""
        print(text, flush=True)

    def epoch(self, setting: Setting, epoch: Epoch, training: int) -> None:
        """See :class:`Display`."""
        super().epoch(setting, epoch, training)
        if time.monotonic() - self.printed >= PLAIN_EVERY:
            self.printed = time.monotonic()
            self.line(self.studies[setting.key])

    def end(self, setting: Setting, runs: Sequence[Run]) -> None:
        """See :class:`Display`."""
        super().end(setting, runs)
        self.line(self.studies[setting.key])

    def line(self, study: StudyProgress) -> None:
        """Print how far a study is."""
        counts = " ".join(f"{threshold_label(t)}:{n}" for t, n in zip(THRESHOLDS, study.counts, strict=True))
        pace = f"  {study.rate:.2g} epochs/s" if study.rate else ""
        left = "done" if study.finished else f"left {duration(self.seconds_left())}"
        print(
            f"{study.setting.task} {study.setting.cell}  epoch {study.epoch}/{study.setting.epochs}  "
            f"runs under {counts} of {study.wanted}  median loss {study.loss:.2e}{pace}  {left}",
            flush=True,
        )


class JsonLines(Studies):
    """One JSON object per line, for machines."""

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
        """Print how far a study is."""
        loss = study.loss if math.isfinite(study.loss) else None
        print(
            json.dumps(
                {
                    "event": kind,
                    "study": study.setting.key,
                    "task": study.setting.task,
                    "cell": study.setting.cell,
                    "epoch": study.epoch,
                    "training": study.training,
                    "under": {threshold_label(t): n for t, n in zip(THRESHOLDS, study.counts, strict=True)},
                    "median_valid_loss": loss,
                    "epochs_per_second": study.rate,
                }
            ),
            flush=True,
        )


class LiveTable(Studies):
    """A table that is redrawn in place, for a terminal."""

    def __init__(self) -> None:
        super().__init__()
        from rich.live import Live

        self.live = Live(get_renderable=self.table, refresh_per_second=4)

    def plan(self, settings: Sequence[Setting], seeds: Sequence[int]) -> None:
        """See :class:`Display`."""
        super().plan(settings, seeds)
        self.live.start()

    def say(self, text: str) -> None:
        """See :class:`Display`."""
        self.live.console.print(text)

    def close(self) -> None:
        """See :class:`Display`."""
        self.live.stop()

    def table(self) -> Any:
        """The table as it is now."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        left, wanted = self.seconds_left(), max((study.wanted for study in self.studies.values()), default=0)
        table = Table(
            title=f"how many of {wanted} runs are under each loss",
            title_justify="left",
            caption=f"time left {duration(left)}" if left else None,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=0,
            pad_edge=False,
        )
        for title in ("task", "cell", "epoch"):
            table.add_column(title, no_wrap=True)
        for title in (*(threshold_label(threshold) for threshold in THRESHOLDS), "active", "median", "ep/s"):
            table.add_column(title, justify="right", no_wrap=True)
        for study in self.studies.values():
            begun = study.epoch > 0
            table.add_row(
                study.setting.task,
                study.setting.cell.upper(),
                f"{study.epoch}/{study.setting.epochs}" if begun else "",
                *(str(count) if begun else "" for count in study.counts),
                "done" if study.finished else str(study.training) if begun else "",
                f"{study.loss:.1e}" if begun else "",
                f"{study.rate:.2g}" if study.rate else "",
                style=None if begun else "dim",
            )
        return table


def choose_display(as_json: bool) -> Display:
    """A live table in a terminal, lines elsewhere, JSON where asked for."""
    if as_json:
        return JsonLines()
    return LiveTable() if sys.stdout.isatty() else PlainLines()


def median(losses: Sequence[float]) -> float:
    """Of the finite ones; nan if there are none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.median(finite) if finite else math.nan


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
