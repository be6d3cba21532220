"""The tasks: each file holds one task's data, its network's shape, its loss and its metrics."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from typing import Any

from deepmemory.lab.settings import TASKS, Setting
from deepmemory.lab.tasks.adding import Adding
from deepmemory.lab.tasks.batch import FORMATS, SPLITS, Batch, Feed, Shape, Tally
from deepmemory.lab.tasks.natlang import NatLang
from deepmemory.lab.tasks.noisy_sequence import NoisySequence
from deepmemory.lab.tasks.pixel_mnist import PixelMNIST
from deepmemory.lab.tasks.polymusic import PolyMusic
from deepmemory.lab.tasks.ptb import PTB
from deepmemory.lab.tasks.state_tracking import StateTracking
from deepmemory.lab.tasks.synthetic import Sequences
from deepmemory.lab.tasks.task import Level, Task
from deepmemory.lab.tasks.temporal_order import TemporalOrder
from deepmemory.lab.tasks.translation import Translation

__all__ = [
    "FORMATS",
    "PTB",
    "TASK_CLASSES",
    "Adding",
    "Batch",
    "Feed",
    "Level",
    "NatLang",
    "NoisySequence",
    "PixelMNIST",
    "PolyMusic",
    "Sequences",
    "Shape",
    "StateTracking",
    "Tally",
    "Task",
    "TemporalOrder",
    "Translation",
    "chance_level",
    "data_of",
    "series_of",
    "task_of",
]


# The class of each task is ``TASK`` in the file of its name: state_tracking.py has the task state-tracking.
TASK_CLASSES: dict[str, type[Task]] = {
    name: import_module(f"{__name__}.{name.replace('-', '_')}").TASK for name in TASKS
}


def series_of(task: str) -> tuple[str, ...]:
    """Names of the values that every epoch of a task records, in the order they are stored.

    >>> series_of("adding")
    ('train_loss', 'valid_loss', 'valid_accuracy')
    >>> series_of("polymusic")
    ('train_loss', 'valid_loss', 'test_loss')
    """
    kind = TASK_CLASSES[task]
    if not kind.every_epoch:
        return ("train_loss", "valid_loss", *(f"valid_{name}" for name in kind.measures))
    return tuple(f"{split}_{name}" for name in ("loss", *kind.measures) for split in SPLITS.values())


def task_of(setting: Setting, data: str | None = None) -> Task:
    """The task a setting names; real data is read from ``data``, ``$DEEPMEMORY_DATA`` or the user's cache."""
    kind = TASK_CLASSES[setting.task]
    if kind.dataset(setting) is None:
        return kind.of(setting, None)
    own: dict[str, Any] = {name: getattr(setting, name) for name in kind.data_settings}
    return real_task(Setting(setting.task, **own), data or os.environ.get("DEEPMEMORY_DATA"))


@lru_cache(maxsize=1)
def real_task(setting: Setting, data: str | None) -> Task:
    """A task with real data. The last one is cached: studies of one task follow each other and share its data."""
    return TASK_CLASSES[setting.task].of(setting, data)


def data_of(setting: Setting) -> str | None:
    """The registry's name of the data that a setting reads; None if sequences are generated.

    >>> data_of(Setting("translation", language="german")), data_of(Setting())
    ('german', None)
    """
    return TASK_CLASSES[setting.task].dataset(setting)


def chance_level(setting: Setting) -> Level | None:
    """The scores of the best answer that ignores the input; None if they are not known."""
    return TASK_CLASSES[setting.task].chance(setting)
