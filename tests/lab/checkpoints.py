"""Small trained models, with made data where the task needs some."""

import pytest
from lab import real_data

from deepmemory.lab.records import Records
from deepmemory.lab.settings import GENERATED, Machine, Setting
from deepmemory.lab.tasks import PTB, task_of
from deepmemory.lab.training import studies
from deepmemory.lab.training.progress import PlainLines

TINY = {"min_length": 24, "max_length": 26, "batch": 4, "steps": 2, "validation": 8, "test": 8}
SMALL = {
    "adding": TINY,
    "polymusic": {"batch": 3},
    "natlang": {"batch": 4, "window": 10},
    "ptb": {"batch": 4, "window": 10},
    "state-tracking": TINY | {"max_length": 24, "elements": "s3"},
    "translation": {"batch": 16},
    "pixel-mnist": {"batch": 16},
}
MADE = {**real_data.TASKS, "ptb": lambda: real_data.text(task=PTB)}


def small(task="adding", **changes):
    """A setting that trains in no time."""
    return Setting(**{"task": task, "hidden": (5,), "lr": 0.01, "epochs": 2, **SMALL[task], **changes})


def made(setting):
    """The task of a setting on made data."""
    return task_of(setting) if setting.task in GENERATED else MADE[setting.task]()


def train(out, setting, seeds=(0, 1), task=None):
    """The checkpoint that training leaves; the first where there are several."""
    task = task or made(setting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepmemory.lab.training.trainer.task_of", lambda *_: task)
        studies.run_studies([setting], seeds, out, Machine("cpu", threads=1), PlainLines())
    opened = Records(out)
    path = min(opened.checkpoint_folder(setting).glob("*.safetensors"))
    opened.close()
    return path
