"""The tasks: each file holds one task's data, its network's shape, its loss and its metrics."""

from __future__ import annotations

import os
from functools import lru_cache

from deepmemory.lab.data import load_digits, load_music, load_pairs, load_text
from deepmemory.lab.settings import DEFAULTS, Setting
from deepmemory.lab.tasks.adding import Adding
from deepmemory.lab.tasks.batch import FORMATS, SPLITS, Batch, Feed, Shape, Tally, Task
from deepmemory.lab.tasks.chance import chance_level
from deepmemory.lab.tasks.natlang import NatLang
from deepmemory.lab.tasks.noisy_sequence import NoisySequence
from deepmemory.lab.tasks.pixel_mnist import PixelMNIST
from deepmemory.lab.tasks.polymusic import PolyMusic
from deepmemory.lab.tasks.ptb import PTB
from deepmemory.lab.tasks.state_tracking import StateTracking
from deepmemory.lab.tasks.synthetic import Sequences
from deepmemory.lab.tasks.temporal_order import TemporalOrder
from deepmemory.lab.tasks.translation import Translation

__all__ = [
    "FORMATS",
    "PTB",
    "TASK_CLASSES",
    "Adding",
    "Batch",
    "Feed",
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


TASK_CLASSES: dict[str, type[Task]] = {
    "adding": Adding,
    "temporal-order": TemporalOrder,
    "noisy-sequence": NoisySequence,
    "polymusic": PolyMusic,
    "natlang": NatLang,
    "translation": Translation,
    "pixel-mnist": PixelMNIST,
    "ptb": PTB,
    "state-tracking": StateTracking,
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
    if setting.task == "adding":
        return Adding(setting.min_length, setting.max_length)
    if setting.task == "temporal-order":
        return TemporalOrder(setting.min_length, setting.max_length)
    if setting.task == "noisy-sequence":
        return NoisySequence(setting.min_length, setting.noise == "fixed")
    if setting.task == "state-tracking":
        return StateTracking(setting.elements, setting.max_length)
    name = data_of(setting)
    assert name is not None
    folder = data or os.environ.get("DEEPMEMORY_DATA")
    return real_task(
        setting.task, name, setting.pairs, setting.min_count, setting.pixels == "permuted", setting.limit, folder
    )


@lru_cache(maxsize=1)
def real_task(task: str, name: str, pairs: int, min_count: int, permuted: bool, limit: int, data: str | None) -> Task:
    """A task with real data. The last one is cached: studies of one task follow each other and share its data."""
    if task == "polymusic":
        return PolyMusic(load_music(name, data), limit)
    if task == "natlang":
        return NatLang(load_text(data), limit)
    if task == "ptb":
        return PTB(load_text(data), limit)
    if task == "translation":
        return Translation(load_pairs(name, pairs or None, data, min_count))
    return PixelMNIST(load_digits(data), permuted, limit)


def data_of(setting: Setting) -> str | None:
    """The registry's name of the data that a setting reads; None for synthetic tasks.

    >>> data_of(Setting("translation", language="german")), data_of(Setting())
    ('german', None)
    """
    pairs = setting.language
    if setting.release != DEFAULTS["release"]:
        pairs += f"-{setting.release}"
    names = {"polymusic": setting.music, "natlang": "ptb", "ptb": "ptb", "translation": pairs, "pixel-mnist": "mnist"}
    return names.get(setting.task)
